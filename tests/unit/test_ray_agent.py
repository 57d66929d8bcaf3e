"""Notices on their way from a node to the head, and what a worker wrote; no Ray."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from metadata_server import metadata

from spotlight.cluster.nodes.agent import log_tail
from spotlight_fleet.notices.notice import Cancelled, Noticed, Rebalance
from spotlight_fleet.notices.notice_mail import Message, NoticeUpdate, Outbox, read_messages
from spotlight_fleet.notices.notice_watch import NoticeSettings, NoticeWatch
from spotlight_fleet.notices.sigterm import catching_sigterm


def test_messages_are_numbered_and_sent_again_until_they_are_passed() -> None:
    now_s = 100.0
    outbox = Outbox(clock=lambda: now_s)
    outbox.put(Noticed("aws", 130.0, "terminate"))
    outbox.put(Cancelled("aws", "terminate"))
    outbox.put(Rebalance("aws", "risk"))
    outbox.put("no cloud")
    now_s = 110.0
    messages = read_messages(outbox.after(0, 0))
    assert messages == [
        Message(1, NoticeUpdate.NOTICED, "terminate", 20.0),
        Message(2, NoticeUpdate.CANCELLED, "terminate"),
        Message(3, NoticeUpdate.REBALANCE, "risk"),
        Message(4, NoticeUpdate.UNWATCHED, "no cloud"),
    ]
    assert read_messages(outbox.after(0, 0)) == messages
    assert read_messages(outbox.after(3, 0)) == messages[3:]
    assert outbox.after(4, 0.01) == []


def test_what_a_later_version_tells_is_left_out() -> None:
    rows: list[dict[str, object]] = [
        {"number": 1, "update": "resized", "detail": "", "remaining_s": 0.0},
        {"number": 2, "update": "noticed", "detail": "x", "remaining_s": 3.5, "more": 1},
    ]
    assert read_messages(rows) == [Message(2, NoticeUpdate.NOTICED, "x", 3.5)]


def test_a_question_hangs_until_there_is_an_answer() -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(outbox.after, 0, 3600.0)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.05)
        outbox.put("late")
        assert len(asked.result(timeout=60)) == 1


def test_sigterm_becomes_a_notice() -> None:
    outbox = Outbox()
    with catching_sigterm(30.0) as source:
        NoticeWatch(NoticeSettings("none"), source, outbox).start()
        os.kill(os.getpid(), signal.SIGTERM)
        (message,) = read_messages(outbox.after(0, 5.0))
    assert message.update is NoticeUpdate.NOTICED
    assert 29.0 < message.remaining_s <= 30.0


def test_a_clouds_notice_arrives_and_is_acknowledged() -> None:
    outbox = Outbox()
    with metadata("azure") as server:
        server.change(events=[server.event()])
        watch = NoticeWatch(NoticeSettings("auto", server.url, None), None, outbox)
        watch.start()
        (message,) = read_messages(outbox.after(0, 10.0))
        assert message.update is NoticeUpdate.NOTICED
        assert 25.0 < message.remaining_s <= 30.0
        assert watch.acknowledge()
        assert server.started == ["602d9444"]


def test_a_node_that_nothing_watches_says_so() -> None:
    for settings in (NoticeSettings("none", None, None), NoticeSettings("auto", "http://127.0.0.1:9", None)):
        outbox = Outbox()
        watch = NoticeWatch(settings, None, outbox)
        watch.start()
        (message,) = read_messages(outbox.after(0, 10.0))
        assert message.update is NoticeUpdate.UNWATCHED
        assert not watch.acknowledge()


def test_the_end_of_a_workers_log(tmp_path: Path) -> None:
    def write(pid: int, end: str, text: str) -> None:
        (tmp_path / f"worker-{pid:056x}-01000000-{pid}.{end}").write_text(text)

    write(7, "out", ":job_id:01000000\n:actor_name:w\n" + "".join(f"line {n}\n" for n in range(100)))
    write(7, "err", ":job_id:01000000\nFatal Python error: Aborted\n")
    write(77, "err", ":actor_name:other\nnot mine\n")
    tail = log_tail(tmp_path, "w")
    assert [line.strip() for line in tail.splitlines() if line.startswith("  ")] == [
        "Fatal Python error: Aborted", *(f"line {n}" for n in range(80, 100)),
    ]  # fmt: skip
    assert "nothing written by actor nobody" in log_tail(tmp_path, "nobody")
    assert "nothing written" in log_tail(tmp_path / "absent", "w")


def test_a_cloud_that_answers_late_is_found_and_the_head_learns_that_it_was_absent() -> None:
    outbox = Outbox()
    with metadata() as server, catching_sigterm(30.0) as sigterm:
        watch = NoticeWatch(NoticeSettings("auto", server.url, 30.0), sigterm, outbox)
        watch.start()
        (message,) = read_messages(outbox.after(0, 10.0))
        assert message.update is NoticeUpdate.UNWATCHED
        assert "no cloud's metadata service" in message.detail
        server.change(plays=("azure",), events=[server.event()])
        (message,) = read_messages(outbox.after(1, 30.0))
        assert message.update is NoticeUpdate.NOTICED
        assert watch.acknowledge()
