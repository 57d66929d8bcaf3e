"""Findings of running runs as alerts: each is logged and sent when it comes and when it is gone.

A thread of the dashboard's process looks at the runs' directories, so that a run that was killed, with all
its processes, is told too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from urllib.parse import urlsplit

import httpx2

from spotlight.dashboard.answers import RunAnswers
from spotlight.dashboard.figures import Json
from spotlight.dashboard.run_folders import RunFolder
from spotlight.dashboard.views.overview import UNREADABLE

LOOKS_EVERY_S = 30.0
TIMEOUT_S = 10.0
PAUSES_S = (2.0, 10.0)
"""Before the second and the third try."""
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

    A run is watched from when it is seen running until it has ended, its ending included: those that ended
    before are history.
    """

    answers: RunAnswers
    _standing: dict[str, dict[str, Alert]] = field(default_factory=dict)

    def look(self, runs: Mapping[str, RunFolder]) -> list[Alert]:
        """What has come and gone since the last look."""
        found: list[Alert] = []
        for name, run in runs.items():
            try:
                found += self._look_at(name, run)
            except UNREADABLE as error:
                log.info("%s: cannot be read now: %s", name, error)
        return found

    def _look_at(self, name: str, run: RunFolder) -> list[Alert]:
        if name not in self._standing and self.answers.headline(run)["state"] != "running":
            return []
        answer = self.answers.answer(run, "accounting", {})
        assert answer is not None
        runs_now = answer["state"] == "running"  # when it was made, which may be before it ended
        before, now = self._standing.get(name, {}), _alerts(name, answer)
        come = [alert for alert in now.values() if alert.name not in before]
        if not runs_now:
            self._standing.pop(name, None)
            return come
        self._standing[name] = {key: before.get(key, alert) for key, alert in now.items()}
        gone = [
            Alert(name, alert.name, False, alert.finding, alert.remedy, alert.serious, time.time())
            for alert in before.values()
            if alert.name not in now
        ]
        return come + gone


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
    """Send an alert; True if the receiver has taken it, after at most three tries.

    The log names the receiver's host only: its address may hold a key.
    """
    failure = ""
    for pause_s in (0.0, *PAUSES_S):
        sleep(pause_s)
        try:
            status = httpx2.post(url, json=alert.message(), timeout=TIMEOUT_S).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            failure = type(error).__name__
            continue
        if status < 300:
            return True
        failure = f"status {status}"
        if status < 500 and status != 429:
            break  # the same again would be refused again
    log.warning(
        "the webhook at %s did not take an alert (%s): %s", urlsplit(url).hostname, failure, alert.text
    )
    return False


def watch_runs(look: Callable[[], Mapping[str, RunFolder]], watch: AlertWatch, url: str, ends: Event) -> None:
    """Log and send alerts until ``ends`` is set.

    Args:
        look: the runs by name.
        url: of a webhook; empty: alerts are logged only.
    """
    while not ends.wait(LOOKS_EVERY_S):
        for alert in watch.look(look()):
            log.warning("%s", alert.text)
            if url:
                post_alert(url, alert, ends.wait)
