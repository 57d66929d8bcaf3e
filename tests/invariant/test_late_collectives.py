"""Whichever collective a peer is lost in, and however it shows, a survivor learns that its group is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_ranks import Model, Work, Workers
from late_collectives import LateNccl

from spotlight.rollout.sequence_parallel.membership import FormationError

PAIR = ("w0", "w1")
LEFT = (0, -1, 2**40)


@pytest.fixture(scope="module", params=[False, True], ids=["ulysses", "guidance"])
def workers(
    request: pytest.FixtureRequest, random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    embeddings = tmp_path_factory.mktemp("embeds")
    model = Model(random_pipeline, embeddings, guidance=request.param, link=LateNccl)
    workers = Workers(model, count=2)
    yield workers
    workers.close()


def live(workers: Workers, work: Work) -> list[tuple[str, object]]:
    """Form a group, take a step, dissolve it: what each member has to say in the end."""
    epoch = workers.next_epoch()
    said: dict[str, tuple[str, object]] = {}

    def told(command: str, *arguments: object) -> None:
        there = [name for name in PAIR if name not in said]
        for name in there:
            workers.tell(name, command, *arguments)
        for name in there:
            try:
                found = workers.answer(name)
            except (ArithmeticError, FormationError) as error:
                said[name] = (type(error).__name__, str(error))
            else:
                if command == "denoise":
                    said[name] = ("GroupLostError" if found[0] else "", found[0])

    told("form", epoch, PAIR)
    for name in PAIR:
        if name not in said:
            workers.ask(name, "start" if name == PAIR[0] else "expect", work)
    told("denoise", 1)
    return [said[name] for name in PAIR]


def test_a_survivor_learns_that_its_group_is_lost_and_nothing_else(workers: Workers) -> None:
    guidance = 3.0 if workers.model.guidance else 1.0
    work = Work((0, 1), guidance=guidance)
    assert live(workers, work) == [("", "")] * 2
    workers.all(PAIR, "part")
    workers.all(PAIR, "link", "life", None, 0)
    assert live(workers, work) == [("", "")] * 2
    workers.all(PAIR, "part")
    (kinds, opening), others = workers.all(PAIR, "link", "life", None, 0)
    assert (kinds, opening) == others
    assert len(kinds) >= 6
    assert {*kinds} <= {*opening}, "the first step would have to connect GPUs"
    for position in range(len(kinds)):
        for victim, survivor in ((0, 1), (1, 0)):
            left = LEFT[(position + victim) % len(LEFT)]
            workers.ask(PAIR[victim], "link", "life", position, 0)
            workers.ask(PAIR[survivor], "link", "life", None, left)
            said = live(workers, work)
            where = (position, kinds[position], PAIR[survivor], left)
            assert said[victim][0] == "ArithmeticError", (where, said)
            assert said[survivor][0] in ("GroupLostError", "FormationError"), (where, said)
            assert workers.all(PAIR, "hooks") == [0, 0], where
    workers.all(PAIR, "link", "life", None, 0)
    assert live(workers, work) == [("", "")] * 2, "the next group forms"
