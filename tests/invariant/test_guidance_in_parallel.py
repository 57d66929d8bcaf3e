"""Halves of a group that make one of guidance's passes each give the rollouts of one process.

gloo, four processes, the tiny pipeline with random weights.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from group_ranks import ALL, PLAIN, STEPS, Mishap, Model, Work, Workers, assert_same, kill_and_go_on
from torch import Tensor

from spotlight.rollout.sequence_parallel.ulysses import SequenceParallelError

GUIDED = Work((0, 1, 2), guidance=3.0)
WORKS = {"guided": GUIDED, "odd size": Work((0, 4), size=(12, 20), guidance=3.0), "unguided": PLAIN}


@pytest.fixture(scope="module")
def workers(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(Model(random_pipeline, tmp_path_factory.mktemp("embeds"), guidance=True), count=4)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def alone(workers: Workers) -> None:
    workers.revive()
    workers.all(ALL, "part")
    workers.all(ALL, "patience", 3600.0, 3600.0)  # who waited for that would end the test


def made_alone(workers: Workers, work: Work) -> dict[str, Tensor]:
    return {name: latents for name, (_, latents) in workers.denoise(work, "w3").items()}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_two_passes_on_two_and_four_ranks_give_the_same(workers: Workers, work: Work) -> None:
    expected = made_alone(workers, work)
    for members in (ALL[2:], ALL):
        workers.form(*members)
        assert_same(workers.denoise(work, *members), expected)


@pytest.mark.parametrize("victim", ["w0", "w1", "w3"])
def test_survivors_of_a_killed_rank_finish_its_rollouts(workers: Workers, victim: str) -> None:
    """Of the leader, of its half, or of the other; then two, one alone, and four again."""
    undisturbed = made_alone(workers, GUIDED)
    kill_and_go_on(workers, undisturbed, victim, Mishap("kill", 3, 1), GUIDED)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["w1", "w2"])
def test_a_stopped_rank_is_given_up_at_the_deadline(workers: Workers, victim: str) -> None:
    """By its own half, which waits in a group that was opened with a longer limit, and by the other."""
    undisturbed, deadline_s = made_alone(workers, GUIDED), 4.0
    workers.form(*ALL)
    workers.denoise(GUIDED, *ALL)  # slow first steps are over before the deadline counts
    workers.all(ALL, "patience", deadline_s, 60.0)
    workers.ask("w0", "start", GUIDED)
    workers.all(ALL[1:], "expect", GUIDED)
    began = time.monotonic()
    for name in ALL:
        workers.tell(name, "denoise", STEPS, Mishap("stop", 2, 1) if name == victim else None)
    pair = [name for name in ALL if name not in ("w3", victim)]
    for name in (*pair, "w3"):
        why, when = workers.answer(name)
        assert "lost the group" in why
        assert when - began >= deadline_s
    workers.form(*pair)
    assert workers.all(pair, "denoise") == [("", 0.0)] * 2
    assert_same(workers.ask(pair[1], "results"), undisturbed)
    workers.signal(victim, signal.SIGCONT)
    assert "lost the group" in workers.answer(victim)[0]


def test_each_rank_makes_one_pass(workers: Workers) -> None:
    """Half the attention of one process: a mishap in a step's second forward never happens."""
    expected = made_alone(workers, GUIDED)
    workers.form(*ALL[:2])
    workers.ask("w0", "start", GUIDED)
    workers.ask("w1", "expect", GUIDED)
    never = Mishap("kill", STEPS - 1, 0, forwards=2)
    for name in ALL[:2]:
        workers.tell(name, "denoise", STEPS, never)
    assert [workers.answer(name) for name in ALL[:2]] == [("", 0.0)] * 2
    assert_same(workers.ask("w1", "results"), expected)


def test_groups_of_odd_size_are_refused(workers: Workers) -> None:
    with pytest.raises(SequenceParallelError, match="group of 3 with guidance in parallel: expected an even"):
        workers.ask("w0", "form", workers.next_epoch(), ALL[:3])
