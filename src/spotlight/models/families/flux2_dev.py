"""FLUX.2-dev, over diffusers' ``Flux2Pipeline``: FLUX.2-klein's transformer, larger and guidance-distilled.

Traps of the reference:
- Prompts stand in a chat with a fixed system message; three hidden states of Mistral Small (10, 20, 30)
  are joined.
- It knows no negative prompt: ``guidance_scale`` is the model's input, so true guidance is an error.
- The tokenizer's class makes a picture processor, which needs torchvision: here is its tokenizer alone.
- It would also draw from reference pictures: not supported, prompts with some are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotlight.models.families.flux2_klein import Flux2Klein
from spotlight.models.family_facts import ActivationCosts, read_models
from spotlight_files.pipeline_files import PipelineComponent


def read_tokenizer(folder: Path) -> Any:
    """A ``PixtralProcessor``'s tokenizer, whose chat template is the processor's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class Flux2Dev(Flux2Klein):
    """A FLUX.2-dev model."""

    name = "flux2-dev"
    pipeline_class = "Flux2Pipeline"
    components = {
        **Flux2Klein.components,
        "tokenizer": PipelineComponent(("PixtralProcessor",), weights=False, load=read_tokenizer),
        "text_encoder": PipelineComponent(("Mistral3ForConditionalGeneration",), weights=True, lazy=True),
    }
    activations = ActivationCosts(
        lora=17.9, full=26.5, elementwise=12.5, checkpointed=1.4, forward=21.5, decode=6.5
    )
    embedded_guidance = 4.0
    guidance_argument = None
    published, tiny_models = read_models(__file__)
