"""The memory of one process with its rewards, and what the package that makes it fit a GPU answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from spotlight.config.schema import RunConfig
from spotlight.dry_run.memory_plan import Estimate, memory_parts
from spotlight.dry_run.model_plan import ModelSizes
from spotlight.dry_run.reward_plan import RewardPlace, reward_parts
from spotlight.registry import FITTINGS

if TYPE_CHECKING:
    from rich.console import Console

Memory: TypeAlias = Callable[[RunConfig], Iterable[Estimate]]
"""The parts of a configuration's memory plan."""
NO_FITTING = "the package spotlight-plan, which is not installed: pip install 'spotlight-rl[plan]'."


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run's memory depends on besides its configuration; ``trained``: parameters."""

    model: ModelSizes
    trained: int
    text_tokens: int
    rewards: Sequence[RewardPlace]

    def parts(self, config: RunConfig, *, unknown_bytes: float = 0.0) -> tuple[Estimate, ...]:
        """The memory plan of one process and its rewards; ``unknown_bytes`` as in :func:`reward_parts`."""
        return (
            *memory_parts(config, self.model, self.trained, self.text_tokens),
            *reward_parts(config, self.rewards, unknown_bytes=unknown_bytes),
        )

    @property
    def memory(self) -> Memory:
        """:meth:`parts`, where a reward whose size is unknown fits nowhere but on the CPU."""
        return partial(self.parts, unknown_bytes=math.inf)


@dataclass(frozen=True, slots=True)
class Fitting:
    """An entry of :data:`spotlight.registry.FITTINGS`.

    Attributes:
        overrides: arguments of a command with which a configuration fits, which are printed; for ``--fit``.
            Raises UserError: it cannot be read, or nothing fits.
        small_gpus: by GPU whether a configuration can be made to fit, and how; for the dry run.
        trained: published models that a GPU with so many usable bytes trains, as text.
    """

    overrides: Callable[[RunConfig, str, int, Console], list[str]]
    small_gpus: Callable[[RunConfig, Needs], Iterator[tuple[str, str, str]]]
    trained: Callable[[float], Sequence[str]]


def find_fitting() -> Fitting | None:
    """What an installed package answers; None: there is none. Raises RegistryError: it is broken."""
    return FITTINGS.load("gpu") if "gpu" in FITTINGS else None
