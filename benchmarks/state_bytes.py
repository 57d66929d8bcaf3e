"""Bytes of a progress commit for published models and sizes of videos.

    python -m benchmarks.state_bytes --json build/state_bytes.json

A state is packed as a worker packs it after a step: its latents, and in commits of their own those kept for
training (two stochastic steps keep three). Embeddings are in the store already. Nothing is compressed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks._measure import report
from spotlight.diffusion.samplers import FlowSDE
from spotlight.diffusion.schedule import RandomWindow
from spotlight.models.condition import Condition
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.rollout.commits import Committer
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.worker.stored_rollouts import REPORT_BYTES
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_rewards.base.prompts import PromptId

STEPS, WINDOW = 10, 2
CASES = (
    ("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", MediaSize(480, 832, frames=5)),
    ("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", MediaSize(480, 832, frames=81)),
    ("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", MediaSize(720, 1280, frames=81)),
    ("wan", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", MediaSize(704, 1280, frames=121)),
    ("hunyuan-video", "hunyuanvideo-community/HunyuanVideo", MediaSize(480, 480, frames=5)),
    ("hunyuan-video", "hunyuanvideo-community/HunyuanVideo", MediaSize(720, 1280, frames=129)),
    ("qwen-image", "Qwen/Qwen-Image", MediaSize(512, 512)),
    ("qwen-image-edit", "Qwen/Qwen-Image-Edit-2511", MediaSize(512, 512)),
)


def state_bytes(family: str, model: str, size: MediaSize, kept: int) -> int:
    """Of one state, packed for the first time.

    Args:
        kept: latents besides the current ones.
    """
    kind = FAMILIES.load(family)
    published = kind.published[model]
    files = PipelineFiles(Path(model), known={**published.configs, "model_index": published.settings})
    dimensions = kind.read_dimensions(files)
    dimensions.check_size(size, video=kind.video)
    latents = torch.zeros(dimensions.channels, dimensions.latent_frames(size), *dimensions.grid(size))
    rollout = Rollout(RolloutId("a"), Purpose.TRAIN, 0, PromptId("a"), 0, 0, STEPS, PolicyVersion(0))
    recipe = Recipe(size, FlowSDE(0.7), RandomWindow(WINDOW, high=STEPS), 1.0, "trajectory")
    state = RolloutState(
        rollout,
        recipe,
        Condition({}, "of the prompt"),
        step=WINDOW,
        latents=latents,
        sigmas=torch.zeros(STEPS + 1),
        window=range(WINDOW),
        kept=tuple(latents.clone() for _ in range(kept)),
        log_probs=tuple(torch.zeros(()) for _ in range(kept - 1)),
    )
    return sum(len(value.data) for value in Committer().begin([state]))


def main(
    json: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
) -> None:
    """Print the table."""
    rows = []
    for family, model, size in CASES:
        plain, whole = (state_bytes(family, model, size, kept) for kept in (0, WINDOW + 1))
        rows.append(
            {
                "model": model,
                "height x width, frames": f"{size.height} x {size.width}, {size.frames}",
                "commit_mb": plain / 1e6,
                "all_kept_mb": whole / 1e6,
                "first_commits_a_report": max(1, math.floor(REPORT_BYTES / whole)),
            }
        )
    report(json, "Bytes of a progress commit", rows=rows)


if __name__ == "__main__":
    typer.run(main)
