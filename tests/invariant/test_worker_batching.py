"""A worker's loop: company, pauses and moves leave no trace in a rollout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worker_world import (
    RECIPES,
    SLOT_OF,
    Body,
    MemoryHome,
    form,
    grant,
    home_with_prompts,
    loop,
    mark_of,
    pull,
    ready,
    reported_steps,
    resume_of,
    rollout,
    turns,
    work_off,
)

from spotlight.rollout import engine as engine_module
from spotlight.scheduler.effects import AbandonLease
from spotlight.scheduler.events import GroupPulled, LeaseCompleted, LeaseProgressed
from spotlight.scheduler.types import LeaseId, PolicyVersion, Purpose, Rollout, WorkerId

TOLERANCE = 2e-5
"""Largest difference of latents (standard deviation about 1) that batch mates may make, as for the engine."""

LOG_PROB_TOLERANCE = 1e-6


@dataclass
class Draws:
    """Every draw of noise that engines made: equal for equal (seed, step), or it fails."""

    bits: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    asked: set[tuple[int, int]] = field(default_factory=set)


@pytest.fixture(scope="module")
def draws() -> Iterator[Draws]:
    """Listens to all noise drawn."""
    recorded, original = Draws(), engine_module.noise_batch

    def listen(seeds: list[int], steps: list[int], *args: object, **kwargs: object) -> Tensor:
        drawn: Tensor = original(seeds, steps, *args, **kwargs)  # type: ignore[arg-type]
        for seed, step, row in zip(seeds, steps, drawn, strict=True):
            bits = hash(row.numpy().tobytes())
            assert recorded.bits.setdefault((seed, step), bits) == bits
            recorded.asked.add((seed, step))
        return drawn

    engine_module.noise_batch = listen
    yield recorded
    engine_module.noise_batch = original


@pytest.fixture(scope="module")
def bodies(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Body]:
    cache = tmp_path_factory.mktemp("embeds")
    return [Body.build(random_pipeline, cache) for _ in range(2)]


@pytest.fixture(scope="module")
def conditions(bodies: list[Body]) -> MemoryHome:
    return home_with_prompts(bodies[0].family)


@pytest.fixture
def home(conditions: MemoryHome) -> MemoryHome:
    return MemoryHome(dict(conditions.values))


@pytest.fixture(scope="module")
def alone(bodies: list[Body], conditions: MemoryHome, draws: Draws) -> Alone:
    return Alone(bodies[1], conditions, draws)


@dataclass
class Alone:
    """Rollouts made one at a time by the engine's own loop, and the noise that each took."""

    body: Body
    conditions: MemoryHome
    draws: Draws
    made: dict[Rollout, tuple[dict[str, Tensor], set[tuple[int, int]]]] = field(default_factory=dict)

    def __call__(self, one: Rollout) -> dict[str, Tensor]:
        return self._make(one)[0]

    def noise(self, one: Rollout) -> set[tuple[int, int]]:
        return self._make(one)[1]

    def _make(self, one: Rollout) -> tuple[dict[str, Tensor], set[tuple[int, int]]]:
        if one not in self.made:
            self.draws.asked.clear()
            home = MemoryHome(dict(self.conditions.values))
            worker, _ = loop(self.body, home)
            ready(worker, home, one.version)
            worker.commands.put(grant(1, [one]))
            work_off(worker)
            self.made[one] = home.sample(one.id, mark_of(one.version)), set(self.draws.asked)
        return self.made[one]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, bitwise: bool = False) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        exact = bitwise or name == "sigmas"
        allowed = 0.0 if exact else LOG_PROB_TOLERANCE if name == "log_probs" else TOLERANCE
        assert (found[name] - tensor).abs().max() <= allowed, name


def test_a_lone_rollout_is_what_the_engine_makes(
    bodies: list[Body], conditions: MemoryHome, alone: Alone
) -> None:
    """The yardstick of this file is no worker's but the engine's."""
    body, one = bodies[0], rollout(4)
    made = alone(one)
    (condition,) = body.family.encode(["two blue squares"])
    worker, _ = loop(body, MemoryHome(dict(conditions.values)))
    ready(worker, MemoryHome())
    with body.slots.use(SLOT_OF[one.purpose], merged=True) as model:
        states = body.engine.start([one], [condition], RECIPES[one.purpose])
        (result,) = body.engine.run(model, states)
    assert torch.equal(result.tensors.final, made["final"])


