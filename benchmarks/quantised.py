"""What few bits cost in learning: LoRA beside the testbed's base in bfloat16, int8, NF4 and float32.

    python -m benchmarks.quantised --json quantised.json
    python -m benchmarks.quantised --json quantised.json --seeds 10 --iterations 30

Run seeds 0, 1, ... train the demo's task on every base, by DiffusionNFT and by Flow-GRPO-Fast, each seed on
all of them before the next. Printed are how far the weights held are from those on file, held-out scores by
iteration (mean and standard deviation over seeds), each seed's last score less that in bfloat16, and how far
replayed log-probs were from the rollouts'. What is in the file is not made again: the same command goes on
where it was interrupted.

Extra arguments are overrides of all runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import torch
import typer
from torch import nn

from benchmarks._exploration_figures import table_of
from benchmarks._exploration_lab import laboratory
from benchmarks._learning_cases import CASES, Case, LearningSizes
from benchmarks._measure import wide_console
from benchmarks._record import Record, Tree
from benchmarks.learning import _known
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.shared.quantised import held
from spotlight.models.shared.transformer_files import weight_sources
from spotlight_kernels.quantised.linear import QuantisedLinear

_BFLOAT16 = ("model.dtype=bfloat16", "learner.autocast=bfloat16")
BASES: Mapping[str, tuple[str, ...]] = {
    "bfloat16": _BFLOAT16,
    "int8": (*_BFLOAT16, "model.quantize=int8"),
    "nf4": (*_BFLOAT16, "model.quantize=nf4"),
    "float32": (),
}
"""The first is what the others are compared with; int8 and NF4 compute in bfloat16, as it does."""
ALGORITHMS = {"diffusion-nft": CASES["baseline"], "flow-grpo-fast": CASES["flow-grpo"]}
_TASK = "counting"


def held_error(family: ModelFamily) -> float:
    """Relative distance from the files of weights held in few bits or, if none are, of those adapted."""
    read = weight_sources(family.files, list(denoisers(family.transformer)), None).reader()
    modules = family.transformer.named_modules()
    layers: Mapping[str, nn.Linear] = held(family.transformer) or {
        name.removesuffix(".base_layer"): each
        for name, each in modules
        if name.endswith(".base_layer") and isinstance(each, nn.Linear)
    }
    far, norm = 0.0, 0.0
    for name, layer in layers.items():
        stored = read(f"{name}.weight").float()
        whole = layer.whole(torch.float32) if isinstance(layer, QuantisedLinear) else layer.weight.float()
        far, norm = far + float((whole - stored).square().sum()), norm + float(stored.square().sum())
    return math.sqrt(far / norm)


def train(sizes: LearningSizes, algorithm: str, base: str, seed: int) -> Tree:
    """A run's scores by iteration, and its largest replay difference."""
    torch.set_num_threads(1)
    case = ALGORITHMS[algorithm]
    chosen = Case((*case.overrides, *BASES[base]), case.rates, stochastic=case.stochastic)
    with laboratory(sizes.config(_TASK, chosen, case.rates[1], seed)) as lab:
        error = held_error(lab.learning.model.family)
        recorder = lab.train(None)
    replays = [value for row in recorder.rows for key, value in row.items() if key.startswith("replay/")]
    return {
        "error": error,
        "strict": {str(at): row["strict"] for at, row in recorder.validations.items()},
        "graded": {str(at): row["graded"] for at, row in recorder.validations.items()},
        "replay_max": max(replays, default=None),
    }


def rows_of(runs: Mapping[str, Tree], algorithm: str, kind: str) -> Iterator[Tree]:
    """A row for each base with runs, of the seeds that it and the first have."""
    by_base: dict[str, dict[str, Tree]] = {base: {} for base in BASES}
    for key, run in runs.items():
        name, base, seed = key.split("/")
        if name == algorithm:
            by_base[base][seed] = run
    reference = next(iter(BASES))
    first = by_base[reference]
    for base, mine in by_base.items():
        pairs = [(run, first[seed]) for seed, run in mine.items() if seed in first]
        if not pairs:
            continue
        at = list(pairs[0][0][kind])
        replays = [run["replay_max"] for run, _ in pairs if run["replay_max"] is not None]
        yield {
            "base": base, "seeds": len(pairs), "error of weights": f"{pairs[0][0]['error']:.2%}",
            **{f"at {each}": _spread([run[kind][each] for run, _ in pairs]) for each in at},
            f"less {reference}": _spread([run[kind][at[-1]] - other[kind][at[-1]] for run, other in pairs]),
            "replay": f"{max(replays):.1e}" if replays else "",
        }  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Results; what is there is kept.")] = Path(
        "quantised.json"
    ),
    algorithm: Annotated[
        list[str] | None, typer.Option(help=f"Only these of {', '.join(ALGORITHMS)}.")
    ] = None,
    base: Annotated[list[str] | None, typer.Option(help=f"Only these of {', '.join(BASES)}.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0, 1, ...")] = 5,
    iterations: Annotated[int, typer.Option(min=2, help="Of a run.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Of an iteration.")] = 12,
    group_size: Annotated[int, typer.Option(min=4, help="Pictures of a prompt.")] = 16,
    rollout_steps: Annotated[int, typer.Option(min=2, help="Denoising steps of a picture.")] = 10,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Iterations.")] = 5,
    evaluation_images: Annotated[int, typer.Option(min=1, help="Of each held-out prompt.")] = 32,
) -> None:
    """Compare bases of a LoRA on the testbed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the rewards' processes, too
    sizes = LearningSizes(
        iterations,
        prompts,
        group_size,
        rollout_steps,
        evaluate_every,
        evaluation_images,
        1,
        1,
        tuple(overrides or ()),
    )
    chosen, bases = _known(algorithm, ALGORITHMS, "--algorithm"), _known(base, BASES, "--base")
    record = Record(json_file, sizes, ("runs",))
    for seed in range(seeds):
        for name in chosen:
            for each in bases:
                typer.echo(f"{name}/{each}/{seed}")
                record.once("runs", f"{name}/{each}/{seed}", partial(train, sizes, name, each, seed))
    for name in chosen:
        for kind in ("strict", "graded"):
            wide_console().print(
                table_of(f"{name}, {kind} held-out scores", [*rows_of(record.tree["runs"], name, kind)])
            )


if __name__ == "__main__":
    typer.run(main)
