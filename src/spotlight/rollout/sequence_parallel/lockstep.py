"""A group denoises the same rollouts together: the leader decides, all compute and hold the results.

    leader                                          followers
    lead = Lead(engine, membership)                 follow = Follower(engine, membership, recipes, use)
    while not all done:                             follow.run()     # until the leader ends
        states = lead.step("policy", model, states)
    lead.end()

Before each step the leader broadcasts the weights to use and the rollouts to advance, in order, with states
that followers lack. Every rank then takes the same step on equal inputs and gets equal results.

Invariants:
- A failed step leaves every rank with the previous states. After a :class:`GroupLostError` survivors continue
  from theirs (``Follower.states``, or the input of ``Lead.step``), alone or in a new group. They may differ
  by one step; a new group uses its leader's states.
- Ranks never step with different weights: the order carries the weights digest.
- Every survivor knows each rollout's lease (``Follower.claims``) and can report for the leader.
- Nobody waits in a collective without work: followers run from a lease's first step to its end. Between steps
  the leader has less than :class:`StepLimit` gives.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import safetensors.torch
from torch import Tensor, nn

from spotlight.rollout.engine import Engine
from spotlight.rollout.sequence_parallel.membership import GroupLostError, SpGroup, SpMembership
from spotlight.rollout.state import Recipe, RolloutState, from_tensors
from spotlight.scheduler.types import LeaseId, Purpose, RolloutId

_LENGTH_BYTES = 8
NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class Claim:
    """The lease under which a rollout is held.

    Attributes:
        began: step at which the controller believes the rollout began; progress counts from it.
    """

    lease: LeaseId
    began: int


@dataclass(frozen=True, slots=True)
class Given:
    """A state sent by value, new to the followers."""

    header: dict[str, object]
    tensors: dict[str, Tensor]
    claim: Claim


def _given(state: RolloutState, claim: Claim) -> Given:
    header, tensors = state.to_tensors()
    return Given(header, tensors, claim)


@dataclass(frozen=True, slots=True)
class LockstepOrder:
    """What the leader broadcasts before a step.

    Attributes:
        slot: weight slot; empty at the end.
        weights_digest: of the weights in use.
        rollouts: those to advance, in order.
        kept: others that followers keep; they drop all else.
        given: those of ``rollouts`` that followers lack.
        seen: at the end, the last lease granted to the leader.
    """

    slot: str
    weights_digest: str = ""
    rollouts: tuple[RolloutId, ...] = ()
    kept: tuple[RolloutId, ...] = ()
    given: tuple[Given, ...] = ()
    seen: LeaseId = NO_LEASE

    def to_bytes(self) -> bytes:
        """A length, JSON, and tensors as safetensors (named by position). No pickle."""
        fields = {
            "slot": self.slot,
            "weights_digest": self.weights_digest,
            "rollouts": self.rollouts,
            "kept": self.kept,
            "given": [[given.header, given.claim.lease, given.claim.began] for given in self.given],
            "seen": self.seen,
        }
        header = json.dumps(fields).encode()
        tensors = {
            f"{i}.{name}": tensor
            for i, given in enumerate(self.given)
            for name, tensor in given.tensors.items()
        }
        packed = safetensors.torch.save(tensors) if tensors else b""
        return len(header).to_bytes(_LENGTH_BYTES, "big") + header + packed

    @classmethod
    def from_bytes(cls, data: bytes) -> LockstepOrder:
        """Read what :meth:`to_bytes` wrote."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        fields = json.loads(data[_LENGTH_BYTES:end])
        tensors: list[dict[str, Tensor]] = [{} for _ in fields["given"]]
        for key, tensor in (safetensors.torch.load(data[end:]) if data[end:] else {}).items():
            position, _, name = key.partition(".")
            tensors[int(position)][name] = tensor
        given = [
            Given(header, values, Claim(LeaseId(lease), began))
            for (header, lease, began), values in zip(fields["given"], tensors, strict=True)
        ]
        return cls(
            fields["slot"],
            fields["weights_digest"],
            tuple(RolloutId(name) for name in fields["rollouts"]),
            tuple(RolloutId(name) for name in fields["kept"]),
            tuple(given),
            LeaseId(fields["seen"]),
        )


