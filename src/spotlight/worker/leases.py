"""The leases a worker works on, and how far their rollouts are. Bookkeeping only: no clock, no messages.

Invariants:
- A rollout is held under one lease: the one granted last.
- A lease is held as long as one of its rollouts is: who asks what is held is never told of an empty one.
- Progress told of a lease is safe for each of its rollouts: it is that of the one that lags behind most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotlight.rollout.sequence_parallel.lockstep import NO_LEASE, Claim
from spotlight.rollout.state import RolloutState
from spotlight.scheduler.types import LeaseId, RolloutId


@dataclass(slots=True)
class OpenLease:
    """One lease.

    Attributes:
        began: of each open rollout, the step at which the controller takes it to have begun.
        taken: steps taken since the lease began.
        told: steps that the controller was told to be safe.
    """

    began: dict[RolloutId, int]
    taken: int = 0
    told: int = 0


@dataclass(slots=True)
class Leases:
    """All leases of a worker, and the states of their rollouts.

    Attributes:
        seen: the last lease granted, whatever became of it.
    """

    seen: LeaseId = NO_LEASE
    _leases: dict[LeaseId, OpenLease] = field(default_factory=dict)
    _states: dict[RolloutId, RolloutState] = field(default_factory=dict)
    _lease_of: dict[RolloutId, LeaseId] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def ids(self) -> tuple[LeaseId, ...]:
        """Leases worked on, in the order of their grants."""
        return tuple(self._leases)

    @property
    def states(self) -> tuple[RolloutState, ...]:
        """Of all open rollouts, in the order of their grants."""
        return tuple(self._states.values())

    @property
    def claims(self) -> dict[RolloutId, Claim]:
        """Under what each open rollout is held."""
        return {name: Claim(lease, self._leases[lease].began[name]) for name, lease in self._lease_of.items()}

    def add(self, lease: LeaseId, states: Iterable[RolloutState], resume: Mapping[RolloutId, int]) -> None:
        """Begin a lease; nothing to do when there is nothing to work on.

        Args:
            resume: the committed steps that the grant names; others began at 0.
        """
        for state in states:
            name = state.rollout.id
            if name in self._states:
                self.remove(name)
            held = self._leases.setdefault(lease, OpenLease({}))
            held.began[name] = resume.get(name, 0)
            self._states[name], self._lease_of[name] = state, lease

    def advance(self, states: Iterable[RolloutState]) -> None:
        """Put states in the place of earlier ones of the same rollouts."""
        for state in states:
            assert state.rollout.id in self._states, f"{state.rollout.id} is not held"
            self._states[state.rollout.id] = state

    def step_taken(self, commit_every: int) -> list[LeaseId]:
        """All rollouts took a step. Returns the leases whose progress is to be committed now."""
        for held in self._leases.values():
            held.taken += 1
        return [lease for lease, held in self._leases.items() if held.taken % commit_every == 0]

    def of_lease(self, lease: LeaseId) -> tuple[RolloutState, ...]:
        """States of one lease; none when it is not held."""
        held = self._leases.get(lease)
        return tuple(self._states[name] for name in held.began) if held else ()

    def remove(self, rollout: RolloutId) -> LeaseId:
        """A rollout is finished or failed. Returns the lease that held it."""
        lease = self._lease_of.pop(rollout)
        del self._states[rollout], self._leases[lease].began[rollout]
        if not self._leases[lease].began:
            del self._leases[lease]
        return lease

    def drop(self, lease: LeaseId) -> None:
        """A lease does not count any more."""
        for state in self.of_lease(lease):
            self.remove(state.rollout.id)

    def let_go(self) -> None:
        """Hold nothing; what was seen stays seen."""
        self._leases.clear()
        self._states.clear()
        self._lease_of.clear()

    def news(self, lease: LeaseId, safe: int) -> bool:
        """Whether ``safe`` steps are more than was told before; then they count as told."""
        held = self._leases[lease]
        if safe <= held.told:
            return False
        held.told = safe
        return True


def safe_steps(states: Iterable[RolloutState], claims: Mapping[RolloutId, Claim]) -> dict[LeaseId, int]:
    """Steps since each lease began at which all of its ``states`` are, or beyond. May be negative."""
    safe: dict[LeaseId, int] = {}
    for state in states:
        claim = claims[state.rollout.id]
        steps = state.step - claim.began
        safe[claim.lease] = min(steps, safe.get(claim.lease, steps))
    return safe
