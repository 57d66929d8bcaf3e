"""A local Ray's nodes, without a Ray: what fails to start is reported as ours, and leaves nothing behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotlight.cluster.local.emulation import require_learner_room
from spotlight.config.load import load_config
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.emulated import guard, guarded
from spotlight_fleet.emulated import local_cluster as local
from spotlight_fleet.emulated.local_cluster import LocalCluster, LocalClusterError, LocalNode
from spotlight_rewards.base.errors import ConfigError


@pytest.mark.parametrize("error", [Exception, RuntimeError, SystemExit, OSError])
def test_a_node_that_does_not_start_is_reported_as_ours_and_its_name_is_free(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error("The current node timed out during startup.")  # Ray's own words

    head: Any = SimpleNamespace(gcs_address="127.0.0.1:1", session=tmp_path)
    first = LocalNode("reserved-0", NodeKind.RESERVED, 1, "ray-0")
    cluster = LocalCluster("0.0.0", tmp_path, first, head)
    monkeypatch.setattr(local, "start_node", fails)
    for _ in range(2):
        with pytest.raises(LocalClusterError, match=r"'spot-0' did not start: .*timed out during startup"):
            cluster.add_node("spot-0", NodeKind.SPOT, 1)
    assert cluster.nodes() == [first]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_killed_or_stopped_is_replaced_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def start(cluster: str, directory: Path) -> subprocess.Popen[bytes]:
        started.put(process := real_start(cluster, directory))
        return process

    real_start = guarded._start
    monkeypatch.setattr(guarded, "_start", start)
    with guarded.guarded(f"{guard.owner_of(os.getpid())}.0", tmp_path):
        first = started.get()
        first.send_signal(number)
        second = started.get(timeout=60)
        assert first.poll() == -signal.SIGKILL
        assert second.poll() is None
    assert second.poll() == 0
    assert started.empty()


def test_guards_that_end_at_once_are_replaced_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.put(timeout)
            return self.is_set()

    (ends := tmp_path / "ends.py").touch()
    monkeypatch.setattr(guard, "__file__", str(ends))
    monkeypatch.setattr(guarded, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(guarded, "threading", SimpleNamespace(Event=Waits, Thread=threading.Thread))
    with guarded.guarded("1.1.0", tmp_path):
        assert [waits.get(timeout=60) for _ in range(2)] == [guarded._RETRY_S] * 2


SPOT_LEARNER = ("fleet.driver=ray", "fleet.learner_placement=spot", "device=cpu", "rollout.group_size=4")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["fleet.learner_ranks=3", "fleet.spot.slots=2"], r"equally many on each.*or learner\.shard=all"),
        (["fleet.learner_ranks=3", "fleet.spot.slots=2", "learner.shard=all"], None),
        (["fleet.learner_ranks=2", "fleet.spot.trace=minute"], "and one more that rolls out"),
        (["fleet.learner_ranks=2", "fleet.spot.trace=minute", "fleet.local.rollout_slots=1"], None),
        (["fleet.spot.trace=minute"], None),
    ],
)
def test_a_learner_for_which_there_is_never_room_among_spot_nodes_is_refused(
    overrides: list[str], error: str | None
) -> None:
    config = load_config(None, [*SPOT_LEARNER, "learner.micro_batch_size=1", *overrides])
    if error is None:
        require_learner_room(config)
    else:
        with pytest.raises(ConfigError, match=f"(?s){error}"):
            require_learner_room(config)
