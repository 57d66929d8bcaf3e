"""What a step takes: which states share a forward, with which weights, and how fast rollouts are made.

Measured are the steps of training rollouts that a worker takes alone or leads, from denoising to copying
what is to be stored: all that a GPU still computes is waited for in there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from spotlight.models.shared.flop_count import Compute
from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.state import RolloutState
from spotlight.scheduler.types import Phase, Purpose
from spotlight.worker.leases import GroupRole
from spotlight.worker.reports import RolloutSpeed

if TYPE_CHECKING:
    from spotlight.rollout.engine import Engine


def by_slot(
    states: Iterable[RolloutState], slot_of: Mapping[Purpose, Slot], first: Slot | None
) -> list[tuple[Slot, list[RolloutState]]]:
    """Group states by weight slot, ``first`` first: the slot in use changes once per step."""
    parts: dict[Slot, list[RolloutState]] = {}
    for state in states:
        parts.setdefault(slot_of[state.rollout.purpose], []).append(state)
    return sorted(parts.items(), key=lambda part: part[0] != first)


def kind_of(states: Sequence[RolloutState]) -> str:
    """Of a denoising step, as the profiler tells them apart."""
    purposes = {state.rollout.purpose for state in states}
    return Phase.ROLLOUT if purposes == {Purpose.TRAIN} else " and ".join(sorted(purposes))


class OpenModel:
    """The module with one slot's weights, kept open across steps.

    Args:
        merged: see :meth:`~spotlight.models.slots.WeightSlots.use`; merging makes entering a slot slow.
    """

    def __init__(self, slots: WeightSlots, *, merged: bool) -> None:
        self._slots, self._merged = slots, merged
        self._open = ExitStack()
        self._model: nn.Module | None = None
        self.slot: Slot | None = None

    def use(self, slot: Slot) -> nn.Module:
        """The module with the weights of ``slot``, valid until the next call of any method."""
        if self._model is None or slot != self.slot:
            self.close()
            self._model = self._open.enter_context(self._slots.use(slot, merged=self._merged))
            self.slot = slot
        return self._model

    def close(self) -> None:
        """Leave the slot, so that its weights may change."""
        self._model = self.slot = None
        self._open.close()


class SpeedMeter:
    """How fast this worker makes training rollouts, reported as they finish. Not thread-safe.

    Args:
        report: is given what was measured since the last time, whenever rollouts end.
    """

    def __init__(self, engine: Engine, report: Callable[[RolloutSpeed], None]) -> None:
        self._engine, self._report = engine, report
        self._work, self._seconds = Compute(0.0, 0.0), 0.0

    @contextmanager
    def step(self, role: GroupRole, ranks: int) -> Iterator[None]:
        """One step of the role's rollouts.

        Args:
            ranks: that make each forward together; this device's share of it is counted.
        """
        states, began = role.leases.states, time.perf_counter()
        self._engine.forwards.clear()  # of steps that do not count
        yield
        if role.lost or any(state.rollout.purpose is not Purpose.TRAIN for state in states):
            return
        self._work += self._engine.take_work() * (1 / ranks)
        self._seconds += time.perf_counter() - began
        if len(role.leases) < len(states):
            work, peak_flop_s = self._work, self._engine.peak_flop_s
            self._report(RolloutSpeed(work.tokens, work.flops, self._seconds, peak_flop_s))
            self._work, self._seconds = Compute(0.0, 0.0), 0.0


def all_finite(states: Sequence[RolloutState]) -> list[bool]:
    """Whether each state's latents are finite, after one wait for the device."""
    if not states:
        return []
    found: list[bool] = torch.stack([torch.isfinite(state.latents).all() for state in states]).tolist()
    return found
