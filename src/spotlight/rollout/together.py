"""A group denoises the same rollouts together: the leader decides, all compute, all hold the results.

    leader                                          followers
    lead = Lead(engine, membership)                 follow = Follower(engine, membership, recipes, use)
    while not all done:                             follow.run()     # until the leader ends
        states = lead.step("policy", model, states)
    lead.end()

Before each step the leader tells the others which weight slot, and which rollouts in which order; states that
they do not hold it sends along, by value. Then every rank takes the same step on equal inputs, and has equal
results.

Invariants:
- A step that fails leaves the states of before it, on every rank: after a :class:`GroupLostError` each
  survivor goes on, alone or in a new group, from the states it holds (``Follower.states``, or what the
  leader's caller passed to ``step``). Survivors may be one step apart; in a new group the leader's count.
- Nobody waits while there is no work: followers run from a lease's first step to its end. Between two steps
  the leader has less than ``collective_s`` for whatever else it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import safetensors.torch
from torch import Tensor, nn

from spotlight.core.types import Purpose, RolloutId
from spotlight.rollout.engine import Engine
from spotlight.rollout.groups import Membership
from spotlight.rollout.state import Recipe, RolloutState, from_tensors

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """What the leader tells the others before a step.

    Attributes:
        slot: whose weights to use; empty at the end.
        rollouts: those to advance, in order; others that the followers hold are dropped.
        given: states by value (headers, and tensors named by position): new to the followers.
    """

    slot: str
    rollouts: tuple[RolloutId, ...] = ()
    given: tuple[tuple[dict[str, object], dict[str, Tensor]], ...] = ()

    def to_bytes(self) -> bytes:
        """A length, JSON, and tensors in safetensors: no pickle."""
        headers = [header for header, _ in self.given]
        told = json.dumps({"slot": self.slot, "rollouts": self.rollouts, "given": headers}).encode()
        tensors = {
            f"{i}.{name}": tensor
            for i, (_, values) in enumerate(self.given)
            for name, tensor in values.items()
        }
        packed = safetensors.torch.save(tensors) if tensors else b""
        return len(told).to_bytes(_LENGTH_BYTES, "big") + told + packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """What :meth:`to_bytes` wrote."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        told = json.loads(data[_LENGTH_BYTES:end])
        tensors: list[dict[str, Tensor]] = [{} for _ in told["given"]]
        for key, tensor in (safetensors.torch.load(data[end:]) if data[end:] else {}).items():
            position, _, name = key.partition(".")
            tensors[int(position)][name] = tensor
        rollouts = tuple(RolloutId(name) for name in told["rollouts"])
        return cls(told["slot"], rollouts, tuple(zip(told["given"], tensors, strict=True)))


class Lead:
    """The leader's part, for one lease; alone, the engine's own step."""

    def __init__(self, engine: Engine, membership: Membership) -> None:
        if not membership.leads:
            raise ValueError(f"worker {membership.worker} does not lead; {membership.group.leader} does")
        self._engine, self._membership = engine, membership
        self._held: dict[RolloutId, int] = {}  # step of each rollout that the followers hold

    def step(self, slot: str, model: nn.Module, states: Sequence[RolloutState]) -> list[RolloutState]:
        """Advance every state that is not done by one step, together; order is kept.

        Args:
            slot: the weight slot that ``model`` is, by which the others find theirs.

        Raises:
            GroupLostError: ``states`` are still good.
        """
        if self._membership.group.degree == 1:
            return self._engine.step(model, states)
        running = [state for state in states if not state.done]
        if not running:
            return list(states)  # nothing to order: what the followers hold stays theirs
        new = [state for state in running if self._held.get(state.rollout.id) != state.step]
        ids = tuple(state.rollout.id for state in running)
        self._membership.broadcast(Order(slot, ids, tuple(state.to_tensors() for state in new)).to_bytes())
        with self._membership.exchange():
            advanced = self._engine.step(model, states)
        self._held = {state.rollout.id: state.step + 1 for state in running}
        return advanced

    def end(self) -> None:
        """Let the followers go. Raises GroupLostError when they cannot be told."""
        self._membership.broadcast(Order("").to_bytes())


class Follower:
    """The others' part.

    Args:
        engine: of the same settings as the leader's.
        recipes: how rollouts of each purpose are denoised here; the leader's must be the same.
        use: gives the module with the weights of a slot, for as long as the context lasts.

    Attributes:
        states: what this rank holds: the rollouts of the last order, at the last step it finished.
    """

    def __init__(
        self,
        engine: Engine,
        membership: Membership,
        recipes: Mapping[Purpose, Recipe],
        use: Callable[[str], AbstractContextManager[nn.Module]],
    ) -> None:
        self._engine, self._membership = engine, membership
        self._recipes, self._use = recipes, use
        self.states: tuple[RolloutState, ...] = ()

    def run(self) -> None:
        """Do what the leader says until it ends.

        Raises:
            GroupLostError: ``states`` are still good.
            ValueError: the leader's rollouts and ours are of different recipes; the group is lost to all.
        """
        with ExitStack() as weights:
            slot, model = "", nn.Module()
            while True:
                order = Order.from_bytes(self._membership.broadcast(None))
                if not order.slot:
                    return
                if order.slot != slot:
                    weights.close()
                    slot, model = order.slot, weights.enter_context(self._use(order.slot))
                with self._membership.exchange():
                    self.states = self._taken(order)
                    self.states = tuple(self._engine.step(model, self.states))

    def _taken(self, order: Order) -> tuple[RolloutState, ...]:
        held = {state.rollout.id: state for state in self.states}
        for header, tensors in order.given:
            state = from_tensors(header, tensors, self._recipe(header), self._engine.device)
            held[state.rollout.id] = state
        return tuple(held[rollout] for rollout in order.rollouts)

    def _recipe(self, header: Mapping[str, object]) -> Recipe:
        rollout = header["rollout"]
        assert isinstance(rollout, Mapping)
        return self._recipes[Purpose(str(rollout["purpose"]))]
