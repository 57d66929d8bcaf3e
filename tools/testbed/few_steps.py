"""Distil the embedded pipeline to four steps, as a LoRA: ``python -m tools.testbed.few_steps OUT``.

The teacher is the pipeline without guidance on a finer schedule with the student's levels in it. The student
starts from the same noise with the same prompt, takes its own steps, and is regressed on the teacher's states
at those levels, through all its steps. Writes diffusers' LoRA file, ``TRAINING.json`` (recipe and its hash,
seconds, losses) and ``scores.json``: held-out ones of the pipeline in few and in its usual steps, and of the
student. Reproducible like the pipeline (:mod:`tools.testbed.make`).

The committed one: ``python -m tools.testbed.few_steps src/spotlight/testbed/four_steps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from spotlight.models.families.qwen_image import QwenImage
from spotlight.testbed import PIPELINE_DIR
from spotlight_files.lora_file import LORA_FILE
from tools.testbed.architecture import PROMPT_TEMPLATE, Parts
from tools.testbed.flow import TEMPLATE_TOKENS, FlowRecipe, learning_rate
from tools.testbed.making import Clock, log, parser, run, write_records
from tools.testbed.prompts import Record, split
from tools.testbed.scores import ScoreRecipe, as_json, score_pipeline
from tools.testbed.vae import Log

TOKENS, ROWS, CHANNELS = 64, 8, 48
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class DistilRecipe:
    """Everything that determines the adapter.

    Attributes:
        student_steps: on the pipeline's own schedule.
        finer: steps of the teacher for each of the student's.
        paths: pool of noise and prompt, each of whose paths the teacher draws once.
        rank: of the adapter, on all layers that Spotlight trains by default.
    """

    seed: int = 0
    student_steps: int = 4
    finer: int = 3
    paths: int = 2048
    rank: int = 8
    steps: int = 900
    batch: int = 16
    learning_rate: float = 4e-3
    warmup_steps: int = 30

    def scaled(self, factor: float) -> DistilRecipe:
        """The same recipe with ``factor`` times the paths and training steps."""
        return replace(
            self,
            paths=max(round(self.paths * factor), self.batch),
            steps=max(round(self.steps * factor), 10),
        )


@dataclass(frozen=True, slots=True)
class Paths:
    """The teacher's.

    Attributes:
        states: at the student's levels but the last, [paths, steps, tokens, channels].
        prompts: index of each path's, [paths].
    """

    states: Tensor
    prompts: Tensor


@dataclass(frozen=True, slots=True)
class Texts:
    """Embedded prompts, as the pipeline pads them: [prompts, tokens, width] and [prompts, tokens]."""

    embeds: Tensor
    mask: Tensor


def levels(pipeline: QwenImagePipeline, steps: int) -> list[float]:
    """Noise levels of the pipeline's schedule, from 1 to 0."""
    pipeline.set_progress_bar_config(disable=True)
    pipeline("a circle", height=32, width=32, num_inference_steps=steps, output_type="latent")
    found: list[float] = pipeline.scheduler.sigmas.tolist()
    return found


def embed(parts: Parts, prompts: Sequence[str]) -> Texts:
    """The text encoder's last states without the template's first tokens."""
    tokens = parts.tokenizer(
        [PROMPT_TEMPLATE.format(prompt) for prompt in prompts], padding=True, return_tensors="pt"
    )
    mask = tokens.attention_mask[:, TEMPLATE_TOKENS:].bool()
    with torch.no_grad():
        hidden = parts.text_encoder.model.language_model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        ).last_hidden_state[:, TEMPLATE_TOKENS:]
    return Texts(hidden * mask.unsqueeze(-1), mask)


