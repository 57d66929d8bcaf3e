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
from spotlight.models.family import ConditionBatch, Instruction, MediaSize, ModelError, pack
from spotlight.models.family_facts import read_models
from spotlight.models.shared.checks import require_even_split
from spotlight.models.shared.rows import by_kind
from spotlight.models.text.references import open_reference, reference_sides
from spotlight_files.pipeline_files import PipelineFiles


class FluxKontext(Flux):
    """A FLUX.1-Kontext model; guidance as in FLUX.1."""

    name = "flux-kontext"
    pipeline_class = "FluxKontextPipeline"
    embedded_guidance = 2.5
    references_max = 1
    reference_tokens = 4150  # of 800 x 1328, the largest of the sizes
    text_recipe = "a reference at the pipeline's sizes"
    published, tiny_models = read_models(__file__)

    @classmethod
    def size_arguments(cls, height: int, width: int, frames: int) -> dict[str, object]:
        return super().size_arguments(height, width, frames) | {"max_area": height * width}

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Depends on the reference: :meth:`check_reference_split`."""

    @classmethod
    def check_reference_split(
        cls, files: PipelineFiles, degree: int, tokens: int, text_tokens: int, reference: str
    ) -> None:
        """As FLUX.1's, with the reference's tokens."""
        unit = cls.read_dimensions(files).patch_px
        height, width = _scaled(reference, *reference_sides(reference), unit)
        shown = height // unit * (width // unit)
        require_even_split(degree, tokens + text_tokens + shown, "FLUX", reference)

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """FLUX.1's, the reference's packed latents, and its rows and columns."""
        reference = {REFERENCES: (self.reference_tokens, self.dimensions.channels), GRIDS: (1, 2)}
        return super().condition_shapes(text_tokens) | reference

    def embed_instruction(self, pipeline: Any, instruction: Instruction) -> dict[str, Tensor]:
        """The pipeline's own embeddings, and its latents of the reference."""
        latents = self._reference(*instruction.references)
        grid = [[latents.shape[2] // 2, latents.shape[3] // 2]]
        found = {REFERENCES: pack(latents)[0].to(self.dtype), GRIDS: torch.tensor(grid)}
        return super().embed(pipeline, instruction.text) | found

    def _reference(self, path: str) -> Tensor:
        """Normalised latents [1, channels, height, width]."""
        from diffusers.image_processor import VaeImageProcessor

        picture, unit = open_reference(path), self.dimensions.patch_px
        resizer = VaeImageProcessor(vae_scale_factor=unit)
        height, width = _scaled(path, picture.height, picture.width, unit)
        pixels = resizer.preprocess(resizer.resize(picture, height, width), height, width)
        return self.encode_picture(pixels.to(self.device, torch.float32).unsqueeze(2))

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
        grids = [(rows, columns) for rows, columns in condition[GRIDS][:, 0].tolist()]

        def run(grid: tuple[int, int], rows: list[int]) -> Tensor:
            seen = condition[REFERENCES][rows, : math.prod(grid)]
            inputs = torch.cat([latents[rows], seen], dim=1), sigma[rows], condition.at(torch.tensor(rows))
            positions = torch.cat([drawn, self.positions(grid, 1)])
            return self.forward(model, *inputs, embedded, positions)[:, :tokens]

        return by_kind(model, grids, run)


def _scaled(path: str, height: int, width: int, unit: int) -> tuple[int, int]:
    """(height, width) that the pipeline scales a reference to; ``unit``: the pixels of a token's side."""
    from diffusers.pipelines.flux import pipeline_flux_kontext as pipeline

    rows, columns = height // unit, width // unit
    if not (rows and columns):
        raise ModelError(
            f"reference picture {path} has {width} x {height} pixels; expected at least {unit} a side"
        )
    sizes = pipeline.PREFERRED_KONTEXT_RESOLUTIONS
    _, width, height = min((abs(columns / rows - w / h), w, h) for w, h in sizes)
    return height // unit * unit, width // unit * unit
