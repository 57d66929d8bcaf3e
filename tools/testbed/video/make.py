"""Make the video pipeline: ``python -m tools.testbed.video.make OUT``.

Trains the VAE, then DiT and text encoder jointly. Writes a ``WanPipeline`` directory plus ``TRAINING.json``
and ``scores.json``, as ``tools/testbed/make.py`` does for pictures; the same holds for reproducibility.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline

from spotlight_rewards.motion import motion
from spotlight_rewards.reward import Image
from tools.testbed.architecture import halve
from tools.testbed.making import Clock, log, parser, run, write_records
from tools.testbed.prompts import Record
from tools.testbed.video import architecture
from tools.testbed.video.architecture import TEXT_TOKENS
from tools.testbed.video.clips import FRAMES, SIDE_PX, render_all
from tools.testbed.video.flow import VideoFlowRecipe, make_data, train_flow
from tools.testbed.video.prompts import split
from tools.testbed.video.vae import VideoVaeRecipe, reconstruct, set_latent_mean, sharpen, train_vae

_CENTRED = 512
_STEPS, _BATCH = 10, 64


@dataclass(frozen=True, slots=True)
class VideoRecipe:
    """Everything that determines the weights.

    Attributes:
        reconstructed, scored: held-out videos of the figures beside the weights, a multiple of the prompts.
    """

    seed: int = 0
    vae: VideoVaeRecipe = field(default_factory=VideoVaeRecipe)
    flow: VideoFlowRecipe = field(default_factory=VideoFlowRecipe)
    reconstructed: int = 240
    scored: int = 384

    def scaled(self, factor: float) -> VideoRecipe:
        """The same recipe with ``factor`` times the training steps."""
        return replace(
            self,
            vae=replace(
                self.vae,
                steps=max(round(self.vae.steps * factor), 30),
                decoder_steps=max(round(self.vae.decoder_steps * factor), 30),
            ),
            flow=replace(self.flow, steps=max(round(self.flow.steps * factor), 30)),
        )


def make(directory: Path, recipe: VideoRecipe, earlier: Path | None = None) -> None:
    """Train a pipeline and write it with its training record and scores.

    Args:
        earlier: a pipeline made before by the same recipe of the VAE, whose VAE and its figures are taken.

    Raises:
        ValueError: that VAE was made by another recipe.
    """
    train, test = split()
    parts = architecture.build(recipe.seed)
    clock = Clock()
    if earlier is None:
        made = make_vae(parts, train, recipe, clock)
    else:
        made = take_vae(parts, recipe, clock, earlier)
    quality = reconstruction_quality(parts, test * (recipe.reconstructed // len(test)), recipe.seed)
    log(f"vae reconstructions: {quality}")
    with clock.phase("flow_data"):
        data = make_data(parts, train, recipe.flow, recipe.seed + 1)
    with clock.phase("flow"):
        flow_losses = train_flow(parts, data, recipe.flow, recipe.seed + 2, log)
    halve(parts.transformer)
    architecture.save(parts, directory)
    with clock.phase("scores"):
        scores = measure(directory, test * (recipe.scored // len(test)))
    figures = {**made, "vae_reconstruction": quality, "flow_losses": flow_losses}
    write_records(directory, recipe, clock, figures, scores)


def make_vae(
    parts: architecture.Parts, train: list[Record], recipe: VideoRecipe, clock: Clock
) -> dict[str, float]:
    """Train the VAE in place, on clips anywhere in the frame; its last losses."""
    with clock.phase("vae"):
        rng = np.random.default_rng(recipe.seed)
        chosen = [train[index] for index in rng.integers(len(train), size=recipe.vae.clips)]
        small = render_all(chosen, recipe.seed, recipe.vae.side_px, anywhere=True)
        vae_loss = train_vae(parts.vae, small, recipe.vae, recipe.seed, log)
        decoder_loss = sharpen(parts.vae, small, recipe.vae, recipe.seed + 4, log)
        halve(parts.vae)
        set_latent_mean(parts.vae, render_all(chosen[:_CENTRED], recipe.seed, anywhere=True))
    return {"vae_loss": round(vae_loss, 6), "decoder_loss": round(decoder_loss, 6)}


def take_vae(parts: architecture.Parts, recipe: VideoRecipe, clock: Clock, earlier: Path) -> dict[str, float]:
    """Load the VAE of an earlier pipeline in place; its last losses, and its seconds into ``clock``."""
    record = json.loads((earlier / "TRAINING.json").read_text(encoding="utf-8"))
    of = record["recipe"]
    if (of["seed"], of["vae"]) != (recipe.seed, asdict(recipe.vae)):
        raise ValueError(
            f"the VAE of {earlier} was made with seed {of['seed']} and {of['vae']}; expected seed "
            f"{recipe.seed} and {asdict(recipe.vae)}. Leave --vae out to train one"
        )
    vae = AutoencoderKLWan.from_pretrained(earlier / "vae")
    parts.vae.load_state_dict(vae.state_dict())
    parts.vae.register_to_config(
        latents_mean=vae.config["latents_mean"], latents_std=vae.config["latents_std"]
    )
    clock.wall_s["vae"], clock.cpu_s["vae"] = record["wall_s"]["vae"], record["cpu_s"]["vae"]
    return {name: record[name] for name in ("vae_loss", "decoder_loss")}


def reconstruction_quality(parts: architecture.Parts, records: list[Record], seed: int) -> dict[str, float]:
    """PSNR over all pixels and the reward of VAE reconstructions of new clips for held-out prompts."""
    videos = render_all(records, seed + 3)
    copies = reconstruct(parts.vae, videos)
    squared = (videos.astype(np.float64) - copies.astype(np.float64)) ** 2
    return {"psnr_db": round(float(10 * np.log10(255**2 / squared.mean())), 2), **_scores(copies, records)}


def measure(directory: Path, records: list[Record]) -> dict[str, Any]:
    """Held-out scores of the saved pipeline, by plain diffusers with Wan's own solver."""
    videos = generate(WanPipeline.from_pretrained(directory), records)
    scores = _scores(videos, records)
    log(f"held-out: {scores}")
    return {"settings": {"videos": len(videos), "steps": _STEPS, "seed": 0}, "scores": scores}


