"""``spotlight doctor --gpu``: what cards do, measured."""

from __future__ import annotations

from pathlib import Path


def measure(model: str, side_px: int | None, json_file: Path | None) -> None:
    """Check this machine's cards with a model: a family, hub id, preset or file.

    Args:
        side_px: height and width of its pictures; None: the configuration's.
        json_file: where a report goes; None: nowhere.
    """
    from spotlight_plan.commands.gpu.asked_model import find_model
    from spotlight_plan.commands.gpu.gpu_check import check_gpus, missing_gpu
    from spotlight_rewards.base.terminal import TextConsole
    from spotlight_rewards.commands.exit_codes import EXIT_STOPPED_BY_ERROR, failure

    if (why := missing_gpu()) is not None:
        raise failure(f"no GPU to measure: {why}.", EXIT_STOPPED_BY_ERROR)
    check_gpus(find_model(model, side_px), json_file, TextConsole())
