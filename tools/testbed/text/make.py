"""Make the pipeline that writes: ``python -m tools.testbed.text.make OUT``.

Trains the VAE, then DiT and text encoder jointly. Writes a ``QwenImagePipeline`` directory plus
``TRAINING.json`` and ``scores.json``, as ``tools/testbed/make.py`` does for shapes; the same holds for
reproducibility.

Pictures show random strings of letters, never a held-out word. Captions misspell them, letter by letter, as
captions on the web do: so the model writes clearly, and whether it spells as asked is left to reinforcement
learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline

from spotlight_rewards.ocr import ocr
from spotlight_rewards.reading.ocr_onnx import OcrOnnx
from spotlight_rewards.reward import Image
from tools.testbed.architecture import PROMPT_TEMPLATE, Parts, halve
from tools.testbed.flow import UNCONDITIONAL, FlowData, FlowRecipe, pack_latents, train_flow
from tools.testbed.making import Clock, log, parser, run, write_records
from tools.testbed.prompts import Record
from tools.testbed.text import architecture
from tools.testbed.text.pictures import CELL_PX, HEIGHT_PX, WIDTH_PX, render_all
from tools.testbed.text.prompts import INKS, LENGTHS, LETTERS, is_held_out, record, split
from tools.testbed.vae import VaeRecipe, mean_psnr_db, reconstruct, train_vae

_STEPS, _BATCH = 10, 100


@dataclass(frozen=True, slots=True)
class TextRecipe:
    """Everything that determines the weights.

    Attributes:
        misspelled: chance of a caption's letter to be another than the picture's.
        scored: held-out pictures of the figures beside the weights, a multiple of the prompts.
    """

    seed: int = 0
    vae: VaeRecipe = field(default_factory=lambda: VaeRecipe(pictures=2048, steps=700, batch=32, crop_px=24))
    flow: FlowRecipe = field(
        default_factory=lambda: FlowRecipe(pictures=16384, steps=1000, batch=64, tag_weights={})
    )
    misspelled: float = 0.17
    scored: int = 8

    def scaled(self, factor: float) -> TextRecipe:
        """The same recipe with ``factor`` times the training steps."""
        return replace(
            self,
            vae=replace(self.vae, steps=max(round(self.vae.steps * factor), 30)),
            flow=replace(self.flow, steps=max(round(self.flow.steps * factor), 30)),
        )


def make(directory: Path, recipe: TextRecipe) -> None:
    """Train a pipeline and write it with its training record and scores."""
    _, test = split()
    parts = architecture.build(recipe.seed)
    clock = Clock()
    with clock.phase("vae"):
        words, inks = random_words(recipe.vae.pictures, recipe.seed)
        # Cut between letters: a code of blocks that stand anywhere in a letter is harder to learn.
        images = render_all(words, inks, recipe.seed)[:, :, : recipe.vae.crop_px]
        code = architecture.code_of(images)
        vae_loss = train_vae(parts.vae, images, recipe.vae, recipe.seed, log, code)
        halve(parts.vae)
    quality = reconstruction_quality(parts, recipe.seed)
    log(f"vae reconstructions: {quality}")
    with clock.phase("flow_data"):
        data = make_data(parts, recipe, recipe.seed + 1)
    with clock.phase("flow"):
        losses = train_flow(parts, data, recipe.flow, recipe.seed + 2, log, HEIGHT_PX // CELL_PX)
    halve(parts.transformer)
    architecture.save(parts, directory)
    with clock.phase("scores"):
        scores = measure(directory, test * recipe.scored)
    figures = {"vae_loss": round(vae_loss, 6), "vae_reconstruction": quality, "flow_losses": losses}
    write_records(directory, recipe, clock, figures, scores)


def random_words(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Strings of letters, none of them held out, and an ink for each."""
    rng = np.random.default_rng(seed)
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(list(LETTERS), size=rng.choice(LENGTHS)))
        if not is_held_out(word):
            words.append(word)
    return words, [str(ink) for ink in rng.choice(list(INKS), size=count)]


def make_data(parts: Parts, recipe: TextRecipe, seed: int) -> FlowData:
    """Render and encode random words; their captions misspell them."""
    words, inks = random_words(recipe.flow.pictures, seed)
    rng = np.random.default_rng(seed + 1)
    captions = [misspelled(word, recipe.misspelled, rng) for word in words]
    prompts = [str(record(word, ink)["prompt"]) for word, ink in zip(captions, inks, strict=True)]
    tokens = parts.tokenizer(
        [PROMPT_TEMPLATE.format(text) for text in (*prompts, UNCONDITIONAL)],
        padding=True,
        return_tensors="pt",
    )
    latents = pack_latents(parts.vae, render_all(words, inks, seed))
    return FlowData(latents, torch.arange(len(words)), tokens.input_ids, tokens.attention_mask)


def misspelled(word: str, chance: float, rng: np.random.Generator) -> str:
    """The word with each letter, by this chance, replaced by a random one."""
    return "".join(str(rng.choice(list(LETTERS))) if rng.random() < chance else letter for letter in word)


def reconstruction_quality(parts: Parts, seed: int, count: int = 200) -> dict[str, float]:
    """PSNR and readings of VAE reconstructions of new pictures."""
    words, inks = random_words(count, seed + 3)
    images = render_all(words, inks, seed + 3)
    copies = reconstruct(parts.vae, images)
    records = [record(word, ink) for word, ink in zip(words, inks, strict=True)]
    return {"psnr_db_mean": round(mean_psnr_db(images, copies), 2), **read(copies, records)}


def measure(directory: Path, records: Sequence[Record]) -> dict[str, Any]:
    """Held-out scores of the saved pipeline, by plain diffusers."""
    pictures = generate(QwenImagePipeline.from_pretrained(directory), records)
    scores = read(pictures, records)
    log(f"held-out: {scores}")
    return {"settings": {"pictures": len(pictures), "steps": _STEPS, "seed": 0}, "scores": scores}


def generate(pipeline: QwenImagePipeline, records: Sequence[Record]) -> Image:
    """One picture per record from seed 0: uint8 [records, height, width, 3]."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for start in range(0, len(records), _BATCH):
        output = pipeline(
            prompt=[str(each["prompt"]) for each in records[start : start + _BATCH]],
            true_cfg_scale=1.0,
            num_inference_steps=_STEPS,
            height=HEIGHT_PX,
            width=WIDTH_PX,
            generator=generator,
            output_type="np",
        )
        pictures.append((output.images * 255).round().astype(np.uint8))
    return np.concatenate(pictures)


def read(pictures: Image, records: Sequence[Record]) -> dict[str, float]:
    """Mean ``score`` and ``exact`` of the reader that is trained on, and ``exact`` of the held-out judge."""
    images, prompts = list(pictures), [str(each["prompt"]) for each in records]
    reader = OcrOnnx(find=False)(images, prompts, records)
    judge = ocr(images, prompts, records)
    curves = {"score": reader["score"], "exact": reader["exact"], "tesseract_exact": judge["exact"]}
    return {name: round(float(np.array(values).mean()), 4) for name, values in curves.items()}


def main() -> None:
    """Run the command line."""
    given = parser("tools.testbed.text.make", "Make a tiny pipeline that writes.").parse_args()
    recipe = TextRecipe(seed=given.seed).scaled(given.scale)
    run(
        given,
        make=lambda: make(given.directory, recipe),
        untrained=lambda: architecture.save(architecture.build(given.seed), given.directory),
    )


if __name__ == "__main__":
    main()
