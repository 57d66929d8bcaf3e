"""The watcher: a stream of notices from sources that come and go, and few words about it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from metadata_server import VM, FakeMetadata, metadata, serving

from spotlight_fleet.notices.aws import ACTION, AwsNotices
from spotlight_fleet.notices.azure import AzureNotices
from spotlight_fleet.notices.gcp import PREEMPTED, GcpNotices
from spotlight_fleet.notices.metadata import MetadataServer
from spotlight_fleet.notices.notice import (
    Cancelled,
    MetadataError,
    Notice,
    Noticed,
    NoticeError,
    NoticeReading,
    NoticeSource,
    NoticeTrouble,
    Rebalance,
)
from spotlight_fleet.notices.watcher import Backoff, NoticeWatcher, ask_once

QUICK = Backoff(first_s=0.02, max_s=0.04)
EVENTS_PATH = "/metadata/scheduledevents"

Next = Callable[[], Awaitable[Notice]]


def aws(fake: FakeMetadata) -> AwsNotices:
    return AwsNotices(MetadataServer(fake.url), period_s=0.02, answer_s=5.0)


class CountedNotices(AwsNotices):
    """Counts the questions in vain."""

    vain = 0

    async def read(self) -> NoticeReading | None:
        try:
            return await super().read()
        except MetadataError:
            self.vain += 1
            raise


def azure(fake: FakeMetadata) -> AzureNotices:
    return AzureNotices(MetadataServer(fake.url), period_s=0.02, answer_s=5.0)


def watch(
    sources: list[NoticeSource], script: Callable[[Next, NoticeWatcher], Awaitable[None]]
) -> list[Notice]:
    """Run a script beside a watcher; returns the notices that the script did not ask for."""

    async def main() -> list[Notice]:
        queue: asyncio.Queue[Notice] = asyncio.Queue()
        watcher = NoticeWatcher(sources, random.Random(0), QUICK)
        watching = asyncio.create_task(watcher.run(queue.put_nowait))
        try:
            await script(lambda: asyncio.wait_for(queue.get(), 60.0), watcher)
        finally:
            watching.cancel()
            await asyncio.wait([watching], timeout=60.0)
        assert watching.cancelled(), "the watch ended by itself"
        return [queue.get_nowait() for _ in range(queue.qsize())]

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_notice_repeated_by_every_answer_is_reported_once_and_its_end_too() -> None:
    async def script(following: Next, watcher: NoticeWatcher) -> None:
        await until(lambda: fake.count(ACTION) > 1)
        fake.action = {"action": "terminate", "time": fake.in_s(110)}
        notice = await following()
        assert isinstance(notice, Noticed)
        assert 30 < notice.remaining_s(time.monotonic()) <= 110
        seen = fake.count(ACTION)
        await until(lambda: fake.count(ACTION) > seen + 3)
        fake.action = None
        assert isinstance(await following(), Cancelled)
        fake.rebalance = {"noticeTime": "2026-06-02T08:22:00Z"}
        assert isinstance(await following(), Rebalance)
        await until(lambda: fake.count(ACTION) > seen + 8)

    with metadata("aws") as fake:
        assert watch([aws(fake)], script) == []


def test_an_event_that_moves_or_vanishes_is_followed_and_a_drained_node_may_go() -> None:
    async def script(following: Next, watcher: NoticeWatcher) -> None:
        fake.events = [fake.event(), fake.event(EventId="other", Resources=["trainer_4"])]
        assert isinstance(await following(), Noticed)
        fake.events = [fake.event(NotBefore=fake.http_in_s(600))]
        assert isinstance(await following(), Cancelled)
        assert isinstance(put_off := await following(), Noticed)
        assert put_off.remaining_s(time.monotonic()) > 500
        assert await watcher.acknowledge()
        assert fake.started == ["602d9444"]
        fake.events = []
        assert isinstance(await following(), Cancelled)
        assert not await watcher.acknowledge()

    with metadata("azure") as fake:
        assert watch([azure(fake)], script) == []


def test_silence_cancels_nothing_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeMetadata(plays=("aws",))

    async def script(following: Next, watcher: NoticeWatcher) -> None:
        async def several_vain_questions() -> None:
            before = source.vain
            await until(lambda: source.vain > before + 3)

        port = int(fake.url.rpartition(":")[2])
        with serving(fake, port):
            fake.action = {"action": "terminate", "time": fake.in_s(90)}
            assert isinstance(await following(), Noticed)
        await until(lambda: len(caplog.records) == 1)
        await several_vain_questions()
        with serving(fake, port):
            await until(lambda: len(caplog.records) == 2)
        await several_vain_questions()
        with serving(fake, port):
            fake.action = None
            assert isinstance(await following(), Cancelled)

    with serving(fake):
        source = CountedNotices(MetadataServer(fake.url), period_s=0.02, answer_s=5.0)
    with caplog.at_level(logging.WARNING, "spotlight_fleet.notices"):
        assert watch([source], script) == []
    absent, answers = (record.getMessage() for record in caplog.records)
    assert "aws: metadata service absent" in absent
    assert "answers; notices are watched" in answers


def test_a_service_that_lies_is_reported_once_by_kind_and_asked_ever_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(following: Next, watcher: NoticeWatcher) -> None:
        await until(lambda: fake.count(EVENTS_PATH) > 4)
        fake.bodies, fake.statuses = {}, {EVENTS_PATH: 403}
        await until(lambda: len(caplog.records) > 1)
        seen = fake.count(EVENTS_PATH)
        await until(lambda: fake.count(EVENTS_PATH) > seen + 3)

    with metadata("azure", bodies={EVENTS_PATH: b"<html>"}) as fake:
        began_s = time.monotonic()
        assert watch([azure(fake)], script) == []
        # Pauses of at least 10 ms once, and of at least 20 ms from the second one on.
        assert fake.count(EVENTS_PATH) <= 2 + (time.monotonic() - began_s) / 0.02
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "azure: metadata service broken",
        "azure: metadata service refused",
    ]


def test_a_server_that_should_hang_and_does_not_is_asked_once_a_period() -> None:
    async def script(following: Next, watcher: NoticeWatcher) -> None:
        await until(lambda: fake.count(PREEMPTED) > 2)

    with metadata("gcp", hangs=False) as fake:
        began_s = time.monotonic()
        assert watch([GcpNotices(MetadataServer(fake.url), period_s=0.1)], script) == []
        assert fake.count(PREEMPTED) <= 1 + (time.monotonic() - began_s) / 0.1


def test_a_question_that_hangs_ends_with_the_watch() -> None:
    async def script(following: Next, watcher: NoticeWatcher) -> None:
        await until(lambda: fake.count(PREEMPTED) == 2)

    with metadata("gcp") as fake:
        watch([GcpNotices(MetadataServer(fake.url), period_s=0.0, hang_s=3600)], script)


@dataclass
class Scripted:
    """A source that answers what it is given, and is done then."""

    readings: list[NoticeReading | MetadataError]
    name: str = "scripted"
    period_s: float = 0.0
    asked_s: list[float] = field(default_factory=list)

    async def read(self) -> NoticeReading | None:
        self.asked_s.append(time.monotonic())
        if not self.readings:
            return None
        found = self.readings.pop(0)
        if isinstance(found, MetadataError):
            raise found
        return found

    async def acknowledge(self) -> bool:
        return False


def test_the_same_trouble_that_comes_and_goes_is_not_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    flapping = [NoticeReading(), MetadataError(NoticeTrouble.ABSENT, "gone")] * 4
    asyncio.run(NoticeWatcher([Scripted(flapping)], random.Random(0), QUICK).run(lambda notice: None))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "scripted: metadata service absent",
        "scripted: metadata service answers; notices are watched",
    ]


def test_an_outage_of_hours_is_reported_once_and_a_later_one_again(caplog: pytest.LogCaptureFixture) -> None:
    hours = itertools.count(0.0, 3600.0)
    gone = MetadataError(NoticeTrouble.ABSENT, "gone")
    source = Scripted([gone, gone, gone, NoticeReading(), gone])
    asyncio.run(
        NoticeWatcher([source], random.Random(0), QUICK, lambda: next(hours)).run(lambda notice: None)
    )
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "scripted: metadata service absent",
        "scripted: metadata service answers; notices are watched",
        "scripted: metadata service absent",
    ]


def test_pauses_are_drawn_from_the_given_source_of_chance() -> None:
    failures: list[NoticeReading | MetadataError] = [
        MetadataError(NoticeTrouble.ABSENT, "gone") for _ in range(4)
    ]
    source, backoff, rng = Scripted(failures), Backoff(first_s=0.01, max_s=0.04), random.Random(7)
    asyncio.run(NoticeWatcher([source], random.Random(7), backoff).run(lambda notice: None))
    for index in range(4):
        pause_s = source.asked_s[index + 1] - source.asked_s[index]
        assert pause_s >= backoff.pause_s(index + 1, rng) - 0.001


def test_a_listener_that_fails_ends_the_watch() -> None:
    def tell(notice: Notice) -> None:
        raise RuntimeError("no controller")

    source = Scripted([NoticeReading(rebalance="now")])
    with pytest.raises(RuntimeError, match="no controller"):
        asyncio.run(
            NoticeWatcher([source, Scripted([NoticeReading()], name="other")], random.Random(0)).run(tell)
        )


def test_sources_are_named_apart() -> None:
    for sources in ([], [Scripted([]), Scripted([])]):
        with pytest.raises(NoticeError, match="expected at least one, each once"):
            NoticeWatcher(sources, random.Random(0))


def test_asking_once_tells_what_stands_or_why_nothing_is_known() -> None:
    with metadata("azure") as fake:
        fake.events = [fake.event(), fake.event(EventId="2", Resources=[VM], NotBefore=fake.http_in_s(900))]
        (notice,) = asyncio.run(ask_once(azure(fake)))
        assert isinstance(notice, Noticed)
    with pytest.raises(MetadataError, match="found no metadata service"):
        asyncio.run(ask_once(azure(fake)))
