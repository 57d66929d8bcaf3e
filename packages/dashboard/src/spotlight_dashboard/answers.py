"""What the page may ask for: one function per path, used by the server and by the page in one file."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

from spotlight.store.ledger.ledger_schema import RolloutOutcome
from spotlight_dashboard.comparison import RunCurve
from spotlight_dashboard.figures import Axis, Json
from spotlight_dashboard.prometheus import RunFigure, run_figures
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views import gallery as gallery_views
from spotlight_dashboard.views.curves import (
    ALL_POINTS,
    Booked,
    CurveReader,
    curve,
    curve_names,
    read_booked,
)
from spotlight_dashboard.views.findings import RunLimits
from spotlight_dashboard.views.lanes import lanes
from spotlight_dashboard.views.means import run_curve
from spotlight_dashboard.views.money import money
from spotlight_dashboard.views.overview import accounting, headline, is_small, overview, verdict
from spotlight_dashboard.views.run_log import happened, log_tail
from spotlight_dashboard.views.samples import IN_FLIGHT, SampleSearch, sample, samples
from spotlight_dashboard.views.votes import votes

_KEPT = 128
"""Answers, most of them below 100 kB."""
_STALE_S = 10.0
_QUICK_S = 0.5
_REST = 10.0
"""An answer that took longer than :data:`_QUICK_S` is made again after this many times the seconds it took,
so that a long run's pages take a tenth of a core each at most, however often the run writes."""
_AUDIT_REST = 30.0
"""An audit is made again after this many times the seconds it took, and :data:`_AUDIT_REST_S` at least."""
_AUDIT_REST_S = 15.0
T = TypeVar("T")
Query = Mapping[str, str]
Answer = Callable[["RunAnswers", RunFolder, Query], Json | None]


class BadQueryError(ValueError):
    """A parameter of a request is not what is expected; says which."""


@dataclass(slots=True)
class _Kept(Generic[T]):
    """Something computed, the state of the run's files that it is of, and a lock for computing it."""

    lock: Lock = field(default_factory=Lock)
    state: tuple[str, object] | None = None
    rests_until: float = 0.0
    found: list[T] = field(default_factory=list)

    def fresh(self, run: RunFolder, compute: Callable[[], T], besides: object = None) -> T:
        """What is known, computed if the run has changed since; all who ask meanwhile wait for the first.

        Args:
            besides: what it depends on besides the run's files; None: on time.
        """
        with self.lock:
            started = time.monotonic()
            # Whether the run's process lives is not in its files; neither does a log count as one.
            state = (run.signature(), int(started / _STALE_S) if besides is None else besides)
            if self.state != state and started >= self.rests_until:
                self.found, self.state = [compute()], state
                ended = time.monotonic()
                took_s = ended - started
                self.rests_until = ended + _REST * took_s if took_s > _QUICK_S else 0.0
            return self.found[0]


@dataclass(slots=True)
class _Audit:
    lock: Lock = field(default_factory=Lock)
    answer: Json | None = None
    signature: str = ""
    ended: float = 0.0
    took_s: float = 0.0

    def rests(self) -> bool:
        return time.monotonic() - self.ended < max(_AUDIT_REST_S, _AUDIT_REST * self.took_s)


@dataclass(slots=True)
class _OfRun:
    reader: CurveReader
    headline: _Kept[Json] = field(default_factory=_Kept)
    figures: _Kept[tuple[RunFigure, ...]] = field(default_factory=_Kept)
    booked: _Kept[Booked] = field(default_factory=_Kept)
    audit: _Audit = field(default_factory=_Audit)


