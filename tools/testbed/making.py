"""What makers of the embedded pipelines share: seconds by phase, the record of a training, the command."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers


@dataclass(slots=True)
class Clock:
    """Seconds by phase, wall and CPU."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as one phase."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name] = round(time.perf_counter() - wall, 1)
        self.cpu_s[name] = round(time.process_time() - cpu, 1)


def log(message: str) -> None:
    """Print a progress line, flushed."""
    print(message, flush=True)


def write_records(
    directory: Path, recipe: Any, clock: Clock, figures: Mapping[str, object], scores: Mapping[str, object]
) -> None:
    """Write ``TRAINING.json`` and ``scores.json`` beside a pipeline.

    Args:
        recipe: a dataclass.
        figures: losses and qualities of the training.
        scores: held-out ones of the saved pipeline.
    """
    cpu_minutes = round(sum(clock.cpu_s.values()) / 60, 1)
    training = {
        "recipe": asdict(recipe),
        "recipe_sha256": recipe_hash(recipe),
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "cpu_minutes_total": cpu_minutes,
        **figures,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
    }
    for name, value in (("TRAINING.json", training), ("scores.json", scores)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    log(f"wrote {directory} in {cpu_minutes} CPU minutes")


def recipe_hash(recipe: Any) -> str:
    """SHA-256 of the JSON of a recipe, a dataclass."""
    return hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    """Of what determines the weights."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def parser(module: str, description: str, *, untrained: bool = True) -> argparse.ArgumentParser:
    """The options of all makers; ``untrained``: there is something to write without training."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("directory", type=Path, help="where the pipeline directory is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiply the training steps (0.01: a trial)"
    )
    if untrained:
        parser.add_argument("--untrained", action="store_true", help="random weights, in seconds")
    return parser


def run(
    options: argparse.Namespace, make: Callable[[], None], untrained: Callable[[], None] | None = None
) -> None:
    """Make the pipeline, on so many threads as the options say (one)."""
    if untrained is not None and options.untrained:
        untrained()
        return
    # The number of threads determines how sums are split, hence the weights.
    torch.set_num_threads(getattr(options, "threads", 1))
    _keep_freed_memory()
    make()


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory: otherwise every step faults in the pages of its large tensors."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
