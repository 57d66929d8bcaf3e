"""The rows of each record of the controller, as statements with their values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias, assert_never

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
from spotlight.store.ledger.ledger_schema import RolloutOutcome
from spotlight.store.store_errors import LedgerError

_Values: TypeAlias = tuple[str | int | float | None, ...]

_OUTCOME = (
    "INSERT INTO outcomes (seq, rollout, purpose, kind, optimizer_step, reason, detail) "
    "VALUES (?1, ?2, COALESCE((SELECT purpose FROM rollouts WHERE id = ?2), 'never issued'), ?3, ?4, ?5, ?6)"
)


def rows_of(number: int, record: Record) -> Iterator[tuple[str, _Values]]:
    """Raises LedgerError for a sample without scores."""
    match record:
        case PromptSeen(prompt):
            metadata = json.dumps(dict(prompt.metadata), sort_keys=True, ensure_ascii=False)
            yield "INSERT INTO prompts VALUES (?, ?, ?, ?)", (number, prompt.id, prompt.text, metadata)
        case RolloutIssued(rollout):
            yield (
                "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    number,
                    rollout.id,
                    rollout.purpose,
                    rollout.iteration,
                    rollout.prompt_id,
                    rollout.member,
                    rollout.seed,
                    rollout.steps,
                    rollout.version,
                ),
            )
        case SampleFinished(rollout_id, version, worker, epoch, preview):
            yield "INSERT INTO samples VALUES (?, ?, ?, ?, ?)", (number, rollout_id, version, worker, epoch)
            if preview is not None:
                yield "INSERT INTO kept_previews VALUES (?, ?)", (rollout_id, preview)
        case SampleScored(rollout_id, scores):
            if not scores:
                raise LedgerError(
                    f"record {number} has no scores: {record!r}; drop the sample with a reason instead."
                )
            for name, value in scores.items():
                yield "INSERT INTO rewards VALUES (?, ?, ?, ?)", (number, rollout_id, name, float(value))
        case SampleTrained(rollout_id, step):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.TRAINED, step, None, None)
        case SampleDropped(rollout_id, reason, detail):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.DROPPED, None, reason, detail)
        case SampleEvaluated(rollout_id):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.EVALUATED, None, None, None)
        case SampleExplored(rollout_id):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.EXPLORED, None, None, None)
        case StepApplied(version, iteration, update, samples, loss, grad_norm):
            yield (
                "INSERT INTO optimizer_steps VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, version, iteration, update, samples, loss, grad_norm),
            )
        case VersionPublished(version):
            yield "INSERT INTO versions VALUES (?, ?)", (number, version)
        case CommitRejected(rollout_or_none, reason_text):
            yield "INSERT INTO rejected VALUES (?, ?, ?)", (number, rollout_or_none, reason_text)
        case _:
            assert_never(record)
