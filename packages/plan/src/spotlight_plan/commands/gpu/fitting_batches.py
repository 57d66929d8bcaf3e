"""The largest batches that fit a card, by the memory plan of ``--dry-run``. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight.dry_run.memory_plan import memory_parts, peak_bytes, worker_parts
from spotlight.dry_run.model_plan import ModelSizes
from spotlight.dry_run.run_plan import parameters_trained
from spotlight_plan.commands.gpu.gpu_report import ROWS_MAX, FittingBatch

MODES = ("none", "elementwise", "blocks")
"""Values of ``learner.recompute``."""


def fitting_batches(
    config: RunConfig, model: ModelSizes, text_tokens: int, memory_bytes: int
) -> Iterator[FittingBatch]:
    """Of a worker's rollouts, and of a micro-batch of one timestep a pass in each recompute mode.

    Args:
        memory_bytes: of the card, of which :data:`USABLE` counts.
    """
    trained = parameters_trained(config, model)

    def rollout(rows: int) -> float:
        section = config.rollout.model_copy(update={"batch_size": rows})
        sized = config.model_copy(update={"rollout": section})
        return peak_bytes(worker_parts(memory_parts(sized, model, trained, text_tokens)))

    def training(mode: str, rows: int) -> float:
        changes = {"micro_batch_size": rows, "timesteps_per_pass": 1, "recompute": mode}
        sized = config.model_copy(
            update={
                "learner": config.learner.model_copy(update=changes),
                "rollout": config.rollout.model_copy(update={"batch_size": 1}),
            }
        )
        return peak_bytes(memory_parts(sized, model, trained, text_tokens))

    usable = USABLE * memory_bytes
    yield _largest("rollouts", rollout, usable)
    for mode in MODES:
        yield _largest(f"training, recompute {mode}", partial(training, mode), usable)


def _largest(what: str, peak: Callable[[int], float], usable_bytes: float) -> FittingBatch:
    low, high = 0, ROWS_MAX + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= usable_bytes else (low, middle)
    return FittingBatch(what, low, peak(max(low, 1)))
