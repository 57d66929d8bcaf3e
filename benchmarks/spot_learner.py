"""A learner on spot nodes whose node is taken again and again: what is learnt, and what it costs.

    python -m benchmarks.spot_learner --json spot_learner.json
    python -m benchmarks.spot_learner --every 60 --lead 30 --seeds 3 --runs-dir spot iterations=60

Trains on a cluster of this machine that has no reserved slots (``fleet.learner_placement=spot``), per seed
three times: undisturbed, with the learner's node announced (SIGTERM) and then killed every ``--every`` s, and
with it killed (SIGKILL) unannounced. For each node taken, another joins. Told are the seconds from each loss
to the next optimizer step that is new, beside the usual time between two steps, what was lost and done again,
and whether scores and weights are those of the undisturbed run, digit for digit. Every run is audited.
Samples are denoised one by one, since the size of a batch changes rounding. Run again with the same
arguments and ``--runs-dir``, it measures only what is missing there. Exit status 1 if an audit finds
something or a run does not end. Linux only; extra arguments are overrides of all runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks._places import place_for_runs
from spotlight.report.record import read_run
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary
from spotlight.store.store_errors import LedgerError
from spotlight_fleet.emulated import guard
from spotlight_fleet.traces.trace import Trace, TraceEvent, TraceEventKind
from spotlight_fleet.traces.trace_files import write_trace

LOOK_S = 0.1
NODES = 3
"""Spot nodes at a time: one trains."""
GROUP = 4
SETTINGS = (
    "fleet.driver=ray",
    "fleet.learner_placement=spot",
    "fleet.local.threads=1",
    "fleet.drain_margin_s=2",
    "iterations=40",
    "learner.decay_iterations=null",
    "rollout.prompts_per_iteration=2",
    f"rollout.group_size={GROUP}",
    "rollout.batch_size=1",
    "learner.micro_batch_size=8",
    "evaluation.every=20",
    "evaluation.prompts=4",
    "evaluation.images_per_prompt=1",
    "evaluation.grid_prompts=4",
    "evaluation.grid_images=1",
    "metrics.tensorboard=false",
)
STEPS = "SELECT COUNT(*) FROM optimizer_steps"
PLACE = "SELECT detail FROM incidents WHERE kind = 'learner_placed' ORDER BY id DESC LIMIT 1"


class Mode(StrEnum):
    """What happens to the learner's node."""

    UNDISTURBED = "undisturbed"
    NOTICED = "with notice"
    KILLED = "without notice"


