"""Finds the processes of one run on a local cluster, and kills or stops them.

They are known by a mark that the run's command is started with in its environment, and that all it starts
inherits; which node a process is on, by the mark of ``spotlight_fleet.emulated.guard``. A process is its
number and its start time: numbers are used again, and nothing is signalled that was not looked at. Linux.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from spotlight_fleet.emulated import guard

MARK = "SPOTLIGHT_SOAK"
_PROC = Path("/proc")
_SETTLE_S = 0.02
_RANK = re.compile(r"learner rank in process (\d+) ")


class TargetKind(StrEnum):
    """What is killed or stopped."""

    WORKER = "worker"
    REWARD = "reward process"
    AGENT = "node agent"
    NODE = "spot node"
    LEARNER = "learner rank"
    HEAD = "head"
    HEAD_NODE = "head's node"


@dataclass(frozen=True, slots=True)
class Process:
    """A living process of the run.

    Attributes:
        born: its start time, in clock ticks since the machine's.
        title: its command line; Ray's processes say there what they are.
        node: of the cluster, 0 being the reserved one; None: the head's own process and its children.
    """

    pid: int
    born: str
    title: str
    node: int | None

    @property
    def kind(self) -> TargetKind | None:
        """What kills of it alone are counted as; None: it is not killed alone."""
        for start, kind in _TITLES.items():
            if self.title.startswith(start):
                return kind
        return TargetKind.REWARD if "spotlight_rewards.pool.reward_worker" in self.title else None

    @property
    def is_raylet(self) -> bool:
        """Whether it is the process that makes a node one."""
        return self.title.partition(" ")[0].endswith("/raylet")

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. False: it is no more."""
        fields = _stat(self.pid)
        if not fields or fields[19] != self.born or fields[0] == "Z":
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


_TITLES = {
    "ray::WorkerActor": TargetKind.WORKER,
    "ray::LearnerRank": TargetKind.LEARNER,
    "ray::NodeAgent": TargetKind.AGENT,
}


def processes_of(mark: str) -> list[Process]:
    """Everything alive that was started with :data:`MARK` set to ``mark``, or by such a process."""
    wanted, node_mark = f"{MARK}={mark}".encode(), f"{guard.MARK}=".encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            fields = _stat(int(entry.name))
            if wanted not in environment or not fields or fields[0] == "Z":
                continue
            node = next((item for item in environment if item.startswith(node_mark)), None)
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            number = None if node is None else int(node.rpartition(b"/")[2])
            found.append(Process(int(entry.name), fields[19], title, number))
    return found


def learner_processes(logs: Path) -> set[int]:
    """Numbers of the processes that are or were learner ranks, by their logs."""
    found = (
        _RANK.match(log.read_text(encoding="utf-8", errors="replace")) for log in logs.glob("learner-*.log")
    )
    return {int(match[1]) for match in found if match is not None}


