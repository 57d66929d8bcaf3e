"""Sequence-parallel groups of living processes: form, shrink, grow, dissolve, survive a death.

A worker process has one :class:`SpMembership`: alone, or a rank of one group. It changes group at step
boundaries with ``form`` under a new epoch: close the old communicator, meet in the store, connect, verify.
Weights stay in place. The controller decides who forms a group.

Invariants:
- After any error here the worker is alone and can denoise alone.
- A group is its epoch and members. Epochs only grow, so a worker that missed a change never meets a later
  group, nor do workers told different members meet.
- A failure in one rank's exchange removes it from the group and so ends the others' exchange: nobody waits
  for a member that left, died or stopped longer than :class:`StepLimit` says.
- Only use proves that a group formed everywhere: a rank that fails right after verification is noticed at the
  first exchange.

How long members wait for each other follows from the steps they took before (:class:`StepLimit`).
A limit that a healthy step exceeds breaks its group, and every group after it; one that is too long leaves a
dead member unnoticed. What a step takes is known only once one is done, so a limit that ran out is doubled
until then.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from spotlight.models.condition import Passes
from spotlight.rollout.sequence_parallel.communicators import Communicator, SpPeerLostError
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.scheduler.types import WorkerId


class GroupError(RuntimeError):
    """A group failed to form or was lost. The worker is alone and can continue."""


class FormationError(GroupError):
    """The members did not meet; the message names those known not to have arrived."""


class GroupLostError(GroupError):
    """A member died, stopped or left while others waited for it."""


class StaleEpochError(GroupError):
    """A command to form a group under a past epoch; the current group is unchanged."""


@dataclass(frozen=True, slots=True)
class SpGroup:
    """Workers of one node that denoise together.

    Attributes:
        epoch: grows with each formation.
        members: by rank; the first leads.
    """

    epoch: int
    members: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) < len(self.members):
            raise ValueError(f"group members are {self.members}; expected at least one, and each once")

    @property
    def leader(self) -> WorkerId:
        """The member that makes decisions."""
        return self.members[0]

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.members)


class SpMembership:
    """This process's current group and its transitions. Not thread-safe.

    Args:
        store: where members meet; see :mod:`spotlight.rollout.sequence_parallel.rendezvous`.
        parallel: the transformers to split.
        form_s: longest wait for members to arrive.

    Attributes:
        group: the current one; just this worker when alone, under the last epoch.
        batch: rollouts per forward that every member of the group has memory for.
    """

    def __init__(
        self,
        worker: WorkerId,
        store: Store,
        communicator: Communicator,
        parallel: SequenceParallel,
        form_s: float,
    ) -> None:
        if not form_s > 0:
            raise ValueError(f"form_s is {form_s}; expected seconds above 0")
        self.worker = worker
        self._store = store
        self._communicator = communicator
        self._parallel = parallel
        self._form_s = form_s
        self.group = SpGroup(0, (worker,))
        self._limit = StepLimit()
        self.batch = sys.maxsize

    @property
    def leads(self) -> bool:
        """Whether this worker leads its group."""
        return self.group.leader == self.worker

    @property
    def passes(self) -> Passes:
        """How this group makes the two forwards of guidance."""
        return self._parallel.passes

    @property
    def ranks_per_forward(self) -> int:
        """How many members make each forward together."""
        return self._parallel.ranks_per_forward

    def form(self, group: SpGroup, batch: int = sys.maxsize) -> None:
        """Leave the current group and join ``group``, unless it is the current one.

        Takes at most ``form_s`` plus twice ``collective_s`` (2.5 times with guidance in parallel).

        Args:
            batch: rollouts per forward that this worker has memory for; :attr:`batch` is the least of all.

        Raises:
            ValueError: this worker is no member, or the degree is unsupported; nothing changed.
            StaleEpochError: the epoch was already formed, attempted or surpassed.
            FormationError: the others did not come; this worker is alone, and the epoch is used up.
        """
        if group == self.group:
            return
        if self.worker not in group.members:
            raise ValueError(
                f"worker {self.worker} is told to form a group of {', '.join(group.members)}; "
                "expected itself among them"
            )
        if group.epoch <= self.group.epoch:
            raise StaleEpochError(
                f"worker {self.worker} is told to form a group under epoch {group.epoch}, but has seen "
                f"{self.group.epoch}: every attempt takes a new epoch"
            )
        self._parallel.check(group.degree)
        self.part()
        self.group = SpGroup(group.epoch, (self.worker,))  # used up, even if the others do not come
        if group.degree > 1:
            self._meet(group, batch)
        self.group = group

    def part(self) -> None:
        """Leave the group at once; exchanges of the remaining members fail."""
        self.group = SpGroup(self.group.epoch, (self.worker,))
        self.batch = sys.maxsize
        self._parallel.leave()
        self._communicator.close()

    @contextmanager
    def exchange(self, work: float = 0.0) -> Iterator[None]:
        """Context for everything that all members do together, at least every step.

        Args:
            work: size of a step, in any unit: limits follow how long such work took before. 0: no step.

        Raises:
            GroupLostError: a peer failed; this worker is now alone.
            Exception: this rank's own failure, which also removes it from the group.
        """
        if self.group.degree == 1:
            yield
            return
        began = time.monotonic()
        try:
            with self._communicator.bounded(self._limit.limit_s(work, self._communicator.collective_s)):
                yield
            self._limit.took(work, time.monotonic() - began)
        except SpPeerLostError as error:
            self._limit.lost(time.monotonic() - began, self._communicator.collective_s)
            group = self.group
            self._release(error)
            raise GroupLostError(
                f"worker {self.worker} lost the group of {', '.join(group.members)} (epoch {group.epoch}): "
                f"{error}"
            ) from None
        except BaseException:
            self.part()
            raise

    def broadcast(self, data: bytes | None) -> bytes:
        """Send the leader's ``data`` to all members; followers pass None.

        Raises:
            GroupLostError: see :meth:`exchange`.
        """
        if self.group.degree == 1:
            assert data is not None
            return data
        device = self._communicator.device
        with self.exchange():
            length = torch.tensor([len(data or b"")], device=device)
            dist.broadcast(length, 0)
            content = torch.empty(int(length), dtype=torch.uint8, device=device)
            if data:
                content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(content, 0)
            return content.cpu().numpy().tobytes()

    def _meet(self, group: SpGroup, batch: int) -> None:
        try:
            # Members and epoch are the key: workers told otherwise wait under another key, and time out.
            place = PrefixStore(f"sp/{group.epoch}/{'+'.join(group.members)}", self._store)
            self._arrive(group, place)
            rank = group.members.index(self.worker)
            opened = self._communicator.open(place, rank, group.degree)
            self.batch = self._verify(group, rank, batch)
            self._parallel.enter(opened, self._communicator.half)
        except SpPeerLostError as error:
            self._release(error)
            raise FormationError(f"{self._attempt(group)}: {error}") from None
        except BaseException:
            self.part()
            raise

    def _arrive(self, group: SpGroup, place: Store) -> None:
        try:
            place.set(self.worker, "here")
            place.wait(list(group.members), timedelta(seconds=self._form_s))
        except RuntimeError as error:
            try:
                missing = [member for member in group.members if not place.check([member])]
                why = f"{', '.join(missing) or 'nobody'} did not come within {self._form_s:g} s"
            except RuntimeError:
                why = f"the group store does not answer ({str(error).splitlines()[0]})"
            raise FormationError(f"{self._attempt(group)}: {why}") from None

    def _verify(self, group: SpGroup, rank: int, batch: int) -> int:
        """Exchange a first value: the least ``batch`` of all."""
        batches = torch.zeros(group.degree, dtype=torch.int64, device=self._communicator.device)
        batches[rank] = batch
        with self._communicator.bounded():
            dist.all_reduce(batches)
            answers = batches.tolist()
        met = sum(each > 0 for each in answers)
        if met != group.degree:
            raise SpPeerLostError(f"{met} ranks answered; expected {group.degree}")
        return int(min(answers))

    def _release(self, error: BaseException) -> None:
        """Leave, and clear the error's frames, which hold tensors of the unfinished step."""
        self.part()
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__

    def _attempt(self, group: SpGroup) -> str:
        return f"worker {self.worker} formed no group of {', '.join(group.members)} (epoch {group.epoch})"


