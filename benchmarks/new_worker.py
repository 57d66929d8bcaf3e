"""How soon a new worker process has the model: from a peer on its node, against from disk.

    python -m benchmarks.new_worker
    python -m benchmarks.new_worker --megabytes 2000 --rounds 10 --json build/new_worker.json

Each round starts three processes, one after the other in a random order, on the same machine in the same
minute. Each imports what a worker imports, and gets the model:

- peer: its skeleton, then the weights from a worker of the node, checked byte by byte on arrival.
- disk, cached: from the pipeline's directory, whose files are in the page cache. Nothing is checked.
- disk: the same, after the files were dropped from the page cache. The share still there is reported.

Timing ends after a first forward: on a CPU, weights from disk are mapped, and read only when they are used.

Models: the shipped testbed, and one of the same family made larger, with random weights, written to --folder.
What arrived is compared: all three ways must give the same weights.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import QwenImageTransformer2DModel
from rich.console import Console
from rich.table import Table
from tools.testbed.architecture import LATENT_CHANNELS, TEXT_WIDTH, build, save

from benchmarks._measure import machine, ratio, wide_console, write_result
from benchmarks._new_worker_process import Ready, arrive, serve
from spotlight.testbed import PIPELINE_DIR

WAYS = ("peer", "disk, cached", "disk")
PHASES = ("start, import", "model, first forward", "total")
_ANSWER_S = 600.0
_HEADS, _HEAD_DIM = 6, 128
_processes = multiprocessing.get_context("spawn")


def write_synthetic(directory: Path, megabytes: int) -> None:
    """A pipeline directory whose transformer has about ``megabytes`` of float32 weights, random."""

    def transformer(layers: int) -> QwenImageTransformer2DModel:
        return QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=layers,
            attention_head_dim=_HEAD_DIM,
            num_attention_heads=_HEADS,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(16, 56, 56),
        )

    with torch.device("meta"):
        one, two = (sum(p.nbytes for p in transformer(layers).parameters()) for layers in (1, 2))
    layers = max(1, round((megabytes * 10**6 - one) / (two - one)) + 1)
    with torch.random.fork_rng(devices=[]):
        save(dataclasses.replace(build(seed=0), transformer=transformer(layers).eval()), directory)


def weight_files(pipeline: Path) -> list[Path]:
    """Where the transformer's weights lie."""
    return sorted((pipeline / "transformer").glob("*.safetensors"))


def drop_from_cache(files: Sequence[Path]) -> float:
    """Ask the kernel to drop files from the page cache; the share of their pages that is still there."""
    pages = left = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
                count = -(-len(view) // mmap.PAGESIZE)
                there = (ctypes.c_ubyte * count)()
                start = ctypes.c_char.from_buffer(view)
                failed = libc.mincore(
                    ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), there
                )
                del start
                if failed:
                    raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += count
        left += sum(entry & 1 for entry in there)
    return left / pages


