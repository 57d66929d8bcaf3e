"""The memory that ``--fit`` fits: one process of a configuration with its rewards; and what is near."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotlight.dry_run.fit.fit import Fit, Memory, fit
from spotlight.dry_run.fitting_sizes import GPU_GIB, USABLE, resized, sizes_of
from spotlight.dry_run.memory_plan import memory_parts
from spotlight.dry_run.model_plan import ModelSizes
from spotlight.dry_run.reward_plan import RewardPlace, reward_parts

if TYPE_CHECKING:
    from spotlight.models.family import ModelFamily


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run's memory depends on besides its configuration; ``trained``: parameters."""

    model: ModelSizes
    family: type[ModelFamily]
    trained: int
    text_tokens: int
    rewards: Sequence[RewardPlace]

    @property
    def memory(self) -> Memory:
        """Of one process; a reward whose size is unknown fits nowhere but on the CPU."""
        return lambda changed: (
            *memory_parts(changed, self.model, self.family, self.trained, self.text_tokens),
            *reward_parts(changed, self.rewards, unknown_bytes=math.inf),
        )


def nearest(found: Fit, needs: Needs) -> list[str]:
    """What would fit, if :func:`fit` did not make the run do so: smaller pictures here, a larger GPU."""
    now = found.config.rollout.height
    smaller = [
        size
        for size in sizes_of(found.config, needs.model)
        if size.height < now and fit(resized(found.config, size), needs.memory, found.usable_bytes).fits
    ]
    gpus = [gib for gib in GPU_GIB if fit(found.config, needs.memory, USABLE * gib * 2**30).fits]
    sizes = [f"rollout.height={size.height} rollout.width={size.width}" for size in smaller[-1:]]
    return [*sizes, *(f"a GPU of {gib} GB" for gib in gpus[:1])]
