"""The ledger as its durable records imply it: a part of the reference model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotlight.scheduler.records import (
    REWARD,
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
from spotlight.scheduler.types import (
    Purpose,
    Rollout,
    RolloutId,
)


@dataclass(slots=True)
class LedgerModel:
    """The ledger as its durable records imply it.

    Attributes:
        stale: samples of an iteration that may be one published version old.
        older: the version published before ``published``.
        begun: issued samples of each iteration that are one published version old.
        kept: preview of each sample that was kept from one.
    """

    stale: int
    records: list[Record] = field(default_factory=list)
    issued: dict[RolloutId, Rollout] = field(default_factory=dict)
    finished: set[RolloutId] = field(default_factory=set)
    scored: set[RolloutId] = field(default_factory=set)
    ended: dict[RolloutId, str] = field(default_factory=dict)
    rewards: dict[RolloutId, float] = field(default_factory=dict)
    stepped: dict[int, int] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    published: int = 0
    older: int = 0
    begun: Counter[int] = field(default_factory=Counter)
    kept: dict[RolloutId, RolloutId] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)

    def write(self, position: int, record: Record) -> None:
        """Append a record. Raises AssertionError if it may not follow."""
        assert position == len(self.records) + 1, f"record {position} follows {len(self.records)}"
        self.records.append(record)
        match record:
            case RolloutIssued(rollout):
                assert rollout.id not in self.issued, f"{rollout.id} is issued twice"
                if rollout.version != self.published:
                    self._may_be_stale(rollout)
                self.issued[rollout.id] = rollout
            case SampleFinished(rollout, version, preview=preview):
                assert rollout in self.issued, f"{rollout} is finished without being issued"
                assert rollout not in self.finished, f"{rollout} is finished twice"
                assert rollout not in self.ended, f"{rollout} is finished after its end"
                assert version == self.issued[rollout].version, f"{rollout} was made by version {version}"
                self.finished.add(rollout)
                if preview is not None:
                    self._keep(rollout, preview)
            case SampleScored(rollout, scores):
                self.rewards[rollout], self.scores[rollout] = scores[REWARD], scores
                made_as = self.kept.get(rollout, rollout)
                assert scores == self.scores[made_as], f"{rollout} has other scores than {made_as}"
                assert rollout in self.finished, f"{rollout} is scored before it is finished"
                assert rollout not in self.scored, f"{rollout} is scored twice"
                self.scored.add(rollout)
            case SampleTrained(rollout, step):
                made_by = self.issued[rollout].version
                assert made_by in (self.published, self.older), f"{rollout} is stale: made by {made_by}"
                self._end(rollout, Purpose.TRAIN)
                self.trained[step] = self.trained.get(step, 0) + 1
            case SampleEvaluated(rollout):
                self._end(rollout, Purpose.EVAL)
            case SampleExplored(rollout):
                self._end(rollout, Purpose.EXPLORE)
            case SampleDropped(rollout, reason):
                assert rollout in self.issued
                assert rollout not in self.ended, f"{rollout} is dropped after its end"
                assert not reason.by_choice or rollout in self.scored, (
                    f"{rollout} is {reason} without a score"
                )
                self.ended[rollout] = reason.value
            case StepApplied(version, _, _, samples):
                assert version == len(self.stepped) + 1, f"step {version} follows {len(self.stepped)}"
                assert samples == self.trained.get(version), "a step counts other samples than entered it"
                self.stepped[version] = samples
            case VersionPublished(version):
                assert version == len(self.stepped), "a version is published that was not made"
                self.older, self.published = self.published, version

    def _keep(self, rollout: RolloutId, preview: RolloutId) -> None:
        """Only a scored preview that is exactly this rollout, once."""
        assert self.preview_of(self.issued[rollout]) == preview, f"{rollout} is kept from {preview}"
        assert preview not in self.kept.values(), f"{preview} is kept twice"
        self.kept[rollout] = preview

    def preview_of(self, rollout: Rollout) -> RolloutId | None:
        """The scored preview that made this rollout's sample: but for its name, it is the same."""
        for name in self.scored:
            found = self.issued[name]
            same = replace(rollout, id=name, purpose=Purpose.EXPLORE, member=found.member)
            if rollout.purpose is Purpose.TRAIN and found == same:
                return name
        return None

    def _may_be_stale(self, rollout: Rollout) -> None:
        """Only samples of the next iteration may be begun early, and only so many."""
        assert rollout.version == self.older, f"{rollout} asks for other weights than published"
        assert rollout.purpose is Purpose.TRAIN, f"{rollout} is one version old"
        self.begun[rollout.iteration] += 1
        assert self.begun[rollout.iteration] <= self.stale, f"more samples than allowed are old: {rollout}"

    def _end(self, rollout: RolloutId, purpose: Purpose) -> None:
        assert rollout in self.scored, f"{rollout} is used without a score"
        assert rollout not in self.ended, f"{rollout} is used after its end ({self.ended.get(rollout)})"
        assert self.issued[rollout].purpose is purpose
        self.ended[rollout] = purpose.value

    @classmethod
    def until(cls, records: Sequence[Record], stale: int) -> LedgerModel:
        """The model of these records only."""
        ledger = cls(stale)
        for position, record in enumerate(records, start=1):
            ledger.write(position, record)
        return ledger
