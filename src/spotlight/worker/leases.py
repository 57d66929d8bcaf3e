"""A worker's role in one group, the leases it holds there, and their progress. It sends nothing.

Invariants:
- A rollout belongs to the lease granted last.
- A lease exists only while it has open rollouts.
- Reported progress is that of the lease's slowest rollout, so it is safe for all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotlight.rollout.sequence_parallel.lockstep import NO_LEASE, Claim, Follower, Lead
from spotlight.rollout.state import RolloutState
from spotlight.scheduler.events import GroupPulled
from spotlight.scheduler.types import LeaseId, RolloutId, WorkerId


@dataclass(slots=True)
class OpenLease:
    """One lease.

    Attributes:
        began: step at which the controller believes each open rollout began.
        taken: steps taken since the lease began.
        reported: steps reported as committed.
    """

    began: dict[RolloutId, int]
    taken: int = 0
    reported: int = 0


@dataclass(slots=True)
class Leases:
    """A worker's leases and their rollouts' states.

    Attributes:
        seen: the last lease granted, even if dropped since.
    """

    seen: LeaseId = NO_LEASE
    _leases: dict[LeaseId, OpenLease] = field(default_factory=dict)
    _states: dict[RolloutId, RolloutState] = field(default_factory=dict)
    _lease_of: dict[RolloutId, LeaseId] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def ids(self) -> tuple[LeaseId, ...]:
        """In the order of their grants."""
        return tuple(self._leases)

    @property
    def states(self) -> tuple[RolloutState, ...]:
        """Of all open rollouts, in the order of their grants."""
        return tuple(self._states.values())

    @property
    def claims(self) -> dict[RolloutId, Claim]:
        """The lease and first step of each open rollout."""
        return {name: Claim(lease, self._leases[lease].began[name]) for name, lease in self._lease_of.items()}

    def add(self, lease: LeaseId, states: Iterable[RolloutState], resume: Mapping[RolloutId, int]) -> None:
        """Start a lease; no effect without states.

        Args:
            resume: committed steps named by the grant; other rollouts began at 0.
        """
        for state in states:
            name = state.rollout.id
            if name in self._states:
                self.remove(name)
            held = self._leases.setdefault(lease, OpenLease({}))
            held.began[name] = resume.get(name, 0)
            self._states[name], self._lease_of[name] = state, lease

    def advance(self, states: Iterable[RolloutState]) -> None:
        """Replace states of held rollouts."""
        for state in states:
            assert state.rollout.id in self._states, f"{state.rollout.id} is not held"
            self._states[state.rollout.id] = state

    def step_taken(self, commit_every: int) -> list[LeaseId]:
        """Count a step of every rollout. Returns the leases due for a commit."""
        for held in self._leases.values():
            held.taken += 1
        return [lease for lease, held in self._leases.items() if held.taken % commit_every == 0]

    def of_lease(self, lease: LeaseId) -> tuple[RolloutState, ...]:
        """States of one lease, if held."""
        held = self._leases.get(lease)
        return tuple(self._states[name] for name in held.began) if held else ()

    def remove(self, rollout: RolloutId) -> LeaseId:
        """Remove a finished or failed rollout. Returns its lease."""
        lease = self._lease_of.pop(rollout)
        del self._states[rollout], self._leases[lease].began[rollout]
        if not self._leases[lease].began:
            del self._leases[lease]
        return lease

    def drop(self, lease: LeaseId) -> None:
        """Remove a lease and its rollouts."""
        for state in self.of_lease(lease):
            self.remove(state.rollout.id)

    def let_go(self) -> None:
        """Drop every lease; ``seen`` stays."""
        self._leases.clear()
        self._states.clear()
        self._lease_of.clear()

    def news(self, lease: LeaseId, safe: int) -> bool:
        """Record ``safe`` steps; whether that exceeds what was reported."""
        held = self._leases[lease]
        if safe <= held.reported:
            return False
        held.reported = safe
        return True


def safe_steps(states: Iterable[RolloutState], claims: Mapping[RolloutId, Claim]) -> dict[LeaseId, int]:
    """Steps since each lease began that all its ``states`` have reached. May be negative."""
    safe: dict[LeaseId, int] = {}
    for state in states:
        claim = claims[state.rollout.id]
        steps = state.step - claim.began
        safe[claim.lease] = min(steps, safe.get(claim.lease, steps))
    return safe


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