PURPOSES = st.sampled_from([Purpose.TRAIN, Purpose.TRAIN, Purpose.EXPLORE, Purpose.EVAL])
LEASES = st.lists(
    st.tuples(
        st.integers(0, 8),  # steps before it joins
        st.lists(st.tuples(st.integers(0, 7), st.integers(3, 6)), min_size=1, max_size=3, unique=True),
        PURPOSES,
        st.one_of(st.none(), st.none(), st.integers(1, 6)),  # abandoned so many steps after it joined
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=settings.default.max_examples // 5)
@given(leases=LEASES, commit_every=st.integers(1, 3), max_batch=st.sampled_from([2, 5, 16]))
def test_company_leaves_no_trace(
    bodies: list[Body],
    conditions: MemoryHome,
    alone: Alone,
    draws: Draws,
    leases: list[tuple[int, list[tuple[int, int]], Purpose, int | None]],
    commit_every: int,
    max_batch: int,
) -> None:
    home = MemoryHome(dict(conditions.values))
    bodies[0].engine.max_batch = max_batch
    worker, _ = loop(bodies[0], home, commit_every=commit_every, capacity=12)
    ready(worker, home)
    given_up: set[int] = set()
    wanted: dict[int, list[Rollout]] = {}
    joins: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}
    for lease, (joined, members, purpose, after) in enumerate(sorted(leases, key=lambda item: item[0]), 1):
        # A seed of its own for each lease: a rollout is granted once.
        wanted[lease] = [rollout(10 * lease + seed, steps, purpose) for seed, steps in members]
        joins.setdefault(joined, []).append(lease)
        if after is not None:
            leaves.setdefault(joined + after, []).append(lease)
    for one in [one for members in wanted.values() for one in members]:
        alone(one)
    draws.asked.clear()
    for step in range(20):
        for lease in joins.get(step, ()):
            worker.commands.put(grant(lease, wanted[lease]))
        for lease in leaves.get(step, ()):
            worker.commands.put(AbandonLease(WorkerId("w0"), 1, LeaseId(lease)))
            given_up.add(lease)
        if worker.busy or step in joins or step in leaves:
            worker.turn()
    assert not worker.busy
    completed = {name for event in home.of(LeaseCompleted) for name in event.rollouts}
    needed: set[tuple[int, int]] = set()
    for lease, members in wanted.items():
        for one in members:
            needed |= alone.noise(one)
            assert one.id in completed or lease in given_up
            if one.id in completed:
                assert_same(home.sample(one.id, mark_of(0)), alone(one))
    assert draws.asked <= needed
    assert draws.asked == needed or given_up


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=pytest.mark.slow if pair >= 16 else ()) for pair in range(32)]
)
def test_paused_and_moved_to_another_worker(
    bodies: list[Body],
    conditions: MemoryHome,
    home: MemoryHome,
    alone: Alone,
    draws: Draws,
    pair: int,
) -> None:
    """Bitwise what it would have been in the same company; alone, but for the rounding of the kernels."""
    draw = random.Random(pair)
    purpose = draw.choice([Purpose.TRAIN, Purpose.TRAIN, Purpose.EVAL])
    seeds = draw.sample(range(100), draw.choice([1, 1, 2, 3]))
    steps = draw.randrange(3, 7)
    pause, every = draw.randrange(1, steps), draw.choice([1, 1, 2])
    members = [rollout(seed, steps, purpose) for seed in seeds]
    for one in members:
        alone(one)
    draws.asked.clear()
    for body in bodies:
        body.engine.max_batch = 8
    first, _ = loop(bodies[0], home, commit_every=every)
    ready(first, home)
    first.commands.put(grant(1, members))
    turns(first, pause)
    safe = pause // every * every
    assert (reported_steps(home, 1) or [0])[-1] == safe
    # The first one dies here: what it knows is lost. Another process goes on from bytes.
    second, _ = loop(bodies[1], home, "w1", commit_every=every)
    second.commands.put(pull(name="w1"))
    second.commands.put(form(1, "w1"))
    second.turn()
    second.commands.put(grant(2, members, leader="w1", **(resume_of(members, safe) if safe else {})))
    draws.asked.clear()
    work_off(second)
    resumed = set(draws.asked)
    if safe:
        assert not {step for _, step in resumed if step < safe}  # nothing is drawn or done twice
    together = MemoryHome(dict(conditions.values))
    never_moved, _ = loop(bodies[1], together)
    ready(never_moved, together)
    never_moved.commands.put(grant(1, members))
    work_off(never_moved)
    for one in members:
        made = home.sample(one.id, mark_of(0))
        assert {(s, k) for s, k in alone.noise(one) if k >= safe} <= resumed
        assert_same(made, together.sample(one.id, mark_of(0)), bitwise=True)
        assert_same(made, alone(one))