def generate(pipeline: WanPipeline, records: list[Record]) -> Image:
    """One video per record from seed 0: uint8 [records, frames, 32, 32, 3]."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    videos = []
    for start in range(0, len(records), _BATCH):
        output = pipeline(
            prompt=[str(record["prompt"]) for record in records[start : start + _BATCH]],
            guidance_scale=1.0,
            num_inference_steps=_STEPS,
            height=SIDE_PX,
            width=SIDE_PX,
            num_frames=FRAMES,
            max_sequence_length=TEXT_TOKENS,
            generator=generator,
            output_type="np",
        )
        videos.append((output.frames * 255).round().astype(np.uint8))
    return np.concatenate(videos)


def _scores(videos: Image, records: list[Record]) -> dict[str, float]:
    curves = motion(list(videos), [str(record["prompt"]) for record in records], records)
    return {name: round(float(np.mean(values)), 4) for name, values in curves.items() if name != "score"}


def main() -> None:
    """Run the command line."""
    options = parser("tools.testbed.video.make", "Make a tiny pipeline of moving shapes.")
    options.add_argument("--vae", type=Path, metavar="PIPELINE", help="take the VAE that was made for it")
    given = options.parse_args()
    recipe = VideoRecipe(seed=given.seed).scaled(given.scale)
    run(
        given,
        make=lambda: make(given.directory, recipe, given.vae),
        untrained=lambda: architecture.save(architecture.build(given.seed), given.directory),
    )


if __name__ == "__main__":
    main()
