"""Rollouts as safetensors bytes, with a JSON header and a checksum in the metadata. No pickle.

The checksum covers the header and every tensor's name, type, shape and bytes: truncated or altered data is an
error. It detects accidents, not tampering.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from spotlight.models.condition import Condition
from spotlight.rollout.state import FinishedRollout, SampleTensors

_FORMAT = 2
_UNREADABLE = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading bytes of others may raise."""


class SerializationError(ValueError):
    """The bytes are damaged or of another kind; names both and the remedy."""


def pack_sample(finished: FinishedRollout) -> bytes:
    """The tensors that training needs."""
    return pack_tensors("sample", finished.rollout.id, finished.tensors.by_name())


def unpack_sample(data: bytes) -> SampleTensors:
    """Read :func:`pack_sample`'s bytes. Raises SerializationError."""
    _, tensors = unpack_tensors("sample", data)
    try:
        return SampleTensors(**tensors)
    except TypeError as error:
        _refuse("sample", data, str(error))


def pack_image(finished: FinishedRollout) -> bytes:
    """The image that rewards need."""
    return pack_tensors("image", finished.rollout.id, {"image": torch.from_numpy(finished.image)})


def unpack_image(data: bytes) -> NDArray[np.uint8]:
    """[height, width, 3] uint8, or [frames, height, width, 3] of a video. Raises SerializationError."""
    _, tensors = unpack_tensors("image", data)
    if "image" not in tensors:
        _refuse("image", data, f"it holds {sorted(tensors)}, expected 'image'")
    image: NDArray[np.uint8] = tensors["image"].numpy()
    return image


def pack_condition(condition: Condition) -> bytes:
    """A prompt's embeddings."""
    return pack_tensors("condition", "", condition.tensors)


def unpack_condition(data: bytes) -> Condition:
    """Read :func:`pack_condition`'s bytes onto the CPU. Raises SerializationError."""
    _, tensors = unpack_tensors("condition", data)
    return Condition(tensors, checksum_of(data))


def checksum_of(data: bytes) -> str:
    """That of packed tensors. Raises SerializationError."""
    try:
        return str(_header(data)["checksum"])
    except _UNREADABLE as error:
        _refuse("value", data, f"it cannot be read ({type(error).__name__}: {error})")


def pack_tensors(
    kind: str, name: str, tensors: Mapping[str, Tensor], content: Mapping[str, object] | None = None
) -> bytes:
    """Tensors and ``content`` (of JSON types) under a checksum."""
    about = {"format": _FORMAT, "kind": kind, "name": name, "content": content or {}}
    plain = {key: _plain(tensor) for key, tensor in tensors.items()}
    # One metadata entry: safetensors orders several arbitrarily, and equal rollouts must give equal bytes.
    header = json.dumps({"checksum": _checksum(about, plain), **about})
    return safetensors.torch.save(plain, {"header": header})


def unpack_tensors(kind: str, data: bytes) -> tuple[Mapping[str, object], dict[str, Tensor]]:
    """Content and tensors of :func:`pack_tensors`' bytes. Raises SerializationError."""
    try:
        tensors = safetensors.torch.load(data)
        about = _header(data)
        checksum = about.pop("checksum")
        found = _checksum(about, tensors)
    except _UNREADABLE as error:
        _refuse(kind, data, f"it cannot be read ({type(error).__name__}: {error})")
    if found != checksum:
        _refuse(kind, data, f"its checksum is {found}, expected {checksum}")
    found_kind, found_format = about.get("kind"), about.get("format")
    if (found_kind, found_format) != (kind, _FORMAT):
        _refuse(kind, data, f"it is a {found_kind!r} of format {found_format}; expected {_FORMAT}")
    if not isinstance(content := about.get("content"), dict):
        _refuse(kind, data, f"its content is {content!r}, expected a JSON object")
    return content, tensors


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous on the CPU with its own storage, as safetensors requires."""
    plain = tensor.detach().cpu().contiguous()
    whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if whole else plain.clone()


def _checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    # CRC-32 takes half the time of any digest, and this runs within a worker's step.
    crc = zlib.crc32(json.dumps(about).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _header(data: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8:end])["__metadata__"]["header"])
    return header


def _refuse(kind: str, data: bytes, why: str) -> NoReturn:
    try:
        about = _header(data)
        claim = f", said to be the {about['kind']} of {about['name']!r}"
    except _UNREADABLE:
        claim = ""
    raise SerializationError(
        f"serialized {kind} ({len(data)} bytes{claim}): {why}. "
        "It was damaged on its way, or made by another version of the package: fetch it again, or make it new"
    )
