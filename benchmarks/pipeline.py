"""What overlapping generation and training brings, switch by switch, beside the ceiling of any overlap.

    python -m benchmarks.pipeline --json pipeline.json
    python -m benchmarks.pipeline --part ray --seeds 1 --mode synchronous --mode +GAP --runs-dir runs/pipeline
    python -m benchmarks.pipeline --part simulator --model Wan2.1 --gpus 32 --steps 40 --fraction 0.6

``--part ray``: the real Ray driver on CPU slots of this machine; see ``_pipeline_ray.py``. Runs that are
finished already are read, not repeated. Extra arguments are overrides of all its runs.

``--part simulator``: four published models on 16 and 32 H100; see ``_pipeline_simulator.py``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks._measure import machine
from benchmarks._pipeline_ray import run_ray
from benchmarks._pipeline_simulator import MODELS, Setting, run_simulator


class Part(StrEnum):
    """Where the pipeline runs."""

    RAY = "ray"
    SIMULATOR = "simulator"


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    part: Annotated[list[Part] | None, typer.Option(help="Only these.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0, 1, ...")] = 3,
    mode: Annotated[list[str] | None, typer.Option(help="Of ray: only these, such as +GAP.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs/pipeline"),
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of the simulator: only {', '.join(MODELS)}.")
    ] = None,
    gpus: Annotated[list[int], typer.Option(help="Of the simulator: a multiple of 16.")] = [16, 32],  # noqa: B006
    training: Annotated[list[int], typer.Option(help="Of 16 GPUs: a multiple of 4.")] = [8, 12],  # noqa: B006
    steps: Annotated[list[int], typer.Option(help="Of the simulator: of a rollout.")] = [20],  # noqa: B006
    fraction: Annotated[list[float], typer.Option(help="Of the simulator: of steps trained.")] = [0.4],  # noqa: B006
    resident: Annotated[bool, typer.Option(help="Of the simulator: GPUs turn at no cost.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Of the simulator: processes.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure every mode and compare."""
    record: dict[str, object] = {"machine": machine(torch.device("cpu"))}
    if Part.RAY in (part or list(Part)):
        record["ray"] = run_ray(runs_dir, seeds, mode or (), overrides or ())
    if Part.SIMULATOR in (part or list(Part)):
        settings = [
            Setting(name, count, count * share // 16, length, part_trained, resident)
            for name in model or MODELS
            for count in gpus
            for share in training
            for length in steps
            for part_trained in fraction
        ]
        record["simulator"] = run_simulator(settings, jobs)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