def end(find: Callable[[], Sequence[Process]], timeout_s: float = 10.0) -> list[Process]:
    """SIGKILL all that ``find`` finds, again and again until it finds nothing. Returns what is left.

    All are stopped before any is killed, as when a machine is gone: none sees another die.
    """
    deadline_s = time.monotonic() + timeout_s
    while rest := find():
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in rest:
                process.send(number)
        if time.monotonic() > deadline_s:
            return list(find())
        time.sleep(_SETTLE_S)
    return []


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Something done to the run.

    Attributes:
        at_s: since the soak began.
        stopped_s: how long it was stopped; None: it was killed.
        by: who did it: ``injector``, or the ``trace`` that the spot nodes follow.
    """

    at_s: float
    kind: TargetKind
    what: str
    stopped_s: float | None = None
    by: str = "injector"


KILLS = {
    TargetKind.WORKER: 42.0, TargetKind.REWARD: 18.0, TargetKind.AGENT: 12.0, TargetKind.NODE: 8.0,
    TargetKind.LEARNER: 10.0, TargetKind.HEAD: 5.0, TargetKind.HEAD_NODE: 5.0,
}  # fmt: skip
"""How often each is killed, relative to the others."""
STOPS = {
    TargetKind.WORKER: 40.0, TargetKind.REWARD: 14.0, TargetKind.AGENT: 10.0, TargetKind.NODE: 14.0,
    TargetKind.LEARNER: 14.0, TargetKind.HEAD: 8.0,
}  # fmt: skip
SHORT_S = (0.5, 5.0)
"""A stop that nobody should mind."""
LONG_S = {
    TargetKind.WORKER: (8.0, 25.0), TargetKind.REWARD: (10.0, 25.0), TargetKind.AGENT: (20.0, 40.0),
    TargetKind.NODE: (10.0, 30.0), TargetKind.LEARNER: (10.0, 70.0), TargetKind.HEAD: (5.0, 15.0),
}  # fmt: skip
"""A stop beyond heartbeats, leases, answers, and what Ray waits for a silent node."""
DISRUPTIVE = frozenset({TargetKind.LEARNER, TargetKind.HEAD, TargetKind.HEAD_NODE})
"""After which the run goes back to its last checkpoint."""
STOP_SHARE = 0.25
LONG_SHARE = 0.6
DOUBLE_SHARE = 0.15
"""How often a disruptive fault does not wait for the run to have recovered from the one before."""


@dataclass(slots=True)
class ProcessFaultInjector:
    """Does things to one run; draws from ``seed`` what and to whom, as far as the run lets it foresee.

    Attributes:
        logs: of the learner's ranks, which name their processes: some were workers before.
        faults: all so far, the trace's among them.
    """

    mark: str
    seed: int
    began_s: float
    logs: Path
    faults: list[InjectedFault] = field(default_factory=list)
    _draw: random.Random = field(init=False)
    _asleep: list[tuple[float, Sequence[Process]]] = field(default_factory=list)
    _nodes: set[int | None] = field(default_factory=set)
    _touched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.seed}/injector")

    @property
    def kills(self) -> int:
        """Kills so far, the trace's included."""
        return sum(fault.stopped_s is None for fault in self.faults)

    def act(self, head: int, recovered: bool) -> TargetKind | None:
        """Kill or stop something. Returns the kind if that was a kill.

        Args:
            head: process id of the head.
            recovered: whether the run made progress since the last disruptive fault.
        """
        stops = self._draw.random() < STOP_SHARE
        victims = self._victims(head)
        spared = frozenset() if recovered or self._draw.random() < DOUBLE_SHARE else DISRUPTIVE
        weights = {
            kind: weight
            for kind, weight in (STOPS if stops else KILLS).items()
            if victims.get(kind) and kind not in spared
        }
        if not weights:
            return None
        (kind,) = self._draw.choices(list(weights), list(weights.values()))
        victim = self._draw.choice(victims[kind])
        if stops:
            long = self._draw.random() < LONG_SHARE
            self._stop(kind, victim, self._draw.uniform(*(LONG_S[kind] if long else SHORT_S)))
            return None
        return kind if self._kill(kind, victim) else None

    def watch(self) -> None:
        """Wake whose time it is, and see which nodes the trace has taken."""
        now_s = time.monotonic()
        for item in [item for item in self._asleep if item[0] <= now_s]:
            self._asleep.remove(item)
            _send_all(item[1], signal.SIGCONT)
        everything = processes_of(self.mark)
        raylets = {process.node for process in everything if process.is_raylet}
        for number in self._nodes - raylets:
            # One that was stopped may have been given up by Ray instead: that is no kill.
            if number not in self._touched:
                self._note(TargetKind.NODE, f"node {number}", by="trace")
        # Without an agent a node is still coming up, and may fail to.
        usable = {process.node for process in everything if process.kind is TargetKind.AGENT and process.node}
        self._nodes = (self._nodes | usable) & raylets

    def wake_all(self) -> None:
        """Nothing is stopped any more."""
        for _, processes in self._asleep:
            _send_all(processes, signal.SIGCONT)
        self._asleep.clear()

    def head_is_gone(self) -> None:
        """Its nodes go with it and are not counted. What is stopped wakes: it could not end by itself."""
        self._nodes.clear()
        self._touched.clear()
        self.wake_all()

    def _victims(self, head: int) -> dict[TargetKind, list[list[Process]]]:
        """Whom one fault would hit, by kind."""
        found: dict[TargetKind, list[list[Process]]] = {}
        nodes: dict[int, list[Process]] = {}
        everything, ranks = processes_of(self.mark), learner_processes(self.logs)
        for process in everything:
            kind = TargetKind.LEARNER if process.pid in ranks else process.kind
            if kind is not None:
                found.setdefault(kind, []).append([process])
            if process.node:
                nodes.setdefault(process.node, []).append(process)
        there = [members for members in nodes.values() if any(member.is_raylet for member in members)]
        if not any(process.is_raylet for process in everything):
            # A head tries its rewards before anything else, and does not start where one fails: no promise.
            found.pop(TargetKind.REWARD, None)
        own = [process for process in everything if process.pid == head]
        return found | {
            TargetKind.NODE: there,
            TargetKind.HEAD: [own] if own else [],
            TargetKind.HEAD_NODE: [everything],
        }

    def _kill(self, kind: TargetKind, victim: Sequence[Process]) -> bool:
        """False: it had died meanwhile."""
        match kind:
            case TargetKind.NODE:
                number = victim[0].node
                assert number is not None
                self._touched.add(number)
                self._note(kind, f"node {number}, {len(victim)} processes")
                end(lambda: [p for p in processes_of(self.mark) if p.node == number])
            case TargetKind.HEAD_NODE:
                self._note(kind, f"{len(victim)} processes")
                end(lambda: processes_of(self.mark))
            case _:
                (process,) = victim
                if not process.send(signal.SIGKILL):
                    return False
                self._note(kind, _where(process))
        return True

    def _stop(self, kind: TargetKind, victim: Sequence[Process], seconds: float) -> None:
        if kind is TargetKind.NODE and victim[0].node is not None:
            self._touched.add(victim[0].node)
        _send_all(victim, signal.SIGSTOP)
        self._asleep.append((time.monotonic() + seconds, victim))
        self._note(kind, _where(victim[0]), stopped_s=round(seconds, 2))

    def _note(
        self, kind: TargetKind, what: str, stopped_s: float | None = None, by: str = "injector"
    ) -> None:
        fault = InjectedFault(round(time.monotonic() - self.began_s, 2), kind, what, stopped_s, by)
        self.faults.append(fault)
        done = "killed" if stopped_s is None else f"stopped for {stopped_s:.1f} s:"
        print(f"{fault.at_s:7.1f} s  {by} {done} {kind.value} ({what})", flush=True)


def _send_all(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        process.send(number)


def _where(process: Process) -> str:
    place = "" if process.node is None else f" on node {process.node}"
    return f"process {process.pid}{place}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: 0 state, 19 start time; empty: no such process."""
    try:
        return (
            (_PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return []


def tally(faults: Sequence[InjectedFault]) -> Iterator[tuple[str, int, int, int]]:
    """Of each kind: its name, kills by the injector, kills by the trace, stops."""
    for kind in TargetKind:
        own = [fault for fault in faults if fault.kind is kind]
        killed = [fault.by for fault in own if fault.stopped_s is None]
        yield kind.value, killed.count("injector"), killed.count("trace"), len(own) - len(killed)
