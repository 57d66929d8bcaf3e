"""Rollouts as bytes: safetensors, whose metadata hold a JSON header and a checksum. No pickle.

A parcel that was cut or altered on its way is an error, never other numbers: the checksum covers the header
and every tensor's name, type, shape and bytes. It guards against accidents, not against forgers.
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

from spotlight.models.family import Condition
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState, SampleTensors, from_tensors

_FORMAT = 1


class SerializationError(ValueError):
    """Bytes that are not the parcel they should be. The message says which, and what to do."""


def pack_state(state: RolloutState) -> bytes:
    """All that is needed to go on with a rollout elsewhere."""
    header, tensors = state.to_tensors()
    return _pack("state", state.rollout.id, tensors, header)


def unpack_state(data: bytes, recipe: Recipe, device: torch.device | str = "cpu") -> RolloutState:
    """What :func:`pack_state` wrote, on ``device``.

    Raises:
        SerializationError: the parcel is damaged, or another one.
        ValueError: the rollout began with another recipe.
    """
    header, tensors = _unpack("state", data)
    return from_tensors(header, tensors, recipe, device)


def pack_sample(finished: FinishedRollout) -> bytes:
    """What the learner needs of a rollout."""
    fields = {name: getattr(finished.tensors, name) for name in SampleTensors.__slots__}
    tensors = {name: tensor for name, tensor in fields.items() if tensor is not None}
    return _pack("sample", finished.rollout.id, tensors)


def unpack_sample(data: bytes) -> SampleTensors:
    """What :func:`pack_sample` wrote. Raises SerializationError."""
    _, tensors = _unpack("sample", data)
    try:
        return SampleTensors(**tensors)
    except TypeError as error:
        _refuse("sample", data, str(error))


def pack_image(finished: FinishedRollout) -> bytes:
    """What rewards need of a rollout."""
    return _pack("image", finished.rollout.id, {"image": torch.from_numpy(finished.image)})


def unpack_image(data: bytes) -> NDArray[np.uint8]:
    """[height, width, 3]. Raises SerializationError."""
    _, tensors = _unpack("image", data)
    image: NDArray[np.uint8] = tensors["image"].numpy()
    return image


def pack_condition(condition: Condition) -> bytes:
    """A prompt's embeddings."""
    return _pack("condition", "", {"embeds": condition.embeds})


def unpack_condition(data: bytes) -> Condition:
    """What :func:`pack_condition` wrote, on the CPU. Raises SerializationError."""
    _, tensors = _unpack("condition", data)
    return Condition(tensors["embeds"])


def _pack(
    parcel: str, name: str, tensors: Mapping[str, Tensor], content: Mapping[str, object] | None = None
) -> bytes:
    about = {"format": _FORMAT, "parcel": parcel, "name": name, "content": content or {}}
    plain = {key: _plain(tensor) for key, tensor in tensors.items()}
    # One entry: safetensors writes several in any order, and equal rollouts are to be equal bytes.
    header = json.dumps({"checksum": _checksum(about, plain), **about})
    return safetensors.torch.save(plain, {"header": header})


def _unpack(parcel: str, data: bytes) -> tuple[Mapping[str, object], dict[str, Tensor]]:
    """(content, tensors) of a parcel that is whole and of the kind ``parcel``."""
    try:
        tensors = safetensors.torch.load(data)
        about = _header(data)
        checksum = about.pop("checksum")
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        _refuse(parcel, data, f"it cannot be read ({type(error).__name__}: {error})")
    found = _checksum(about, tensors)
    if found != checksum:
        _refuse(parcel, data, f"its checksum is {found}, expected {checksum}")
    if (about["parcel"], about["format"]) != (parcel, _FORMAT):
        _refuse(parcel, data, f"it is a {about['parcel']!r} of format {about['format']}; expected {_FORMAT}")
    return about["content"], tensors


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU and with memory of its own, as safetensors wants it; copied only where it is not so."""
    plain = tensor.detach().cpu().contiguous()
    whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if whole else plain.clone()


def _checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    # CRC-32: half the time of any digest, in the midst of a worker's step; weights have a digest besides.
    crc = zlib.crc32(json.dumps(about).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _header(data: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8:end])["__metadata__"]["header"])
    return header


def _refuse(parcel: str, data: bytes, why: str) -> NoReturn:
    try:
        about = _header(data)
        claim = f", said to be the {about['parcel']} of {about['name']!r}"
    except (ValueError, LookupError, TypeError):
        claim = ""
    raise SerializationError(
        f"{parcel} parcel ({len(data)} bytes{claim}): {why}. "
        "It was damaged on its way, or made by another version of the package: fetch it again, or make it new"
    )
