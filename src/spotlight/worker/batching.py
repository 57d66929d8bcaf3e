"""Which states share a forward, and with which weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from torch import nn

from spotlight.models.slots import Slot
from spotlight.rollout.state import RolloutState
from spotlight.scheduler.types import Purpose
from spotlight.worker.interfaces import Slots


def by_slot(
    states: Iterable[RolloutState], slot_of: Mapping[Purpose, Slot], first: Slot | None
) -> list[tuple[Slot, list[RolloutState]]]:
    """Group states by weight slot, ``first`` first: the slot in use changes once per step."""
    parts: dict[Slot, list[RolloutState]] = {}
    for state in states:
        parts.setdefault(slot_of[state.rollout.purpose], []).append(state)
    return sorted(parts.items(), key=lambda part: part[0] != first)


class OpenModel:
    """The module with one slot's weights, kept open across steps.

    Args:
        merged: see :meth:`~spotlight.models.slots.WeightSlots.use`; merging makes entering a slot slow.
    """

    def __init__(self, slots: Slots, *, merged: bool) -> None:
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
