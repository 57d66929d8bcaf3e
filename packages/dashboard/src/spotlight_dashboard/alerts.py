"""Findings of running runs as alerts: each is logged and sent when it comes and when it is gone.

A thread of the dashboard's process looks at the runs' directories, so that a run that was killed, with all
its processes, is reported too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Event

import httpx2

from spotlight_dashboard.answers import RunAnswers
from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.run_threads import ASKED_S, RunThreads
from spotlight_dashboard.views.findings import ENDINGS
from spotlight_dashboard.views.overview import UNREADABLE

LOOKS_EVERY_S = 30.0
TIMEOUT_S = 10.0
"""For a whole request, connecting included."""
PAUSES_S = (2.0, 10.0)
"""Before the second and the third try."""
UNSENT_MAX = 100
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding of a run that has come, or is gone. Holds nothing of the run's configuration and prompts."""

    run: str
    name: str
    firing: bool
    finding: str
    remedy: str
    serious: bool
    at: float

    @property
    def text(self) -> str:
        """In one line; of one that is gone, what it was."""
        return (
            f"{self.run}: {self.finding} {self.remedy}"
            if self.firing
            else f"{self.run}: over: {self.finding}"
        )

    def message(self) -> Json:
        """As JSON; ``text`` is what chats show."""
        return {
            "text": self.text,
            "run": self.run,
            "alert": self.name,
            "state": "firing" if self.firing else "resolved",
            "finding": self.finding,
            "remedy": self.remedy,
            "serious": self.serious,
            "at": self.at,
        }


@dataclass(slots=True)
class AlertWatch:
    """Compares the findings of runs with those before.

    A run is watched from when it is seen running. When it has ended only that stands, until it runs again:
    runs that ended before are history. Of a run that is gone, all is over.
    """

    answers: RunAnswers
    threads: RunThreads = field(default_factory=RunThreads)
    _standing: dict[RunFolder, dict[str, Alert]] = field(default_factory=dict)

    def look(self, runs: Mapping[str, RunFolder]) -> list[Alert]:
        """What has come and gone since the last look."""
        read = asyncio.run(self.threads.each("alerts", list(runs.values()), self._look_at, ASKED_S))
        found: list[Alert] = []
        for run in self._standing.keys() - set(runs.values()):
            found += self._changes(run, {}, runs=False)
        for run in runs.values():
            if run not in read:
                log.info("%s: does not answer", run.name)
        for run, each in read.items():
            try:
                now, running = each.get()
                found += self._changes(run, now, runs=running)
            except UNREADABLE as error:
                log.info("%s: cannot be read now: %s", run.name, error)
            except Exception as error:  # noqa: BLE001 - one run's fault hides no other's alerts
                log.warning("%s: no alerts of it now (%s)", run.name, type(error).__name__)
        return found

    def _look_at(self, run: RunFolder) -> tuple[dict[str, Alert], bool]:
        """What stands now by name, and whether the run is running. Changes nothing: it may be left behind."""
        before = self._standing.get(run, {})
        waits = run not in self._standing or any(ending in before for ending in ENDINGS)
        if waits and self.answers.headline(run)["state"] != "running":
            return before, False
        answer = self.answers.answer(run, "accounting", {})
        assert answer is not None
        now = _alerts(run.name, answer)
        running = answer["state"] == "running"  # when it was made, which may be before or after it ended
        return now if running else {ending: now[ending] for ending in ENDINGS if ending in now}, running

    def _changes(self, run: RunFolder, now: Mapping[str, Alert], *, runs: bool) -> list[Alert]:
        before = self._standing.pop(run, {})
        if now or runs:
            self._standing[run] = {name: before.get(name, alert) for name, alert in now.items()}
        come = [alert for name, alert in now.items() if name not in before]
        gone = [alert for name, alert in before.items() if name not in now]
        return come + [replace(alert, firing=False, at=time.time()) for alert in gone]


def _alerts(run: str, answer: Json) -> dict[str, Alert]:
    findings = answer["findings"]
    assert isinstance(findings, list)
    return {
        each["name"]: Alert(
            run, each["name"], True, each["finding"], each["remedy"], each["serious"], time.time()
        )
        for each in findings
    }


def post_alert(url: str, alert: Alert, sleep: Callable[[float], object] = time.sleep) -> bool:
    """Send an alert, in at most three tries; False if it should be sent again later.

    True also of one that the receiver refuses: it would refuse it again. The log names the receiver's host
    only: its address may hold a key.
    """
    failure, refused = "", False
    for pause_s in (0.0, *PAUSES_S):
        sleep(pause_s)
        try:
            status = asyncio.run(_status(url, alert.message()))
        except Exception as error:  # noqa: BLE001 - whatever the receiver does
            failure = type(error).__name__
            continue
        if status < 300:
            return True
        failure = f"status {status}"
        refused = status < 500 and status != 429
        if refused:
            break
    log.warning("the webhook at %s did not take an alert (%s): %s", httpx2.URL(url).host, failure, alert.text)
    return refused


async def _status(url: str, message: Json) -> int:
    """Of the answer, whose body is not read. Raises TimeoutError after :data:`TIMEOUT_S`."""
    client = httpx2.AsyncClient(timeout=None)  # loads certificates: not the receiver's time
    async with client, asyncio.timeout(TIMEOUT_S), client.stream("POST", url, json=message) as answer:
        return answer.status_code


def watch_runs(look: Callable[[], Mapping[str, RunFolder]], watch: AlertWatch, url: str, ends: Event) -> None:
    """Log and send alerts until ``ends`` is set. Those not taken are sent again after the next look.

    Args:
        look: the runs by name.
        url: of a webhook; empty: alerts are logged only.
    """
    unsent: deque[Alert] = deque(maxlen=UNSENT_MAX)
    while not ends.wait(LOOKS_EVERY_S):
        try:
            found = watch.look(look())
        except Exception as error:  # noqa: BLE001 - alerts go on with the next look
            log.warning("the runs cannot be looked at now (%s)", type(error).__name__)
            found = []
        for alert in found:
            log.warning("%s", alert.text)
        if url:
            unsent.extend(found)
            while unsent and post_alert(url, unsent[0], ends.wait):
                unsent.popleft()
