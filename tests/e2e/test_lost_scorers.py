"""Reward processes are killed while they score, here and with their nodes: every sample is scored still.

What is lost is scored again elsewhere, and counts once in the ledger.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from main_job import NFT, Job, clean_audit
from ray_job import PATIENCE_S, running

from spotlight.scheduler.types import NodeKind
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError
from spotlight_fleet.emulated.local_cluster import local_cluster

SLOW = "rewards=[{{name: 'reward_functions:unhurried', retries: 3, batch_size: 2, replicas: 2, device: {0}}}]"
LIMITS = AuditLimits(group_size=4)
SMALL = ("iterations=2", "rollout.group_size=4", "evaluation.every=1", "evaluation.prompts=2")
EVERY_SAMPLE = 2 * 2 * 4
RUNS = re.compile(r"process \d runs on spot-(\d)")
SCORED_TWICE = "SELECT rollout FROM rewards GROUP BY rollout, name HAVING COUNT(*) > 1"


def killer(run: Path, over: threading.Event, killed: list[int]) -> None:
    """SIGKILL to a reward process of this process, after every few scores."""
    scored = 0
    while not over.wait(0.05):
        if (now := scores_of(run)) <= scored:
            continue
        oldest = min(psutil.Process().children(), key=born, default=None)  # the others may be loading
        if oldest is not None and born(oldest) < math.inf:
            oldest.kill()
            killed.append(oldest.pid)
            scored = now


def born(child: psutil.Process) -> float:
    """When a reward process began; infinity for another process, and for one that has just been killed."""
    with suppress(psutil.Error):
        if "reward_worker" in " ".join(child.cmdline()):
            return child.create_time()
    return math.inf


def scores_of(run: Path) -> int:
    """How many samples of a run are scored so far."""
    with (
        suppress(LedgerError, sqlite3.OperationalError),
        closing(queries.open_readonly(RunPaths(run).ledger)) as connection,
    ):
        (count,) = connection.execute("SELECT COUNT(*) FROM rewards").fetchone()
        return int(count)
    return 0


@pytest.mark.slow  # what the pool does is in test_rewards_failures.py; a run sees a score or a failure
def test_killed_processes_cost_no_sample(job: Job) -> None:
    over, killed = threading.Event(), list[int]()
    thread = threading.Thread(target=killer, args=(job.root / "killed-scorers", over, killed))
    thread.start()
    try:
        recorded = job.train("killed-scorers", *NFT, *SMALL, SLOW.format("cpu"))
    finally:
        over.set()
        thread.join()
    assert recorded.result is not None
    assert recorded.result.finished
    assert len(killed) >= 2
    report = clean_audit(job.root / "killed-scorers", LIMITS)
    assert report.counts.trained == EVERY_SAMPLE
    assert not report.counts.dropped


TRACE = """# spotlight trace horizon_s=60.0
time_s,event,node,gpus
0.0,add,spot-1,1
0.1,add,spot-2,1
"""


@pytest.mark.slow
def test_nodes_that_vanish_with_their_scorers_cost_no_sample(job: Job) -> None:
    trace: Path = job.root / "scorers.csv"
    trace.write_text(TRACE, encoding="utf-8")
    ray = (
        "fleet.driver=ray",
        "fleet.drain_margin_s=1000",
        f"fleet.spot.trace={trace}",
        "fleet.spot.notice_s=null",
    )
    with running(
        job.root / "lost-scorers",
        job.arguments("lost-scorers", *NFT, *SMALL, *ray, "iterations=3", SLOW.format("spot")),
    ) as it:
        end_s = time.monotonic() + PATIENCE_S
        while (runs := RUNS.search(it.printed)) is None:
            assert time.monotonic() < end_s, it.printed
            time.sleep(0.1)
        it.kill(int(runs[1]))
        assert it.end() == 0, it.printed
        assert "is gone" in it.printed, it.printed
        assert it.ask(SCORED_TWICE) == []
        left = it.left
    report = clean_audit(it.run, LIMITS)
    assert report.counts.trained == 3 * 2 * 4
    assert not report.counts.dropped
    assert not left


@pytest.mark.slow
def test_scorers_on_the_learner_s_device_come_back_with_it(job: Job) -> None:
    name, beside = "learner-scorers", re.compile(r"process 0 runs on ([\w-]+)")
    slow = "rewards=[{name: 'reward_functions:unhurried', batch_size: 2, device: learner}]"
    with local_cluster(1) as cluster:
        cluster.add_node("first", NodeKind.RESERVED, 1)  # of equals, ranks take the first by name
        ray = ("fleet.driver=ray", f"fleet.address={cluster.address}", "fleet.notices.cloud=none")
        arguments = job.arguments(name, *NFT, *SMALL, *ray, "iterations=3", slow)
        with running(job.root / name, arguments) as it:
            it.wait_for("SELECT * FROM rewards", 4)
            cluster.kill("first")
            cluster.add_node("second", NodeKind.RESERVED, 1)
            assert it.end() == 0, it.printed
            assert list(dict.fromkeys(beside.findall(it.printed))) == ["first", "second"], it.printed
            assert it.ask(SCORED_TWICE) == []
    report = clean_audit(it.run, LIMITS)
    assert report.counts.trained == 3 * 2 * 4
    assert not report.counts.dropped
