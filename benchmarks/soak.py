"""A training run under fire: is everything accounted for, and does it get on, when anything may die any time?

    python -m benchmarks.soak --json soak.json
    python -m benchmarks.soak --kills 12 --minutes 4 --seed 3 fleet.learner_ranks=2
    python -m benchmarks.soak --kills 40 --minutes 10 --spot-learner

Starts ``spotlight train`` on a cluster of this machine whose spot nodes come, get notices (some) and are
killed by a trace made from the seed. Beside it, an injector kills (SIGKILL) or stops (SIGSTOP, later SIGCONT)
workers, reward processes, node agents, learner ranks, whole nodes, the head, and the head with all else on
its node; after the last two the same command is started again. When enough was killed, or time is nearly up,
the run is left alone until its next optimizer step, stopped by SIGTERM, and audited. With ``--spot-learner``
the learner is on the spot nodes too, with two ranks or one.

Exit status 1 if a promise is broken: the audit finds something, a head ends by itself or does not stop, no
step is made for ``--patience`` seconds, processes or directories are left over, billed seconds are not the
sum over phases, or fewer were killed than asked for. Extra arguments are overrides of the run. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._places import place_for_runs
from benchmarks._process_faults import MARK, ProcessFaultInjector, TargetKind, end, processes_of
from benchmarks._soak_result import collect, show
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError
from spotlight_fleet.emulated import guard
from spotlight_fleet.traces.trace import Trace, TraceEvent, TraceEventKind
from spotlight_fleet.traces.trace_files import write_trace
from spotlight_plan.traces.generator import TraceSpec, generate
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED

NAME = "soak"
LOOK_S = 0.5
GONE_S = 20.0
"""How long after a head's death its last process may live."""
STOP_S = 120.0
"""How long a run may take from SIGTERM to its next checkpoint and its end."""
ENDING_MOST_S = 150.0
"""Of the time, kept for the last step, the end and the audit."""
UPTIME_S = 70.0
"""Mean time of a spot node until it is taken alone."""
SLOTS = (2, 1)
"""Of the nodes at each place for a spot node."""
NOTICED_SHARE = 0.5
NOTICES_S = (0.5, 8.0)

