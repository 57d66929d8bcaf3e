"""``summary.json``: the outcome of a run, for people and scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from spotlight.scheduler.types import DropReason, Phase
from spotlight.store.metrics import FinalTable
from spotlight_rewards.base.file_errors import StoreError, storage_errors
from spotlight_rewards.base.files import read_regular, write_atomically
from spotlight_rewards.base.typed_json import typed


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """Mean scores on held-out prompts at one point of the run.

    Attributes:
        iteration: iterations trained so far.
        samples_trained: used in optimizer steps so far.
        wall_s: seconds of work so far, all attempts together.
        strict: in [0, 1]; None if the rewards have no strict score.
        graded: the reward that training maximises.
    """

    iteration: int
    samples_trained: int
    wall_s: float
    strict: float | None
    graded: float


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Train rollouts: issued, trained, and dropped by reason."""

    issued: int
    trained: int
    dropped: Mapping[DropReason, int]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The keys of ``summary.json``.

    Attributes:
        validation: by ascending iteration; may be empty.
        validation_stderr: of the last validation's strict score, else the graded one; None below two images.
        wall_s: seconds of work, all attempts together.
        lora: path relative to the run directory; None if not exported.
    """

    iterations: int
    validation: tuple[ValidationPoint, ...]
    validation_stderr: float | None
    wall_s: float
    gpu_seconds_by_phase: Mapping[Phase, float]
    cost_usd: float
    samples: SampleCounts
    lora: str | None
    run_seed: int


def final_table(summary: RunSummary) -> FinalTable:
    """For trackers: what the final screen says."""
    first, last = summary.validation[:1], summary.validation[-1:]
    by_strict = any(each.strict is not None for each in last)
    judged = {each.iteration: each.strict if by_strict else each.graded for each in (*first, *last)}
    rows = [
        (f"validation at iteration {at}", f"{score:.4f}") for at, score in judged.items() if score is not None
    ]
    if summary.validation_stderr is not None:
        rows.append(("its standard error", f"{summary.validation_stderr:.4f}"))
    rows += [
        ("iterations", str(summary.iterations)),
        ("hours of work", f"{summary.wall_s / 3600:.3f}"),
        ("dollars", f"{summary.cost_usd:.2f}"),
        *(
            (f"worker-seconds, {phase.value}", f"{s:.1f}")
            for phase, s in summary.gpu_seconds_by_phase.items()
        ),
        ("samples issued", str(summary.samples.issued)),
        ("samples trained", str(summary.samples.trained)),
        *((f"samples dropped, {reason.value}", str(n)) for reason, n in summary.samples.dropped.items()),
    ]
    return FinalTable(("figure", "value"), tuple(dict.fromkeys(rows)))


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write atomically.

    Raises:
        StoreError: the disk is full or not writable.
        ValueError: a number is not finite.
    """
    content = json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n"
    with storage_errors("cannot write the summary", path):
        write_atomically(path, content.encode())


def read_summary(path: Path) -> RunSummary:
    """Read ``summary.json``. Raises StoreError if missing or malformed."""
    try:
        fields = json.loads(read_regular(path, _BYTES_MAX))
        if "iterations" not in fields:  # an older summary: every run ended with an evaluation
            fields["iterations"] = fields["validation"][-1]["iteration"]
        return typed(_SUMMARY, fields, "summary")
    except FileNotFoundError as error:
        raise StoreError(f"{path}: no summary here; the run has not come to its end yet.") from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path}: not a summary of a run ({type(error).__name__}: {error}). Restore it from a copy, "
            "or delete it: `spotlight train` then writes it again from the last checkpoint."
        ) from error


_BYTES_MAX = 1 << 26
_SUMMARY = TypeAdapter(RunSummary)
