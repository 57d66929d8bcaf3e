"""Several training timesteps in one pass against one after the other, on one rank or sharded over several.

    python -m benchmarks.timesteps_per_pass
    torchrun --nproc-per-node 2 -m benchmarks.timesteps_per_pass --clock wall

All contestants train the same samples at the same timesteps; before timing, their gradient norms are
compared. The memory column is the peak of one micro-batch on the first rank, in the contestants' order;
not shown for ranks on CPUs, where gathered weights are not seen to be freed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers.utils import logging as diffusers_logging

from benchmarks._measure import CLOCK_HELP, Clock, Report, Row, ratio, take_turns, wide_console
from benchmarks.training_step import PROMPTS, TIMESTEPS, Mode, made_now, make_learner, ours, roll_out
from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.runtime.process import prepare_process
from spotlight.testbed import PIPELINE_DIR
from spotlight.training.device_memory import measure_peak
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.sharding import Ranks, process_group

SIZE = MediaSize(32, 32)


def peak_mib(learner: Learner, samples: Sequence[TrainingSample], micro_batch: int) -> float:
    """Of the first micro-batch's passes, beyond what was held before."""
    keys = [sample.key for sample in samples][:micro_batch]
    learner.prepare(made_now(learner, samples), [keys])
    _, peak = measure_peak(learner.family.device, lambda: learner.accumulate(keys, micro_batch))
    learner.step()
    learner.finish_batch()
    return peak / 2**20


def measure(
    family: QwenImage,
    conditions: Sequence[Condition],
    name: str,
    mode: Mode,
    sizes: tuple[int, int],
    rounds: int,
    clock: Clock,
    ranks: Ranks,
) -> Row:
    """One line of the table. ``sizes``: samples of an update, and of a rank's micro-batch."""
    count, micro_batch = sizes[0], sizes[1] * ranks.world
    samples = roll_out(make_learner(family, name, mode, SIZE), conditions, count)
    held = [
        sample if i % ranks.world == ranks.rank else replace(sample, tensors=None)
        for i, sample in enumerate(samples)
    ]
    learners = {
        f"K = {per_pass}": make_learner(family, name, mode, SIZE, per_pass, ranks)
        for per_pass in range(1, TIMESTEPS + 1)
    }
    norms = [ours(learner, held, micro_batch) for learner in learners.values()]
    if max(norms) / min(norms) - 1 > 1e-3:
        raise SystemExit(f"gradient norms are {norms}: the contestants do not train the same")
    peaks: list[float] = []
    if ranks.world == 1 or family.device.type == "cuda":
        peaks = [peak_mib(learner, held, micro_batch) for learner in learners.values()]
    seconds = take_turns(
        {k: lambda learner=learner: ours(learner, held, micro_batch) for k, learner in learners.items()},  # type: ignore[misc]
        rounds,
        family.device,
        clock,
    )
    case = {
        "algorithm": name,
        "mode": mode,
        "ranks": str(ranks.world),
        "samples": f"{count} in {micro_batch}s",
        "peak MiB": " / ".join(f"{peak:.1f}" for peak in peaks) or "-",
    }
    first, *others = learners
    return Row(case, seconds, {f"{k} / {first}": ratio(seconds[k], seconds[first]) for k in others})


def main(
    pipeline: Annotated[str, typer.Option(help="Directory or hub id; 32 x 32 pictures.")] = str(PIPELINE_DIR),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    algorithm: Annotated[list[str], typer.Option(help="Repeatable.")] = ["flow-grpo", "diffusion-nft"],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="lora or full; repeatable.")] = ["lora"],  # noqa: B006
    samples: Annotated[int, typer.Option(help="Of an optimizer step, over all ranks.")] = 32,
    micro_batch: Annotated[int, typer.Option(help="Of a forward and backward of one rank.")] = 4,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 9,
    clock: Annotated[Clock, typer.Option(help=CLOCK_HELP)] = Clock.WALL,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time an update in passes of 1, 2, ... all timesteps, taking turns."""
    where = torch.device(device)
    prepare_process(where, deterministic=False)  # as a run does
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    with process_group(where, timeout_s=600) as ranks:
        with tempfile.TemporaryDirectory() as cache:
            family = QwenImage.load(pipeline, device=where, dtype=torch.float32, embeddings_cache=Path(cache))
            conditions = family.encode(PROMPTS)
        family.free_text_encoder()
        rows = [
            measure(
                family,
                conditions,
                name,
                "lora" if kind == "lora" else "full",
                (samples, micro_batch),
                repeats,
                clock,
                ranks,
            )
            for name in algorithm
            for kind in mode
        ]
        if not ranks.is_main:
            return
        title = f"K of {TIMESTEPS} timesteps in a pass, {clock} time"
        settings = {
            "pipeline": Path(pipeline).name,
            "timesteps": TIMESTEPS,
            "clock": clock,
            "ranks": ranks.world,
        }
        report = Report(title, where, settings, rows, "sample", [samples] * len(rows))
        report.show(wide_console())
        if json is not None:
            report.write(json)


if __name__ == "__main__":
    typer.run(main)
