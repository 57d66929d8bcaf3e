"""A reward that does not answer is asked again, and nothing else is."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import urllib.request
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from spotlight_rewards.pool import outages
from spotlight_rewards.pool.outages import Outage
from spotlight_rewards.pool.scoring import Outcome
from spotlight_rewards.results import FailureKind, RewardFailure
from spotlight_rewards.reward import AwayError, RewardScore, SampleError, is_away
from spotlight_rewards.reward_config import RewardConfig

AWAY = RewardFailure(FailureKind.ERROR, "judge", "reward 'judge': POST http://h failed (refused)", away=True)
BAD = RewardFailure(FailureKind.ERROR, "judge", "reward 'judge': no score in the answer")
GOOD = RewardScore(1.0, {})


@pytest.fixture(autouse=True)
def _short_pauses_by_a_clock_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(1)  # a millisecond each
    monkeypatch.setattr(outages, "time", SimpleNamespace(monotonic=lambda: next(readings) / 1e3))
    monkeypatch.setattr(outages, "PAUSE_S", 1e-4)
    monkeypatch.setattr(outages, "PAUSE_MAX_S", 1e-3)


def outage(outage_s: float = 1e5) -> tuple[Outage, list[str]]:
    made, notes = Outage(RewardConfig(name="judge", outage_s=outage_s)), list[str]()
    made.note = notes.append
    return made, notes


@pytest.mark.parametrize("together", [False, True])
def test_only_what_is_away_is_asked_again_until_it_is_there_and_this_is_said_once(together: bool) -> None:
    made, notes = outage()
    asked: list[list[int]] = []

    def score(which: Sequence[int]) -> list[Outcome]:
        asked.append(list(which))
        down = len(asked) < 9
        return [BAD if at == 1 else AWAY if down and at else GOOD for at in which]

    assert made.outlast(score, 4, together=together) == [GOOD, BAD, GOOD, GOOD]
    # Alone, each in turn, as one of them may be why the other is not answered.
    apart = [[2, 3], [2], [2, 3], [3], [2, 3], [2], [2, 3], [3], [2]]
    assert asked == [[0, 1, 2, 3]] + ([[0, 1, 2, 3]] * 8 if together else apart)
    began, ended = notes
    assert "POST http://h failed (refused)" in began
    assert "(rewards[].outage_s of 'judge'); samples that are made meanwhile wait" in began
    assert "reward 'judge' scores again, after " in ended


def test_a_sample_that_is_never_answered_takes_no_other_with_it() -> None:
    made, _ = outage(outage_s=0.5)

    def score(which: Sequence[int]) -> list[Outcome]:
        return [AWAY if 1 in which else GOOD] * len(which)

    found = made.outlast(score, 4, together=False)
    assert [isinstance(each, RewardScore) for each in found] == [True, False, True, True]


def test_samples_that_are_asked_alone_have_no_more_patience_than_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = outage(outage_s=60)
    calls: list[int] = []
    monkeypatch.setattr(outages, "time", SimpleNamespace(monotonic=lambda: 1.0 + 20 * len(calls)))

    def score(which: Sequence[int]) -> list[Outcome]:
        calls.append(len(which))  # each takes 20 s
        return [GOOD if calls == [8, 8, 1] else AWAY for _ in which]

    found = made.outlast(score, 8, together=False)
    assert [isinstance(each, RewardScore) for each in found] == [True] + [False] * 7
    assert calls == [8, 8, 1, 1]


def test_a_failure_of_another_kind_is_not_asked_again() -> None:
    made, notes = outage()
    calls: list[object] = []

    def score(which: Sequence[int]) -> list[Outcome]:
        calls.append(which)
        return [BAD for _ in which]

    assert made.outlast(score, 2, together=False) == [BAD, BAD]
    assert (len(calls), notes) == (1, [])


def test_patience_has_the_end_that_the_key_names() -> None:
    made, _ = outage(0.01)
    failed, scored = made.outlast(lambda which: [AWAY, GOOD][: len(which)], 2, together=False)
    assert scored == GOOD
    assert isinstance(failed, RewardFailure)
    assert failed.message.endswith("(refused)\nIt did not answer for rewards[].outage_s=0.01.")
    made, notes = outage(0)
    assert made.outlast(lambda which: [AWAY], 1, together=False) == [AWAY]
    assert notes == []


def test_a_reward_that_is_away_for_good_is_not_waited_for_batch_by_batch() -> None:
    made, notes = outage(0.05)
    calls: list[int] = []

    def away(which: Sequence[int]) -> list[Outcome]:
        calls.append(len(which))
        return [AWAY for _ in which]

    made.outlast(away, 1, together=False)
    waited = len(calls)
    made.outlast(away, 1, together=False)
    assert len(calls) == waited + 1 > 2
    made.outlast(lambda which: [BAD], 1, together=False)
    assert len(notes) == 1, "what fails otherwise is no score"
    made.outlast(lambda which: [GOOD], 1, together=False)
    made.outlast(away, 1, together=False)
    assert len(calls) > waited + 2
    assert ["scores again" in each for each in notes] == [False, True, False]


def test_who_waits_while_others_are_answered_tells_it_once_and_gives_up() -> None:
    made, notes = outage(0.05)

    def away(which: Sequence[int]) -> list[Outcome]:
        made.outlast(lambda which: [GOOD], 1, together=False)  # by another process
        return [AWAY for _ in which]

    (failed,) = made.outlast(away, 1, together=False)
    assert isinstance(failed, RewardFailure)
    made.outlast(lambda which: [GOOD], 1, together=False)
    assert ["scores again" in each for each in notes] == [False, True]


def test_a_pool_that_closes_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "PAUSE_S", 1e5)
    monkeypatch.setattr(outages, "PAUSE_MAX_S", 1e5)
    made, _ = outage()
    made.note = lambda text: threading.Thread(target=made.close).start()
    replies = iter([[AWAY], [GOOD]])
    assert made.outlast(lambda which: next(replies), 1, together=False) == [GOOD]


def raised_by(address: str) -> Exception:
    try:
        urllib.request.urlopen(address, timeout=5)
    except OSError as error:
        try:
            raise RuntimeError("no score") from error
        except RuntimeError as outer:
            return outer
    raise AssertionError("somebody listens")


def test_what_a_reward_of_ones_own_raises_for_want_of_a_server_is_an_outage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert is_away(raised_by(address))
    assert is_away(AwayError("503"))
    assert is_away(OSError(errno.EHOSTUNREACH, "No route to host"))
    itself = ValueError("its own cause")
    itself.__cause__ = itself
    for error in (
        itself,
        ValueError("shape"),
        FileNotFoundError("weights"),
        SampleError("no text"),
        MemoryError(),
    ):
        assert not is_away(error)
