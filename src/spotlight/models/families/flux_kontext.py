"""FLUX.1-Kontext, over diffusers' ``FluxKontextPipeline``: draws a picture from a reference picture.

Traps of the reference:
- It scales the reference to one of 17 sizes of about a megapixel, whatever the size of the result; and the
  result to ``max_area`` pixels, a megapixel unless told, whatever height and width say.
- The reference's latents follow the picture's in the sequence, with 1 for 0 as first position; of several
  references it reads the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.condition import GRIDS, REFERENCES
from spotlight.models.families.flux import Flux
from spotlight.models.family import ConditionBatch, Instruction, MediaSize, encode_image, pack
from spotlight.models.family_facts import ActivationCosts, read_models
from spotlight.models.shared.rows import by_kind
from spotlight.models.text.references import open_reference


class FluxKontext(Flux):
    """A FLUX.1-Kontext model; guidance as in FLUX.1."""

    name = "flux-kontext"
    pipeline_class = "FluxKontextPipeline"
    activations = ActivationCosts(
        lora=14.5, full=23.0, elementwise=11.8, checkpointed=1.5, forward=15.5, decode=6.5
    )
    embedded_guidance = 2.5
    captures_graphs = False  # it reads the references' shapes
    references_max = 1
    reference_tokens = 4150  # of 800 x 1328, the largest of the sizes
    text_recipe = "a reference at the pipeline's sizes"
    published, tiny_models = read_models(__file__)

    @classmethod
    def size_arguments(cls, size: MediaSize) -> dict[str, object]:
        return super().size_arguments(size) | {"max_area": size.height * size.width}

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """FLUX.1's, the reference's packed latents, and its rows and columns."""
        reference = {REFERENCES: (self.reference_tokens, self.dimensions.channels), GRIDS: (1, 2)}
        return super().condition_shapes(text_tokens) | reference

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """Without a reference picture, as of the run's negative prompt; prompts to draw need one."""
        return self.embed_instruction(pipeline, Instruction(prompt, (), prompt))

    def embed_instruction(self, pipeline: Any, instruction: Instruction) -> dict[str, Tensor]:
        """The pipeline's own embeddings, and its latents of the reference."""
        text = super().embed(pipeline, instruction.text)
        latents = [self._reference(path) for path in instruction.references]
        grids = [[latent.shape[2] // 2, latent.shape[3] // 2] for latent in latents]
        tokens = [pack(latent)[0].to(self.dtype) for latent in latents]
        none = text["embeds"].new_zeros(0, self.dimensions.channels)
        positions = torch.tensor(grids, dtype=torch.int64).reshape(-1, 2)
        return text | {REFERENCES: torch.cat([none, *tokens]), GRIDS: positions}

    def _reference(self, path: str) -> Tensor:
        """Normalised latents [1, channels, height, width]."""
        from diffusers.image_processor import VaeImageProcessor
        from diffusers.pipelines.flux import pipeline_flux_kontext as reference

        picture, unit = open_reference(path), self.dimensions.patch_px
        resizer = VaeImageProcessor(vae_scale_factor=unit)
        height, width = resizer.get_default_height_width(picture)
        sizes = reference.PREFERRED_KONTEXT_RESOLUTIONS
        _, width, height = min((abs(width / height - w / h), w, h) for w, h in sizes)
        height, width = height // unit * unit, width // unit * unit
        pixels = resizer.preprocess(resizer.resize(picture, height, width), height, width)
        return encode_image(self.vae, pixels.to(self.device, torch.float32).unsqueeze(2))

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Rows whose references have equal shapes share a forward; the picture is its output's head."""
        drawn, tokens = self.positions(self.dimensions.grid(size)), latents.shape[1]
        grids = [tuple((rows, columns) for rows, columns in each.tolist()) for each in condition.rows(GRIDS)]

        def run(shapes: tuple[tuple[int, int], ...], rows: list[int]) -> Tensor:
            seen = condition[REFERENCES][rows, : sum(math.prod(shape) for shape in shapes)]
            inputs = torch.cat([latents[rows], seen], dim=1), sigma[rows], condition.at(torch.tensor(rows))
            positions = torch.cat([drawn, *(self.positions(shape, 1) for shape in shapes)])
            return self.forward(model, *inputs, embedded, positions)[:, :tokens]

        return by_kind(model, grids, run)
