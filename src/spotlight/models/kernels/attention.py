"""The attention implementation of a DiT (``model.attention``), by diffusers' dispatcher.

The only module that touches the dispatcher's private names; ``tests/contract/test_kernels.py`` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from spotlight.models.experts import denoisers
from spotlight_files.model_errors import ModelError

BACKENDS: Mapping[str, str] = {
    "native": "native",
    "math": "_native_math",
    "cudnn": "_native_cudnn",
    "flash": "flash",
    "flash-varlen": "flash_varlen",
    "flash-3": "_flash_3",
    "flash-3-varlen": "_flash_varlen_3",
}
"""Our names for diffusers' backends. Quantised ones are left out: replays would differ too much."""


def missing(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on ``device``; None if it can, as far as can be told without running it."""
    from diffusers.models import attention_dispatch as dispatch

    if name not in ("native", "math") and device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    try:
        dispatch._check_attention_backend_requirements(dispatch.AttentionBackendName(BACKENDS[name]))
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None


def use_attention(
    module: nn.Module, name: str, device: torch.device, *, splits_sequence: bool = False
) -> None:
    """Let all attention layers of a transformer use a backend of :data:`BACKENDS`.

    Args:
        device: where it will run.
        splits_sequence: it must also work with sequence parallelism.

    Raises:
        ModelError: this machine lacks it, or the model's layers are not dispatched.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if (why := missing(name, device)) is not None:
        raise ModelError(
            f"model.attention is {name!r}, which cannot be used here: {why} Leave the key out, or see "
            "`spotlight doctor` for what this machine has"
        )
    backend = AttentionBackendName(BACKENDS[name])
    if splits_sequence and not _AttentionBackendRegistry._is_context_parallel_available(backend):
        able = [
            ours
            for ours, theirs in BACKENDS.items()
            if _AttentionBackendRegistry._is_context_parallel_available(AttentionBackendName(theirs))
        ]
        raise ModelError(
            f"model.attention is {name!r}; expected one that can split a sequence, as "
            f"fleet.sequence_parallel.degrees asks for: {', '.join(able)}"
        )
    for part in denoisers(module).values():
        if not _dispatched(part):
            raise ModelError(
                f"model.attention is {name!r}, but {type(part).__name__} calls torch's attention directly: "
                "leave the key out"
            )
        active, _ = _AttentionBackendRegistry.get_active_backend()
        try:
            part.set_attention_backend(backend.value)  # type: ignore[operator]
        finally:
            _AttentionBackendRegistry.set_active_backend(active)  # a global default, not ours to change


@contextmanager
def explaining_masks() -> Iterator[None]:
    """Around a forward: a kernel that refuses the mask of unequal prompts raises :class:`ModelError`."""
    try:
        yield
    except ValueError as error:
        if "`attn_mask` is not" not in str(error):
            raise
        raise ModelError(
            "model.attention is one of the kernels that take no mask; expected one that does, for prompts of "
            f"unequal length in one forward ({error}): leave the key out or set it to cudnn, or let each "
            "batch have one prompt (rollout.batch_size and learner.micro_batch_size that divide "
            "rollout.group_size, and evaluation.images_per_prompt)"
        ) from error


def _dispatched(module: nn.Module) -> bool:
    processors = (getattr(part, "processor", None) for part in module.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)
