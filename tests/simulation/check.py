"""Deterministic simulation testing: the production controller under thousands of faulty runs.

A seed fixes everything: configuration, faults and their times, noise. A trial has a fault phase, in which
every invariant is checked after every event, and then a liveness phase without faults, in which the run must
come to its end. The seeds together also fail when some branch of recovery was never taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from rich.console import Console
from rich.progress import track

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.types import Filler, Node
from spotlight_plan.simulation.scenario import NodeEvent
from spotlight_plan.simulation.virtual_workers import Receipt
from tests.simulation.faults import FaultInjector, FaultKind
from tests.simulation.faulty_simulation import FaultySimulation
from tests.simulation.reference_model import ReferenceModel
from tests.simulation.swarm import Trial, draw_trial

LIVENESS_S = 3000.0
"""After the last fault has healed, a run must end within this time (a trial takes some hundred seconds)."""
EVENTS_MAX = 30_000
SHRINK_RUNS = 60
OVERLAPS = (
    *(f"pipeline/{filler}_s" for filler in Filler),
    "pipeline/overlapped_samples",
    "pipeline/early_samples",
    "choice/not_chosen",
    "choice/silent",
)
"""What an iteration's pipeline and choice report, counted by iterations in which there was some."""
PROGRAM = "python -m tests.simulation.check"
EXAMPLES = f"""\
Run it from the root of a checkout (`make env` installs what it needs).

examples:
  {PROGRAM}                             seeds 0 to 299, and how often each recovery was taken
  {PROGRAM} --seeds 10000 --jobs 8      more of them, each twice, in 8 processes
  {PROGRAM} --first 10000 --seeds 5000  others
  {PROGRAM} --mutations                 plant bugs, one at a time: each must be found
  {PROGRAM} --replay 17                 one seed again, with its plan and its faults

A failing seed is shrunk and printed as a --replay line. The exit status is 0 if nothing failed.
"""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial went.

    Attributes:
        failure: what was violated, with where; None if nothing was.
        branches: how often each recovery was taken and each fault happened.
        kind: of the failure: what was raised, and by which line.
    """

    failure: str | None
    log_hash: str
    branches: Counter[str]
    events: int
    gpu_hours: float
    kind: str | None = None


class CheckedSimulation(FaultySimulation):
    """A simulation with faults, compared with a reference model after every event."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.scenario)
        self.log = hashlib.blake2b(digest_size=16)
        self.workers.poll_s = trial.poll_s
        self.injector = FaultInjector(self, trial.faults)
        self.reference = ReferenceModel(self)
        self.branches: Counter[str] = Counter()

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        """Check, then inject the faults that are due."""
        self.log.update(f"{self.now:.6f} {event}\n".encode())
        self.reference.check(event, effects, receipt)
        choices = (effect.row() for effect in effects if isinstance(effect, ef.ReportChoice))
        self.branches.update(name for row in choices for name, amount in row.items() if amount)
        self.injector.advance()

    def apply(self, event: NodeEvent) -> None:
        """See :class:`Simulation`; the reference model computes its own bill."""
        self.reference.bill.apply(event, self.now)
        super().apply(event)

    def reboot(self, node: Node) -> None:
        """See :class:`FaultySimulation`."""
        # `apply` bills the node again, if it was there.
        self.reference.bill.apply(ev.NodeLost(node.id), self.now)
        super().reboot(node)

    def restart_head(self, down_s: float) -> None:
        """See :class:`FaultySimulation`; recoveries counted by the old controller are kept."""
        self.branches.update(self.controller.cluster.recoveries)
        super().restart_head(down_s)
        durable = self.learner.checkpoint
        self.reference.head_restarted(durable.effect.position if durable else 0)

    def run(self) -> None:
        """Fault phase, then liveness phase; raises AssertionError for whatever is violated."""
        self.begin()
        while self.step():
            late_s = self.now - self.injector.last_s
            if not self.injector.pending and late_s > LIVENESS_S:
                raise AssertionError(f"no end {late_s:.0f} s after the last fault: {self.controller.stage}")
            if self.events > EVENTS_MAX:
                raise AssertionError(f"no end after {self.events} events: {self.controller.stage}")
        if self.finish is None:
            raise AssertionError(f"nothing is left to happen, and the run is {self.controller.stage}")
        self.reference.check_end()


def run_trial(trial: Trial) -> TrialOutcome:
    """Run a trial to its end or to its first violation."""
    failure, kind, simulation = None, None, None
    try:
        simulation = CheckedSimulation(trial)
        simulation.run()
    except Exception as error:  # noqa: BLE001 - whatever a planted or real bug raises is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f"({place.name}, line {place.lineno})"
        failure, kind = f"{type(error).__name__}: {error} {at}", f"{type(error).__name__} {at}"
    if simulation is None:
        return TrialOutcome(failure, "", Counter(), 0, 0.0, kind)
    branches = Counter(simulation.branches)
    branches.update(simulation.controller.cluster.recoveries)
    branches.update(simulation.injector.injected)
    for overlap in simulation.overlaps:
        branches.update(name for name, amount in overlap.row().items() if amount)
    hours = sum(simulation.accounts.seconds.values()) / 3600
    return TrialOutcome(failure, simulation.log.hexdigest(), branches, simulation.events, hours, kind)


def run_seed(seed: int, *, twice: bool) -> TrialOutcome:
    """Run a seed's trial; ``twice``: and again, which must give the same event log."""
    trial = draw_trial(seed)
    outcome = run_trial(trial)
    if outcome.failure is None and twice and run_trial(trial).log_hash != outcome.log_hash:
        return dataclasses.replace(outcome, failure="two runs of the seed differ in their event logs")
    return outcome


