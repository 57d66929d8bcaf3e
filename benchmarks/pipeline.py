"""What overlapping generation and training brings, switch by switch, beside the ceiling of any overlap.

    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --part ray --seeds 1 --mode synchronous --mode +GAP --runs-dir runs/pipeline

``--part ray``: the real Ray driver on CPU slots of this machine; see ``_pipeline_ray.py``. Runs that are
finished already are read, not repeated. Extra arguments are overrides of all its runs.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from _measure import machine
from _pipeline_ray import run_ray


class Part(StrEnum):
    """Where the pipeline runs."""

    RAY = "ray"


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    part: Annotated[list[Part] | None, typer.Option(help="Only these.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0, 1, ...")] = 3,
    mode: Annotated[list[str] | None, typer.Option(help="Of ray: only these, such as +GAP.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs/pipeline"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure every mode and compare."""
    record: dict[str, object] = {"machine": machine(torch.device("cpu"))}
    if Part.RAY in (part or list(Part)):
        record["ray"] = run_ray(runs_dir, seeds, mode or (), overrides or ())
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
