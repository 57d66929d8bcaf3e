"""Remote calls: each ends once, by whichever of answer, failure and deadline comes first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualTimeLoop, played, settle

from spotlight.cluster.remote_calls import (
    GRACE_S,
    AbandonedError,
    Conversations,
    Inbox,
    NoAnswerError,
    answer,
)
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId


def reference() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def event(number: int) -> ev.Event:
    return ev.NodeLost(NodeId(str(number)))


def test_an_answer_and_a_failure_are_passed_on_as_they_are() -> None:
    async def scene() -> None:
        asked, error = reference(), ValueError("no")
        asked.set_result("yes")
        assert await answer(asked, "the question", 5.0) == "yes"
        asked = reference()
        asked.set_exception(error)
        with pytest.raises(ValueError, match="no") as raised:
            await answer(asked, "the question", 5.0)
        assert raised.value is error

    played(scene())


def test_silence_ends_at_the_deadline() -> None:
    async def scene() -> None:
        asked, began_s = reference(), asyncio.get_running_loop().time()
        with pytest.raises(NoAnswerError, match=r"^the question: no answer within 5 s$"):
            await answer(asked, "the question", 5.0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(5.0)
        assert asked.cancelled(), "a late answer is not waited for"

    played(scene())


def test_after_a_standstill_answers_have_a_moment_to_arrive() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        asked = loop.create_future()
        asking = asyncio.create_task(answer(asked, "the question", 0.3))
        await asyncio.sleep(0)
        loop.stand_still(0.6)  # as if this process were stopped, and its deadline passed meanwhile
        loop.call_later(0.1, asked.set_result, "arrived right after")
        assert await asking == "arrived right after"
        asking = asyncio.create_task(answer(loop.create_future(), "the question", 0.2))
        await asyncio.sleep(0)
        loop.stand_still(0.5)
        with pytest.raises(NoAnswerError):
            await asyncio.wait_for(asking, 2 * GRACE_S)

    played(scene())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.one_of(st.none(), st.floats(0.1, 10))), max_size=12))
def test_every_call_ends_once_whenever_it_is_answered(plan: list[tuple[float, float | None]]) -> None:
    async def ask(deadline_s: float, answered_s: float | None) -> str:
        asked = reference()
        if answered_s is not None:
            asyncio.get_running_loop().call_later(
                answered_s, lambda: asked.done() or asked.set_result("in time")
            )
        try:
            text: str = await answer(asked, "it", deadline_s)
        except NoAnswerError:
            return "late"
        return text

    async def scene() -> list[str]:
        return await asyncio.gather(*(ask(*each) for each in plan))

    for (deadline_s, answered_s), end in zip(plan, played(scene()), strict=True):
        if answered_s is None or answered_s > deadline_s:
            assert end == "late"
        elif answered_s < deadline_s:
            assert end == "in time"


def test_events_keep_their_order_and_end_a_wait() -> None:
    async def scene() -> None:
        inbox, loop = Inbox(), asyncio.get_running_loop()
        loop.call_later(1.0, inbox.put, event(1))
        await inbox.wait(5.0)
        assert loop.time() == pytest.approx(1.0)
        inbox.put(event(2), "digest")
        assert [inbox.take(), inbox.take(), inbox.take()] == [(event(1), ""), (event(2), "digest"), None]
        await inbox.wait(5.0)  # it was filled and emptied meanwhile
        began_s = loop.time()
        await inbox.wait(5.0)
        assert loop.time() - began_s == pytest.approx(5.0)
        loop.call_later(1.0, inbox.wake)
        await inbox.wait(5.0)
        assert loop.time() - began_s == pytest.approx(6.0)

    played(scene())


def test_the_first_error_of_a_conversation_ends_all_of_them() -> None:
    async def scene() -> None:
        conversations, cancelled = Conversations(), list[str]()

        async def endless(name: str) -> None:
            try:
                await asyncio.sleep(1e9)
            finally:
                cancelled.append(name)

        async def fail(after_s: float, text: str) -> None:
            await asyncio.sleep(after_s)
            raise RuntimeError(text)

        conversations.start(endless("other"))
        conversations.start(fail(2.0, "second"))
        conversations.start(fail(1.0, "first"))
        with pytest.raises(RuntimeError, match="first"):
            await conversations.supervise(endless("main"))
        assert sorted(cancelled) == ["main", "other"]

    played(scene())


def test_an_abandoned_conversation_ends_nothing_and_the_end_cancels_the_rest() -> None:
    async def scene() -> None:
        conversations, steps = Conversations(), list[str]()

        async def abandoned() -> None:
            raise AbandonedError

        async def main() -> str:
            conversations.start(abandoned())
            rest = conversations.start(asyncio.sleep(1e9))
            await settle()
            steps.append("went on")
            asyncio.get_running_loop().call_soon(lambda: steps.append(str(rest.done())))
            return "value"

        assert await conversations.supervise(main()) == "value"
        assert steps[0] == "went on"
        assert asyncio.get_running_loop().time() < 1

    played(scene())


def test_conversations_take_their_first_steps_in_order_before_whoever_yields_goes_on() -> None:
    async def scene() -> None:
        conversations, steps = Conversations(), list[int]()

        async def step(number: int) -> None:
            steps.append(number)

        async def main() -> None:
            for number in range(5):
                conversations.start(step(number))
            await asyncio.sleep(0)
            assert steps == list(range(5))

        await conversations.supervise(main())

    played(scene())