SETTINGS = (
    "fleet.driver=ray",
    "iterations=100000",
    "learner.decay_iterations=null",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "rollout.batch_size=2",
    "learner.micro_batch_size=8",
    "evaluation.every=100000",
    "evaluation.prompts=2",
    "evaluation.images_per_prompt=1",
    "evaluation.grid_prompts=2",
    "evaluation.grid_images=1",
    "metrics.tensorboard=false",
    "fleet.local.rollout_slots=1",
    "fleet.local.threads=1",
    "fleet.sequence_parallel={degrees: [1, 2], pays_from_pixels: 1}",
    "fleet.heartbeat_s=2",
    "fleet.answer_s=4",
    "fleet.lease_s=8",
    "fleet.collective_s=4",
    "fleet.start_s=240",
    "fleet.learner_s=60",
    "fleet.drain_margin_s=30",
    "fleet.spot.notice_s=null",
)
"""Small iterations with a checkpoint each, little patience, and notices as the trace gives them."""
SPOT_LEARNER = (
    "fleet.learner_placement=spot",
    "fleet.learner_ranks=2",
    "fleet.learner_ranks_min=1",
    "fleet.learner_grows_after_s=5",
)
SPOT_LEARNER_SLOTS = (2, 1, 1)
"""The same as :data:`SLOTS`, where some of them train."""


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the run.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Until so many were killed.")] = 120,
    minutes: Annotated[float, typer.Option(min=0.5, help="At most, from start to audit.")] = 29.0,
    seed: Annotated[int, typer.Option(help="Of the trace, and of what the injector does.")] = 0,
    patience: Annotated[float, typer.Option(help="Longest time without an optimizer step, s.")] = 300.0,
    slots: Annotated[list[int] | None, typer.Option(help="Of spot nodes, once a place: 2 and 1.")] = None,
    uptime: Annotated[float, typer.Option(help="Mean s until a spot node is taken alone.")] = UPTIME_S,
    spot_learner: Annotated[bool, typer.Option(help="The learner is on spot nodes too.")] = False,
    runs_dir: Annotated[Path | None, typer.Option(help="New directory for the run.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Train under SIGKILL and SIGSTOP, then audit."""
    if runs_dir is not None and RunPaths(runs_dir / NAME).ledger.exists():
        raise typer.BadParameter(
            f"{runs_dir} has a run already; expected a new directory", param_hint="--runs-dir"
        )
    own, usual = (SPOT_LEARNER, SPOT_LEARNER_SLOTS) if spot_learner else ((), SLOTS)
    settings = [*own, *(overrides or [])]
    with place_for_runs(runs_dir, "spotlight-soak-") as place:
        soak = Soak(place, kills, 60.0 * minutes, seed, patience, slots or usual, settings, uptime)
        try:
            soak.run()
        finally:
            soak.clean_up()
        result = collect(soak)
        show(result)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if soak.violations:
            raise typer.Exit(1)


# -- the run under fire ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """Optimizer steps of a run, seen from outside. A step that was undone and is made again counts again.

    Attributes:
        waiting: disruptions since the last step, and when each was over (for a head: started again).
        waited_s: from those of a kind to the next step.
        undone: steps that a restart or a lost learner took back.
    """

    ledger: Path
    patience_s: float
    made: int = 0
    last_s: float | None = None
    longest_s: float = 0.0
    waiting: list[tuple[TargetKind, float]] = field(default_factory=list)
    waited_s: dict[TargetKind, list[float]] = field(default_factory=dict)
    undone: int = 0
    _known: int = 0

    def look(self) -> bool:
        """Whether a step was made since the last look."""
        try:
            with closing(queries.open_readonly(self.ledger)) as connection:
                (found,) = connection.execute("SELECT COUNT(*) FROM optimizer_steps").fetchone()
        except (LedgerError, sqlite3.Error):
            return False  # not there yet, or a writer is at it
        now_s, new = time.monotonic(), found - self._known
        self._known = found
        self.undone += max(0, -new)
        if new <= 0:
            return False
        self.made += new
        if self.last_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s
        for kind, since_s in self.waiting:
            self.waited_s.setdefault(kind, []).append(round(now_s - since_s, 2))
        self.waiting.clear()
        return True


class Soak:
    """One run, its injector, and what is wrong with them.

    Attributes:
        violations: broken promises, in words.
        heads: process owners (``guard.owner_of``) of every head there was.
        cleared_s: from each head's death to that of its last process.
    """

    def __init__(
        self,
        place: Path,
        kills: int,
        limit_s: float,
        seed: int,
        patience_s: float,
        slots: Sequence[int],
        overrides: Sequence[str],
        uptime_s: float = UPTIME_S,
    ) -> None:
        self.place, self.run_directory = place, place / NAME
        self.kills, self.limit_s, self.seed = kills, limit_s, seed
        self.slots, self.overrides, self.uptime_s = tuple(slots), list(overrides), uptime_s
        self.began_s = time.monotonic()
        paths = RunPaths(self.run_directory)
        self.injector = ProcessFaultInjector(secrets.token_hex(8), seed, self.began_s, paths.attempts)
        self.progress = Progress(RunPaths(self.run_directory).ledger, patience_s)
        self.violations: list[str] = []
        self.heads: list[str] = []
        self.cleared_s: list[float] = []
        self.stopping_s = 0.0
        self._pace = random.Random(f"{seed}/pace")
        self._since_s = self.began_s  # the last step, or the last start that has not made one
        self._head: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        """The one command, also after each death of the head."""
        own = [f"name={NAME}", f"runs_dir={self.place}", f"fleet.spot.trace={self.place / 'spot.csv'}"]
        return [
            *(sys.executable, "-m", "spotlight.cli", "train", "--plain"),
            *SETTINGS, *own, *self.overrides,
        ]  # fmt: skip

    def run(self) -> None:
        """Start, sabotage, stop. What goes wrong is in :attr:`violations`."""
        self._start()
        ending_s = self.began_s + self.limit_s - min(ENDING_MOST_S, 0.3 * self.limit_s)
        next_s: float | None = None
        while self.injector.kills < self.kills and time.monotonic() < ending_s:
            if not self._turn():
                return
            if self.progress.made and (next_s is None or time.monotonic() >= next_s):
                if next_s is not None:
                    self._act()
                next_s = time.monotonic() + self._pause_s(ending_s)
        self._stop()

    def clean_up(self) -> None:
        """End what is left, whatever happened."""
        end(lambda: processes_of(self.injector.mark))
        if self._head is not None:
            self._head.wait()
        guard.sweep(_base())

    def _pause_s(self, ending_s: float) -> float:
        """Until the next fault: soon enough that as many are killed as asked for."""
        left_s = max(0.0, ending_s - time.monotonic())
        mean_s = 0.6 * left_s / max(1, self.kills - self.injector.kills)
        return min(self._pace.expovariate(1 / max(mean_s, 0.1)), 3 * mean_s)

    def _start(self) -> None:
        number = len(self.heads) + 1
        trace = spot_trace(f"{self.seed}/{number}", self.limit_s, self.slots, self.uptime_s)
        write_trace(trace, self.place / "spot.csv")
        with (self.place / "train.log").open("ab") as log:
            self._head = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: self.injector.mark},
                start_new_session=True,
            )
        self.heads.append(guard.owner_of(self._head.pid))
        self._since_s = time.monotonic()

    def _turn(self) -> bool:
        """Look around. False: it is of no use to go on."""
        assert self._head is not None
        time.sleep(LOOK_S)
        if (status := self._head.poll()) is not None:
            self._broken(f"head {len(self.heads)} ended by itself with status {status}; see train.log")
            self.injector.head_is_gone()
            return False
        self.injector.watch()
        if self.progress.look():
            self._since_s = time.monotonic()
        elif (without_s := time.monotonic() - self._since_s) > self.progress.patience_s:
            self._broken(f"no optimizer step for {without_s:.0f} s")
            return False
        return True

    def _act(self) -> None:
        assert self._head is not None
        killed = self.injector.act(self._head.pid, recovered=not self.progress.waiting)
        if killed in (TargetKind.HEAD, TargetKind.HEAD_NODE):
            self._restart()
        if killed in (TargetKind.HEAD, TargetKind.HEAD_NODE, TargetKind.LEARNER):
            self.progress.waiting.append((killed, time.monotonic()))

    def _restart(self) -> None:
        assert self._head is not None
        self._head.wait()
        self.injector.head_is_gone()
        self._expect_gone(f"of head {len(self.heads)}, which was killed")
        self._start()

    def _stop(self) -> None:
        """In peace, the run gets on by itself, and ends on SIGTERM."""
        assert self._head is not None
        self.injector.wake_all()
        before = self.progress.made
        while self.progress.made == before:
            if not self._turn():
                return
        began_s = time.monotonic()
        self._head.send_signal(signal.SIGTERM)
        try:
            status = self._head.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._broken(f"the head did not end within {STOP_S:g} s of SIGTERM")
            return
        self.stopping_s = time.monotonic() - began_s
        if status != EXIT_INTERRUPTED:
            self._broken(f"the head ended with status {status} after SIGTERM; expected {EXIT_INTERRUPTED}")
        self._expect_gone("of the head that was stopped")
        self._expect_no_directories()

    def _expect_gone(self, of: str) -> None:
        began_s = time.monotonic()
        while left := processes_of(self.injector.mark):
            if time.monotonic() - began_s > GONE_S:
                names = "; ".join(f"{process.pid} {process.title[:60]}" for process in left)
                self._broken(f"processes {of}, are left after {GONE_S:g} s: {names}")
                break
            time.sleep(0.1)
        self.cleared_s.append(round(time.monotonic() - began_s, 2))

    def _expect_no_directories(self) -> None:
        left = [
            str(entry)
            for entry in (_base().iterdir() if _base().is_dir() else ())
            if any(entry.name.startswith(f"{owner}.") for owner in self.heads)
        ]
        if left:
            self._broken(f"directories are left: {', '.join(left)}")

    def _broken(self, what: str) -> None:
        print(f"{time.monotonic() - self.began_s:7.1f} s  VIOLATED: {what}", flush=True)
        self.violations.append(what)


def _base() -> Path:
    """Where local clusters of this user have their directories."""
    return Path(tempfile.gettempdir()) / f"spotlight-{os.getuid()}"


def spot_trace(
    seed: str, horizon_s: float, slots: Sequence[int] = SLOTS, uptime_s: float = UPTIME_S
) -> Trace:
    """Nodes of two sizes that come and go; some with notice, some at the last moment, some without."""
    draw = random.Random(f"{seed}/trace")
    events: list[TraceEvent] = []
    for place, gpus in enumerate(slots):
        spec = TraceSpec(
            draw.randrange(2**32), horizon_s, 1, gpus, uptime_s, mean_downtime_s=4.0, bursts_per_h=10.0
        )
        events += [
            TraceEvent(event.time_s, event.kind, f"spot{place}-{event.node}", event.gpus)
            for event in generate(spec).events
        ]
    added_s = {event.node: event.time_s for event in events if event.kind is TraceEventKind.ADD}
    for event in [event for event in events if event.kind is TraceEventKind.REMOVE]:
        noticed_s = event.time_s - draw.uniform(*NOTICES_S)
        if draw.random() < NOTICED_SHARE and noticed_s > added_s[event.node]:
            events.append(TraceEvent(noticed_s, TraceEventKind.NOTICE, event.node, event.gpus))
    events.sort(key=lambda event: event.time_s)
    return Trace(tuple(events), horizon_s, f"soak, seed {seed}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        typer.run(main)
