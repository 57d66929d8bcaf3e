"""A device that is out of memory, told by the phase that wanted more and the keys that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spotlight.runtime.clock import PhaseClock
from spotlight.scheduler.types import Phase

_DENOISING = "Lower rollout.batch_size"
_ALWAYS = (
    "model.dtype=bfloat16 with learner.autocast=bfloat16 and learner.mode=lora, a smaller learner.lora.rank, "
    "or more GPUs under torchrun, which divide the model"
)
_HELPS = {
    Phase.ROLLOUT: _DENOISING,
    Phase.EXPLORATION: _DENOISING,
    Phase.EVALUATION: _DENOISING,
    Phase.TRAINING: (
        "Lower learner.micro_batch_size or learner.timesteps_per_pass, "
        "or set learner.gradient_checkpointing=true"
    ),
}


class DeviceMemoryError(RuntimeError):
    """The device has too little memory for what the configuration asks of it (phase and remedies named)."""


@contextmanager
def memory_told_plainly(clock: PhaseClock) -> Iterator[None]:
    """Turn the device's error into :class:`DeviceMemoryError`, with the phase in which it happened."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase = clock.failed_in
        what = str(error).partition(" GPU ")[0].strip()
        helps = _HELPS.get(phase)
        remedy = f"{helps}: then the same command goes on. Or start another run with" if helps else "Use"
        raise DeviceMemoryError(
            f"out of memory on the device during {phase.value}: {what} {remedy} {_ALWAYS}. "
            "`--dry-run` estimates the memory by part; see docs/howto/several-gpus.md#memory."
        ) from error
