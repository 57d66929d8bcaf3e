"""Sequence-parallel groups in living processes: any degree gives the same rollouts, broken groups too.

gloo, four processes, the tiny pipeline with random weights.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from group_ranks import (
    ALL,
    PLAIN,
    STEPS,
    TOLERANCE,
    Mishap,
    Model,
    Work,
    Workers,
    assert_same,
    kill_and_go_on,
)
from torch import Tensor

from spotlight.rollout.sequence_parallel.membership import FormationError, StaleEpochError
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallelError


@pytest.fixture(scope="module")
def workers(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(Model(random_pipeline, tmp_path_factory.mktemp("embeds")), count=4)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def alone(workers: Workers) -> None:
    """Every test begins with four living workers, each alone."""
    workers.revive()
    workers.all(ALL, "part")
    workers.all(ALL, "patience", 3600.0, 3600.0)  # who waited for that would end the test


@pytest.fixture(scope="module")
def undisturbed(workers: Workers) -> dict[str, Tensor]:
    workers.all(ALL, "part")
    return {name: latents for name, (_, latents) in workers.denoise(PLAIN, "w0").items()}


WORKS = {
    "lengths": PLAIN,
    "guidance": Work((0, 4), guidance=3.0),
    "alone": Work((5,)),
    "odd size": Work((0, 1, 2), size=(12, 20)),  # 15 image tokens
    "a token a rank": Work((2,), size=(4, 16)),
    "step cache": Work((0, 1, 2), size=(12, 20), guidance=3.0, step_cache=2),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_degrees_one_two_and_four_give_the_same(workers: Workers, work: Work) -> None:
    expected = {name: latents for name, (_, latents) in workers.denoise(work, "w3").items()}
    for members in (ALL[:2], ALL):
        workers.form(*members)
        assert_same(workers.denoise(work, *members), expected)


@pytest.mark.parametrize("degree", [2, 4])
def test_any_numbers_of_tokens_give_the_same(workers: Workers, degree: int) -> None:
    shapes = [(i, t, b, m) for i in (4, 7, 9) for t in (1, 6, 7) for b, m in ((1, False), (2, True))]
    expected = [workers.ask("w0", "velocity", *shape) for shape in shapes]
    workers.form(*ALL[:degree])
    for shape, whole in zip(shapes, expected, strict=True):
        first, *others = workers.all(ALL[:degree], "velocity", *shape)
        assert all(torch.equal(first, other) for other in others), shape
        assert (first - whole).abs().max() <= TOLERANCE, shape


def test_groups_shrink_and_grow_while_rollouts_go_on(
    workers: Workers, undisturbed: dict[str, Tensor]
) -> None:
    """A step each at degrees 4, 2, 1, 2 and 4, led by changing workers; nothing is left behind."""
    workers.ask("w1", "start", PLAIN)
    workers.all(ALL, "hooks")
    before = workers.all(ALL, "hooks")
    rounds = (("w1", "w0", "w2", "w3"), ("w3", "w1"), ("w3",), ("w3", "w0"), ("w0", "w3", "w2", "w1"))
    workers.all([name for name in ALL if name != "w1"], "expect", PLAIN)
    for members in rounds:
        workers.form(*members)
        assert workers.all(members, "denoise", 1) == [("", 0.0)] * len(members)
    assert_same(workers.ask("w2", "results"), undisturbed)
    workers.all(ALL, "part")
    assert workers.all(ALL, "hooks") == before == [0, 0, 0, 0]
    assert {n: r for n, (_, r) in workers.denoise(PLAIN, "w2").items()}.keys() == undisturbed.keys()
    for name, latents in undisturbed.items():
        assert torch.equal(workers.ask("w2", "results")[name][1], latents)


@pytest.mark.parametrize(
    "rounds",
    [
        (("w3",), ("w3", "w1"), ("w3", "w0"), ("w3",), ALL[::-1]),
        (("w3", "w1"), ("w1", "w2"), ("w1", "w3"), ("w3", "w0"), ("w3",)),
    ],
)
def test_what_blocks_added_in_one_group_is_not_reused_in_another(
    workers: Workers, undisturbed: dict[str, Tensor], rounds: tuple[tuple[str, ...], ...]
) -> None:
    """Previews that change groups after each step run all blocks at each, as if none were to be reused."""
    cached = Work(PLAIN.seeds, step_cache=2)
    workers.all(ALL, "expect", cached)
    workers.ask("w3", "start", cached)
    for members in rounds:
        workers.form(*members)
        assert workers.all(members, "denoise", 1) == [("", 0.0)] * len(members)
    assert_same(workers.ask("w3", "results"), undisturbed)
    workers.all(ALL, "part")
    reused = {name: latents for name, (_, latents) in workers.denoise(cached, "w3").items()}
    assert any((reused[name] - undisturbed[name]).abs().max() > 100 * TOLERANCE for name in reused)


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_survivors_of_a_killed_rank_finish_its_rollouts(
    workers: Workers, undisturbed: dict[str, Tensor], seed: int
) -> None:
    draw = random.Random(seed)
    mishap = Mishap("kill", draw.randrange(1, STEPS), draw.randrange(2))
    kill_and_go_on(workers, undisturbed, draw.choice(ALL[1:]), mishap)


def test_survivors_of_a_killed_leader_finish_its_rollouts(
    workers: Workers, undisturbed: dict[str, Tensor]
) -> None:
    kill_and_go_on(workers, undisturbed, "w0", Mishap("kill", 3, 1))


def test_a_stopped_rank_is_given_up_at_the_deadline(workers: Workers, undisturbed: dict[str, Tensor]) -> None:
    deadline_s = 2.0
    workers.form(*ALL[:2])  # slow first steps are over before the deadline counts
    workers.all(ALL, "patience", deadline_s, 30.0)
    epoch = workers.form(*ALL)
    workers.ask("w0", "start", PLAIN)
    workers.all(ALL[1:], "expect", PLAIN)
    began = time.monotonic()
    for name in ALL:
        workers.tell(name, "denoise", STEPS, Mishap("stop", 2, 1) if name == "w3" else None)
    for name in ALL[:3]:
        why, when = workers.answer(name)
        assert "lost the group" in why
        assert when - began >= deadline_s
    workers.form("w0", "w2")
    assert workers.all(("w0", "w2"), "denoise") == [("", 0.0)] * 2
    assert_same(workers.ask("w2", "results"), undisturbed)
    # It wakes up, finds itself alone, and cannot come back under what it knew.
    workers.signal("w3", signal.SIGCONT)
    assert "lost the group" in workers.answer("w3")[0]
    with pytest.raises(
        StaleEpochError, match=f"told to form a group under epoch {epoch}, but has seen {epoch}"
    ):
        workers.ask("w3", "form", epoch, ALL)
    workers.form("w3", "w1")
    assert_same(workers.denoise(PLAIN, "w3", "w1"), undisturbed)


def test_a_rank_that_fails_by_itself_frees_the_others_at_once(workers: Workers) -> None:
    workers.form(*ALL[:3:2])
    workers.ask("w0", "start", PLAIN)
    workers.ask("w2", "expect", PLAIN)
    workers.tell("w0", "denoise", STEPS, Mishap("raise", 1, 1))
    workers.tell("w2", "denoise")
    with pytest.raises(ArithmeticError, match="own failure"):
        workers.answer("w0")
    assert "lost the group of w0, w2" in workers.answer("w2")[0]
    assert workers.all(("w0", "w2"), "hooks") == [0, 0]


def test_a_group_that_cannot_form_leaves_its_members_alone(
    workers: Workers, undisturbed: dict[str, Tensor]
) -> None:
    workers.all(ALL, "patience", 3.0, 0.5)
    workers.form("w0", "w1")
    epoch = workers.next_epoch()
    for name in ("w0", "w1"):
        workers.tell(name, "form", epoch, ("w0", "w1", "w2", "w3"))
    for name in ("w0", "w1"):
        with pytest.raises(FormationError, match=r"w2, w3 did not come within 0.5 s") as failed:
            workers.answer(name)
        assert name in str(failed.value)
    # One that seems to come and cannot be reached: the others are through to the connection.
    epoch = workers.next_epoch()
    workers.store.set(f"sp/{epoch}/w0+w3/w3", "here")
    with pytest.raises(FormationError, match="worker w0 formed no group of w0, w3"):
        workers.ask("w0", "form", epoch, ("w0", "w3"))
    # Alone they denoise, and what failed before does not stand in the way of the next group.
    assert_same(workers.denoise(PLAIN, "w0"), undisturbed)
    workers.all(ALL, "patience", 3600.0, 3600.0)  # who waited for that would end the test
    workers.form("w1", "w0", "w2", "w3")
    assert_same(workers.denoise(PLAIN, "w1", "w0", "w2", "w3"), undisturbed)


def test_workers_told_different_members_do_not_meet(workers: Workers) -> None:
    workers.all(ALL, "patience", 3.0, 0.5)
    epoch = workers.next_epoch()
    workers.tell("w0", "form", epoch, ("w0", "w1"))
    workers.tell("w1", "form", epoch, ("w1", "w0"))
    for name, other in (("w0", "w1"), ("w1", "w0")):
        with pytest.raises(FormationError, match=f"{other} did not come"):
            workers.answer(name)


def test_what_does_not_fit_changes_nothing(workers: Workers) -> None:
    epoch = workers.form("w0", "w1")
    assert (
        workers.all(("w0", "w1"), "form", epoch, ("w0", "w1")) == [(2, True)] * 2
    )  # told again: nothing to do
    later = workers.next_epoch()
    with pytest.raises(
        SequenceParallelError,
        match="degree 3 does not divide the transformer's 4 attention heads; use one of 1, 2, 4",
    ):
        workers.ask("w0", "form", later, ("w0", "w1", "w2"))
    with pytest.raises(ValueError, match="w0 is told to form a group of w1, w2; expected itself among them"):
        workers.ask("w0", "form", later, ("w1", "w2"))
    with pytest.raises(ValueError, match="expected at least one, and each once"):
        workers.ask("w0", "form", later, ("w0", "w0"))
    with pytest.raises(StaleEpochError, match=f"epoch 1, but has seen {epoch}"):
        workers.ask("w0", "form", 1, ("w0", "w1"))
    with pytest.raises(
        SequenceParallelError, match=r"forward with gradients inside a sequence-parallel group"
    ):
        workers.ask("w0", "gradients")
    with pytest.raises(SequenceParallelError, match=r"an image of 1 tokens at sequence-parallel degree 2"):
        workers.ask("w0", "velocity", 1, 4, 1, False)
    assert torch.equal(*workers.all(("w0", "w1"), "velocity", 8, 4, 1, False))


def test_diffusers_own_mode_for_uneven_lengths_does_not_do(workers: Workers) -> None:
    """Why ours is there. Once this fails, diffusers computes it right, and ours may not be needed."""
    shapes = {"masked": (8, 6, 2, True), "plain": (8, 6, 2, False)}
    expected = {kind: workers.ask("w0", "velocity", *shape) for kind, shape in shapes.items()}
    workers.form(*ALL)
    found = {kind: workers.all(ALL, "theirs", *shape)[0] for kind, shape in shapes.items()}
    assert (found["plain"] - expected["plain"]).abs().max() <= TOLERANCE
    assert (found["masked"] - expected["masked"]).abs().max() > 100 * TOLERANCE
    for name in ALL:
        workers.tell(name, "theirs", 9, 8, 1, False)
    for name in ALL:
        with pytest.raises(RuntimeError, match="invalid tensor size"):  # gloo gathers equal sizes only
            workers.answer(name)
