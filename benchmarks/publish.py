"""Seconds to publish the adapters of a version and to bind them in a node's workers, without the network.

    python -m benchmarks.publish [--gb 0.85] [--rounds 5] [--json FILE]

The learner packs and hashes; a node's first worker writes the version into shared memory and hashes it there;
every other worker of the node maps it, hashed again (as before) or not (as now); each binds it to float32
slots. 0.85 GB are Qwen-Image's rank-64 adapters in bfloat16.
"""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine, wide_console
from spotlight_weights.bundle import WeightsManifest, bind, pack
from spotlight_weights.node_cache import SHARED_MEMORY, NodeCache

RANK, WIDTH, SLOT = 64, 3072, "policy"
PARTS = ("pack and hash", "first worker", "another, hashed again", "another", "bind")


@dataclass
class Slots:
    """Float32 adapters of a worker."""

    tensors: Mapping[str, Tensor]
    modules_bound: int
    slots: tuple[str, ...] = (SLOT,)

    def state(self, slot: Any) -> Mapping[str, Tensor]:
        """Of the only slot."""
        return self.tensors

    def load_state(self, slot: Any, tensors: Mapping[str, Tensor]) -> None:
        """Copy, as weight slots do."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])


def adapters(size: float) -> dict[str, Tensor]:
    """Pairs of bfloat16 matrices of ``size`` bytes together."""
    layers = max(1, round(size / (2 * 2 * RANK * WIDTH)))
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    return {
        f"blocks.{layer}.{half}.weight": torch.rand(shape).to(torch.bfloat16)
        for layer in range(layers)
        for half, shape in shapes.items()
    }


@dataclass
class Publishing:
    """One node, version after version."""

    tensors: dict[str, Tensor]
    cache: NodeCache
    worker: Slots
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def publish(self, version: int) -> None:
        """A version whose content nobody has yet."""
        next(iter(self.tensors.values())).view(-1)[0] = version
        manifest, data = self._timed(PARTS[0], lambda: self._packed(version))
        self._timed(PARTS[1], lambda: self.cache.get(manifest, lambda: data))
        mark = self.cache.directory / f"{manifest.digest}.hashed"
        marked = mark.read_text(encoding="utf-8")
        mark.unlink()
        self._timed(PARTS[2], lambda: self.cache.get(manifest, _never))
        if mark.read_text(encoding="utf-8") != marked:
            raise RuntimeError("the file was written again")
        bundle = self._timed(PARTS[3], lambda: self.cache.get(manifest, _never))
        dtype = torch.bfloat16
        self._timed(PARTS[4], lambda: bind(bundle, self.worker, needs=[SLOT], dtype=dtype))

    def _packed(self, version: int) -> tuple[WeightsManifest, bytearray]:
        return pack(version, 0, {SLOT: self.tensors}, self.worker.modules_bound)

    def _timed(self, part: str, run: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = run()
        self.seconds[part].append(time.perf_counter() - began_s)
        return result


def _never() -> bytes:
    raise RuntimeError("fetched again")


def measure(size: float, rounds: int, parent: Path = SHARED_MEMORY) -> dict[str, list[float]]:
    """Seconds of each part in every round."""
    tensors = adapters(size)
    worker = Slots({name: torch.zeros(t.shape) for name, t in tensors.items()}, len(tensors) // 2)
    with NodeCache(f"publish-{os.getpid()}", parent=parent) as cache:
        publishing = Publishing(tensors, cache, worker)
        try:
            for version in range(1, rounds + 1):
                publishing.publish(version)
        finally:
            shutil.rmtree(cache.directory, ignore_errors=True)
    return publishing.seconds


def main(
    gb: Annotated[float, typer.Option(min=1e-4, help="Size of a version in GB.")] = 0.85,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path | None, typer.Option(help="Also write what was measured here.")] = None,
) -> None:
    """Seconds to publish and bind the adapters of a version."""
    seconds = measure(gb * 1e9, rounds)
    table = Table(title=f"Publishing and binding {gb:g} GB, median of {rounds}")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for part, taken in seconds.items():
        table.add_row(part, f"{median(taken):.2f}")
    wide_console().print(table)
    if json is not None:
        content = {"gb": gb, "seconds": seconds, "machine": machine(torch.device("cpu"))}
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