@dataclass(slots=True)
class Outcome:
    """One run.

    Attributes:
        resumed_s: from each loss of the learner's node to the next new optimizer step.
        step_s: median seconds between two new steps.
        training_s: from the first step to the last.
        undone: ledger records done again.
        scores: SHA-256 of all scores; ``weights``: of the exported adapter.
    """

    seed: int
    mode: Mode
    violations: list[str]
    resumed_s: list[float] = field(default_factory=list)
    step_s: float = 0.0
    training_s: float = 0.0
    undone: int = 0
    lost_s: float = 0.0
    cost_usd: float = 0.0
    scores: str = ""
    weights: str = ""

    @property
    def waited_share(self) -> float:
        """Of the training time: what losses took beyond a usual step."""
        return sum(max(0.0, each - self.step_s) for each in self.resumed_s) / max(self.training_s, 1e-9)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    seeds: Annotated[int, typer.Option(help="Run seeds 0, 1, ...")] = 1,
    every: Annotated[float, typer.Option(min=1.0, help="The learner's node is taken so often, s.")] = 60.0,
    lead: Annotated[float, typer.Option(min=1.0, help="From a notice to the end, s.")] = 30.0,
    start: Annotated[float, typer.Option(help="What a start takes; then nodes join, s.")] = 30.0,
    limit: Annotated[float, typer.Option(help="A run that takes longer is ended, s.")] = 1800.0,
    runs_dir: Annotated[Path | None, typer.Option(help="For the runs; complete ones are kept.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Take the learner's node every minute, with and without notice, and compare."""
    outcomes: list[Outcome] = []
    with place_for_runs(runs_dir, "spotlight-spot-learner-") as place:
        for seed in range(seeds):
            for mode in Mode:
                run = LearnerHunt(place, seed, mode, every, lead, start, limit, overrides or [])
                outcomes.append(run.outcome())
                _show(outcomes)
                if json_file is not None:
                    json_file.parent.mkdir(parents=True, exist_ok=True)
                    json_file.write_text(
                        json.dumps([asdict(each) for each in outcomes], indent=2) + "\n", encoding="utf-8"
                    )
        if any(outcome.violations for outcome in outcomes):
            raise typer.Exit(1)


class LearnerHunt:
    """One run, and what takes its learner's node."""

    def __init__(
        self,
        place: Path,
        seed: int,
        mode: Mode,
        every_s: float,
        lead_s: float,
        start_s: float,
        limit_s: float,
        overrides: list[str],
    ) -> None:
        self.seed, self.mode, self.every_s, self.lead_s, self.limit_s = seed, mode, every_s, lead_s, limit_s
        self.run, self.start_s = place / f"{seed}-{mode.replace(' ', '-')}", start_s
        trace = self.run.with_suffix(".csv")
        self.arguments = [
            *SETTINGS, f"run_seed={seed}", f"name={self.run.name}", f"runs_dir={place}", *overrides,
            f"fleet.spot.trace={trace}", f"fleet.spot.notice_s={lead_s:g}",
        ]  # fmt: skip
        self.steps: list[float] = []
        self.losses: list[tuple[float, int]] = []

    def outcome(self) -> Outcome:
        """What came of the run, which is made if it was not before, with the same arguments."""
        file, arguments = self.run.with_suffix(".json"), [*self.arguments, f"every {self.every_s:g} s"]
        with suppress(OSError, ValueError):
            before = json.loads(file.read_text(encoding="utf-8"))
            if before["arguments"] == arguments:
                return Outcome(**before["outcome"] | {"mode": Mode(before["outcome"]["mode"])})
        made = self._made()
        if not made.violations:
            file.write_text(
                json.dumps({"arguments": arguments, "outcome": asdict(made)}, indent=2) + "\n",
                encoding="utf-8",
            )
        return made

    def _made(self) -> Outcome:
        """Start the run, take its learner's node, and read what came of it."""
        shutil.rmtree(self.run, ignore_errors=True)
        undisturbed = self.mode is Mode.UNDISTURBED
        more_s = () if undisturbed else range(int(self.start_s), int(self.limit_s), int(self.every_s))
        write_trace(joining(tuple(map(float, more_s)), self.limit_s), self.run.with_suffix(".csv"))
        log = self.run.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "spotlight.cli", "train", "--plain", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        owner = guard.owner_of(process.pid)
        try:
            self._watch(process, owner)
        finally:
            process.kill()
            process.wait()
            guard.end(f"{owner}.0/")
        if process.returncode != 0:
            return Outcome(self.seed, self.mode, [f"ended with {process.returncode}: see {log}"])
        return self._read()

    def _watch(self, process: subprocess.Popen[bytes], owner: str) -> None:
        end_s, due_s, doomed = time.monotonic() + self.limit_s, 0.0, None
        while process.poll() is None and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            now_s, made = time.monotonic(), int(str(self._ask(STEPS) or 0))
            self.steps += [now_s] * (made - len(self.steps))
            if not self.steps or self.mode is Mode.UNDISTURBED:
                continue
            due_s = due_s or now_s + self.every_s
            if doomed is not None and now_s >= doomed[1]:
                self._kill(owner, doomed[0])
                doomed = None
            if now_s < due_s:
                continue
            node = str(self._ask(PLACE)).partition(" ")[0].removeprefix("spot-")
            due_s = now_s + self.every_s
            if self.mode is Mode.KILLED:
                self._kill(owner, int(node))
            else:
                self._notice(owner, int(node))
                doomed = int(node), now_s + self.lead_s
            self.losses.append((now_s, len(self.steps)))

    def _ask(self, query: str) -> object:
        with (
            suppress(LedgerError, sqlite3.Error),
            closing(queries.open_readonly(RunPaths(self.run).ledger)) as connection,
        ):
            return next(iter(connection.execute(query).fetchone() or ()), None)
        return None

    def _kill(self, owner: str, node: int) -> None:
        guard.end(f"{owner}.0/{node}")

    def _notice(self, owner: str, node: int) -> None:
        members = guard.marked(f"{owner}.0/{node}")
        base = Path(tempfile.gettempdir()) / f"spotlight-{os.getuid()}" / f"{owner}.0"
        for file in base.glob("session_2*/spotlight_agent_*.pid"):
            if (pid := int(file.read_text(encoding="utf-8"))) in members:
                os.kill(pid, signal.SIGTERM)

    def _read(self) -> Outcome:
        report, record = audit(self.run, AuditLimits(group_size=GROUP)), read_run(self.run)
        with closing(queries.open_readonly(RunPaths(self.run).ledger)) as connection:
            rows = connection.execute("SELECT rollout, name, value FROM rewards ORDER BY rollout, name")
            scores = sha256("\n".join(map(repr, rows)).encode()).hexdigest()
        assert record.weights is not None, "a finished run has exported its weights"
        weights = sha256()
        for file in sorted(record.weights.glob("*.safetensors")):
            for name, tensor in sorted(load_file(file).items()):
                weights.update(f"{name} {tensor.tolist()}".encode())
        gaps = [after - before for before, after in zip(self.steps, self.steps[1:], strict=False)]
        resumed = [self.steps[made] - at_s for at_s, made in self.losses if made < len(self.steps)]
        return Outcome(
            self.seed,
            self.mode,
            [str(violation) for violation in report.violations],
            resumed,
            statistics.median(gaps),
            self.steps[-1] - self.steps[0],
            record.history.undone,
            record.history.lost_s,
            read_summary(RunPaths(self.run).summary).cost_usd,
            scores,
            weights.hexdigest(),
        )


def joining(more_s: tuple[float, ...], horizon_s: float) -> Trace:
    """Spot nodes that join: some at once, and one at each of these times."""
    times = [*(0.1 * number for number in range(NODES)), *more_s]
    events = tuple(
        TraceEvent(at_s, TraceEventKind.ADD, f"spot-{number}", 1)
        for number, at_s in enumerate(times, start=1)
    )
    return Trace(events, horizon_s, "benchmarks.spot_learner")


def _seconds(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """From the losses to the next new step: median and largest."""
    resumed_s = [seconds for each in outcomes for seconds in each.resumed_s]
    return (f"{statistics.median(resumed_s):.1f} s", f"{max(resumed_s):.1f} s") if resumed_s else ("", "")


def _show(outcomes: list[Outcome]) -> None:
    table = Table(title="A learner on spot nodes, whose node is taken")
    for title in ("seed", "learner's node", "losses", "next step, median", "largest", "step", "share",
                  "done again", "lost", "cost", "scores", "weights", "audit"):  # fmt: skip
        table.add_column(title, justify="right")
    for each in outcomes:
        base = next(one for one in outcomes if one.seed == each.seed and one.mode is Mode.UNDISTURBED)
        table.add_row(
            str(each.seed), each.mode, str(len(each.resumed_s)), *_seconds([each]), f"{each.step_s:.1f} s",
            f"{each.waited_share:.0%}", str(each.undone), f"{each.lost_s:.0f} s", f"${each.cost_usd:.4f}",
            "same" if each.scores == base.scores else "differ",
            "same" if each.weights == base.weights else "differ",
            "clean" if not each.violations else f"{len(each.violations)} violations",
        )  # fmt: skip
    for mode in Mode:
        alike = [each for each in outcomes if each.mode is mode and not each.violations]
        if len(alike) > 1:
            losses, usual_s = sum(len(each.resumed_s) for each in alike), [each.step_s for each in alike]
            share = sum(each.waited_share * each.training_s for each in alike)
            table.add_row(
                "all", mode, str(losses), *_seconds(alike), f"{statistics.median(usual_s):.1f} s",
                f"{share / sum(each.training_s for each in alike):.0%}",
            )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
