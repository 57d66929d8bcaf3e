"""On-disk cache of prompt embeddings: one safetensors file per prompt, named by a hash of all inputs.

Invariants: files are written atomically; a damaged file is logged and recomputed, never used. Processes may
share the directory, and it may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spotlight_files.model_errors import storing

_log = logging.getLogger(__name__)
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
        return self.path(text).is_file()

    def get(self, text: str) -> dict[str, Tensor] | None:
        """A condition's tensors on the CPU, or None if absent or damaged (which is logged)."""
        path = self.path(text)
        if not path.is_file():
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