class Lead:
    """The leader's side, while it has leases; in a group of one, the engine's own step.

    Args:
        weights_digest: of its weights; followers with others refuse to take part.
    """

    def __init__(self, engine: Engine, membership: SpMembership, weights_digest: str = "") -> None:
        if not membership.leads:
            raise ValueError(f"worker {membership.worker} does not lead; {membership.group.leader} does")
        self._engine, self._membership, self._weights_digest = engine, membership, weights_digest
        self._held: dict[RolloutId, tuple[int, Claim]] = {}  # what followers hold, and at which step

    def step(
        self,
        slot: str,
        model: nn.Module,
        states: Sequence[RolloutState],
        *,
        others: Sequence[RolloutState] = (),
        claims: Mapping[RolloutId, Claim] | None = None,
    ) -> list[RolloutState]:
        """Advance every unfinished state by one step on all ranks; order is preserved.

        Args:
            slot: of ``model``; followers use theirs.
            others: held states that this step does not change.
            claims: for all states, so that followers can take over.

        Raises:
            GroupLostError: ``states`` are still valid.
        """
        if self._membership.group.degree == 1:
            return self._engine.step(model, [_whole(state) for state in states])
        running = [state for state in states if not state.done]
        if not running:
            return list(states)  # nothing to order: followers keep what they hold
        claimed = {
            state.rollout.id: (claims or {}).get(state.rollout.id, Claim(NO_LEASE, 0))
            for state in (*running, *others)
        }
        known = {
            state.rollout.id
            for state in (*running, *others)
            if self._held.get(state.rollout.id) == (state.step, claimed[state.rollout.id])
        }
        # Block residuals exist per rank, so they are usable only if every rank has them.
        states = [s if s.rollout.id in known else dataclasses.replace(s, added=None) for s in states]
        order = LockstepOrder(
            slot,
            self._weights_digest,
            rollouts=tuple(state.rollout.id for state in running),
            kept=tuple(state.rollout.id for state in others if state.rollout.id in known),
            given=tuple(_given(s, claimed[s.rollout.id]) for s in running if s.rollout.id not in known),
        )
        self._membership.broadcast(order.to_bytes())
        with self._membership.exchange(_work(running)):
            advanced = self._engine.step(model, states, self._membership.batch, self._membership.passes)
        stepped = {state.rollout.id: (state.step + 1, claimed[state.rollout.id]) for state in running}
        self._held = {name: self._held[name] for name in order.kept} | stepped
        return advanced

    def end(self, seen: LeaseId = NO_LEASE) -> None:
        """Release the followers. Raises GroupLostError if they cannot be reached.

        Args:
            seen: the last lease granted; it answers calls to follow this or an earlier lease.
        """
        self._held = {}
        self._membership.broadcast(LockstepOrder("", seen=seen).to_bytes())


class Follower:
    """The followers' side.

    Args:
        engine: with the leader's settings.
        recipes: per purpose; must equal the leader's.
        use: context with the module of a slot.
        weights_digest: of the weights held here.

    Attributes:
        states: rollouts of the last order, at the last finished step.
        running: how many rollouts the last order advances.
        seen: after ``run``, the last lease granted to the leader.
    """

    def __init__(
        self,
        engine: Engine,
        membership: SpMembership,
        recipes: Mapping[Purpose, Recipe],
        use: Callable[[str], AbstractContextManager[nn.Module]],
        weights_digest: str = "",
    ) -> None:
        self._engine, self._membership = engine, membership
        self._recipes, self._use = recipes, use
        self._weights_digest = weights_digest
        self.states: tuple[RolloutState, ...] = ()
        self.running = 0
        self.claims: dict[RolloutId, Claim] = {}
        self.seen = NO_LEASE

    def run(self) -> None:
        """Execute the leader's orders until it ends.

        Raises:
            GroupLostError: a peer failed, or the leader's weights digest differs; ``states`` are still valid.
            ValueError: the leader's recipes differ, which ends the group.
        """
        with ExitStack() as weights:
            slot, model = "", nn.Module()
            while True:
                order = LockstepOrder.from_bytes(self._membership.broadcast(None))
                if not order.slot:
                    self.seen = order.seen
                    return
                if order.weights_digest != self._weights_digest:
                    self._refuse(order)
                self.running = len(order.rollouts)
                if order.slot != slot:
                    weights.close()
                    slot, model = order.slot, weights.enter_context(self._use(order.slot))
                with self._membership.exchange():
                    running, kept = self._taken(order)
                    self.states = (*kept, *running)  # with the claims, even if the exchange fails at its end
                with self._membership.exchange(_work(running)):
                    advanced = self._engine.step(
                        model, running, self._membership.batch, self._membership.passes
                    )
                self.states = (*kept, *advanced)

    def _refuse(self, order: LockstepOrder) -> None:
        group: SpGroup = self._membership.group
        self._membership.part()
        raise GroupLostError(
            f"worker {self._membership.worker} holds weights of digest {self._weights_digest or 'unknown'}, "
            f"but {group.leader} orders a step with {order.weights_digest or 'unknown'} (epoch {group.epoch})"
        )

    def _taken(self, order: LockstepOrder) -> tuple[tuple[RolloutState, ...], tuple[RolloutState, ...]]:
        """States to advance, and those kept unchanged."""
        held = {state.rollout.id: state for state in self.states}
        for given in order.given:
            state = from_tensors(given.header, given.tensors, self._recipe(given.header), self._engine.device)
            held[state.rollout.id] = state
            self.claims[state.rollout.id] = given.claim
        names = {*order.rollouts, *order.kept}
        self.claims = {name: claim for name, claim in self.claims.items() if name in names}
        return tuple(held[name] for name in order.rollouts), tuple(held[name] for name in order.kept)

    def _recipe(self, header: Mapping[str, object]) -> Recipe:
        rollout = header["rollout"]
        assert isinstance(rollout, Mapping)
        return self._recipes[Purpose(str(rollout["purpose"]))]


def _work(states: Sequence[RolloutState]) -> float:
    """Size of a step: values denoised, twice with guidance."""
    return float(sum(s.latents.numel() * (2 if s.recipe.guidance_scale > 1 else 1) for s in states))


def _whole(state: RolloutState) -> RolloutState:
    """Drop block residuals of a former group, which cover only a share of the tokens."""
    if state.added is None or all(len(rows) == len(state.latents) for rows in state.added.values()):
        return state
    return dataclasses.replace(state, added=None)
