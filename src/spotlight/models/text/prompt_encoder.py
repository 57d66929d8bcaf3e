"""Prompts to conditions through a disk cache; the text encoders are loaded on the first miss only.

Prompts are encoded one at a time, so a condition depends on its own text only, never on its batch.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from spotlight.models.condition import Condition, Instruction, ModelInput
from spotlight.models.text.embeddings import EmbeddingsCache
from spotlight.models.text.references import read_reference
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

_log = logging.getLogger(__name__)


class PromptEncoder:
    """Embeds prompts through a disk cache.

    Args:
        files: the pipeline.
        pipeline: makes diffusers' pipeline of its tokenizers and text encoders.
        components: those tokenizers and text encoders.
        embed: one prompt's tensors from that pipeline.
        cache: of embeddings.
        device: where the text encoders run, in the cache's dtype.
    """

    def __init__(
        self,
        files: PipelineFiles,
        pipeline: Callable[..., Any],
        components: Mapping[str, PipelineComponent],
        embed: Callable[[Any, ModelInput], Mapping[str, Tensor]],
        cache: EmbeddingsCache,
        device: torch.device,
    ) -> None:
        self._files, self._make, self._components = files, pipeline, components
        self._embed, self._cache, self._device = embed, cache, device
        self._pipeline: Any = None

    def missing(self, prompts: Sequence[ModelInput]) -> list[ModelInput]:
        """The distinct prompts that the disk cache lacks. Raises ModelError for a reference picture."""
        return [prompt for prompt in dict.fromkeys(prompts) if not self._cache.has(_cache_key(prompt))]

    @torch.no_grad()
    def encode(self, prompts: Sequence[ModelInput]) -> list[Condition]:
        """Conditions on the CPU, in the order of ``prompts``; equal prompts share one."""
        known: dict[ModelInput, Condition] = {}
        for prompt in prompts:
            if prompt not in known:
                key = _cache_key(prompt)
                tensors = self._cache.get(key)
                if tensors is None:
                    if self._pipeline is None:
                        self._pipeline = self._load()
                    embedded = self._embed(self._pipeline, prompt)
                    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in embedded.items()}
                    self._cache.put(key, tensors)
                known[prompt] = Condition(tensors)
        return [known[prompt] for prompt in prompts]

    def free(self) -> None:
        """Drop tokenizers and text encoders; the next miss loads them again."""
        if self._pipeline is not None:
            self._pipeline = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self) -> Any:
        return self._make(**{name: self._load_part(name, part) for name, part in self._components.items()})

    def _load_part(self, name: str, part: PipelineComponent) -> Any:
        import transformers

        folder = self._files.folder(name)
        kind = getattr(transformers, self._files.component_class(name) or "", None)
        if kind is None:
            return None  # optional, and not in this pipeline
        if part.weights:
            self._files.fetch(name)
        try:
            if not part.weights:
                return (part.load or kind.from_pretrained)(folder)
            _log.info("loading the text encoder from %s", folder)
            # Load onto the GPU file by file: host memory could not hold one copy per rank.
            placed = {} if self._device.type == "cpu" else {"device_map": {"": self._device}}
            encoder, report = kind.from_pretrained(
                folder, dtype=self._cache.dtype, use_safetensors=True, output_loading_info=True, **placed
            )
        except Exception as error:
            raise ModelError(f"cannot load {kind.__name__} from {folder}: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} tensors of its configuration, first {missing[0]!r}: "
                "copy or download it again"
            )
        return encoder.eval().requires_grad_(False).to(self._device)


def _cache_key(prompt: ModelInput) -> str:
    """The text, or everything that an instruction's embeddings depend on: pictures by their content."""
    if not isinstance(prompt, Instruction):
        return prompt
    digests = [hashlib.sha256(read_reference(path)).hexdigest() for path in prompt.references]
    return json.dumps([prompt.text, prompt.negative, digests, astuple(prompt.size)])
