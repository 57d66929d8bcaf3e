"""Qwen-Image's prompt encoding: template, 34 dropped tokens and truncation exactly as in QwenImagePipeline.

Prompts are encoded one at a time, so an embedding depends on its own text only, never on its batch.
Tokenizer and text encoder are loaded on the first cache miss.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from spotlight.models.embeddings import EmbeddingsCache
from spotlight.models.family import Condition, ModelError
from spotlight.models.pipeline_files import PipelineFiles

_log = logging.getLogger(__name__)

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DROPPED_TOKENS = 34
"""The template's tokens before the prompt, by Qwen's tokenizer; the pipeline drops this many with any."""
TOKENIZER_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class _Loaded:
    tokenizer: Qwen2Tokenizer
    encoder: Qwen2_5_VLForConditionalGeneration


class PromptEncoder:
    """Embeds prompts through a disk cache.

    Args:
        files: the pipeline.
        device: where the text encoder runs.
        dtype: of the text encoder.
        cache: its directory.
        max_tokens: limit per prompt, 1 to 1024.
    """

    def __init__(
        self, files: PipelineFiles, device: torch.device, dtype: torch.dtype, cache: Path, max_tokens: int
    ) -> None:
        if not 1 <= max_tokens <= TOKENIZER_MAX_TOKENS:
            raise ModelError(f"max_text_tokens is {max_tokens}; expected 1 to {TOKENIZER_MAX_TOKENS}")
        self._files, self._device, self._dtype, self._max_tokens = files, device, dtype, max_tokens
        self._cache = EmbeddingsCache(
            root=cache,
            model=files.identity("tokenizer", "text_encoder"),
            template=f"{TEMPLATE}|drop {DROPPED_TOKENS}|max {TOKENIZER_MAX_TOKENS}",
            max_tokens=max_tokens,
            dtype=dtype,
        )
        self._loaded: _Loaded | None = None

    @property
    def loaded(self) -> bool:
        """Whether the text encoder is in memory."""
        return self._loaded is not None

    def missing(self, prompts: Sequence[str]) -> list[str]:
        """The distinct prompts that the disk cache lacks."""
        return [prompt for prompt in dict.fromkeys(prompts) if not self._cache.has(prompt)]

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """Embeddings on the CPU, in the order of ``prompts``; equal prompts share one."""
        known: dict[str, Condition] = {}
        for prompt in prompts:
            if prompt not in known:
                embeds = self._cache.get(prompt)
                if embeds is None:
                    embeds = self._embed(prompt)
                    self._cache.put(prompt, embeds)
                known[prompt] = Condition(embeds)
        return [known[prompt] for prompt in prompts]

    def free(self) -> None:
        """Drop tokenizer and text encoder; the next miss loads them again."""
        if self._loaded is not None:
            self._loaded = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def _embed(self, prompt: str) -> Tensor:
        if self._loaded is None:
            self._loaded = self._load()
        tokens = self._loaded.tokenizer(
            [TEMPLATE.format(prompt)],
            max_length=TOKENIZER_MAX_TOKENS + DROPPED_TOKENS,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        output = self._loaded.encoder(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            output_hidden_states=True,
            logits_to_keep=1,  # logits are unused, and a full vocabulary per token is large
        )
        embeds: Tensor = output.hidden_states[-1][0, DROPPED_TOKENS:][: self._max_tokens]
        if embeds.shape[0] == 0:
            raise ModelError(
                f"prompt {prompt!r} has {tokens.input_ids.shape[1]} tokens with the template, but the "
                f"pipeline drops the first {DROPPED_TOKENS}: the tokenizer of {self._files.root} does not "
                "split the template as Qwen's does"
            )
        return embeds.to("cpu", copy=True)

    def _load(self) -> _Loaded:
        self._files.fetch("text_encoder")
        folder = self._files.folder("text_encoder")
        _log.info("loading the text encoder from %s", folder)
        # Load onto the GPU file by file: host memory could not hold one copy per rank.
        placed = {} if self._device.type == "cpu" else {"device_map": {"": self._device}}
        try:
            tokenizer = Qwen2Tokenizer.from_pretrained(self._files.folder("tokenizer"))
            encoder, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(
                folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True, **placed
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"cannot load tokenizer and text encoder of {self._files.root}: {error}"
            ) from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} tensors of its configuration, first {missing[0]!r}: "
                "copy or download it again"
            )
        return _Loaded(tokenizer, encoder.eval().requires_grad_(False).to(self._device))
