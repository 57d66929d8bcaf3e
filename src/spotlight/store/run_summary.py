"""``summary.json``: what came of a run, for people and scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from spotlight.scheduler.types import DropReason, Phase
from spotlight.store.files import write_atomically
from spotlight.store.store_errors import StoreError, storage_error


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """Mean scores of the held-out prompts' pictures, at one moment of the run.

    Attributes:
        iteration: iterations trained before.
        samples_trained: samples that had entered optimizer steps.
        wall_s: seconds of work on the run until then, from the start of training code: the interpreter's
            start and its imports come before.
        strict: mean of the strict score, in [0, 1]; None where the rewards have none.
        graded: mean of the reward that training maximises.
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
        iterations: trained.
        validation: in order of the iterations; empty where the run was never evaluated.
        validation_stderr: standard error of the last validation's mean score (strict where there is one);
            None where a single picture was judged, or none.
        wall_s: seconds of work on the run, all attempts together.
        lora: where the adapter lies, relative to the run directory; None where none was exported.
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


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write atomically.

    Raises:
        StoreError: the disk is full or not writable; an older summary is unchanged.
        ValueError: a number is not finite.
    """
    content = json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n"
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise storage_error("cannot write the summary", path, error) from error


def read_summary(path: Path) -> RunSummary:
    """Read what :func:`write_summary` wrote.

    Raises:
        StoreError: the file is missing or is no summary.
    """
    try:
        fields = json.loads(path.read_bytes())
        samples = fields.pop("samples")
        validation = tuple(ValidationPoint(**point) for point in fields.pop("validation"))
        if "iterations" not in fields:  # an older summary: every run ended with an evaluation
            fields["iterations"] = validation[-1].iteration
        return RunSummary(
            validation=validation,
            gpu_seconds_by_phase={
                Phase(phase): seconds for phase, seconds in fields.pop("gpu_seconds_by_phase").items()
            },
            samples=SampleCounts(
                samples["issued"],
                samples["trained"],
                {DropReason(reason): number for reason, number in samples["dropped"].items()},
            ),
            **fields,
        )
    except FileNotFoundError as error:
        raise StoreError(f"{path}: no summary here; the run has not come to its end yet.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a summary of a run ({error!r}).") from error
