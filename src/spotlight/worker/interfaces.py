"""What a worker's loop is connected to (the head, a loader of weights, a model), and the commands it takes.

Whoever runs the loop (an actor of a cluster, a thread of a test) provides these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import nn

from spotlight.models.slots import Slot
from spotlight.rollout.state import Recipe
from spotlight.scheduler.effects import AbandonLease, FormGroup, GrantLease, PullWeights, StopGroup
from spotlight.scheduler.types import LeaseId, Purpose, WorkerId
from spotlight.worker.reports import Report

if TYPE_CHECKING:  # diffusers is behind them, and the head of a cluster needs none of it
    from spotlight.rollout.engine import Engine
    from spotlight.rollout.sequence_parallel.membership import SpMembership


class HeadLostError(RuntimeError):
    """Nothing can be kept or told any more: the loop ends."""


class LoadError(RuntimeError):
    """Weights could not be loaded: the worker tells it, and goes on with what it holds.

    Attributes:
        intact: the weights held before are whole; else the worker takes no work until it has others.
    """

    def __init__(self, message: str, *, intact: bool = True) -> None:
        super().__init__(message)
        self.intact = intact


class StoredValue(Protocol):
    """A value that was kept."""

    @property
    def step(self) -> int:
        """Of a rollout's state: the step it is at."""

    @property
    def data(self) -> bytes:
        """The value."""


class HeadClient(Protocol):
    """Where values are kept and events go; both outlive the worker."""

    def deliver(self, report: Report) -> None:
        """Return when the values are safe and the events on their way. Raises HeadLostError."""

    def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> Sequence[StoredValue | None]:
        """Values by name, the latest step of each; None where there is none. Raises HeadLostError."""


class Loader(Protocol):
    """Gets weights and puts them into the slots."""

    def load(self, pull: PullWeights) -> str:
        """Carry out a pull; returns the digest of the weights that are bound now.

        Raises:
            LoadError: the version, the checksum or the number of bound modules is not what was asked for,
                or the source is lost.
        """


class Slots(Protocol):
    """Weights by name; a :class:`~spotlight.models.slots.WeightSlots` is one."""

    def use(self, slot: Slot, *, merged: bool = False) -> AbstractContextManager[nn.Module]:
        """The module with the weights of a slot."""


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """What a worker works with.

    Attributes:
        recipes: how rollouts of each purpose are denoised.
        slot_of: weights of each purpose.
        membership: called once, when a group of several is formed first.
    """

    engine: Engine
    slots: Slots
    recipes: Mapping[Purpose, Recipe]
    slot_of: Mapping[Purpose, Slot]
    membership: Callable[[], SpMembership]

    def known_slot(self, name: str) -> Slot:
        """The slot of that name. Raises ValueError when no purpose uses it."""
        for slot in self.slot_of.values():
            if slot == name:
                return slot
        used = ", ".join(sorted(set(self.slot_of.values())))
        raise ValueError(f"weight slot {name!r} is none that rollouts use here; expected one of {used}")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker waits.

    Attributes:
        ask_again_s: an idle worker whose pull was not answered pulls again: messages may be lost.
        grace_s: a worker that lost its group waits so long to be told what to do with what it holds.
        pause_s: before a failure is told, since the answer to it is to try again at once.
    """

    ask_again_s: float = 5.0
    grace_s: float = 5.0
    pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class FollowLease:
    """Help a group's leader with a lease: sent to the other members whenever the leader is granted one."""

    leader: WorkerId
    epoch: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over."""


Command: TypeAlias = PullWeights | FormGroup | StopGroup | GrantLease | AbandonLease | FollowLease | Leave