def read_whole(files: Sequence[Path]) -> None:
    """Bring files into the page cache."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def start_worker(
    pipeline: Path, cache: Path, device: str, peer: Path | None
) -> tuple[Ready, dict[str, float]]:
    """Start a process that gets the model; seconds of its phases."""
    ours, theirs = _processes.Pipe()
    began = time.monotonic()
    process = _processes.Process(target=arrive, args=(pipeline, cache, device, peer, theirs), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(_ANSWER_S):
        process.kill()
        raise TimeoutError(f"the new worker did not answer within {_ANSWER_S:g} s")
    ready = ours.recv()
    assert isinstance(ready, Ready)
    process.join()
    lengths = (ready.imported_s - began, ready.ran_s - ready.imported_s, ready.ran_s - began)
    return ready, dict(zip(PHASES, lengths, strict=True))


def measure(
    pipeline: Path, cache: Path, device: str, rounds: int, seed: int
) -> tuple[dict[str, list[dict[str, float]]], list[float]]:
    """Seconds of every way in every round, after one round that does not count; shares left in the cache."""
    order, draw = list(WAYS), random.Random(seed)
    seconds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    left: list[float] = []
    sums = set()
    ours, theirs = _processes.Pipe()
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        home = Path(folder) / "peers"
        lender = _processes.Process(target=serve, args=(pipeline, cache, device, home, theirs), daemon=True)
        lender.start()
        theirs.close()
        peer = ours.recv()
        for turn in range(rounds + 1):
            draw.shuffle(order)
            for way in order:
                if way == "disk":
                    left.append(drop_from_cache(weight_files(pipeline)))
                elif way == "disk, cached":
                    read_whole(weight_files(pipeline))
                ready, taken = start_worker(pipeline, cache, device, peer if way == "peer" else None)
                sums.add(ready.sums)
                if turn > 0:
                    seconds[way].append(taken)
        ours.close()
        lender.join()
    if len(sums) != 1:
        raise SystemExit("the ways give different weights: nothing to compare")
    return seconds, left[1:]


def summary(seconds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median, quartiles and largest of every phase, seconds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for way, rows in seconds.items():
        found[way] = {}
        for phase in PHASES:
            values = [row[phase] for row in rows]
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
            found[way][phase] = {
                "median": statistics.median(values),
                "quartile 1": first,
                "quartile 3": third,
                "max": max(values),
            }
    return found


def show(
    console: Console,
    title: str,
    seconds: Mapping[str, Sequence[Mapping[str, float]]],
    left: Sequence[float],
) -> dict[str, str]:
    """The table of one model, and the ratios; the ratios."""
    table = Table(title=title)
    for column in ("from", "phase", "median s", "quartiles s", "max s"):
        table.add_column(column, justify="left" if column in ("from", "phase") else "right")
    for way, phases in summary(seconds).items():
        for phase, value in phases.items():
            table.add_row(
                way,
                phase,
                f"{value['median']:.3f}",
                f"{value['quartile 1']:.3f} to {value['quartile 3']:.3f}",
                f"{value['max']:.3f}",
            )
    console.print(table)
    model = {way: [row[PHASES[1]] for row in rows] for way, rows in seconds.items()}
    ratios = {f"peer / {way}": str(ratio(model["peer"], model[way])) for way in WAYS[1:]}
    console.print(
        f"{PHASES[1]}: "
        + "; ".join(f"{name} {value}" for name, value in ratios.items())
        + " (median [95 % interval]; below 1: the peer is faster). Page cache: at most "
        + f"{max(left):.0%} of the file was still there when it had been dropped."
    )
    return ratios


def main(
    megabytes: Annotated[
        int, typer.Option(help="Size of the synthetic transformer, float32; 0: none.")
    ] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds for each model, at least 2.")] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    folder: Annotated[Path | None, typer.Option(help="Where to write the synthetic model.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the ways.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time new workers that get the model from a peer, and from disk."""
    if rounds < 2:
        raise typer.BadParameter(f"{rounds} rounds: at least 2 are needed to speak of a spread")
    console = wide_console()
    results = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        cache = Path(scratch) / "embeddings"
        models = {"testbed": PIPELINE_DIR}
        if megabytes:
            models["synthetic"] = Path(scratch) / "synthetic"
            write_synthetic(models["synthetic"], megabytes)
        for name, pipeline in models.items():
            size = sum(path.stat().st_size for path in weight_files(pipeline))
            seconds, left = measure(pipeline, cache, device, rounds, seed)
            ratios = show(console, f"{name}, {size / 1e6:.0f} MB, {rounds} rounds", seconds, left)
            results.append(
                {
                    "model": name,
                    "bytes": size,
                    "rounds": rounds,
                    "summary": summary(seconds),
                    "ratios": ratios,
                    "cached_after_drop": left,
                    "seconds": seconds,
                }
            )
    about = machine(torch.device(device))
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json is not None:
        content = {
            "rows": results,
        }
        write_result(json, "New worker: from a peer against from disk", about, content)


if __name__ == "__main__":
    typer.run(main)
