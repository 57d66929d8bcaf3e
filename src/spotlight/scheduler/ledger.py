"""The sample ledger: pure accounting, no decisions.

Invariants, checked after every event
    1. For every purpose: issued = trained + evaluated + explored + dropped + in flight.
    2. A rollout goes issued -> finished -> scored -> used, each once; it may be dropped instead at any point.
       A second outcome, or one for a rollout never issued, is an error.
    3. Billed GPU-seconds = the sum over phases.

Every fact becomes a :class:`~spotlight.scheduler.records.Record` with the next position; the durable ledger
in ``store/`` holds the same records, so the run can be recounted offline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum

from pydantic import TypeAdapter

from spotlight.scheduler.records import (
    CommitRejected,
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleExplored,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import DropReason, Maker, Phase, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.base.typed_json import typed


class AccountingError(RuntimeError):
    """An accounting rule was broken: a bug, not an input error."""


class _Reached(IntEnum):
    ISSUED = 0
    FINISHED = 1
    SCORED = 2


@dataclass(slots=True)
class _OpenRollout:
    purpose: Purpose
    reached: _Reached = _Reached.ISSUED


@dataclass(slots=True)
class Ledger:
    """Counts of a run so far. ``position`` is that of the last record."""

    position: int = 0
    issued: Counter[Purpose] = field(default_factory=Counter)
    finished: Counter[Purpose] = field(default_factory=Counter)
    trained: int = 0
    evaluated: int = 0
    explored: int = 0
    replaced_prompts: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    dropped_purpose: Counter[Purpose] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    gpu_seconds: dict[Phase, float] = field(default_factory=dict)
    billed_s: float = 0.0
    prompts: set[PromptId] = field(default_factory=set)
    _open: dict[RolloutId, _OpenRollout] = field(default_factory=dict)
    _in_flight: Counter[Purpose] = field(default_factory=Counter)
    _written: list[tuple[int, Record]] = field(default_factory=list)

    # -- facts -----------------------------------------------------------------------------------------

    def issue(self, rollout: Rollout, prompt: Prompt) -> None:
        """Open a rollout; it must end in exactly one outcome."""
        if rollout.id in self._open:
            raise AccountingError(f"rollout {rollout.id} issued twice")
        if prompt.id not in self.prompts:
            self.prompts.add(prompt.id)
            self._write(PromptSeen(prompt))
        self.issued[rollout.purpose] += 1
        self._open[rollout.id] = _OpenRollout(rollout.purpose)
        self._in_flight[rollout.purpose] += 1
        self._write(RolloutIssued(rollout))

    def finish(self, rollout: Rollout, maker: Maker) -> None:
        """Count an accepted finished sample."""
        self._reach(rollout.id, _Reached.FINISHED)
        self.finished[rollout.purpose] += 1
        self._write(SampleFinished(rollout.id, rollout.version, *maker))

    def score(self, rollout: RolloutId, scores: Mapping[str, float]) -> None:
        """Record a sample's rewards."""
        self._reach(rollout, _Reached.SCORED)
        self._write(SampleScored(rollout, scores))

    def train(self, rollout: RolloutId, version: PolicyVersion) -> None:
        """Outcome: the sample entered the optimizer step that made ``version``."""
        self._use(rollout, Purpose.TRAIN)
        self.trained += 1
        self._write(SampleTrained(rollout, version))

    def evaluate(self, rollout: RolloutId) -> None:
        """Outcome: the sample counts in an evaluation."""
        self._use(rollout, Purpose.EVAL)
        self.evaluated += 1
        self._write(SampleEvaluated(rollout))

    def explore(self, rollout: RolloutId) -> None:
        """Outcome: the preview's scores were used to choose seeds."""
        self._use(rollout, Purpose.EXPLORE)
        self.explored += 1
        self._write(SampleExplored(rollout))

    def replace_prompts(self, count: int) -> None:
        """Count prompts without contrast replaced by spare ones.

        They need no record: their previews are explored, and no train rollout of theirs follows.
        """
        self.replaced_prompts += count

    def drop(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """Outcome: the sample will not be used."""
        entry = self._close(rollout)
        if reason.by_choice and (entry.purpose is not Purpose.TRAIN or entry.reached is not _Reached.SCORED):
            raise AccountingError(f"rollout {rollout} for {entry.purpose}, {entry.reached.name}, is {reason}")
        self.dropped_purpose[entry.purpose] += 1
        self.dropped[reason] += 1
        self._write(SampleDropped(rollout, reason, detail))

    def step(self, record: StepApplied) -> None:
        """Record an optimizer step."""
        self._write(record)

    def publish(self, version: PolicyVersion) -> None:
        """Record a published version."""
        self._write(VersionPublished(version))

    def reject(self, rollout: RolloutId | None, reason: str) -> None:
        """Record a commit that does not count (stale epoch, duplicate, unknown rollout, wrong version)."""
        self.rejected[reason] += 1
        # An id this ledger never issued would dangle in the durable one.
        self._write(CommitRejected(rollout if rollout in self._open else None, reason))

    def spend(self, phase: Phase, seconds: float) -> None:
        """Bill a worker's GPU time. Raises :class:`AccountingError` if negative."""
        if not seconds >= 0:
            raise AccountingError(f"{seconds} seconds spent in {phase}")
        self.gpu_seconds[phase] = self.gpu_seconds.get(phase, 0.0) + seconds
        self.billed_s += seconds

    # -- views -----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Rollouts issued and without an outcome."""
        return len(self._open)

    def take_records(self) -> list[tuple[int, Record]]:
        """Remove and return new records with their positions."""
        records, self._written = self._written, []
        return records

    def check(self) -> None:
        """Raise :class:`AccountingError` unless the invariants hold; O(1) in the number of rollouts."""
        used = {
            Purpose.TRAIN: self.trained,
            Purpose.EVAL: self.evaluated,
            Purpose.EXPLORE: self.explored,
        }
        for purpose, issued in self.issued.items():
            outcomes = used[purpose] + self.dropped_purpose[purpose]
            if issued != outcomes + self._in_flight[purpose]:
                raise AccountingError(
                    f"{purpose}: issued {issued} != outcomes {outcomes} "
                    f"+ in flight {self._in_flight[purpose]}"
                )
        if self._in_flight.total() != len(self._open):
            raise AccountingError(
                f"{self._in_flight.total()} in flight, but {len(self._open)} without an outcome"
            )
        if self.dropped.total() != self.dropped_purpose.total():
            raise AccountingError("drops by reason and by purpose differ")
        spent_s = sum(self.gpu_seconds.values())
        if abs(spent_s - self.billed_s) > 1e-6 * max(1.0, self.billed_s):
            raise AccountingError(f"billed {self.billed_s} s != {spent_s} s over phases")

    def snapshot(self) -> dict[str, object]:
        """JSON-able state. Raises :class:`AccountingError` while rollouts are in flight."""
        if self._open:
            raise AccountingError("a snapshot was asked for while rollouts were in flight")
        return {
            "position": self.position,
            "issued": dict(self.issued),
            "finished": dict(self.finished),
            "trained": self.trained,
            "evaluated": self.evaluated,
            "explored": self.explored,
            "replaced_prompts": self.replaced_prompts,
            "dropped": dict(self.dropped),
            "dropped_purpose": dict(self.dropped_purpose),
            "rejected": dict(self.rejected),
            "prompts": sorted(self.prompts),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, object]) -> Ledger:
        """The ledger that made ``snapshot``. GPU-seconds restart at 0: the durable ledger has them."""
        saved = typed(_SAVED, snapshot, "ledger")
        return cls(**{each.name: getattr(saved, each.name) for each in fields(saved)})

    # -- inside ----------------------------------------------------------------------------------------

    def _require_open(self, rollout: RolloutId) -> _OpenRollout:
        if rollout not in self._open:
            raise AccountingError(f"rollout {rollout} is not in flight")
        return self._open[rollout]

    def _reach(self, rollout: RolloutId, reached: _Reached) -> None:
        entry = self._require_open(rollout)
        if entry.reached != reached - 1:
            raise AccountingError(f"rollout {rollout} was {entry.reached.name}, and then {reached.name}")
        entry.reached = reached

    def _use(self, rollout: RolloutId, purpose: Purpose) -> None:
        entry = self._close(rollout)
        if entry.purpose is not purpose or entry.reached is not _Reached.SCORED:
            raise AccountingError(
                f"rollout {rollout} for {entry.purpose}, {entry.reached.name}, was used for {purpose}"
            )

    def _close(self, rollout: RolloutId) -> _OpenRollout:
        entry = self._require_open(rollout)
        del self._open[rollout]
        self._in_flight[entry.purpose] -= 1
        return entry

    def _write(self, record: Record) -> None:
        self.position += 1
        self._written.append((self.position, record))


@dataclass(frozen=True, slots=True)
class _SavedCounts:
    """Those of a ledger's fields that a checkpoint has."""

    position: int
    issued: Counter[Purpose]
    finished: Counter[Purpose]
    trained: int
    evaluated: int
    explored: int
    dropped: Counter[DropReason]
    dropped_purpose: Counter[Purpose]
    rejected: Counter[str]
    prompts: set[PromptId]
    replaced_prompts: int = 0
    """Absent in older checkpoints."""


_SAVED = TypeAdapter(_SavedCounts)
