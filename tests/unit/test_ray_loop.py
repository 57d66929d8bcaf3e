"""Calls of the loop: in order, each once, whichever of answer, failure and deadline comes first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop

from spotlight.cluster.loop import Calls, Loop, NoAnswerError


@dataclass
class Reference:
    """What Ray gives for a call."""

    answer: Future[Any] = field(default_factory=Future)

    def future(self) -> Future[Any]:
        return self.answer


def test_timers_ring_in_their_order_and_not_before_their_time() -> None:
    loop, rang = VirtualLoop(), list[str]()
    loop.call_later(2.0, rang.append, "late")
    loop.call_later(1.0, rang.append, "early")
    loop.call_later(1.0, rang.append, "as early, but asked later")
    cancelled = loop.call_later(0.5, rang.append, "never")
    cancelled.cancel()
    loop.pass_s(0.9)
    assert rang == []
    loop.pass_s(5)
    assert rang == ["early", "as early, but asked later", "late"]
    cancelled.ring()
    assert len(rang) == 3


def test_calls_of_other_threads_are_made_in_the_loop_s_and_in_order() -> None:
    loop, made = Loop(), list[tuple[int, int]]()
    here = threading.get_ident()

    def post() -> None:
        for number in range(100):
            loop.call_soon_threadsafe(lambda number=number: made.append((number, threading.get_ident())))

    thread = threading.Thread(target=post)
    thread.start()
    while len(made) < 100:
        loop.turn(time.monotonic() + 5)
    thread.join()
    assert made == [(number, here) for number in range(100)]


def test_a_turn_waits_no_longer_than_it_was_told_or_than_the_next_timer() -> None:
    loop, rang = Loop(), list[str]()
    began_s = time.monotonic()
    loop.turn(began_s + 0.05)
    assert time.monotonic() - began_s >= 0.05
    loop.call_later(0.05, rang.append, "timer")
    loop.turn(began_s + 60)
    assert rang == ["timer"]
    assert time.monotonic() - began_s < 30


def test_timers_ring_although_calls_keep_coming() -> None:
    loop, rang = VirtualLoop(), list[str]()

    def again() -> None:
        loop.call_soon_threadsafe(again)

    again()
    loop.call_later(1.0, rang.append, "timer")
    loop.now_s = 2.0
    loop.turn(2.0)
    assert rang == ["timer"]


def test_a_timer_may_set_another_for_now() -> None:
    loop, rang = VirtualLoop(), list[float]()

    def ring(times: int) -> None:
        rang.append(loop.now_s)
        if times:
            loop.call_later(0.0, ring, times - 1)

    loop.call_later(1.0, ring, 3)
    loop.pass_s(1.0)
    assert rang == [1.0] * 4


class Sent:
    """A call under way, and what was told of it."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        self.loop = VirtualLoop()
        self.calls, self.reference = Calls(self.loop), Reference()
        self.told: list[object] = []
        self.calls.send(self.reference, "the question", deadline_s, self.told.append, self.told.append)


def test_an_answer_is_told_once_and_the_deadline_passes_unheard() -> None:
    sent = Sent()
    sent.reference.answer.set_result("yes")
    assert sent.told == [], "not in the thread that answers"
    sent.loop.settle()
    sent.loop.pass_s(10)
    assert sent.told == ["yes"]


def test_a_failure_is_told_as_it_is() -> None:
    sent, error = Sent(), ValueError("no")
    sent.reference.answer.set_exception(error)
    sent.loop.pass_s(10)
    assert sent.told == [error]


def test_silence_is_told_at_the_deadline_and_a_late_answer_is_not() -> None:
    sent = Sent(5.0)
    sent.loop.pass_s(4.9)
    assert sent.told == []
    sent.loop.pass_s(0.2)
    (error,) = sent.told
    assert isinstance(error, NoAnswerError)
    assert str(error) == "the question: no answer within 5 s"
    sent.reference.answer.set_result("too late")
    sent.loop.pass_s(1)
    assert len(sent.told) == 1


def test_what_is_no_exception_ends_the_loop() -> None:
    sent = Sent()
    sent.reference.answer.set_exception(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        sent.loop.settle()


def test_a_reference_is_held_until_it_is_answered() -> None:
    sent = Sent()
    assert len(sent.calls._open) == 1
    sent.reference.answer.set_result(None)
    sent.loop.settle()
    assert not sent.calls._open


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.one_of(st.none(), st.floats(0.1, 10))), max_size=12))
def test_every_call_ends_once_whenever_it_is_answered(plan: list[tuple[float, float | None]]) -> None:
    loop = VirtualLoop()
    calls, told = Calls(loop), dict[int, list[object]]()
    for number, (deadline_s, answered_s) in enumerate(plan):
        reference, heard = Reference(), told.setdefault(number, [])
        calls.send(reference, "it", deadline_s, heard.append, heard.append)
        if answered_s is not None:
            loop.call_later(answered_s, reference.answer.set_result, number)
    loop.pass_s(20)
    for number, (deadline_s, answered_s) in enumerate(plan):
        (end,) = told[number]
        if answered_s is None or answered_s > deadline_s:
            assert isinstance(end, NoAnswerError)
        elif answered_s < deadline_s:
            assert end == number
    assert not calls._open
