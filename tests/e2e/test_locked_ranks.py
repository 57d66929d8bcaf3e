"""Ranks go on after a program that held the ledger's lock for longer than a collective may take."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from main_job import NFT, PROCESS_DEADLINE_S, Job, RecordedRun, clean_audit, free_port
from test_ranks import FOUR, RANKS
from torch.distributed.distributed_c10d import _set_pg_timeout

from spotlight.config.load import load_config
from spotlight.runtime import run as inline_run
from spotlight.store.ledger import ledger_file

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""
COLLECTIVE_S, HELD_S = 4, 9
_processes = multiprocessing.get_context("forkserver")


class Locking(RecordedRun):
    """Another process locks the ledger from the start, and after iteration 2; rank 0 is the one that waits.

    Collectives have a short limit as long as the lock is held.
    """

    def __init__(self, ledger: Path, rank: int) -> None:
        super().__init__()
        self.ledger, self.rank = ledger, rank
        if rank == 0:
            self.lock()

    def lock(self) -> None:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(self.ledger), "BEGIN IMMEDIATE"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        self.release = holder.stdin.close

    def note(self, text: str) -> None:
        super().note(text)
        if "is locked by another program" in text:
            threading.Timer(HELD_S, self.release).start()

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        super().iterated(iteration, row)
        limit_collectives(COLLECTIVE_S if iteration == 2 else 300)
        if iteration == 2 and self.rank == 0:
            self.lock()


def limit_collectives(seconds: float) -> None:
    _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def work(rank: int, port: int, arguments: list[str], pipe: object) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ledger_file._LOOK_S = 0.1
    gather = inline_run._gather

    def gathered(*given: object) -> object:
        made = gather(*given)  # type: ignore[arg-type]
        limit_collectives(COLLECTIVE_S)  # from here on rank 0 opens the ledger
        return made

    inline_run._gather = gathered  # type: ignore[assignment]
    config = load_config(None, arguments)
    observer = Locking(config.runs_dir / config.name / "ledger.sqlite", rank)
    try:
        ended = str(inline_run.train(config, observer).error)
    except Exception as error:  # noqa: BLE001 - the test must know of it
        ended = f"{type(error).__name__}: {error}"
    pipe.send((ended, observer.notes, observer.iterations))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_ranks_wait_for_a_locked_ledger_longer_than_a_collective_may_take(job: Job) -> None:
    name, overrides = "locked-ranks", (*NFT, *RANKS, "checkpoint.every=1")
    job.train(name, *overrides, "iterations=1")
    arguments, ledger = job.arguments(name, *overrides, "iterations=4"), job.root / name / "ledger.sqlite"
    port, pipes, ranks = free_port(), [], []
    for rank in range(2):
        ours, theirs = _processes.Pipe()
        ranks.append(_processes.Process(target=work, args=(rank, port, arguments, theirs), daemon=True))
        ranks[-1].start()
        pipes.append(ours)
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(PROCESS_DEADLINE_S), "a rank waits for the other without end"
            ended, notes, iterations = pipe.recv()
            assert (ended, iterations) == ("None", [1, 2, 3])
            locked = [text for text in notes if "ledger.sqlite is" in text]
            assert ["is locked" in each for each in locked] == ([True, False] * 2 if rank == 0 else [])
    finally:
        for each in ranks:
            each.kill()
    clean_audit(ledger.parent, FOUR)
