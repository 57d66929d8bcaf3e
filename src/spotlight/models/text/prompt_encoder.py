"""Prompts to conditions through a disk cache; the text encoders are loaded on the first miss only.

Prompts are encoded one at a time, so a condition depends on its own text only, never on its batch.

The cache (:class:`EmbeddingsCache`) has one safetensors file per prompt, named by a hash of all inputs. Its
invariants: files are written atomically; a damaged file is logged and recomputed, never used. Processes may
share the directory, and it may be deleted at any time.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spotlight.models.condition import Condition, Instruction, ModelInput
from spotlight.models.text.references import read_reference
from spotlight_files.model_errors import ModelError, storing
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles
from spotlight_rewards.base.file_errors import is_there

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
                        self._pipeline = self._make(
                            **{name: self._load_part(name, part) for name, part in self._components.items()}
                        )
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


# -- on-disk cache of prompt embeddings: one safetensors file per prompt, named by a hash of all inputs ----


_CALLED = ("diffusers", "transformers", "tokenizers", "sentencepiece", "ftfy", "pillow", "torchvision")
_REMEDY = "Free some space there, or set cache_dir to a folder that this user can write."


def called_versions() -> str:
    """Of the packages that a pipeline's ``encode_prompt`` calls, the optional ones where they are installed:
    another version may clean or cut prompts differently.
    """
    return "|".join(f"{name} {_version(name)}" for name in _CALLED)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class EmbeddingsCache:
    """Embeddings of a pipeline's text encoders under one template.

    Attributes:
        root: cache directory; created on the first write.
        model: identity of tokenizer and text encoder (see ``PipelineFiles.identity``).
        template: the prompt template and whatever else shapes the result.
        max_tokens: limit per prompt.
        dtype: of the text encoder.
    """

    root: Path
    model: str
    template: str
    max_tokens: int
    dtype: torch.dtype

    def path(self, text: str) -> Path:
        """File for the embeddings of ``text``, whether it exists or not."""
        key = json.dumps([self.model, self.template, self.max_tokens, str(self.dtype), text])
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.root / name[:2] / f"{name}.safetensors"

    def has(self, text: str) -> bool:
        """Whether a file for ``text`` exists; its checksum is only verified by :meth:`get`."""
        return is_there(self.path(text))

    def get(self, text: str) -> dict[str, Tensor] | None:
        """A condition's tensors on the CPU, or None if absent or damaged (which is logged)."""
        path = self.path(text)
        if not is_there(path):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                expected = (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError) as error:
            _log.warning("cached embeddings %s are damaged (%s): embedding the prompt again", path, error)
            return None
        if _checksum(tensors) != expected:
            _log.warning("cached embeddings %s fail their checksum: embedding the prompt again", path)
            return None
        return tensors

    def put(self, text: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a condition's tensors atomically.

        Raises:
            ModelError: the directory cannot be written, or the disk is full.
        """
        path = self.path(text)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        data = safetensors.torch.save(plain, {"sha256": _checksum(plain)})
        with storing("prompt embeddings", self.root, _REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(data)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
