"""Rollouts and embeddings as bytes: safetensors, with a JSON header and a checksum. No pickle.

Invariant: what is unpacked is what was packed, bit by bit; anything else raises :class:`ParcelError`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight.models.base import Condition
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState, Trajectory, from_tensors

_TRAJECTORY = ("latents", "sigmas", "log_probs")
_CHECKSUM = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class ParcelError(ValueError):
    """Bytes that are no parcel of the kind expected, or not whole."""


def pack_state(state: RolloutState) -> bytes:
    """A rollout in flight; see :func:`unpack_state`."""
    header, tensors = state.to_tensors()
    return _pack("state", tensors, header)


def unpack_state(data: bytes, recipe: Recipe, device: torch.device | str = "cpu") -> RolloutState:
    """The state on ``device``.

    Raises:
        ParcelError: damaged, or no state.
        ValueError: it began under another recipe.
    """
    header, tensors = _unpack("state", data)
    return from_tensors(header, tensors, recipe, device)


def pack_sample(finished: FinishedRollout) -> bytes:
    """What the learner needs of a finished rollout."""
    tensors: dict[str, Tensor] = {"final": finished.final}
    if finished.trajectory is not None:
        tensors |= {name: getattr(finished.trajectory, name) for name in _TRAJECTORY}
    return _pack("sample", tensors)


def unpack_sample(data: bytes) -> tuple[Tensor, Trajectory | None]:
    """x0 [tokens, channels], and the stochastic steps if they were kept. Raises ParcelError."""
    _, tensors = _unpack("sample", data)
    if "latents" not in tensors:
        return tensors["final"], None
    return tensors["final"], Trajectory(*(tensors[name] for name in _TRAJECTORY))


def pack_image(finished: FinishedRollout) -> bytes:
    """What rewards need of a finished rollout."""
    return _pack("image", {"image": torch.from_numpy(finished.image)})


def unpack_image(data: bytes) -> NDArray[np.uint8]:
    """[height, width, 3] uint8. Raises ParcelError."""
    image: NDArray[np.uint8] = _unpack("image", data)[1]["image"].numpy()
    return image


def pack_condition(condition: Condition) -> bytes:
    """A prompt's embeddings."""
    return _pack("condition", {"embeds": condition.embeds})


def unpack_condition(data: bytes) -> Condition:
    """Embeddings, on the CPU. Raises ParcelError."""
    return Condition(_unpack("condition", data)[1]["embeds"])


def _pack(kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, object] | None = None) -> bytes:
    told = {"kind": kind, "header": json.dumps(header or {})}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = safetensors.torch.save(whole, told)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def _unpack(kind: str, data: bytes) -> tuple[dict[str, object], dict[str, Tensor]]:
    body = data[_CHECKSUM.size :]
    if len(data) <= _CHECKSUM.size + _LENGTH.size or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(body):
        raise ParcelError(
            f"a parcel of {len(data)} bytes, expected to be a {kind}, is damaged: its checksum differs; "
            "it was cut or altered on its way"
        )
    (length,) = _LENGTH.unpack_from(body)
    told = json.loads(body[_LENGTH.size : _LENGTH.size + length])["__metadata__"]
    if told["kind"] != kind:
        raise ParcelError(f"a parcel is a {told['kind']}; expected a {kind}")
    return json.loads(told["header"]), safetensors.torch.load(body)
