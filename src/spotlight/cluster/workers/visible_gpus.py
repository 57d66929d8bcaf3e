"""From the GPU that Ray assigned to torch's index of it."""

from __future__ import annotations

_KEY = "CUDA_VISIBLE_DEVICES"


def gpu_index(assigned: int | str, visible: str | None) -> int:
    """Torch's index of a GPU in a process that sees several.

    Ray names a GPU as its node's ``CUDA_VISIBLE_DEVICES`` does: by number, UUID or MIG instance. CUDA counts
    from 0 in the order of that list.

    Args:
        assigned: an entry of ``ray.get_gpu_ids()``.
        visible: ``CUDA_VISIBLE_DEVICES`` of this process; None: not set, so that numbers are indices.

    Raises:
        ValueError: the GPU is not in the list, or the list is not set and it has no number.
    """
    gpu = str(assigned)
    if visible is None:
        if gpu.isdecimal():
            return int(gpu)
        raise ValueError(
            f"Ray assigns the GPU {gpu!r}, but {_KEY} is not set here: expected a number; start Ray on this "
            f"node with {_KEY} set to its GPUs, and do not unset it for workers"
        )
    entries = [entry.strip() for entry in visible.split(",")]
    if gpu in entries:
        return entries.index(gpu)
    # CUDA takes beginnings of UUIDs; Ray may know either form.
    alike = [i for i, entry in enumerate(entries) if _same_uuid(entry, gpu)]
    if len(alike) == 1:
        return alike[0]
    raise ValueError(
        f"Ray assigns the GPU {gpu!r}, which {_KEY}={visible!r} has {len(alike)} times; expected once: give "
        f"workers the {_KEY} that Ray was started with on this node, each GPU once"
    )


def _same_uuid(one: str, other: str) -> bool:
    if not one.startswith(("GPU-", "MIG-")) or not other.startswith(("GPU-", "MIG-")):
        return False
    return one.startswith(other) or other.startswith(one)
