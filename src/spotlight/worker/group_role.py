"""A worker's place in its group, and what it holds there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from spotlight.rollout.sequence_parallel.lockstep import NO_LEASE, Follower, Lead
from spotlight.scheduler.events import GroupPulled
from spotlight.scheduler.types import LeaseId, WorkerId
from spotlight.worker.leases import Leases


@dataclass(slots=True)
class GroupRole:
    """From the formation of a group until this worker parts from it.

    Attributes:
        leads: this worker decides, pulls and commits.
        leases: the leader's leases; of a follower, what was left to it when the group was lost.
        lead: the leader's part while the others follow; made anew when they are called anew.
        called: of a follower, the last lease it is to follow into.
        ended: the last lease of which it is known to all that it needs no following any more.
        lost_at_s: ``time.monotonic()`` when a member was lost.
        asked: rollouts pulled for and not granted yet.
        ask_again_s: ``time.monotonic()`` to pull again if nothing was granted.
    """

    leader: WorkerId
    epoch: int
    degree: int
    leads: bool
    leases: Leases = field(default_factory=Leases)
    lead: Lead | None = None
    called: LeaseId = NO_LEASE
    ended: LeaseId = NO_LEASE
    lost_at_s: float | None = None
    asked: int = 0
    ask_again_s: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether a member was lost: nothing is denoised any more under this epoch."""
        return self.lost_at_s is not None

    @property
    def busy(self) -> bool:
        """Whether there is a step to take, or a leader to follow."""
        return not self.lost and (len(self.leases) > 0 or self.called > self.ended)

    @property
    def others_follow(self) -> bool:
        """Whether members wait for the leader's next order, or will."""
        return self.leads and self.degree > 1 and not self.lost and self.leases.seen > self.ended

    def lose(self) -> None:
        """The group is broken; what is held stays good."""
        self.lost_at_s, self.lead = time.monotonic(), None

    def inherit(self, follower: Follower) -> None:
        """Hold what a follower holds whose leader is lost."""
        for state in follower.states:
            claim = follower.claims[state.rollout.id]
            self.leases.add(claim.lease, [state], {state.rollout.id: claim.began})

    def pull(self, capacity: int, ask_again_s: float) -> GroupPulled | None:
        """The pull to send now, if any: when there is room that was not asked for yet, or no answer came."""
        if not self.leads or self.lost:
            return None
        now, spare = time.monotonic(), capacity - len(self.leases)
        if spare <= self.asked and (len(self.leases) or now < self.ask_again_s):
            return None
        self.asked, self.ask_again_s = spare, now + ask_again_s
        return GroupPulled(self.leader, self.epoch, spare, self.leases.seen, self.leases.ids)
