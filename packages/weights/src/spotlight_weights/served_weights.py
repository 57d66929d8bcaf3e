"""The weights that a worker serves: those of a base model, which training does not change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spotlight_weights.flat import as_bytes
from spotlight_weights.weight_errors import PeerLostError, WeightsError


class ServedWeights:
    """Tensors to serve.

    Args:
        tensors: name -> tensor, contiguous, on one device. Their memory is served: for a base model under
            LoRA, take them while no adapter is merged.
        modules: number of modules they belong to (> 0).
        digest: any name that identifies the base model.

    Raises:
        WeightsError: no tensors or modules, several devices, or a tensor that is not contiguous.
    """

    def __init__(self, tensors: Mapping[str, Tensor], modules: int, digest: str) -> None:
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1 or modules < 1 or not digest:
            raise WeightsError(
                f"weights to serve: found {len(tensors)} tensors of {modules} modules on "
                f"{', '.join(map(str, devices)) or 'no device'} with digest {digest!r}; expected tensors of "
                "at least one module on one device, and a digest that is not empty"
            )
        self.tensors: Mapping[str, Tensor] = {name: tensor.detach() for name, tensor in tensors.items()}
        self.modules = modules
        (self.device,) = devices
        try:
            self.memory: tuple[Tensor, ...] = tuple(as_bytes(tensor) for tensor in self.tensors.values())
        except ValueError as error:
            raise WeightsError(f"weights to serve: {error}") from error
        self.digest = digest
        if self.device.type == "cuda":  # writes that are queued: the server reads on a stream of its own
            torch.cuda.current_stream(self.device).synchronize()

    def check(self, digest: str) -> None:
        """Raise PeerLostError unless these are the weights that are asked for."""
        if self.digest != digest:
            raise PeerLostError(f"weights {digest!r} are not here: this worker has {self.digest!r}")
