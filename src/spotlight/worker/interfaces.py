"""Protocols that the worker's host implements, and the commands that the loop accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.state import Recipe
from spotlight.scheduler.effects import AbandonLease, FormGroup, GrantLease, PullWeights, StopGroup
from spotlight.scheduler.types import LeaseId, Purpose, WorkerId
from spotlight.worker.reports import Report

if TYPE_CHECKING:  # these import diffusers, which the cluster head does not need
    from spotlight.rollout.engine import Engine
    from spotlight.rollout.sequence_parallel.membership import SpMembership


class HeadLostError(RuntimeError):
    """Nothing can be delivered any more: the loop ends."""


class LoadError(RuntimeError):
    """Weights could not be loaded, and the previous ones are whole; the worker reports it and continues."""


class StoredValue(Protocol):
    """A value from the blob store."""

    @property
    def data(self) -> bytes:
        """The bytes."""


class HeadClient(Protocol):
    """Stores values and forwards events; both outlive the worker."""

    def deliver(self, reports: Iterable[Report]) -> None:
        """Make each report's values durable and send its events, before the next one is taken.

        Raises HeadLostError, or with a client that delivers in the background the next call does.
        """

    def fetch(
        self, kind: str, names: Sequence[str], weights_digest: str = ""
    ) -> Sequence[StoredValue | None]:
        """Values by name, the latest step of each; None where there is none. Raises HeadLostError."""


class Loader(Protocol):
    """Fetches weights and loads them into the slots."""

    def load(self, pull: PullWeights) -> str:
        """Carry out a pull. Returns the digest of the loaded weights.

        Raises:
            LoadError: the version, checksum or number of bound modules is not as requested, or the source is
                gone.
        """


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """The worker's engine, weights and settings.

    Attributes:
        membership: called once, when the first group of several members forms.
        around: a context for each denoising step that this worker leads, given its kind (``steps.kind_of``).
        rested: called when this worker has no steps to take, and when it leaves a group; often in vain.
    """

    engine: Engine
    slots: WeightSlots
    recipes: Mapping[Purpose, Recipe]
    slot_of: Mapping[Purpose, Slot]
    membership: Callable[[], SpMembership]
    around: Callable[[str], AbstractContextManager[object]] = nullcontext
    rested: Callable[[], None] = lambda: None

    def known_slot(self, name: str) -> Slot:
        """The slot of that name. Raises ValueError when no purpose uses it."""
        for slot in self.slot_of.values():
            if slot == name:
                return slot
        used = ", ".join(sorted(set(self.slot_of.values())))
        raise ValueError(f"weight slot {name!r} is none that rollouts use here; expected one of {used}")


@dataclass(frozen=True, slots=True)
class Patience:
    """The worker's timeouts.

    Attributes:
        ask_again_s: an idle worker repeats a pull after this: messages may be lost.
        grace_s: wait for instructions after losing a group, before committing its rollouts.
        pause_s: delay before reporting a failure: the controller retries at once.
    """

    ask_again_s: float = 5.0
    grace_s: float = 5.0
    pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class FollowLease:
    """Help the leader with a lease; sent on every grant to it."""

    leader: WorkerId
    epoch: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over."""


Command: TypeAlias = PullWeights | FormGroup | StopGroup | GrantLease | AbandonLease | FollowLease | Leave