def test_one_forward_serves_all_that_fit(bodies: list[Body], home: MemoryHome) -> None:
    """Two leases, different steps, prompts and purposes of one slot, and one of another."""
    body = bodies[0]
    body.engine.max_batch = 8
    worker, _ = loop(body, home)
    ready(worker, home)
    batches: list[int] = []
    hook = body.family.transformer.register_forward_hook(
        lambda module, args, kwargs, out: batches.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    worker.commands.put(grant(1, [rollout(1), rollout(2)]))
    worker.turn()
    worker.commands.put(grant(2, [rollout(3, 4), rollout(5, 3, Purpose.EXPLORE)][:1]))
    worker.commands.put(grant(3, [rollout(6, 3, Purpose.EXPLORE)]))
    worker.turn()
    worker.commands.put(grant(4, [rollout(7, 3, Purpose.EVAL)]))
    turns(worker, 2)
    hook.remove()
    assert batches == [2, 4, 4, 1, 1, 4]
    work_off(worker)


def test_a_slot_is_entered_once_a_run_and_two_are_changed_once_a_step(
    bodies: list[Body], home: MemoryHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = bodies[0]
    entered: list[str] = []
    use = body.slots.use
    monkeypatch.setattr(
        body.slots,
        "use",
        lambda slot, *, merged: entered.append(f"{slot} {merged}") or use(slot, merged=merged),
    )
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, [rollout(1, 4)]))
    worker.turn()
    worker.commands.put(grant(2, [rollout(2, 4)]))
    work_off(worker)
    assert entered == ["policy True"]
    entered.clear()
    worker.commands.put(grant(3, [rollout(3, 3)]))
    worker.commands.put(grant(4, [rollout(4, 3, Purpose.EVAL)]))
    work_off(worker)
    assert entered == ["policy True", "old True", "policy True", "old True"]


def test_finished_rollouts_leave_and_room_is_pulled_for(bodies: list[Body], home: MemoryHome) -> None:
    worker, _ = loop(bodies[0], home, capacity=4)
    ready(worker, home)
    worker.commands.put(grant(1, [rollout(1, 3), rollout(2, 5)]))
    worker.commands.put(grant(2, [rollout(3, 4)]))
    worker.turn()
    assert home.of(GroupPulled)[-1] == GroupPulled(WorkerId("w0"), 1, 1, LeaseId(2), (LeaseId(1), LeaseId(2)))
    turns(worker, 2)
    assert home.events[-4:] == [
        LeaseCompleted(WorkerId("w0"), LeaseId(1), 1, (rollout(1, 3).id,), PolicyVersion(0)),
        LeaseProgressed(WorkerId("w0"), LeaseId(1), 1, 3),
        LeaseProgressed(WorkerId("w0"), LeaseId(2), 1, 3),
        GroupPulled(WorkerId("w0"), 1, 2, LeaseId(2), (LeaseId(1), LeaseId(2))),
    ]
    worker.turn()
    assert home.of(GroupPulled)[-1] == GroupPulled(WorkerId("w0"), 1, 3, LeaseId(2), (LeaseId(1),))
    worker.turn()
    assert home.of(GroupPulled)[-1] == GroupPulled(WorkerId("w0"), 1, 4, LeaseId(2), ())
    assert len(home.of(GroupPulled)) == 4
    assert not worker.busy


@pytest.mark.parametrize(("room", "taken"), [(1, 1), (2, 2), (3, 4)])
def test_a_device_that_holds_fewer_takes_fewer_and_makes_the_same(
    conditions: MemoryHome,
    alone: Alone,
    tmp_path: Path,
    random_pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    taken: int,
) -> None:
    """Leases follow the memory of the GPU they are for; what was rolled out before memory ran out stays."""
    body = Body.build(random_pipeline, tmp_path)
    forward, tried = body.family.velocity, []

    def with_little_memory(model: object, latents: Tensor, *args: object, **kwargs: object) -> Tensor:
        tried.append(len(latents))
        if len(latents) > room:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return forward(model, latents, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(body.family, "velocity", with_little_memory)
    home = MemoryHome(dict(conditions.values))
    worker, _ = loop(body, home)
    ready(worker, home)
    rollouts = [rollout(seed, 4) for seed in range(8)]
    worker.commands.put(grant(1, rollouts[:6]))
    work_off(worker)
    assert home.of(GroupPulled)[-1].capacity == body.engine.max_batch == taken
    worker.commands.put(grant(2, rollouts[6:]))
    tried.clear()
    work_off(worker)
    assert max(tried) <= room, "what does not fit is not tried twice"
    for one in rollouts:
        assert_same(home.sample(one.id, mark_of(0)), alone(one))


def test_what_does_not_fit_alone_ends_the_worker(
    bodies: list[Body], home: MemoryHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("nothing is left")

    monkeypatch.setattr(bodies[1].family, "velocity", without_memory)
    monkeypatch.setattr(bodies[1].engine, "max_batch", 4)
    worker, _ = loop(bodies[1], home)
    ready(worker, home)
    worker.commands.put(grant(1, [rollout(1)]))
    with pytest.raises(torch.OutOfMemoryError):
        work_off(worker)
