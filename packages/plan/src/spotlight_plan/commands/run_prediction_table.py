"""``spotlight simulate --as RUN``: a run that was made, as the simulator predicts it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from spotlight.cli.run_argument import find_run
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from spotlight_plan.calibration.run_prediction import RunPrediction
    from spotlight_plan.calibration.run_times import RunTimes


def show_prediction(run: str, profile_name: str | None, as_json: Path | None) -> None:
    """Predict a run, and print prediction and measurement beside each other."""
    from spotlight.runtime.assembly.controller_plan import cluster_plan_of
    from spotlight_plan.calibration.measured_profile import measured_profile
    from spotlight_plan.calibration.run_prediction import predict_run
    from spotlight_plan.calibration.run_times import read_run_times
    from spotlight_plan.scenarios.profile import load_profile
    from spotlight_rewards.base.output_files import require_place, write_file

    directory = find_run(run)
    with errors_without_traceback():
        if as_json is not None:
            require_place(as_json)
        times = read_run_times(directory)
        profile = measured_profile([times]) if profile_name is None else load_profile(profile_name)
        predicted = predict_run(times, cluster_plan_of(times.config), profile)
        _print(times, predicted, profile_name or "measured in this run itself")
        if as_json is not None:
            write_file(as_json, json.dumps(_record(times, predicted, profile.name), indent=2) + "\n")
            TextConsole().print(f"Wrote {as_json}", soft_wrap=True)
    if predicted.error is not None:
        raise failure(f"the simulated run did not come to its end: {predicted.error}", 1)


def _print(run: RunTimes, predicted: RunPrediction, durations: str) -> None:
    from spotlight.store.ledger.ledger_queries import machine_of

    console = TextConsole()
    console.print(Text(run.label, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("", "predicted", "measured", "difference"):
        table.add_column(title, justify="right" if title else "left", overflow="fold")
    ours, real = predicted, run
    table.add_row("time per iteration in s", *_pair(ours.iteration_s, real.iteration_s, real.iteration_s))
    table.add_row("cost in $, after the first iteration", *_pair(ours.usd, real.usd, real.usd))
    total_s = sum(real.phase_s.values())
    table.add_row(Text("GPU-seconds, and difference as a share of all", style="dim"))
    for phase, seconds in real.phase_s.items():
        if seconds or ours.phase_s[phase]:
            pair = _pair(ours.phase_s[phase], seconds, total_s)
            table.add_row(f"  {phase.value.replace('_', ' ')}", *pair)
    console.print(table)
    console.print()
    for line in (
        f"durations: {durations}",
        f"{len(run.iteration_ends_s)} iterations; the first, in which all starts and warms up, is in no mean "
        "and no cost, only in the GPU-seconds",
        f"replayed: the run's settings, and its {len({*map(machine_of, run.nodes)})} nodes as they joined, "
        "got their notices and left",
        "not replayed: crashes of workers and learner, failed rewards, and what else ran on the machines",
    ):
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def _pair(ours: float, real: float, whole: float) -> tuple[str, str, str]:
    difference = f"{(ours - real) / whole:+.1%}" if whole and math.isfinite(ours) else "-"
    return f"{ours:,.4g}" if math.isfinite(ours) else "-", f"{real:,.4g}", difference


def _record(run: RunTimes, predicted: RunPrediction, profile: str) -> dict[str, object]:
    from spotlight_plan.pages.comparison_summary import finite

    return {
        **finite({"run": run.label, "profile": profile, "deviation": predicted.deviation(run)}),
        "error": predicted.error,
        "predicted": finite({"iteration_s": predicted.iteration_s})
        | {
            "iteration_ends_s": predicted.iteration_ends_s,
            "usd": predicted.usd,
            "gpu_s": {phase.value: seconds for phase, seconds in predicted.phase_s.items()},
        },
        "measured": {
            "iteration_s": run.iteration_s,
            "iteration_ends_s": run.iteration_ends_s,
            "usd": run.usd,
            "gpu_s": {phase.value: seconds for phase, seconds in run.phase_s.items()},
        },
    }
