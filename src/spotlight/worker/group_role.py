"""A worker's role in one group and the leases it holds there."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from spotlight.rollout.sequence_parallel.lockstep import NO_LEASE, Follower, Lead
from spotlight.scheduler.events import GroupPulled
from spotlight.scheduler.types import LeaseId, WorkerId
from spotlight.worker.leases import Leases


@dataclass(slots=True)
class GroupRole:
    """Lives from a group's formation until this worker leaves it.

    Attributes:
        leads: whether this worker decides, pulls and commits.
        batch: rollouts per forward that every member has memory for.
        leases: the leader's; on a follower, those taken over when the group was lost.
        lead: the leader's side of lockstep while others follow; recreated for each call to follow.
        called: on a follower, the last lease it was asked to follow.
        ended: the last lease that all members know needs no more following.
        lost_at_s: ``time.monotonic()`` at the loss of a member.
        asked: rollouts requested and not yet granted.
        ask_again_s: ``time.monotonic()`` for the next pull if nothing was granted.
    """

    leader: WorkerId
    epoch: int
    degree: int
    leads: bool
    batch: int = sys.maxsize
    leases: Leases = field(default_factory=Leases)
    lead: Lead | None = None
    called: LeaseId = NO_LEASE
    ended: LeaseId = NO_LEASE
    lost_at_s: float | None = None
    asked: int = 0
    ask_again_s: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether a member was lost, which ends denoising under this epoch."""
        return self.lost_at_s is not None

    @property
    def busy(self) -> bool:
        """Whether there is a step to take or a leader to follow."""
        return not self.lost and (len(self.leases) > 0 or self.called > self.ended)

    @property
    def others_follow(self) -> bool:
        """Whether followers wait for the leader's orders, or will."""
        return self.leads and self.degree > 1 and not self.lost and self.leases.seen > self.ended

    def lose(self) -> None:
        """Mark the group as broken; leases stay valid."""
        self.lost_at_s, self.lead = time.monotonic(), None

    def inherit(self, follower: Follower) -> None:
        """Take over a follower's leases after the loss of its leader."""
        for state in follower.states:
            claim = follower.claims[state.rollout.id]
            self.leases.add(claim.lease, [state], {state.rollout.id: claim.began})

    def pull(self, capacity: int, ask_again_s: float) -> GroupPulled | None:
        """The pull to send now, if capacity grew or an idle worker got no answer."""
        if not self.leads or self.lost:
            return None
        now, spare = time.monotonic(), capacity - len(self.leases)
        if spare <= self.asked and (len(self.leases) or now < self.ask_again_s):
            return None
        self.asked, self.ask_again_s = spare, now + ask_again_s
        return GroupPulled(self.leader, self.epoch, spare, self.leases.seen, self.leases.ids)
