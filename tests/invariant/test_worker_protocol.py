"""What a worker answers to whom: fencing, pulls, commits, losses. One worker alone, turn by turn."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from worker_world import (
    EPOCH,
    PROMPTS,
    TRAIN,
    Body,
    MemoryHome,
    ToldLate,
    committed,
    form,
    grant,
    home_with_prompts,
    loop,
    mark_of,
    pull,
    ready,
    reported_steps,
    resume_of,
    resumed,
    rollout,
    turns,
    work_off,
)

from spotlight.rollout.sequence_parallel.lockstep import Claim, Follower, LockstepOrder
from spotlight.rollout.sequence_parallel.membership import GroupLostError
from spotlight.scheduler.effects import AbandonLease, StopGroup
from spotlight.scheduler.events import (
    GroupFormed,
    GroupPulled,
    GroupStopped,
    LeaseCompleted,
    LeaseProgressed,
    PullFailed,
    RolloutFailed,
    WeightsPulled,
)
from spotlight.scheduler.types import LeaseId, PolicyVersion, Purpose, WorkerId
from spotlight.worker import stored_rollouts
from spotlight.worker.interfaces import HeadLostError, Leave, LoadError, Patience
from spotlight.worker.leases import GroupRole
from spotlight_rewards.base import device_errors

STEPS = 4
W0 = WorkerId("w0")
PAIR = [rollout(1, STEPS), rollout(2, STEPS)]


@pytest.fixture(scope="module")
def body(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Body:
    return Body.build(random_pipeline, tmp_path_factory.mktemp("embeds"))


@pytest.fixture(scope="module")
def conditions(body: Body) -> MemoryHome:
    return home_with_prompts(body.family)


@pytest.fixture
def home(conditions: MemoryHome) -> MemoryHome:
    return MemoryHome(dict(conditions.values))


def stop(epoch: int = 1, *members: str) -> StopGroup:
    return StopGroup(W0, epoch, tuple(WorkerId(name) for name in members or ("w0",)))


@pytest.mark.parametrize("boundary", range(STEPS + 1))
@pytest.mark.parametrize("every", [1, 3])
def test_stopped_at_any_boundary_everything_held_is_committed(
    body: Body, home: MemoryHome, boundary: int, every: int
) -> None:
    worker, _ = loop(body, home, commit_every=every)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    turns(worker, boundary or 0)
    worker.commands.put(stop())
    worker.turn()
    assert not worker.busy
    assert home.events[-1] == GroupStopped(W0, 1)
    if 0 < boundary < STEPS:
        assert home.step_of(PAIR[0].id, mark_of(0)) == home.step_of(PAIR[1].id, mark_of(0)) == boundary
        assert reported_steps(home, 1)[-1] == boundary
    assert len(home.of(LeaseCompleted)) == (boundary == STEPS)
    # Told again it answers again; a grant of the old group does not count any more.
    worker.commands.put(stop())
    worker.commands.put(grant(2, PAIR))
    worker.turn()
    assert home.events[-1] == GroupStopped(W0, 1)
    assert not worker.busy


@pytest.mark.parametrize("boundary", range(STEPS))
def test_an_abandoned_lease_ends_at_the_next_boundary_and_no_other(
    body: Body, home: MemoryHome, boundary: int
) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR[:1]))
    worker.commands.put(grant(2, PAIR[1:]))
    turns(worker, boundary)
    worker.commands.put(AbandonLease(W0, 0, LeaseId(2)))  # of another group
    worker.commands.put(AbandonLease(W0, 1, LeaseId(1)))
    work_off(worker)
    assert [event.lease for event in home.of(LeaseCompleted)] == [2]
    assert max(reported_steps(home, 1), default=0) == boundary
    assert home.of(GroupPulled)[-1].holds == ()


@pytest.mark.parametrize("boundary", range(STEPS))
@pytest.mark.parametrize("same", [False, True], ids=["other weights", "same weights"])
def test_other_weights_let_go_of_every_lease(body: Body, home: MemoryHome, boundary: int, same: bool) -> None:
    worker, loader = loop(body, home)
    ready(worker, home)
    loader.same_digest = same
    worker.commands.put(grant(1, PAIR[:1]))
    worker.commands.put(grant(2, PAIR[1:]))
    turns(worker, boundary)
    worker.commands.put(pull(version=0 if same else 1, lineage=1))
    work_off(worker)
    assert home.of(WeightsPulled) == [WeightsPulled(W0, EPOCH, PolicyVersion(0 if same else 1), 1)]
    assert len(home.of(LeaseCompleted)) == (2 if same else 0)
    last = home.of(GroupPulled)[-1]
    assert (last.holds, last.seen, last.capacity) == ((), 2, body.engine.max_batch)
    # What other weights made is not resumed from: the mark differs.
    later = [dataclasses.replace(one, version=PolicyVersion(0 if same else 1)) for one in PAIR]
    home.clear()
    worker.commands.put(grant(3, later, **resume_of(PAIR, 2)))
    work_off(worker)
    steps = reported_steps(home, 3)
    assert steps == ([] if same else [1])  # from step 3 on, or from noise


def test_a_lease_is_worked_on_once_however_often_it_is_granted(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    before = body.steps
    worker.commands.put(grant(1, PAIR))
    worker.commands.put(grant(1, PAIR))
    turns(worker, 2)
    worker.commands.put(grant(1, PAIR))
    work_off(worker)
    worker.commands.put(grant(1, PAIR))
    worker.turn()
    assert not worker.busy
    assert body.steps - before == STEPS
    assert [event.rollouts for event in home.of(LeaseCompleted)] == [tuple(one.id for one in PAIR)]


def test_what_is_for_another_process_or_group_changes_nothing(body: Body, home: MemoryHome) -> None:
    worker, loader = loop(body, home)
    ready(worker, home)
    worker.commands.put(pull(version=3, lineage=5, epoch=EPOCH - 1))
    worker.commands.put(grant(1, PAIR, epoch=2))
    worker.commands.put(grant(1, PAIR, leader="w1"))
    worker.commands.put(form(1))
    worker.turn()
    assert home.of(GroupFormed) == [GroupFormed(W0, 1)]  # reported again, in case it was lost
    assert len(loader.pulls) == 1
    worker.commands.put(form(4))
    worker.commands.put(form(3))
    worker.commands.put(stop(2, "w1", "w0"))  # not its part to speak
    worker.turn()
    assert home.of(GroupFormed)[1:] == [GroupFormed(W0, 4)]
    assert not home.of(GroupStopped)
    worker.commands.put(stop(6))
    worker.commands.put(form(5))
    worker.commands.put(grant(1, PAIR, epoch=4))
    worker.turn()
    assert home.of(GroupFormed)[2:] == []
    assert worker.busy  # a stop of a group unknown is answered, and ours goes on
    worker.commands.put(form(6))
    worker.turn()
    assert worker.busy
    worker.commands.put(form(7))
    worker.turn()
    assert not worker.busy
    assert home.of(GroupFormed)[2:] == [GroupFormed(W0, 7)]
    assert home.events[-1] == GroupPulled(W0, 7, body.engine.max_batch, LeaseId(0), ())


def test_only_the_newest_order_to_pull_is_carried_out(body: Body, home: MemoryHome) -> None:
    worker, loader = loop(body, home)
    worker.commands.put(pull(1))
    worker.commands.put(pull(5, lineage=0))
    worker.commands.put(pull(2, lineage=1))
    worker.turn()
    worker.commands.put(pull(4, lineage=0))
    worker.commands.put(pull(2, lineage=1))  # its answer was lost
    worker.turn()
    assert [(one.version, one.lineage) for one in loader.pulls] == [(2, 1)]
    assert home.events == [WeightsPulled(W0, EPOCH, PolicyVersion(2), 1)] * 2


def test_a_failed_pull_is_reported_after_a_pause_and_never_ends_the_worker(
    body: Body, home: MemoryHome
) -> None:
    worker, loader = loop(body, home, patience=Patience(ask_again_s=30, grace_s=0.1, pause_s=1.5))
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    worker.turn()
    loader.failures.append(LoadError("a checksum differs"))
    worker.commands.put(pull(1))
    worker.turn()
    assert not home.of(PullFailed)
    assert worker.busy, "the weights that it has are whole"
    while not home.of(PullFailed):
        worker.turn()
    while worker.busy:
        worker.turn()
    assert home.of(PullFailed) == [PullFailed(W0, EPOCH, PolicyVersion(1), 0)]
    assert len(home.of(LeaseCompleted)) == 1
    worker.commands.put(grant(2, PAIR))
    work_off(worker)
    assert len(home.of(LeaseCompleted)) == 2, "with the weights that it has"
    worker.commands.put(pull(1))
    worker.turn()
    assert home.of(WeightsPulled) == [WeightsPulled(W0, EPOCH, PolicyVersion(1), 0)]


def test_the_controller_never_believes_more_than_is_safe(body: Body, home: MemoryHome) -> None:
    """One of two is kept at its step, of the other nothing is there."""
    worker, _ = loop(body, home)
    ready(worker, home)
    pair = [rollout(1, 6), rollout(2, 6)]
    worker.commands.put(grant(1, pair[:1]))
    turns(worker, 3)
    worker.commands.put(AbandonLease(W0, 1, LeaseId(1)))
    worker.commands.put(grant(2, pair, **resume_of(pair, 2)))
    turns(worker, 2)
    assert reported_steps(home, 2) == []  # at 5 and 2, where 2 was believed of both
    assert [home.step_of(one.id, mark_of(0)) for one in pair] == [5, 2]
    work_off(worker)
    assert reported_steps(home, 2) == [1, 2, 3]
    assert [event.rollouts for event in home.of(LeaseCompleted)] == [(one.id,) for one in pair]


def test_progress_of_another_rollout_or_recipe_is_not_resumed(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    one, other = PAIR
    worker.commands.put(grant(1, [one]))
    turns(worker, 2)
    kept = home.values["progress", one.id, mark_of(0)]
    state = resumed(home, one)
    home.put("progress", other.id, kept.data, mark_of(0), 2)
    odd = dataclasses.replace(state, recipe=dataclasses.replace(TRAIN, guidance_scale=2.0))
    home.put("progress", one.id, committed(odd, home), mark_of(0), 2)
    worker.commands.put(AbandonLease(W0, 1, LeaseId(1)))
    worker.turn()
    before = body.steps
    worker.commands.put(grant(2, PAIR, **resume_of(PAIR, 2)))
    work_off(worker)
    assert body.steps - before == STEPS
    assert len(home.of(LeaseCompleted)[-1].rollouts) == 2


def test_a_rollout_kept_at_its_end_is_only_decoded(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    work_off(worker)
    made = home.sample(PAIR[0].id, mark_of(0))
    state = resumed(home, PAIR[0])
    with body.slots.use("policy", merged=True) as model:
        (done,) = body.engine.step(model, [state])
    home.put("progress", PAIR[0].id, committed(done, home), mark_of(0), STEPS)
    steps = body.steps
    worker.commands.put(grant(2, PAIR[:1], **resume_of(PAIR[:1], 3)))
    work_off(worker)
    assert body.steps == steps
    assert home.of(LeaseCompleted)[-1].rollouts == (PAIR[0].id,)
    assert (home.sample(PAIR[0].id, mark_of(0))["final"] - made["final"]).abs().max() < 2e-5


def test_a_rollout_that_fails_fails_alone(
    body: Body, home: MemoryHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    sound, poisoned, odd = rollout(1), rollout(2), rollout(3)
    short = rollout(4, 2)  # no room for its stochastic steps
    homeless = dataclasses.replace(rollout(5), prompt_id="p99")
    step, decode = body.engine.step, body.family.decode

    def stepped(model, states):  # type: ignore[no-untyped-def]
        taken = step(model, states)
        return [
            dataclasses.replace(s, latents=s.latents * torch.nan)
            if s.rollout == poisoned and s.step == 2
            else s
            for s in taken
        ]

    monkeypatch.setattr(body.engine, "step", stepped)
    oddity: list[torch.Tensor] = []

    def decoded(latents, size):  # type: ignore[no-untyped-def]
        # The second of the batch of two is the odd one; alone it is recognised by its latents.
        if len(latents) == 2:
            oddity.append(latents[1])
            raise RuntimeError("out of memory")
        if torch.equal(latents[0], oddity[0]):
            raise RuntimeError("out of memory")
        return decode(latents, size)

    monkeypatch.setattr(body.family, "decode", decoded)
    worker.commands.put(grant(1, [sound, poisoned, odd, short, homeless]))
    work_off(worker)
    failed = {event.rollout: event.error for event in home.of(RolloutFailed)}
    assert failed.keys() == {poisoned.id, odd.id, short.id, homeless.id}
    assert "not finite at step 2 of 5" in failed[poisoned.id]
    assert "cannot be decoded: out of memory" in failed[odd.id]
    assert "do not fit" in failed[short.id]
    assert "no sound embeddings of prompt p99" in failed[homeless.id]
    assert [event.rollouts for event in home.of(LeaseCompleted)] == [(sound.id,)]
    assert home.step_of(poisoned.id, mark_of(0)) == 1  # nothing that is not finite is kept


def test_values_are_safe_before_anything_is_reported(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    work_off(worker)
    safe: set[tuple[str, str, int]] = set()
    for report in home.reports:
        safe |= {(value.kind, value.name, value.step) for value in report.values}
        assert report.weights_digest == mark_of(0)
        for event in report.events:
            if isinstance(event, LeaseProgressed):
                assert all(("progress", one.id, event.steps) in safe for one in PAIR)
            if isinstance(event, LeaseCompleted):
                assert {(kind, one.id, STEPS) for kind in ("image", "sample") for one in PAIR} <= safe
    image = home.values["image", PAIR[0].id, mark_of(0)]
    assert image.step == STEPS


def test_embeddings_are_fetched_once_and_few_are_kept(
    body: Body, home: MemoryHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    fetch = home.fetch

    def listen(kind, names, mark=""):  # type: ignore[no-untyped-def]
        fetched.extend(names if kind == "condition" else ())
        return fetch(kind, names, mark)

    monkeypatch.setattr(home, "fetch", listen)
    sizes = sorted(condition.nbytes for condition in body.family.encode(PROMPTS))
    monkeypatch.setattr(stored_rollouts, "_KEPT_BYTES", sum(sizes[-2:]))  # any two
    worker, _ = loop(body, home)
    ready(worker, home)
    for lease, seed in enumerate((0, 1, 3, 4, 2, 5, 1, 0), 1):  # prompts 0 1 0 1 2 2 1 0
        worker.commands.put(grant(lease, [rollout(seed, 3)]))
    worker.turn()
    assert fetched == ["p0", "p1", "p2", "p0"]


def test_an_idle_worker_asks_again_and_wakes_when_told(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home, patience=Patience(ask_again_s=0.05, grace_s=1, pause_s=0))
    before = body.steps
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.commands.put(pull())
    worker.commands.put(form())
    pulls = home.wait_for(GroupPulled, 3)
    assert len(set(pulls)) == 1
    worker.commands.put(grant(1, [rollout(1, 3), rollout(1, 4, Purpose.TRAIN)]))
    home.wait_for(LeaseCompleted, 2)
    home.wait_for(GroupPulled, len(home.of(GroupPulled)) + 1)
    assert body.steps - before == 4
    worker.commands.put(Leave())
    thread.join(10)
    assert not thread.is_alive()
    assert worker.failure is None


def test_without_a_home_or_after_the_unforeseen_the_loop_ends(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    worker.turn()
    home.lost = True
    with pytest.raises(HeadLostError, match="the home is gone"):
        worker.run()
    assert worker.failure is not None
    assert "the home is gone" in worker.failure
    home.lost = False
    worker, loader = loop(body, home)
    loader.failures.append(ZeroDivisionError("a bug"))  # type: ignore[arg-type]
    worker.commands.put(pull())
    with pytest.raises(ZeroDivisionError):
        worker.run()
    assert worker.failure is not None
    assert "a bug" in worker.failure
    with pytest.raises(ValueError, match="commit_every is 0"):
        loop(body, home, commit_every=0)


def test_rollouts_of_the_next_iteration_end_before_the_next_weights_are_loaded(
    body: Body, home: MemoryHome
) -> None:
    """As the controller orders it: what began early is finished by its version, the rest made by the next."""
    worker, loader = loop(body, home)
    ready(worker, home)
    early, late = (dataclasses.replace(rollout(seed, version=seed - 8), iteration=4) for seed in (8, 9))
    worker.commands.put(grant(1, [rollout(7)]))
    worker.commands.put(grant(2, [early]))
    work_off(worker)
    worker.commands.put(pull(1))
    worker.commands.put(grant(3, [late]))
    worker.commands.put(grant(4, [rollout(10)]))  # of the version before: too late
    work_off(worker)
    assert [pulled.version for pulled in loader.pulls] == [0, 1]
    completed = home.of(LeaseCompleted)
    assert [(done.rollouts, done.version) for done in completed] == [
        ((rollout(7).id,), 0), ((early.id,), 0), ((late.id,), 1),
    ]  # fmt: skip
    assert home.of(WeightsPulled)[-1].version == 1
    assert (home.of(GroupPulled)[-1].seen, home.of(GroupPulled)[-1].holds) == (4, ())
    assert {key[2] for key in home.values if key[0] == "sample" and key[1] == early.id} == {mark_of(0)}


def test_what_an_early_rollout_left_is_not_taken_for_one_of_the_next_weights(
    body: Body, home: MemoryHome
) -> None:
    """Issued again under the same name, as after the head's death: it starts from noise, not old latents."""
    first, _ = loop(body, home)
    ready(first, home)
    early = rollout(8, 5)
    first.commands.put(grant(1, [early]))
    turns(first, 3)
    assert home.step_of(early.id, mark_of(0)) == 3
    second, _ = loop(body, home, "w1")
    again = dataclasses.replace(early, version=PolicyVersion(1))
    second.commands.put(pull(1, name="w1"))
    second.commands.put(form(1, "w1"))
    second.turn()
    second.commands.put(grant(1, [again], leader="w1", **resume_of([again], 3)))
    second.turn()
    assert home.step_of(again.id, mark_of(1)) == 1
    work_off(second)
    assert home.step_of(early.id, mark_of(0)) == 3
    assert ("sample", early.id, mark_of(0)) not in home.values


def test_a_decoder_on_a_lost_gpu_fails_no_rollout(
    body: Body, home: MemoryHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rollout held would be reported as one that cannot be decoded."""

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def ended(why: str) -> None:
        raise SystemExit(why)

    monkeypatch.setattr(body.family, "decode", lost)
    monkeypatch.setattr(device_errors, "end_process", ended)
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    with pytest.raises(SystemExit, match="device-side assert"):
        work_off(worker)
    assert not home.of(RolloutFailed)


def test_a_follower_inherits_what_the_last_order_left_if_the_loss_is_reported_late(body: Body) -> None:
    second = PAIR[1].id
    membership = ToldLate(LockstepOrder("policy", rollouts=(second,)))
    follower = Follower(body.engine, membership, {}, lambda slot: nullcontext(body.family.transformer))
    follower.states = tuple(body.engine.start(PAIR, body.family.encode(PROMPTS[:2]), TRAIN))
    follower.claims = {one.id: Claim(LeaseId(1), 0) for one in PAIR}
    with pytest.raises(GroupLostError):
        follower.run()
    role = GroupRole(W0, 1, 2, leads=False)
    role.inherit(follower)
    assert [state.rollout.id for state in role.leases.states] == [second]
    assert follower.running == 1