# -- how long members of a group wait for each other, from the steps they took before. Pure ----------------


SLOWER_MAX = 4.0
"""A step may take so many times as long as the slowest of the last did, for its size."""
DOUBLED_MAX = 16.0
"""Limits that run out grow to so many times the configured one."""
_REMEMBERED = 32


class StepLimit:
    """The steps of one process, over all of its groups."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._after_loss_s = 0.0

    def limit_s(self, work: float, least_s: float) -> float:
        """Longest wait within a step of size ``work`` (0: between two), ``least_s`` or longer."""
        per_work = max((seconds / size for size, seconds in self._steps), default=0.0)
        longest_s = max((seconds for _, seconds in self._steps), default=0.0)
        usual_s = per_work * work if work else longest_s
        return max(least_s, SLOWER_MAX * usual_s, self._after_loss_s)

    def took(self, work: float, seconds: float) -> None:
        """A step was finished; 0 work: something else was, which tells nothing."""
        if work > 0:
            self._steps.append((work, seconds))
            self._after_loss_s = 0.0

    def lost(self, waited_s: float, least_s: float) -> None:
        """The group was lost after ``waited_s``: to the limit, unless it was sooner than any limit."""
        if waited_s >= least_s:
            self._after_loss_s = min(2 * waited_s, DOUBLED_MAX * least_s)
