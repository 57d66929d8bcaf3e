"""Runs of a sweep as processes of ``spotlight train``, so many at a time. They end with the sweep.

A run that another process has (the same sweep on another machine, or one that still stops) is left for
last, and then waited for: its directory's lock is what says so.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from spotlight.cli.runs.rank_processes import end_with_parent
from spotlight.runtime.signals import on_signals, signals_that_end
from spotlight.store.run_directory import RunPaths, require_unused
from spotlight.store.store_errors import RunInUseError
from spotlight_plan.sweep_file import FINISHED, SweepRun
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED, EXIT_NOT_STARTED

_LOOK_AGAIN_S = 2.0
_BY_SIGNAL = {code for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for code in (-each, 128 + each)}


@dataclass(frozen=True, slots=True)
class Ended:
    """A run's process that has ended; ``code`` as of ``spotlight train``."""

    run: SweepRun
    code: int


@dataclass
class SideBySide:
    """Starts processes and hears of their ends.

    Attributes:
        places: the environment of each run that may run at a time.
        say: prints a line; must not raise.
        ranks: processes of a run.
        stopped: a signal has come: nothing more is started, or ended at once if it was being chosen.
    """

    runs_dir: Path
    places: Sequence[Mapping[str, str]]
    say: Callable[[str], None]
    ranks: int = 1
    stopped: bool = False
    _ends: queue.SimpleQueue[tuple[int, SweepRun]] = field(default_factory=queue.SimpleQueue)
    _at_work: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)

    def ended(self, runs: Iterator[SweepRun]) -> Iterator[Ended]:
        """Run all; ends as they come. ``runs`` is asked for the next when there is a place for it."""
        waiting: list[SweepRun] = []
        more = True
        with on_signals((signal.SIGINT, *signals_that_end()), self._stop):
            try:
                while not self.stopped and (more or waiting or self._at_work):
                    more = self._fill(runs, waiting) and more
                    if self._at_work:
                        yield from self._next(waiting)
                    elif waiting and not more:
                        time.sleep(_LOOK_AGAIN_S)
                while self._at_work:
                    yield from self._next(waiting)
            finally:
                for process in self._at_work.values():
                    process.terminate()  # which stops where the run can go on
                for process in self._at_work.values():
                    process.wait()

    def _fill(self, runs: Iterator[SweepRun], waiting: list[SweepRun]) -> bool:
        """Whether there may be more runs."""
        while not self.stopped and len(self._at_work) < len(self.places):
            if (run := next(runs, None)) is None:
                self._take_waiting(waiting)
                return False
            if (holder := in_use(self.runs_dir, run.name)) is not None:
                self.say(f"{run.name}: left for last: {holder}")
                waiting.append(run)
            else:
                self._start(run)
        return True

    def _take_waiting(self, waiting: list[SweepRun]) -> None:
        free = [run for run in waiting if in_use(self.runs_dir, run.name) is None]
        for run in free[: len(self.places) - len(self._at_work)]:
            waiting.remove(run)
            self._start(run)

    def _start(self, run: SweepRun) -> None:
        place = next(place for place in range(len(self.places)) if place not in self._at_work)
        options = ["--plain", *(["--ranks", str(self.ranks)] if self.ranks > 1 else [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "spotlight.cli", "train", *run.arguments, *options],
            env={**os.environ, **self.places[place]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # what a terminal signals is passed on, once
            preexec_fn=end_with_parent,
        )
        self._at_work[place] = process
        if self.stopped:  # the signal came while the run was chosen
            process.terminate()
        threading.Thread(target=self._report, args=(place, run, process), daemon=True).start()

    def _report(self, place: int, run: SweepRun, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(f"{run.name}: {line.rstrip()}")
        process.wait()
        self._ends.put((place, run))

    def _next(self, waiting: list[SweepRun]) -> Iterator[Ended]:
        place, run = self._ends.get()
        code = self._at_work.pop(place).returncode
        again = run.name not in self._refused or in_use(self.runs_dir, run.name) is not None
        if code == EXIT_NOT_STARTED and again:
            # Another process had it, or only looked at its lock, and may have ended since.
            self._refused.add(run.name)
            waiting.append(run)
        else:
            # A signal may end a process before its handlers are installed; click turns Ctrl-C into status 1.
            early = code in _BY_SIGNAL or (code == 1 and not (self.runs_dir / run.name).exists())
            yield Ended(run, EXIT_INTERRUPTED if self.stopped and early else code)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._at_work.values():
            process.send_signal(number)


def in_use(runs_dir: Path, name: str) -> str | None:
    """Who has the run; None: nobody."""
    try:
        require_unused(RunPaths(runs_dir / name).lock)
    except RunInUseError as error:
        return str(error)
    return None


def outcome(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    known = {0: FINISHED, EXIT_INTERRUPTED: "stopped", EXIT_NOT_STARTED: "refused"}
    return known.get(code, "failed")
