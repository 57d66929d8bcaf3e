"""``spotlight doctor --gpu``: what this machine's cards do, and what fits them, in about half a minute."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from rich.console import Console

import spotlight
from spotlight.data.media_size import media_size
from spotlight.models.kernels import attention
from spotlight.training.device_memory import free_bytes, release
from spotlight_files.model_errors import ModelError
from spotlight_kernels.measure.device_rates import copy_bytes_s, product_flop_s
from spotlight_kernels.measure.peak_rates import peak_of
from spotlight_plan.commands.gpu.asked_model import AskedModel
from spotlight_plan.commands.gpu.between_cards import all_reduce_rate
from spotlight_plan.commands.gpu.family_timing import TimedWork, time_blocks
from spotlight_plan.commands.gpu.fitting_batches import fitting_batches
from spotlight_plan.commands.gpu.gpu_report import (
    CardRates,
    GpuReport,
    Link,
    depths_to_time,
    named,
    whole_passes,
)
from spotlight_plan.commands.gpu.gpu_tables import print_report
from spotlight_plan.commands.gpu.random_blocks import depth_of
from spotlight_rewards.base.device_errors import is_out_of_memory
from spotlight_rewards.base.output_files import require_place, write_file


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        product_side: of the matrices multiplied.
        copy_bytes, reduce_bytes: of the tensors copied, and added up between cards.
        few, more: blocks of a kind of the models timed.
        pass_s: about as long every pass is repeated.
        reduce_deadline_s: for the cards to add up.
    """

    product_side: int = 8192
    copy_bytes: int = 2**30
    reduce_bytes: int = 2**28
    few: int = 2
    more: int = 6
    pass_s: float = 0.6
    reduce_deadline_s: float = 60.0


def check_gpus(
    asked: AskedModel,
    json_file: Path | None,
    console: Console,
    *,
    devices: Sequence[torch.device] = (),
    effort: Effort = Effort(),
) -> GpuReport:
    """Measure, print, and write ``json_file``.

    Args:
        devices: all are looked at, the first runs the model; none: every card that torch sees.

    Raises:
        ConfigError: the file cannot be written; before anything is measured, where that is known.
        ModelError: not even a denoising forward of few blocks fits the first.
    """
    if json_file is not None:
        require_place(json_file)
    devices = devices or [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    try:
        report = _measured(asked, devices, effort, console)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"rollout.batch_size is {asked.config.rollout.batch_size}; with few blocks such a forward takes "
            f"more than is free of {devices[0]} ({error}): name a smaller --side, or end other processes"
        ) from error
    print_report(report, console)
    if json_file is not None:
        write_file(json_file, json.dumps(asdict(report), indent=1) + "\n")
        console.print(f"report: {json_file}", markup=False)
    return report


def missing_gpu() -> str | None:
    """Why torch sees no CUDA device, and what to do; None: it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; expected a build for this machine's driver: "
            "see https://pytorch.org/get-started/locally"
        )
    if not Path("/proc/driver/nvidia/version").exists():
        return (
            "no NVIDIA driver is loaded; expected one: install it, or start the container with --gpus all "
            "(on Kubernetes with a limit for nvidia.com/gpu)"
        )
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, of which torch sees none: unset it, or name cards there"
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no card, although a driver is loaded: "
        "nvidia-smi says which CUDA that driver has; install a torch for it"
    )


def _measured(
    asked: AskedModel, devices: Sequence[torch.device], effort: Effort, console: Console
) -> GpuReport:
    """A line for each step as it ends."""
    diffusers_logging.set_verbosity_error()
    cards = []
    for device in devices:
        with _step(console, f"{device}: products and copies"):
            cards.append(_rates(device, effort))
    link = _link(devices, effort, console)
    files, config, kind = asked.files, asked.config, asked.family
    depth = depth_of(files.config("transformer"))
    work = TimedWork(
        media_size(config.rollout),
        batch=config.rollout.batch_size,
        rows=asked.rows,
        rank=config.learner.lora.rank,
        text_tokens=asked.text_tokens,
        max_text_tokens=config.model.max_text_tokens,
        pass_s=effort.pass_s,
    )
    measured = []
    with tempfile.TemporaryDirectory(prefix="spotlight-doctor-") as folder:
        for number, blocks in enumerate(depths_to_time(depth, effort.few, effort.more)):
            with _step(console, f"{kind.name}: {named(blocks)}"):
                directory = Path(folder) / str(number)
                measured.append(time_blocks(kind, files, blocks, work, directory, devices[0]))
    return GpuReport(
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        cards=cards,
        link=link,
        attention=[name for name in attention.BACKENDS if attention.missing(name, devices[0]) is None],
        family=kind.name,
        model=str(files.root),
        size=f"{work.size.width}x{work.size.height}" + (f", {work.size.frames} frames" if kind.video else ""),
        text_tokens=work.text_tokens,
        lora_rank=work.rank,
        depth=depth,
        passes=whole_passes(measured, depth, cards[0].peak_flop_s),
        measured=measured,
        fits=list(fitting_batches(config, asked.sizes, asked.planned_tokens, cards[0].memory_bytes)),
    )


def _rates(device: torch.device, effort: Effort) -> CardRates:
    gpu, free = device.type == "cuda", free_bytes(device)
    rates = CardRates(
        name=torch.cuda.get_device_name(device) if gpu else "CPU",
        memory_bytes=torch.cuda.mem_get_info(device)[1] if gpu else free,
        free_bytes=free,
        product_flop_s=product_flop_s(device, effort.product_side),
        copy_bytes_s=copy_bytes_s(device, effort.copy_bytes),
        peak_flop_s=peak_of(device, torch.bfloat16),
    )
    release(device)
    return rates


def _link(devices: Sequence[torch.device], effort: Effort, console: Console) -> Link | None:
    if len(devices) < 2:
        return None
    with _step(console, f"an all-reduce between {len(devices)} cards"):
        backend = "nccl" if devices[0].type == "cuda" else "gloo"
        return all_reduce_rate(len(devices), effort.reduce_bytes, effort.reduce_deadline_s, backend=backend)


def _versions() -> dict[str, str]:
    return {
        "spotlight": spotlight.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "diffusers": diffusers.__version__,
    }


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    began = time.monotonic()
    with console.status(what):
        yield
    console.print(f"{time.monotonic() - began:5.1f} s  {what}", style="dim", markup=False)