def stepped(parts: Parts, x: Tensor, start: float, end: float, texts: Texts, prompts: Tensor) -> Tensor:
    """``x: [batch, tokens, channels]`` after one Euler step from level ``start`` to ``end``."""
    mask = texts.mask[prompts]
    longest = int(mask.sum(1).max())
    velocity: Tensor = parts.transformer(
        hidden_states=x,
        timestep=torch.full((len(x),), start),
        encoder_hidden_states=texts.embeds[prompts, :longest],
        encoder_hidden_states_mask=mask[:, :longest],
        img_shapes=[[(1, ROWS, TOKENS // ROWS)]] * len(x),
        return_dict=False,
    )[0]
    return x + (end - start) * velocity


@torch.no_grad()
def draw_paths(
    parts: Parts, texts: Texts, train: Sequence[Record], at: Sequence[float], recipe: DistilRecipe
) -> Paths:
    """The teacher's states at the levels ``at``, for prompts as often as in pre-training."""
    weights = FlowRecipe().tag_weights
    sizes = {tag: sum(record["tag"] == tag for record in train) for tag in weights}
    shares = np.array([weights[record["tag"]] / sizes[record["tag"]] for record in train])
    rng = np.random.default_rng(recipe.seed)
    prompts = torch.from_numpy(rng.choice(len(train), size=recipe.paths, p=shares / shares.sum()))
    x = torch.randn(recipe.paths, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(recipe.seed))
    states = [x]
    for start, end in pairwise(at):
        fine = np.linspace(start, end, recipe.finer + 1).tolist()
        chunks = []
        for chunk, those in zip(torch.split(x, _CHUNK), torch.split(prompts, _CHUNK), strict=True):
            for left, right in pairwise(fine):
                chunk = stepped(parts, chunk, left, right, texts, those)
            chunks.append(chunk)
        x = torch.cat(chunks)
        states.append(x)
    return Paths(torch.stack(states, 1), prompts)


def distil(
    parts: Parts, texts: Texts, paths: Paths, at: Sequence[float], recipe: DistilRecipe, log: Log
) -> list[float]:
    """Add an adapter to the transformer and train it; returns the mean loss of each tenth of the steps."""
    torch.manual_seed(recipe.seed)
    targets = list(QwenImage.lora_targets)
    parts.transformer.add_adapter(LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=targets))
    trained = [parameter for parameter in parts.transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    tenth, recent = max(recipe.steps // 10, 1), 0.0
    losses: list[float] = []
    for step in range(recipe.steps):
        chosen = torch.randint(recipe.paths, (recipe.batch,), generator=generator)
        x, prompts = paths.states[chosen, 0], paths.prompts[chosen]
        loss = torch.zeros(())
        for index, (start, end) in enumerate(pairwise(at)):
            x = stepped(parts, x, start, end, texts, prompts)
            loss = loss + F.mse_loss(x, paths.states[chosen, index + 1])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe)
        optimizer.step()
        recent += loss.item() / tenth
        if (step + 1) % tenth == 0:
            losses.append(round(recent, 5))
            recent = 0.0
            log(f"step {step + 1}/{recipe.steps} loss {losses[-1]:.4f}")
    return losses


def save_adapter(parts: Parts, file: Path) -> None:
    """In float16, under diffusers' names."""
    layers = get_peft_model_state_dict(parts.transformer, adapter_name="default")
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"transformer.{name}": value.half().contiguous() for name, value in layers.items()}, file)


def measure(test: Sequence[Record], recipe: DistilRecipe, adapter: Path, images: int) -> dict[str, Any]:
    """Held-out scores of the pipeline in its usual and in the student's steps, and of the student."""
    pipeline, found = QwenImagePipeline.from_pretrained(PIPELINE_DIR), {}
    usual = ScoreRecipe(images_per_tag=images)
    few = replace(usual, steps=recipe.student_steps)
    for name, settings in (("pipeline", usual), ("pipeline_few", few), ("student", few)):
        if name == "student":
            pipeline.load_lora_weights(adapter)
        scores = score_pipeline(pipeline, test, settings)
        found[name] = {"steps": settings.steps, "scores": as_json(scores)}
        for tag in ("counting", "overall"):
            log(f"{name:12} {tag:9} strict {scores[tag].strict:.3f}  graded {scores[tag].graded:.3f}")
    return found


def make(directory: Path, recipe: DistilRecipe, images: int = 192) -> None:
    """Train and write with its training record and scores.

    Args:
        images: of a tag, to be scored.
    """
    train, test = split()
    pipeline = QwenImagePipeline.from_pretrained(PIPELINE_DIR)
    parts = Parts(
        pipeline.tokenizer, pipeline.text_encoder, pipeline.vae, pipeline.transformer, pipeline.scheduler
    )
    parts.transformer.requires_grad_(False)
    at = levels(pipeline, recipe.student_steps)[:-1]  # the last step, from a level of .02, is as it is
    clock = Clock()
    texts = embed(parts, [str(record["prompt"]) for record in train])
    with clock.phase("paths"):
        paths = draw_paths(parts, texts, train, at, recipe)
    with clock.phase("distil"):
        losses = distil(parts, texts, paths, at, recipe, log)
    save_adapter(parts, directory / LORA_FILE)
    with clock.phase("scores"):
        scores = measure(test, recipe, directory / LORA_FILE, images)
    figures = {"levels": [round(level, 5) for level in at], "losses": losses}
    write_records(directory, recipe, clock, figures, scores)


def main() -> None:
    """Run the command line."""
    options = parser(
        "tools.testbed.few_steps", "Distil the embedded pipeline to four steps.", untrained=False
    )
    given = options.parse_args()
    recipe = DistilRecipe(seed=given.seed).scaled(given.scale)
    run(given, make=lambda: make(given.directory, recipe))


if __name__ == "__main__":
    main()