def shrink(trial: Trial) -> Trial:
    """A smaller trial that fails in the same way, as far as a bounded number of runs finds one."""
    kind = run_trial(trial).kind
    if kind is None:  # only two runs together show what is wrong: that they differ
        return trial
    runs = SHRINK_RUNS
    size = max(1, len(trial.faults) // 2)
    while size and runs:
        for start in range(0, len(trial.faults), size):
            fewer = dataclasses.replace(trial, faults=trial.faults[:start] + trial.faults[start + size :])
            runs -= 1
            if len(fewer.faults) < len(trial.faults) and run_trial(fewer).kind == kind:
                trial = fewer
                break
            if not runs:
                break
        else:
            size //= 2
    for iterations in range(1, trial.scenario.plan.iterations):
        shorter = with_iterations(trial, iterations)
        if run_trial(shorter).kind == kind:
            return shorter
    return trial


def with_iterations(trial: Trial, iterations: int) -> Trial:
    """The same trial with fewer iterations."""
    plan = dataclasses.replace(trial.scenario.plan, iterations=iterations)
    return dataclasses.replace(trial, scenario=dataclasses.replace(trial.scenario, plan=plan))


def replay_command(trial: Trial) -> str:
    """One line that runs a (shrunk) trial again."""
    whole = draw_trial(trial.seed)
    kept = [str(n) for n, fault in enumerate(whole.faults) if fault in trial.faults]
    command = f"{PROGRAM} --replay {trial.seed}"
    if len(kept) < len(whole.faults):
        command += f" --faults {','.join(kept) or 'none'}"
    if trial.scenario.plan.iterations < whole.scenario.plan.iterations:
        command += f" --iterations {trial.scenario.plan.iterations}"
    return command


def missing_branches(branches: Counter[str]) -> list[str]:
    """Recoveries never taken, faults that never happened, and parts of the pipeline that did nothing."""
    return [str(name) for name in (*Recovery, *FaultKind, *OVERLAPS) if not branches[name]]


def check_seeds(first: int, count: int, *, twice: bool, jobs: int = 1) -> int:
    """Run seeds; print failures, coverage and figures. Returns the number of failures."""
    started_s, failures = time.monotonic(), 0
    branches: Counter[str] = Counter()
    events, gpu_hours, logs = 0, 0.0, hashlib.sha256()
    seeds = range(first, first + count)
    console = Console(stderr=True)
    outcomes = _outcomes(seeds, twice=twice, jobs=jobs)
    bar = track(
        outcomes, "seeds", total=count, console=console, transient=True, disable=not console.is_terminal
    )
    for seed, outcome in zip(seeds, bar, strict=True):
        branches.update(outcome.branches)
        events, gpu_hours = events + outcome.events, gpu_hours + outcome.gpu_hours
        logs.update(outcome.log_hash.encode())
        if outcome.failure is not None:
            failures += 1
            print(f"seed {seed}: {outcome.failure}")
            print(f"  {replay_command(shrink(draw_trial(seed)))}", flush=True)
    seconds = time.monotonic() - started_s
    runs = f"{count} seeds{', each twice' if twice else ''}"
    print(f"{runs}, {failures} failed; {events} events, {gpu_hours:.0f} GPU-hours, {seconds:.0f} s")
    print(f"hash of all event logs: {logs.hexdigest()[:16]}")
    for name in (*FaultKind, *Recovery, *OVERLAPS):
        print(f"  {name:28} {branches[name]}")
    if missing := missing_branches(branches):
        print(f"never taken: {', '.join(missing)}")
        failures += 1
    return failures


def _outcomes(seeds: Sequence[int], *, twice: bool, jobs: int) -> Iterator[TrialOutcome]:
    """In the order of the seeds, however many processes run them."""
    run = functools.partial(run_seed, twice=twice)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, seeds, chunksize=8)


def replay(seed: int, faults: str | None, iterations: int | None) -> int:
    """Run one trial again, whole or shrunk, and print what happens in it. Returns the exit status."""
    trial = draw_trial(seed)
    if faults is not None:
        kept = {int(n) for n in faults.split(",")} if faults != "none" else set()
        trial = dataclasses.replace(
            trial, faults=tuple(fault for n, fault in enumerate(trial.faults) if n in kept)
        )
    if iterations is not None:
        trial = with_iterations(trial, iterations)
    print(trial.scenario.plan)
    for fault in trial.faults:
        print(fault)
    outcome = run_trial(trial)
    print(f"{outcome.failure or 'nothing was violated'}; {outcome.events} events, log {outcome.log_hash}")
    return int(outcome.failure is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument(
        "--twice",
        action=argparse.BooleanOptionalAction,
        help="run each seed twice and compare the event logs (default: from 1,000 seeds on)",
    )
    parser.add_argument("--jobs", type=int, default=1, help=f"processes (1; this machine: {os.cpu_count()})")
    parser.add_argument("--mutations", action="store_true", help="plant bugs, and find them")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed again")
    parser.add_argument("--faults", help="with --replay: only these of its faults, as 0,3 or none")
    parser.add_argument("--iterations", type=int, help="with --replay: only so many iterations")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        return replay(given.replay, given.faults, given.iterations)
    if given.mutations:
        from tests.simulation.mutations import report_mutations  # imports this module

        return int(report_mutations(given.seeds) > 0)
    twice = given.seeds >= 1000 if given.twice is None else given.twice
    return int(check_seeds(given.first, given.seeds, twice=twice, jobs=given.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
