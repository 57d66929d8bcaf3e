"""How fast a new node gets a hub model's files from another node, against reading them from its own disk.

    python -m benchmarks.model_fetch
    python -m benchmarks.model_fetch --megabytes 2000 --rounds 5 --json build/model_fetch.json

Starts a local Ray of two nodes on the loopback interface, each with its own object store and hub cache. One
has a model (that of benchmarks.new_worker, random weights). Each round, in random order:

- other node: all files of the model, by the code that a new node runs: a server is started and says what it
  has; then chunks cross Ray's object stores, each file's SHA-256 is checked, and the snapshot is linked. On
  the source the files are in the page cache.
- disk: the same files are read, dropped from the page cache before.
- disk, cached: the same, in the page cache.
- SHA-256: of the same bytes in memory, on one core: the check alone.

Both ends and Ray share this machine's cores, so two machines with a fast network do better.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer
from rich.table import Table

from benchmarks._measure import machine, wide_console, write_result
from benchmarks.new_worker import drop_from_cache, read_whole, write_synthetic
from spotlight.cluster.model_fetch import node_sources
from spotlight.models.families.qwen_image import QwenImage
from spotlight.scheduler.types import NodeKind
from spotlight_files.hub_snapshot import WantedModel, model_directory, wanted_of
from spotlight_files.snapshot_copy import fetch_snapshot
from spotlight_fleet.connection import connected
from spotlight_fleet.emulated.local_cluster import local_cluster

HUB_ID, COMMIT = "benchmarks/synthetic", "b" * 40
WAYS = ("other node, start", "other node, copy", "disk", "disk, cached", "SHA-256")
_ANSWER_S = 120.0


def fill_cache(cache: Path, megabytes: int) -> list[Path]:
    """A hub cache with a synthetic pipeline; its files."""
    directory = model_directory(cache, HUB_ID)
    root = directory / "snapshots" / COMMIT
    write_synthetic(root, megabytes)
    (directory / "blobs").mkdir()
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            blob = directory / "blobs" / hashlib.file_digest(file, "sha256").hexdigest()
        path.rename(blob)
        path.symlink_to(blob)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return files


def fetch(wanted: WantedModel, cache: Path) -> dict[str, float]:
    """Seconds to fetch everything into an empty cache, in two parts."""
    shutil.rmtree(cache, ignore_errors=True)
    with closing(node_sources(_ANSWER_S)) as sources:
        began = time.monotonic()
        source = next(sources)
        source.offer(wanted)
        up = time.monotonic()
        if fetch_snapshot(wanted, [source], model_directory(cache, HUB_ID)) != COMMIT:
            raise SystemExit("the other node did not give the model: nothing to compare")
        return {"other node, start": up - began, "other node, copy": time.monotonic() - up}


def read(files: list[Path], *, cached: bool) -> dict[str, float]:
    """Seconds to read the files."""
    read_whole(files) if cached else drop_from_cache(files)
    began = time.monotonic()
    read_whole(files)
    return {"disk, cached" if cached else "disk": time.monotonic() - began}


def digest(data: bytes) -> dict[str, float]:
    """Seconds for the SHA-256 of bytes in memory."""
    began = time.monotonic()
    hashlib.sha256(data).digest()
    return {"SHA-256": time.monotonic() - began}


def measure(
    folder: Path, files: list[Path], wanted: WantedModel, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Seconds of every way in every round, after one that does not count."""
    data = b"".join(path.read_bytes() for path in files)
    ways: list[Callable[[], dict[str, float]]] = [
        lambda: fetch(wanted, folder / "new"),
        lambda: read(files, cached=False),
        lambda: read(files, cached=True),
        lambda: digest(data),
    ]
    draw = random.Random(seed)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        mock.patch.dict(os.environ, {"HF_HUB_CACHE": str(folder / "new")}),
        local_cluster(1) as cluster,
        connected(cluster.address),
    ):
        os.environ["HF_HUB_CACHE"] = str(folder / "has it")
        cluster.add_node("source", NodeKind.SPOT, 1)
        for turn in range(rounds + 1):
            draw.shuffle(ways)
            for way in ways:
                for name, taken in way().items():
                    if turn > 0:
                        seconds[name].append(taken)
    return seconds


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the transformer, float32.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds, at least 2.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where to write both caches.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the ways.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time a model's files from another node, and from disk."""
    if rounds < 2:
        raise typer.BadParameter(f"{rounds} rounds: at least 2 are needed to speak of a spread")
    console = wide_console()
    wanted = wanted_of(HUB_ID, COMMIT, QwenImage.components)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = fill_cache(Path(scratch) / "has it", megabytes)
        moved = [path for path in files if not path.match("text_encoder/*.safetensors")]
        size = sum(path.stat().st_size for path in moved)
        seconds = measure(Path(scratch), moved, wanted, rounds, seed)
    table = Table(title=f"{size / 1e6:.0f} MB in {len(moved)} files, {rounds} rounds")
    for column in ("way", "median s", "least to most s", "median MB/s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, taken in seconds.items():
        middle = statistics.median(taken)
        spread = f"{min(taken):.2f} to {max(taken):.2f}"
        rate = "" if way.endswith("start") else f"{size / 1e6 / middle:.0f}"
        table.add_row(way, f"{middle:.2f}", spread, rate)
    console.print(table)
    about = machine(torch.device("cpu"))
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json is not None:
        content = {
            "bytes": size,
            "seconds": seconds,
        }
        write_result(json, "A model's files from another node against from disk", about, content)


if __name__ == "__main__":
    typer.run(main)
