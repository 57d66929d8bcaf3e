"""Recreate the embedded pipeline: ``python -m tools.testbed.make OUT``.

Trains the VAE, then DiT and text encoder jointly. Writes a ``QwenImagePipeline`` directory plus
``TRAINING.json`` (recipe and its hash, seconds, losses, reconstruction quality) and ``scores.json`` (held-out
scores before any reinforcement learning). Weights are reproducible given the seed, number of threads, library
versions and kind of CPU; the shipped ones used one thread.

Example: ``python -m tools.testbed.make build/trial --scale 0.01`` is a short trial of everything;
``--untrained`` writes random weights in a few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np

from spotlight_rewards.shapes import shapes
from tools.testbed import architecture
from tools.testbed.flow import FlowRecipe, make_data, train_flow
from tools.testbed.making import Clock, log, parser, run, write_records
from tools.testbed.prompts import Record, split
from tools.testbed.scenes import render_all
from tools.testbed.scores import ScoreRecipe, as_json, score_pipeline
from tools.testbed.vae import VaeRecipe, mean_psnr_db, reconstruct, train_vae

GUIDANCE = 4.0
_RECONSTRUCTIONS = 760


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the weights."""

    seed: int = 0
    vae: VaeRecipe = field(default_factory=VaeRecipe)
    flow: FlowRecipe = field(default_factory=FlowRecipe)

    def scaled(self, factor: float) -> Recipe:
        """The same recipe with ``factor`` times the training steps."""
        return replace(
            self,
            vae=replace(self.vae, steps=max(round(self.vae.steps * factor), 30)),
            flow=replace(self.flow, steps=max(round(self.flow.steps * factor), 30)),
        )


def make(directory: Path, recipe: Recipe) -> None:
    """Train a pipeline and write it with its training record and scores."""
    train, test = split()
    parts = architecture.build(recipe.seed)
    clock = Clock()
    with clock.phase("vae"):
        rng = np.random.default_rng(recipe.seed)
        chosen = [train[index] for index in rng.integers(len(train), size=recipe.vae.pictures)]
        vae_loss = train_vae(parts.vae, render_all(chosen, recipe.seed), recipe.vae, recipe.seed, log)
        architecture.coarsen(parts.vae)
    quality = reconstruction_quality(parts, test, recipe.seed)
    log(f"vae reconstructions: {quality}")
    with clock.phase("flow_data"):
        data = make_data(parts, train, recipe.flow, recipe.seed + 1)
    with clock.phase("flow"):
        flow_losses = train_flow(parts, data, recipe.flow, recipe.seed + 2, log)
    architecture.coarsen(parts.transformer)
    architecture.coarsen(parts.text_encoder)
    architecture.save(parts, directory)
    with clock.phase("scores"):
        scores = measure(directory, test)
    figures = {
        "vae_loss": round(vae_loss, 6),
        "vae_reconstruction": quality,
        "flow_losses": flow_losses,
    }
    write_records(directory, recipe, clock, figures, scores)


def reconstruction_quality(
    parts: architecture.Parts, records: Sequence[Record], seed: int
) -> dict[str, float]:
    """PSNR and detector scores of VAE reconstructions of new scenes for held-out prompts."""
    records = (list(records) * (1 + _RECONSTRUCTIONS // len(records)))[:_RECONSTRUCTIONS]
    images = render_all(records, seed + 3)
    copies = reconstruct(parts.vae, images)
    scores = shapes(list(copies), [str(record["prompt"]) for record in records], records)
    return {
        "psnr_db_mean": round(mean_psnr_db(images, copies), 2),
        "strict": round(float(np.mean(scores["strict"])), 4),
        "graded": round(float(np.mean(scores["graded"])), 4),
    }


def measure(directory: Path, test: Sequence[Record]) -> dict[str, Any]:
    """Held-out scores of the saved pipeline, without and with guidance."""
    pipeline = diffusers.QwenImagePipeline.from_pretrained(directory)
    result: dict[str, Any] = {}
    for name, guidance in (("unguided", 1.0), ("guided", GUIDANCE)):
        recipe = ScoreRecipe(guidance=guidance)
        scores = score_pipeline(pipeline, test, recipe)
        result[name] = {"settings": asdict(recipe), "scores": as_json(scores)}
        for tag, score in scores.items():
            log(
                f"{name:9} {tag:14} strict {score.strict:.3f} ± {score.strict_stderr:.3f}"
                f"  graded {score.graded:.3f} ± {score.graded_stderr:.3f}"
            )
    return result


def main() -> None:
    """Run the command line."""
    options = parser("tools.testbed.make", "Remake the embedded pipeline of coloured shapes.")
    options.add_argument(
        "--threads", type=int, default=1, help="CPU threads; 2 take less wall-clock time but more CPU time"
    )
    given = options.parse_args()
    recipe = Recipe(seed=given.seed).scaled(given.scale)
    run(
        given,
        make=lambda: make(given.directory, recipe),
        untrained=lambda: architecture.save(architecture.build(given.seed), given.directory),
    )


if __name__ == "__main__":
    main()
