"""Rollouts as bytes: safetensors with a JSON header."""

from __future__ import annotations

import json
import struct

import safetensors.torch
import torch
from torch import Tensor

from spotlight.models.base import Condition
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState, from_tensors


def pack_state(state: RolloutState) -> bytes:
    header, tensors = state.to_tensors()
    return safetensors.torch.save(tensors, {"state": json.dumps(header)})


def unpack_state(data: bytes, recipe: Recipe, device: torch.device | str = "cpu") -> RolloutState:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
    return from_tensors(header, safetensors.torch.load(data), recipe, device)


def pack_image(finished: FinishedRollout) -> bytes:
    return safetensors.torch.save({"image": torch.from_numpy(finished.image)})


def pack_sample(finished: FinishedRollout) -> bytes:
    tensors: dict[str, Tensor] = {"final": finished.final}
    if finished.trajectory is not None:
        tensors["latents"] = finished.trajectory.latents
        tensors["sigmas"] = finished.trajectory.sigmas
        tensors["log_probs"] = finished.trajectory.log_probs
    return safetensors.torch.save(tensors)


def pack_condition(condition: Condition) -> bytes:
    return safetensors.torch.save({"embeds": condition.embeds})


def unpack_condition(data: bytes) -> Condition:
    return Condition(safetensors.torch.load(data)["embeds"])
