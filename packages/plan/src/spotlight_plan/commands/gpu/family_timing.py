"""Time a denoising forward and updates of a family's model that has few blocks of the published width."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from spotlight.models import peft_layers
from spotlight.models.condition import GRIDS, Condition, Guidance
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.kernels.fused import missing
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import ForwardLog
from spotlight.models.slots import LoraSlots
from spotlight.training.device_memory import release
from spotlight.training.recompute import Mode, recompute
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_kernels.measure.device_rates import timed_s
from spotlight_plan.commands.gpu.gpu_report import DENOISING, UPDATE, FewBlocks, PassTime
from spotlight_plan.commands.gpu.random_blocks import random_adapters, random_blocks
from spotlight_rewards.base.device_errors import is_out_of_memory

_ROUNDS = 3, 15


@dataclass(frozen=True, slots=True)
class TimedWork:
    """What is timed.

    Attributes:
        batch: pictures or videos of a denoising forward.
        rows: of an update's forward and backward.
        rank: of the adapters.
        text_tokens: of each prompt.
        max_text_tokens: limit, which some families pad every prompt to.
        pass_s: about as long every pass is repeated.
    """

    size: MediaSize
    batch: int
    rows: int
    rank: int
    text_tokens: int
    max_text_tokens: int
    pass_s: float


def time_blocks(
    kind: type[ModelFamily],
    files: PipelineFiles,
    depth: Mapping[str, int],
    work: TimedWork,
    directory: Path,
    device: torch.device,
) -> FewBlocks:
    """Times and operations of a bfloat16 model with adapters and ``depth`` blocks of each kind.

    Raises:
        RuntimeError: of the device: not even the denoising forward fits.
    """
    family = random_blocks(
        kind,
        files,
        depth,
        directory,
        device=device,
        dtype=torch.bfloat16,
        max_text_tokens=work.max_text_tokens,
    )
    fused, reference = _fuse(family)
    slots = random_adapters(family, work.rank)
    if missing(device) is None:
        peft_layers.fuse(family.transformer)
    passes = {DENOISING: _denoising(family, slots, work)}
    for mode in get_args(Mode):
        passes[UPDATE.format(mode)] = _update(family, slots, work, mode)
    del family, slots
    release(device)
    return FewBlocks(depth, passes, fused, reference)


def _fuse(family: ModelFamily) -> tuple[Mapping[str, int], dict[str, str]]:
    lists = (
        child
        for part in denoisers(family.transformer).values()
        for child in part.children()
        if isinstance(child, nn.ModuleList)
    )
    classes = {type(block).__name__ for blocks in lists for block in blocks}
    if (why := missing(family.device)) is not None:
        return {}, dict.fromkeys(sorted(classes), why)
    from spotlight_kernels.fuse import fuse

    found = fuse(family.transformer, family.device)
    unknown = classes - found.blocks.keys() - found.left.keys()
    return found.blocks, {**found.left, **dict.fromkeys(sorted(unknown), "no fused operators for it")}


def _denoising(family: ModelFamily, slots: LoraSlots, work: TimedWork) -> PassTime:
    noted = ForwardLog()
    forward = _forward_of(family, work, work.batch)
    with torch.no_grad(), slots.use("policy", merged=True) as module:
        run = partial(forward, module)
        run(noted)
        seconds = _median_s(family.device, run, work.pass_s)
    return PassTime(work.batch, seconds, noted.take(family, operations=True).flops)


def _update(family: ModelFamily, slots: LoraSlots, work: TimedWork, mode: Mode) -> PassTime:
    """Forward and backward of a mean square, whose gradients are dropped."""
    recompute(slots.modules()["policy"], mode)
    noted, parameters = ForwardLog(), slots.trainable_parameters().values()
    forward = _forward_of(family, work, work.rows)

    def run(log: ForwardLog | None = None) -> None:
        with slots.use("policy") as module:
            forward(module, log).square().mean().backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.grad = None

    seconds = None
    try:
        run(noted)
        seconds = _median_s(family.device, run, work.pass_s)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        for parameter in parameters:
            parameter.grad = None
        release(family.device)
    return PassTime(work.rows, seconds, noted.take(family, operations=True).flops)


def _forward_of(family: ModelFamily, work: TimedWork, rows: int) -> Callable[..., Tensor]:
    """The velocity of noise; of families that edit pictures, with one reference picture of as many tokens."""
    # Noise, not constants: with many equal bits a GPU takes less power, and its clock is higher.
    latents = torch.randn(rows, *family.latent_shape(work.size), device=family.device)
    levels = torch.full([rows], 0.5, device=family.device)
    shapes = family.condition_shapes(work.text_tokens)
    tensors = {name: torch.randn(shape, device=family.device) for name, shape in shapes.items()}
    if GRIDS in shapes:
        tensors[GRIDS] = torch.tensor([[1, family.reference_tokens]], device=family.device)
    texts = family.collate([Condition(tensors)] * rows)
    guidance = Guidance(embedded=family.embedded_guidance)

    def forward(module: nn.Module, log: ForwardLog | None = None) -> Tensor:
        return family.velocity(module, latents, levels, texts, guidance, work.size, log)

    return forward


def _median_s(device: torch.device, run: Callable[[], object], budget_s: float) -> float:
    run()
    once = timed_s(device, run)
    least, most = _ROUNDS
    rounds = min(most, max(least, int(budget_s / once)))
    return statistics.median(timed_s(device, run) for _ in range(rounds))
