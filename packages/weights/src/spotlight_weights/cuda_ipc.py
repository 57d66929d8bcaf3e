"""The only user of torch's private CUDA IPC: a tensor of one process, mapped into another on the same node.

torch's own wrapper needs pickle and a torch queue; the two storage methods underneath use bytes and integers.
`tests/contract/test_cuda_ipc.py` detects changes in torch.

The owner must keep the tensor while others have it open, and both sides must signal when done (here by
messages), since nothing else orders their streams. Another GPU's memory needs peer access (:func:`readable`).
"""

from __future__ import annotations

import base64

import torch
from torch import Tensor

FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "offset_bytes",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync",
)
"""What ``UntypedStorage._share_cuda_`` returns and ``_new_shared_cuda`` takes, in order."""
_EXPANDABLE = b"e"
"""Second byte of a handle (``SHAREABLE_CUDA_EXPANDABLE_SEGMENT`` of torch's CUDACachingAllocator)."""


def gpu_id(device: torch.device | int) -> str:
    """Of a GPU, the same in all processes of the node whichever GPUs these see."""
    return str(torch.cuda.get_device_properties(device).uuid)


def readable(device: torch.device) -> list[str]:
    """Ids of the visible GPUs whose memory can be mapped for ``device``; none if that is a CPU."""
    if device.type != "cuda":
        return []
    own = _index(device)
    others = (i for i in range(torch.cuda.device_count()) if i != own)
    return [gpu_id(own), *(gpu_id(i) for i in others if torch.cuda.can_device_access_peer(own, i))]


def share(tensor: Tensor) -> dict[str, object]:
    """What another process needs to open a [bytes] uint8 CUDA tensor that owns its whole storage.

    Raises:
        RuntimeError: the allocator cannot share its memory, or only with processes that may trace this one,
            which those of a container may not (``expandable_segments``).
        ValueError: the tensor is of another type or is a view.
    """
    storage = tensor.untyped_storage()
    if tensor.dtype != torch.uint8 or storage.nbytes() != tensor.numel():
        raise ValueError(f"a {tensor.dtype} view of {storage.nbytes()} bytes; expected a whole uint8 storage")
    values = storage._share_cuda_()  # type: ignore[no-untyped-call]
    if values[1][1:2] == _EXPANDABLE:
        raise RuntimeError("memory of PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is not shared")
    return {
        name: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in zip(FIELDS, values, strict=True)
    }


def open_shared(fields: dict[str, object], device: torch.device) -> Tensor:
    """The shared tensor as seen from ``device`` of this process, and labelled with it: [bytes] uint8.

    Copies to ``device`` alone may use it. If the memory is another GPU's, that one's label would cost a
    context there, of some hundred megabytes.

    Raises:
        KeyError, TypeError, ValueError: these are not the fields of :func:`share`.
        RuntimeError: no peer access between the GPUs, or the owner is gone.
    """
    values = [_decoded(fields[name]) for name in FIELDS]
    # Ignore the owner's GPU index: other GPUs may be visible here. The handle identifies the memory, which
    # is mapped for the GPU that will read it.
    index = _index(device)
    with torch.cuda.device(index):
        storage = torch.UntypedStorage._new_shared_cuda(index, *values[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _decoded(value: object) -> object:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
