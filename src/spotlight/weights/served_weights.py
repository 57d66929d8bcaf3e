"""What a worker serves to new workers of its node: tensors, and the one version that they are.

Invariant: reads under :meth:`ServedWeights.reading` see tensors of the version asked for and of no other.
The lock is held for the copy of one bucket at a time, so a new worker that hangs keeps no worker waiting.
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
        tensors: name -> tensor, contiguous, all on one device. The memory they have now is what is served:
            of a base model under LoRA take them while no adapter is merged into it.
        modules: modules they belong to (> 0).
        digest: the mark of what they hold: of a bundle, or any name that says which base model it is.

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
        """The mark of what the tensors hold; empty while they hold a mixture."""
        return self._digest

    @contextmanager
    def reading(self, digest: str) -> Iterator[None]:
        """Read the tensors while they hold ``digest``. Raises PeerLostError when they hold something else."""
        with self._lock:
            if self._digest != digest:
                raise PeerLostError(
                    f"weights {digest!r} are not here: this worker has {self._digest or 'a mixture'!r}"
                )
            yield

    @contextmanager
    def changing(self, digest: str) -> Iterator[None]:
        """Write the tensors, which then hold ``digest``; nobody reads meanwhile.

        After a :class:`WeightsError` nothing was written, and they hold what they held. After any other
        exception they are served to nobody until a change succeeds.
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
        """Have all writes done that were queued on the GPU: readers use another stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