@dataclass(slots=True)
class RunAnswers:
    """Answers about runs, each computed once per state of the run's files, for all who ask.

    Attributes:
        limits: of every run; findings name those that will not keep within them.
    """

    limits: RunLimits = field(default_factory=RunLimits)
    _kept: OrderedDict[tuple[object, ...], _Kept[Json | None]] = field(default_factory=OrderedDict)
    _runs: dict[RunFolder, _OfRun] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def answer(self, run: RunFolder, what: str, query: Query) -> Json | None:
        """The answer for the page; None if there is no such thing.

        Raises:
            BadQueryError: a parameter is malformed.
            StoreError: the run cannot be read.
        """
        if what == "audit":
            return self._audit(run, asked=query.get("now") == "1")
        if (compute := ANSWERS.get(what)) is None:
            return None
        key = (run, what, tuple(sorted(query.items())))
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        with run.values():
            return kept.fresh(run, lambda: compute(self, run, query))

    def forget_others(self, runs: Collection[RunFolder]) -> None:
        """Keep what is known of these runs: the others are gone."""
        there = set(runs)
        with self._lock:
            self._runs = {run: known for run, known in self._runs.items() if run in there}

    def headline(self, run: RunFolder) -> Json:
        """See :func:`.views.overview.headline`."""
        return self._of(run).headline.fresh(run, lambda: headline(run))

    def figures(self, run: RunFolder) -> tuple[RunFigure, ...]:
        """See :func:`.prometheus.run_figures`. Those of runs that have ended are made once."""
        kept = self._of(run).figures
        return kept.fresh(run, lambda: run_figures(run), besides=self.headline(run)["state"])

    def run_curve(self, run: RunFolder, name: str, axis: Axis) -> RunCurve:
        """See :func:`.views.means.run_curve`."""
        with run.values():
            booked = read_booked(run, dollars=axis == "usd")
            with self._of(run).reader.columns() as columns:
                found = curve(columns, name, booked, ALL_POINTS)
            return run_curve(run.name, run.settings().tree, found, axis)

    def _of(self, run: RunFolder) -> _OfRun:
        with self._lock:
            return self._runs.setdefault(run, _OfRun(CurveReader(run)))

    def metrics(self, run: RunFolder) -> Json:
        """See :func:`.views.curves.curve_names`."""
        with self._of(run).reader.columns() as columns:
            return curve_names(columns)

    def curve(self, run: RunFolder, name: str) -> Json:
        """See :func:`.views.curves.curve`."""
        known = self._of(run)
        booked = known.booked.fresh(run, lambda: read_booked(run))
        with known.reader.columns() as columns:
            return curve(columns, name, booked)

    def _audit(self, run: RunFolder, *, asked: bool) -> Json:
        """The newest audit, made again if the run has changed since, and it is quick or ``asked`` for.

        While one is made, others get the one before, or ``running``, at once.
        """
        newest = self._of(run).audit
        if not newest.lock.acquire(blocking=False):
            return newest.answer or {"ok": None, "running": True}
        try:
            signature = run.signature()
            if newest.answer is not None and (newest.signature == signature or newest.rests()):
                return newest.answer
            if not asked and not is_small(run):
                return newest.answer or {"ok": None, "large": True}
            started = time.monotonic()
            newest.answer = verdict(run)
            newest.signature, newest.ended = signature, time.monotonic()
            newest.took_s = newest.ended - started
            return newest.answer
        finally:
            newest.lock.release()


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise BadQueryError(f"{name} is {text[:40]!r}; expected a whole number, 0 or more.")
    return int(text)


def _choice(query: Query, name: str, choices: tuple[str, ...]) -> str:
    text = query.get(name, "")
    if text and text not in choices:
        raise BadQueryError(f"{name} is {text[:40]!r}; expected one of {', '.join(choices)}.")
    return text


def _search(query: Query) -> SampleSearch:
    return SampleSearch(
        text=query.get("text", ""),
        purpose=_choice(query, "purpose", ("train", "eval", "explore")),
        fate=_choice(query, "fate", (*(each.value for each in RolloutOutcome), IN_FLIGHT)),
        worker=query.get("worker", ""),
        iteration=_number(query, "iteration"),
        moved=query.get("moved") == "1",
        before=_number(query, "before"),
    )


def _lanes(run: RunFolder, query: Query) -> Json:
    last_s = _number(query, "last_s")
    return lanes(run, None if last_s is None else float(last_s), _number(query, "page") or 0)


ANSWERS: dict[str, Answer] = {
    "accounting": lambda given, run, query: accounting(run, given.limits),
    "metrics": lambda given, run, query: given.metrics(run),
    "curve": lambda given, run, query: given.curve(run, query.get("name", "")),
    "overview": lambda _, run, query: overview(run),
    "pictures": lambda _, run, query: gallery_views.gallery(run),
    "evaluation": lambda _, run, query: gallery_views.pictures(run, _number(query, "iteration") or 0),
    "training": lambda _, run, query: gallery_views.training_pictures(run, _number(query, "iteration") or 0),
    "cluster": lambda _, run, query: _lanes(run, query),
    "money": lambda _, run, query: money(run),
    "samples": lambda _, run, query: samples(run, _search(query)),
    "sample": lambda _, run, query: sample(run, query.get("id", "")),
    "log": lambda _, run, query: happened(run, _number(query, "before")),
    "votes": lambda _, run, query: votes(run),
    "logfile": lambda _, run, query: log_tail(run, query.get("name", "")),
}
"""By path below ``api/runs/RUN/``; ``audit`` besides."""
