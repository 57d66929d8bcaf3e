"""The weights that a worker serves, and their current version.

Invariant: readers under :meth:`ServedWeights.reading` see the requested version only. The lock is held per
bucket, so a hung client does not block the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from spotlight.weights.flat import as_bytes
from spotlight.weights.weight_errors import PeerLostError, WeightsError


class ServedWeights:
    """Tensors to serve.

    Args:
        tensors: name -> tensor, contiguous, on one device. Their memory is served: for a base model under
            LoRA, take them while no adapter is merged.
        modules: number of modules they belong to (> 0).
        digest: of a bundle, or any name that identifies the base model.

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
        self._digest = digest
        self._lock = threading.Lock()
        self._settle()

    @property
    def digest(self) -> str:
        """Digest of the current content; empty while it is a mixture."""
        return self._digest

    @contextmanager
    def reading(self, digest: str) -> Iterator[None]:
        """Read while the content is ``digest``. Raises PeerLostError if it is something else."""
        with self._lock:
            if self._digest != digest:
                raise PeerLostError(
                    f"weights {digest!r} are not here: this worker has {self._digest or 'a mixture'!r}"
                )
            yield

    @contextmanager
    def changing(self, digest: str) -> Iterator[None]:
        """Write the tensors, which then hold ``digest``, with readers locked out.

        After a :class:`WeightsError`, nothing was written and the old digest stays. After any other exception
        nothing is served until a change succeeds.
        """
        with self._lock:
            before, self._digest = self._digest, ""
            try:
                yield
            except WeightsError:
                self._digest = before
                raise
            self._settle()
            self._digest = digest

    def _settle(self) -> None:
        """Wait for writes queued on the GPU, because readers use another stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
