"""Each cloud's metadata service, asked over real sockets: honest, slow, silent and lying."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from metadata_server import VM, FakeMetadata, metadata, serving

from spotlight_fleet.notices import clouds
from spotlight_fleet.notices.aws import ACTION, REBALANCE, TOKEN, AwsNotices
from spotlight_fleet.notices.azure import AzureNotices
from spotlight_fleet.notices.clouds import cloud_source, find_cloud
from spotlight_fleet.notices.gcp import PREEMPTED, GcpNotices
from spotlight_fleet.notices.metadata import BYTES_MAX, MetadataServer, parse_http_date
from spotlight_fleet.notices.notice import (
    MetadataError,
    NoticeError,
    NoticeReading,
    NoticeSource,
    NoticeTrouble,
)
from spotlight_fleet.notices.registry import CLOUDS

VM_PATH, EVENTS_PATH = "/metadata/instance/compute", "/metadata/scheduledevents"


def aws(fake: FakeMetadata) -> AwsNotices:
    return AwsNotices(MetadataServer(fake.url), answer_s=5.0)


def gcp(fake: FakeMetadata) -> GcpNotices:
    return GcpNotices(MetadataServer(fake.url), answer_s=5.0)


def azure(fake: FakeMetadata) -> AzureNotices:
    return AzureNotices(MetadataServer(fake.url), answer_s=5.0)


def ask(source: NoticeSource) -> NoticeReading:
    reading = asyncio.run(source.read())
    assert reading is not None
    return reading


def refused(source: NoticeSource) -> MetadataError:
    with pytest.raises(MetadataError) as raised:
        ask(source)
    return raised.value


# -- AWS ---------------------------------------------------------------------------------------------------


def test_aws_answers_404_until_there_is_a_notice() -> None:
    with metadata("aws") as fake:
        source = aws(fake)
        assert ask(source) == NoticeReading()
        fake.action = {"action": "terminate", "time": fake.in_s(90)}
        (notice,) = ask(source).pending
        assert 85 < notice.remaining_s <= 90
        assert (notice.key, notice.stamp) == ("terminate", fake.action["time"])
        fake.action = None
        assert ask(source) == NoticeReading()
        assert fake.count(TOKEN, "PUT") == 1


def test_aws_an_expired_token_is_renewed_and_nothing_is_lost() -> None:
    with metadata("aws") as fake:
        source = aws(fake)
        ask(source)
        fake.expire_tokens()
        fake.action = {"action": "stop", "time": fake.in_s(60)}
        assert [notice.key for notice in ask(source).pending] == ["stop"]
        assert fake.count(TOKEN, "PUT") == 2


def test_aws_a_token_that_is_never_good_enough_is_not_asked_for_in_a_loop() -> None:
    with metadata("aws", statuses={ACTION: 401}) as fake:
        error = refused(aws(fake))
        assert (error.trouble, fake.count(TOKEN, "PUT")) == (NoticeTrouble.REFUSED, 2)


def test_aws_a_refused_token_is_reported_with_a_remedy() -> None:
    with metadata("aws", statuses={TOKEN: 403}) as fake:
        error = refused(aws(fake))
        assert error.trouble is NoticeTrouble.REFUSED
        assert re.search(
            r"PUT http\S+/latest/api/token answered 403; expected 200\. .*HttpEndpoint", str(error)
        )
        assert fake.count(ACTION) == 0


def test_aws_a_token_that_never_comes_names_the_hop_limit() -> None:
    with metadata("aws", slow_s={TOKEN: 0.15}) as fake:
        source = AwsNotices(MetadataServer(fake.url), answer_s=0.05)
        error = refused(source)
        assert (error.trouble, "HttpPutResponseHopLimit" in str(error)) == (NoticeTrouble.ABSENT, True)


@pytest.mark.parametrize("skew_s", [-5000.0, 5000.0])
def test_the_remaining_time_is_right_although_the_server_s_clock_is_not(skew_s: float) -> None:
    with metadata("aws", "azure", skew_s=skew_s) as fake:
        fake.action = {"action": "terminate", "time": fake.in_s(90)}
        fake.events = [fake.event(NotBefore=fake.http_in_s(90))]
        for source in (aws(fake), azure(fake)):
            (notice,) = ask(source).pending
            assert 85 < notice.remaining_s <= 90


@pytest.mark.parametrize("year", ["9" * 20, "-1", "two"])
def test_a_date_that_cannot_be_is_none(year: str) -> None:
    assert parse_http_date(f"Mon, 19 Sep {year} 18:29:47 GMT") is None


def test_of_the_last_year_that_there_is_this_machine_s_clock_counts() -> None:
    at_noon = datetime(2026, 6, 2, 12, tzinfo=UTC)
    server = MetadataServer(wall_clock=lambda: at_noon)
    assert server._now("Fri, 31 Dec 9999 23:59:59 GMT") == at_noon
    assert server._now("Tue, 02 Jun 2026 11:00:00 GMT") == datetime(2026, 6, 2, 11, 0, 1, tzinfo=UTC)


def test_without_a_date_this_machine_s_clock_counts() -> None:
    at_noon = datetime(2026, 6, 2, 12, tzinfo=UTC)
    with metadata("aws", dated=False, action={"action": "stop", "time": "2026-06-02T12:01:40Z"}) as fake:
        source = AwsNotices(MetadataServer(fake.url, wall_clock=lambda: at_noon))
        assert ask(source).pending[0].remaining_s == 100.0


@pytest.mark.parametrize(("stated_s", "remaining_s"), [(86_400.0, 120.0), (-86_400.0, 0.0)])
def test_aws_a_deadline_that_cannot_be_is_bounded(stated_s: float, remaining_s: float) -> None:
    with metadata("aws") as fake:
        fake.action = {"action": "terminate", "time": fake.in_s(stated_s)}
        assert ask(aws(fake)).pending[0].remaining_s == remaining_s


def test_aws_advice_to_rebalance() -> None:
    with metadata("aws", rebalance={"noticeTime": "2026-06-02T08:22:00Z"}) as fake:
        reading = ask(aws(fake))
        assert reading == NoticeReading(rebalance="rebalance recommended at 2026-06-02T08:22:00Z")


@pytest.mark.parametrize("body", [b"<html>", b'{"noticeTime": 5}'])
def test_aws_broken_advice_does_not_hide_a_notice(body: bytes) -> None:
    with metadata("aws", bodies={REBALANCE: body}) as fake:
        fake.action = {"action": "terminate", "time": fake.in_s(90)}
        reading = ask(aws(fake))
        assert len(reading.pending) == 1
        assert reading.trouble is not None
        assert reading.trouble.trouble is NoticeTrouble.BROKEN


# -- Google Cloud ------------------------------------------------------------------------------------------


def test_gcp_a_preemption_under_way_is_seen_at_the_first_question() -> None:
    with metadata("gcp", preempted=True) as fake:
        (notice,) = ask(gcp(fake)).pending
        assert notice.remaining_s == 30.0


def test_gcp_a_question_hangs_until_the_value_changes() -> None:
    async def watch(source: GcpNotices) -> NoticeReading:
        assert await source.read() == NoticeReading()
        hanging = asyncio.create_task(source.read())
        while fake.count(PREEMPTED) < 2:
            await asyncio.sleep(0.01)
        assert not hanging.done()
        fake.change(preempted=True)
        return await asyncio.wait_for(hanging, 10.0)

    with metadata("gcp") as fake:
        assert len(asyncio.run(watch(gcp(fake))).pending) == 1
        assert fake.count(PREEMPTED) == 2


def test_gcp_a_change_between_two_questions_is_not_missed() -> None:
    with metadata("gcp") as fake:
        source = gcp(fake)
        ask(source)
        fake.change(preempted=True)
        assert len(ask(source).pending) == 1


def test_gcp_a_server_that_hangs_longer_than_asked_is_left_and_asked_again() -> None:
    with metadata("gcp") as fake:
        source = GcpNotices(MetadataServer(fake.url), answer_s=5.0, hang_s=0)
        ask(source)
        source.answer_s, fake.slow_s = 0.1, {PREEMPTED: 0.2}
        assert refused(source).trouble is NoticeTrouble.ABSENT
        source.answer_s, fake.slow_s = 5.0, {}
        fake.change(preempted=True)
        assert len(ask(source).pending) == 1


def test_gcp_an_answer_that_is_not_google_s_is_not_believed() -> None:
    with metadata("gcp", preempted=True, flavor="Oracle") as fake:
        error = refused(gcp(fake))
        assert (error.trouble, "'Oracle'" in str(error)) == (NoticeTrouble.BROKEN, True)


# -- Azure -------------------------------------------------------------------------------------------------


def test_azure_only_events_that_end_this_vm_count() -> None:
    with metadata("azure") as fake:
        source = azure(fake)
        fake.events = [
            fake.event(EventId="1", Resources=["trainer_4", "trainer_30"]),
            fake.event(EventId="2", EventType="Freeze"),
        ]
        assert ask(source) == NoticeReading()
        fake.events += [fake.event(EventId="3", Resources=["trainer_4", VM.upper()])]
        fake.events += [fake.event(EventId="4", EventType="Reboot", NotBefore=fake.http_in_s(900))]
        third, fourth = ask(source).pending
        assert (third.key, fourth.key) == ("3", "4")
        assert 25 < third.remaining_s <= 30
        assert 895 < fourth.remaining_s <= 900
        fake.events = []
        assert ask(source) == NoticeReading()
        assert fake.count(VM_PATH) == 1


@pytest.mark.parametrize("changes", [{"NotBefore": ""}, {"EventStatus": "Started"}])
def test_azure_an_event_that_has_begun_leaves_no_time(changes: dict[str, object]) -> None:
    with metadata("azure") as fake:
        fake.events = [fake.event(**changes)]
        assert ask(azure(fake)).pending[0].remaining_s == 0.0


def test_azure_the_first_answer_may_be_slow_and_no_later_one() -> None:
    with metadata("azure", first_slow_s={EVENTS_PATH: 0.2}) as fake:
        source = AzureNotices(MetadataServer(fake.url), first_answer_s=5.0)
        asyncio.run(source.probe())
        source.answer_s = 0.1
        assert ask(source) == NoticeReading()
        fake.first_slow_s = {EVENTS_PATH: 0.2}
        assert refused(source).trouble is NoticeTrouble.ABSENT


def test_azure_only_events_of_this_vm_alone_are_acknowledged() -> None:
    with metadata("azure") as fake:
        source = azure(fake)
        shared = fake.event(EventId="shared", Resources=[VM, "trainer_4"])
        fake.events = [shared]
        ask(source)
        assert not asyncio.run(source.acknowledge())
        fake.events = [shared, fake.event(EventId="ours")]
        ask(source)
        assert asyncio.run(source.acknowledge())
        assert fake.started == ["ours"]
        fake.statuses = {EVENTS_PATH: 500}
        with pytest.raises(MetadataError, match=r"POST .* answered 500"):
            asyncio.run(source.acknowledge())


# -- all of them -------------------------------------------------------------------------------------------


def broken_action(**changes: object) -> bytes:
    return json.dumps({"action": "terminate", "time": "2026-06-02T08:22:00Z", **changes}).encode()


def broken_event(**changes: object) -> bytes:
    return json.dumps({"Events": [FakeMetadata().event(**changes)]}).encode()


@pytest.mark.parametrize(
    ("plays", "make", "path", "body", "said"),
    [
        ("aws", aws, TOKEN, b"<html>login</html>", "a token"),
        ("aws", aws, ACTION, b"<html>", "a JSON object"),
        ("aws", aws, ACTION, b"[" * 100_000, "a JSON object"),
        ("aws", aws, ACTION, broken_action(action=None), "action None"),
        ("aws", aws, ACTION, broken_action(time="soon"), "time 'soon'"),
        ("aws", aws, ACTION, broken_action(time="2026-06-02T08:22:00"), "a time in UTC"),
        ("aws", aws, ACTION, b"\xff\xfe", "expected text"),
        ("aws", aws, ACTION, b"x" * (BYTES_MAX + 1), f"at most {BYTES_MAX} bytes"),
        ("gcp", gcp, PREEMPTED, b"true", "TRUE or FALSE"),
        ("azure", azure, VM_PATH, b"{}", "name None"),
        ("azure", azure, EVENTS_PATH, b"{}", "Events None"),
        ("azure", azure, EVENTS_PATH, b'{"Events": [7]}', "Events[0] 7"),
        ("azure", azure, EVENTS_PATH, broken_event(Resources=VM), "Events[0].Resources"),
        ("azure", azure, EVENTS_PATH, broken_event(EventId=""), "Events[0].EventId"),
        ("azure", azure, EVENTS_PATH, broken_event(EventType=None), "Events[0].EventType"),
        ("azure", azure, EVENTS_PATH, broken_event(NotBefore="soon"), "Events[0].NotBefore 'soon'"),
    ],
)
def test_nonsense_is_no_notice_and_is_named(
    plays: str, make: Callable[[FakeMetadata], NoticeSource], path: str, body: bytes, said: str
) -> None:
    with metadata(plays, bodies={path: body}) as fake:
        error = refused(make(fake))
        assert error.trouble is NoticeTrouble.BROKEN
        assert said in str(error)
        assert fake.url + path in str(error)


@pytest.mark.parametrize("make", [aws, gcp, azure])
@pytest.mark.parametrize(
    ("status", "trouble"),
    [(302, NoticeTrouble.REFUSED), (403, NoticeTrouble.REFUSED), (429, NoticeTrouble.BROKEN)],
)
def test_other_statuses_are_errors_and_redirects_are_not_followed(
    make: Callable[[FakeMetadata], NoticeSource], status: int, trouble: NoticeTrouble
) -> None:
    with metadata(
        "aws", "gcp", "azure", statuses=dict.fromkeys((ACTION, PREEMPTED, EVENTS_PATH), status)
    ) as fake:
        error = refused(make(fake))
        assert (error.trouble, f"answered {status}" in str(error)) == (trouble, True)
        assert fake.count("/elsewhere") == 0


@pytest.mark.parametrize("make", [aws, gcp, azure])
def test_a_service_that_is_gone_is_absent_and_found_when_it_is_back(
    make: Callable[[FakeMetadata], NoticeSource],
) -> None:
    fake = FakeMetadata(plays=("aws", "gcp", "azure"))
    with serving(fake):
        source = make(fake)
        ask(source)
    assert refused(source).trouble is NoticeTrouble.ABSENT
    with serving(fake, port=int(fake.url.rpartition(":")[2])):
        ask(source)


def test_no_proxy_is_ever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata("aws") as fake, metadata() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        ask(aws(fake))
        assert proxy.asked == []


@pytest.mark.parametrize(
    "url",
    ["https://169.254.169.254", "169.254.169.254", "http://", "http://h/latest", "http://u@h", "http://h:x"],
)
def test_an_address_that_is_not_one_is_refused(url: str) -> None:
    with pytest.raises(NoticeError, match="expected http://HOST"):
        MetadataServer(url)


# -- which cloud -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", list(CLOUDS))
def test_the_cloud_is_recognised_and_what_is_pending_is_seen_at_once(cloud: str) -> None:
    with metadata(cloud, preempted=True) as fake:
        fake.action = {"action": "terminate", "time": fake.in_s(90)}
        fake.events = [fake.event()]
        source = asyncio.run(find_cloud(MetadataServer(fake.url), timeout_s=10.0))
        assert type(source) is type(cloud_source(cloud, MetadataServer()))
        assert len(asyncio.run(asyncio.wait_for(source.read(), 10.0)).pending) == 1


def test_programs_need_not_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata("aws") as fake:
        monkeypatch.setattr(clouds, "MetadataServer", lambda: MetadataServer(fake.url))
        found = asyncio.run(find_cloud(timeout_s=10.0))
    assert type(found) is type(cloud_source("aws", MetadataServer()))


def test_no_cloud_is_reported_with_what_each_question_met() -> None:
    with metadata() as fake, pytest.raises(NoticeError) as raised:
        asyncio.run(find_cloud(MetadataServer(fake.url)))
    assert all(f"\n  {cloud}: " in str(raised.value) for cloud in CLOUDS)


def test_a_service_that_answers_as_several_clouds_is_not_guessed() -> None:
    with metadata("aws", "azure") as fake, pytest.raises(NoticeError, match="as aws and azure; expected one"):
        asyncio.run(find_cloud(MetadataServer(fake.url)))


def test_a_silent_service_does_not_hold_the_search_up() -> None:
    slow_s = dict.fromkeys((TOKEN, PREEMPTED, VM_PATH), 1.5)
    with metadata("aws", slow_s=slow_s) as fake, pytest.raises(NoticeError, match=r"no answer within 0\.1 s"):
        asyncio.run(find_cloud(MetadataServer(fake.url), timeout_s=0.1))
