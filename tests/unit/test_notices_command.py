"""``spotlight notices`` as a user runs it, and SIGTERM sent to real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from metadata_server import metadata
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_fleet.notices.notice import NoticeError
from spotlight_fleet.notices.sigterm import catching_sigterm

IN_A_THREAD = """
import asyncio, random, threading
from spotlight_fleet.notices.sigterm import catching_sigterm
from spotlight_fleet.notices.watcher import NoticeWatcher

with catching_sigterm(20.0) as source:
    notices = []
    watcher = NoticeWatcher([source], random.Random(0))
    thread = threading.Thread(target=lambda: asyncio.run(watcher.run(notices.append)))
    thread.start()
    print("ready", flush=True)
    thread.join()
    print(notices[0].detail, len(notices), flush=True)
print("default again", flush=True)
import time; time.sleep(20)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    # A shell starts its background jobs, tests among them, with Ctrl-C ignored, and a child
    # inherits that. Set here and not by `preexec_fn`, which would fork this large process.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_is_a_notice_in_json_and_not_the_end_of_the_process() -> None:
    with start(
        "-m", "spotlight.cli", "notices", "--cloud", "none", "--sigterm-grace-s", "20", "--json"
    ) as process:
        assert process.stderr is not None
        assert "Watching sigterm" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    (line,) = output.splitlines()
    notice = json.loads(line)
    assert (notice["notice"], notice["source"]) == ("noticed", "sigterm")
    assert 15 < notice["remaining_s"] <= 20
    assert process.returncode == 0


def test_ctrl_c_ends_the_watch() -> None:
    with metadata("gcp") as fake, start("-m", "spotlight.cli", "notices", "--endpoint", fake.url) as process:
        assert process.stderr is not None
        assert "Watching gcp" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (130, "", "")


def test_a_metadata_service_that_is_late_is_found() -> None:
    with metadata() as fake, start("-m", "spotlight.cli", "notices", "--endpoint", fake.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "Watching no cloud yet. Ctrl-C ends.\n"
        assert "preemptions may come unannounced" in process.stderr.readline()
        fake.change(plays=("aws",), action={"action": "terminate", "time": fake.in_s(100)})
        assert "aws: this node goes in" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130


def test_a_reader_that_is_gone_ends_the_watch_quietly() -> None:
    with metadata("aws") as fake, start("-m", "spotlight.cli", "notices", "--endpoint", fake.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        fake.rebalance = {"noticeTime": "2026-06-02T08:22:00Z"}
        assert process.stderr.read().splitlines() == ["Watching aws. Ctrl-C ends."]
        assert process.wait(timeout=120) == 1


def test_sigterm_reaches_a_watcher_in_another_thread_and_means_its_old_self_afterwards() -> None:
    with start("-c", IN_A_THREAD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM, SIGKILL after 20 s 1\n"
        assert process.stdout.readline() == "default again\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == -signal.SIGTERM


def test_sigterm_cannot_be_caught_outside_the_main_thread() -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            with catching_sigterm():
                pass
        except NoticeError as error:
            errors.append(str(error))

    opened = len(list(Path("/proc/self/fd").iterdir()))
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread only" in errors[0]
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    with pytest.raises(NoticeError, match="grace period -1"), catching_sigterm(-1):
        pass


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["notices", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_once_says_that_nothing_is_pending_or_what_is() -> None:
    with metadata("aws") as fake:
        assert run("--once", "--endpoint", fake.url) == (0, "aws answers; no notice is pending.\n", "")
        fake.action = {"action": "terminate", "time": fake.in_s(100)}
        code, output, _ = run("--once", "--cloud", "aws", "--endpoint", fake.url)
        assert code == 0
        assert "aws: this node goes in" in output
        code, output, _ = run("--once", "--json", "--endpoint", fake.url)
        (notice,) = json.loads(output)["notices"]
        assert 90 < notice["remaining_s"] <= 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cloud", "none"], "expected --sigterm-grace-s"),
        (["--cloud", "none", "--sigterm-grace-s", "3", "--endpoint", "http://h"], "no --endpoint"),
        (["--once", "--sigterm-grace-s", "3"], "Leave one of them out"),
        (["--endpoint", "ftp://h"], "expected http://HOST"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: Sequence[str], said: str) -> None:
    code, _, errors = run(*arguments)
    assert (code, said in errors) == (2, True)


def test_no_cloud_is_an_error_that_says_what_was_tried() -> None:
    with metadata() as fake:
        pass
    for cloud, said in (("auto", "Off these clouds, only SIGTERM"), ("gcp", "found no metadata service")):
        code, _, errors = run("--once", "--cloud", cloud, "--endpoint", fake.url)
        assert (code, said in errors, "Traceback" in errors) == (2, True, False)
