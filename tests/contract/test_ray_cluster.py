"""A real Ray on this machine: nodes that come, get notices and are killed; what of Ray we rely on.

One cluster serves the whole file. Figures are printed: `pytest -s`.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray._private import worker as ray_worker
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import GcsClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from recording_listener import RecordingListener

from spotlight.cluster.nodes import drain
from spotlight.cluster.nodes.agent import log_tail
from spotlight.cluster.nodes.drain import drain_node, draining_nodes
from spotlight.cluster.nodes.listing import LearnerSlots, RayNode, read_view, require_usable
from spotlight.cluster.nodes.node_membership import MembershipSettings, NodeMembership
from spotlight.cluster.scorers.remote_scorer import RemoteScorer, ScorerNodes
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.connection import connected
from spotlight_fleet.emulated import guard
from spotlight_fleet.emulated import local_cluster as local
from spotlight_fleet.emulated.local_cluster import LocalCluster, LocalClusterError, local_cluster
from spotlight_fleet.emulated.market import LocalMachines, Market
from spotlight_fleet.emulated.market_record import Fate
from spotlight_fleet.emulated.node_processes import NodeProcesses, NodeRequest
from spotlight_fleet.facts import gather
from spotlight_fleet.notices.notice_watch import NoticeSettings
from spotlight_fleet.traces.trace import TraceEvent, TraceEventKind
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.pool.channel import Sample, Score, encode
from spotlight_rewards.pool.reward_process import ProcessLost
from spotlight_rewards.reward_config import RewardConfig

GRACE_S = 600.0
"""How long the first node took from the wish to have it: machines differ, and are busy."""
SETTINGS = MembershipSettings(NoticeSettings("none", None, GRACE_S), period_s=0.3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(1) as cluster, connected(cluster.address):
        yield cluster


@pytest.fixture(scope="module")
def listener() -> RecordingListener:
    return RecordingListener()


@pytest.fixture(scope="module", autouse=True)
def membership(cluster: LocalCluster, listener: RecordingListener) -> Iterator[NodeMembership]:
    with NodeMembership(listener, gather(), SETTINGS) as membership:
        listener.wait("joined", cluster.first.name)
        yield membership


@ray.remote(num_cpus=0, resources={"spotlight_slot": 1}, max_concurrency=2)
class Holder:
    """Stands for a worker: holds a slot, has a child process, and says something."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("holder is up", flush=True)

    def pids(self) -> tuple[int, int]:
        return os.getpid(), self.child.pid

    def hang(self) -> None:
        time.sleep(600)


def hold(node: str) -> ray.actor.ActorHandle:
    return Holder.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids: set[int], within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def since(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.2f} s"


# -- what we rely on ----------------------------------------------------------------------------------------


def test_private_parts_of_ray_are_what_the_adapters_call(cluster: LocalCluster) -> None:
    assert {"ray_params", "head", "shutdown_at_exit", "spawn_reaper"} <= set(
        inspect.signature(Node).parameters
    )
    parameters = set(inspect.signature(RayParams).parameters)
    wanted = {"node_ip_address", "node_name", "env_vars", "no_monitor", "include_log_monitor", "gcs_address"}
    assert wanted <= parameters, f"RayParams lost {wanted - parameters}: node_processes.py"
    for name in ("kill_all_processes", "kill_dashboard", "dead_processes", "get_session_dir_path"):
        assert callable(getattr(Node, name, None)), f"Node.{name} is gone: node_processes.py"
    client = GcsClient(address=cluster.address)
    assert callable(getattr(client, "drain_node", None)), "GcsClient.drain_node is gone: drain.py"
    assert callable(getattr(client, "get_draining_nodes", None)), (
        "GcsClient.get_draining_nodes is gone: drain.py"
    )
    assert callable(ray_worker.print_to_stdstream), "connection.py silences a function that Ray no more has"


def test_constructors_of_threaded_actors_run_in_a_main_thread_that_takes_signals(
    cluster: LocalCluster,
) -> None:
    @ray.remote(num_cpus=0, max_concurrency=4)
    class Probe:
        def __init__(self) -> None:
            self.came = threading.Event()
            self.main = threading.current_thread() is threading.main_thread()
            signal.signal(signal.SIGTERM, lambda *_: self.came.set())

        def where(self) -> tuple[bool, int]:
            return self.main, os.getpid()

        def wait(self) -> bool:
            return self.came.wait(60.0)

    probe = Probe.remote()
    main, pid = ray.get(probe.where.remote(), timeout=120)
    assert main, "agent.py sets its handler of SIGTERM in the constructor"
    waiting = probe.wait.remote()
    os.kill(pid, signal.SIGTERM)
    assert ray.get(waiting, timeout=120), "the main thread of an actor no more runs Python's signal handlers"
    ray.kill(probe)


def test_everything_listens_on_the_loopback_interface(cluster: LocalCluster) -> None:
    mine = {f"socket:[{inode}]" for pid in guard.marked(f"{cluster.id}/") for inode in sockets_of(pid)}
    listening = [
        (row.split()[1], f"socket:[{row.split()[9]}]")
        for file in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{file}").read_text(encoding="utf-8").splitlines()[1:]
        if row.split()[3] == "0A"
    ]
    found = {address for address, socket in listening if socket in mine}
    assert found
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
    assert not [address for address in found if not address.startswith(loopback)]


def sockets_of(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(file.readlink())
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


# -- a node's life ------------------------------------------------------------------------------------------


def test_what_is_sent_to_our_process_group_does_not_reach_ray(cluster: LocalCluster) -> None:
    sessions = {os.getsid(pid) for pid in guard.marked(f"{cluster.id}/")}
    assert sessions
    assert os.getsid(0) not in sessions


def notice_alpha(cluster: LocalCluster, listener: RecordingListener, ray_id: str) -> None:
    began_s = time.monotonic()
    cluster.notice("alpha")
    noticed_s, remaining_s = listener.wait("noticed", "alpha")
    print(f"notice after {1000 * (noticed_s - began_s):.0f} ms")
    assert isinstance(remaining_s, float)
    assert 0 < remaining_s <= GRACE_S
    wait_until(lambda: ray_id in draining_nodes())


def test_a_node_comes_gets_notice_and_is_killed(cluster: LocalCluster, listener: RecordingListener) -> None:
    began_s = time.monotonic()
    node = cluster.add_node("alpha", NodeKind.SPOT, 2)
    print(f"\nadded in {since(began_s)}", end="")
    joined_s, joined = listener.wait("joined", "alpha")
    print(f", usable after {joined_s - began_s:.2f} s")
    assert isinstance(joined, tuple)
    seen, facts = joined
    assert (seen.ray_id, seen.kind, seen.slots, seen.gpus, seen.gpu_type) == (
        node.ray_id, NodeKind.SPOT, 2, False, "cpu",
    )  # fmt: skip
    assert (facts.spotlight, facts.torch, facts.boot_id) == (
        gather().spotlight,
        gather().torch,
        gather().boot_id,
    )
    assert alive(facts.agent_pid)

    holder = hold(node.ray_id)
    pids = set(ray.get(holder.pids.remote(), timeout=120))
    notice_alpha(cluster, listener, node.ray_id)
    assert ray.get(holder.pids.remote(), timeout=120), "what runs on a draining node goes on"

    hanging = holder.hang.remote()
    processes = guard.marked(f"{cluster.id}/1") | pids | {facts.agent_pid}
    assert len(processes) >= 6
    began_s = time.monotonic()
    cluster.kill("alpha")
    print(f"killed {len(processes)} processes in {since(began_s)}")
    assert gone(processes), "a process of a killed node survives"
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(hanging, timeout=120)
    print(f"a hanging call fails after {since(began_s)}")
    lost_s, _ = listener.wait("lost", "alpha")
    print(f"loss reported after {lost_s - began_s:.2f} s")
    wait_until(lambda: all(not row["Alive"] for row in ray.nodes() if row["NodeID"] == node.ray_id))
    print(f"gone from Ray's list after {since(began_s)}")


def test_a_node_that_ray_drains_itself_is_noticed_once(
    cluster: LocalCluster, listener: RecordingListener
) -> None:
    node = cluster.add_node("drained", NodeKind.SPOT, 1)
    listener.wait("joined", "drained")
    assert drain_node(node.ray_id, 300.0, "as an autoscaler does")
    _, remaining_s = listener.wait("noticed", "drained")
    assert isinstance(remaining_s, float)
    assert 0 < remaining_s <= 300.0
    cluster.notice("drained")  # of a later end
    cluster.kill("drained")
    listener.wait("lost", "drained")
    assert not [entry for entry in listener.entries if entry[1:3] == ("noticed", "drained")]


def wait_until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_killed_node_s_name_serves_again_and_an_agent_that_dies_on_a_living_node_comes_back(
    cluster: LocalCluster, listener: RecordingListener
) -> None:
    """``alpha`` was started and killed by :func:`test_a_node_comes_gets_notice_and_is_killed`."""
    before = {row["NodeID"] for row in ray.nodes()}
    node = cluster.add_node("alpha", NodeKind.SPOT, 1)
    assert node.ray_id not in before
    _, joined = listener.wait("joined", "alpha")
    assert isinstance(joined, tuple)
    assert joined[0].ray_id == node.ray_id
    os.kill(joined[1].agent_pid, signal.SIGKILL)
    file = cluster.session / f"spotlight_agent_{node.ray_id}.pid"
    wait_until(lambda: int(file.read_text()) != joined[1].agent_pid)
    cluster.notice("alpha")
    listener.wait("noticed", "alpha")
    assert not [item for item in listener.entries if item[1] == "lost"]
    cluster.kill("alpha")
    listener.wait("lost", "alpha")


def test_nodes_that_are_not_there(cluster: LocalCluster) -> None:
    with pytest.raises(LocalClusterError, match="no node 'nowhere'"):
        cluster.kill("nowhere")
    with pytest.raises(LocalClusterError, match="there already"):
        cluster.add_node(cluster.first.name, NodeKind.SPOT, 1)


def test_a_node_that_does_not_start_is_reported_and_leaves_nothing(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[subprocess.Popen[bytes]] = []

    def fail(request: NodeRequest, gcs_address: str) -> NodeProcesses:
        left.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **request.environment}))
        raise RuntimeError("no port is free\nand more")

    monkeypatch.setattr(local, "start_node", fail)
    with pytest.raises(LocalClusterError, match=r"node 'x' did not start: no port is free\n.*raylet"):
        cluster.add_node("x", NodeKind.SPOT, 1)
    assert left[0].wait(60) == -signal.SIGKILL
    assert "x" not in [node.name for node in cluster.nodes()]


def test_a_node_of_another_version_is_refused_once(cluster: LocalCluster) -> None:
    listener = RecordingListener()
    other = NodeMembership(listener, replace(gather(), spotlight="99.0", torch="9.9.0"), SETTINGS)
    looks, look = [0], other._look

    def counted(rows: Sequence[Mapping[str, object]]) -> None:
        looks[0] += 1
        look(rows)

    other._look = counted  # type: ignore[method-assign]
    with other:
        _, problem = listener.wait("told", "a node is not used")
        seen = looks[0]
        wait_until(lambda: looks[0] > seen + 2)
    assert f"node {cluster.first.name!r}" in str(problem)
    assert "spotlight-rl 99.0, torch 9.9.0" in str(problem)
    assert "pip install spotlight-rl==99.0 torch==9.9.0" in str(problem)
    # A node that an earlier test has killed may be reported lost meanwhile.
    assert not [entry for entry in listener.entries if entry[1] == "told" or entry[2] == cluster.first.name]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999999", "head..svc:6379"])
def test_a_cluster_that_is_not_there(address: str) -> None:
    with pytest.raises(ConfigError, match=f"fleet.address: found '{address}'"), connected(address):
        pass


def test_the_view_of_a_real_cluster_is_usable(cluster: LocalCluster) -> None:
    view = read_view(ray.nodes())
    assert [node.name for node in view.nodes.values()] == [cluster.first.name]
    require_usable(view, 1, "this cluster")
    with pytest.raises(ConfigError, match=r"fleet\.learner_ranks: found 2"):
        require_usable(view, 2, "this cluster")


@pytest.mark.slow
def test_a_scorer_beside_the_learner_dies_with_its_node_and_comes_back_with_it(cluster: LocalCluster) -> None:
    cluster.add_node("trains", NodeKind.RESERVED, 2)
    notes: list[str] = []

    def slots_on(name: str) -> dict[str, tuple[RayNode, int]]:
        nodes = read_view(ray.nodes()).nodes
        return {ray_id: (node, 1) for ray_id, node in nodes.items() if node.name == name}

    slots = LearnerSlots(slots_on("trains"))
    places = ScorerNodes(cluster.first.ray_id, slots, notes.append)
    reward = RewardConfig(name="jpeg_size", device="learner")
    scorer = RemoteScorer(places, reward, 60.0, 0, 1)
    picture = encode(Sample(np.zeros((32, 32, 3), np.uint8), "a", {}))
    try:
        first = scorer.ask(Score(10.0, 1), [picture])
        assert notes[-1].endswith("runs on trains")
        cluster.kill("trains")
        with pytest.raises(ProcessLost) as lost:
            scorer.ask(Score(10.0, 1), [picture])
        assert lost.value.preempted
        cluster.add_node("replaces", NodeKind.RESERVED, 2)
        slots.by_node = slots_on("replaces")
        assert scorer.ask(Score(10.0, 1), [picture]) == first
        assert notes[-1].endswith("runs on replaces")
    finally:
        scorer.close()
        cluster.kill("replaces")


def test_draining_that_fails_is_logged_and_no_more(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(address: str) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(drain, "GcsClient", broken)
    with caplog.at_level("WARNING", "spotlight.cluster.nodes.drain"):
        assert not drain_node(cluster.first.ray_id, 5.0, "a test")
    assert "another signature" in caplog.text


def test_logs_of_a_worker_are_found(cluster: LocalCluster, membership: NodeMembership) -> None:
    node = read_view(ray.nodes()).nodes[cluster.first.ray_id]
    holder = hold(node.ray_id)
    ray.get(holder.pids.remote(), timeout=120)
    logs = Path(node.session) / "logs"
    assert "holder is up" in log_tail(logs, "Holder")
    assert "holder is up" in membership.log_tail(node, "Holder")
    assert "has no agent" in membership.log_tail(replace(node, ray_id="00"), "Holder")
    ray.kill(holder)


@pytest.mark.slow  # test_ray_market.py plays traces on other machines; these machines' life is tested above
def test_a_trace_is_played(cluster: LocalCluster, listener: RecordingListener) -> None:
    add, notice, remove = TraceEventKind

    def events() -> Iterator[TraceEvent]:
        """Each falls due as soon as it can be seen what the one before did."""
        yield TraceEvent(0.0, add, "m1", 1)
        yield TraceEvent(0.0, add, "m2", 2)
        yield TraceEvent(0.0, remove, "m2", 2)
        listener.wait("joined", "m1")
        # A notice to a node that has joined, but whose addition has not ended yet, would be skipped.
        wait_until(lambda: any(each.fate is Fate.DONE for each in market.record.outcomes))
        yield TraceEvent(0.0, notice, "m1", 1)
        listener.wait("noticed", "m1")
        yield TraceEvent(0.0, remove, "m1", 1)

    market = Market(SimpleNamespace(events=events()), LocalMachines(cluster))  # type: ignore[arg-type]
    with market:
        listener.wait("lost", "m1")
        assert market.wait(120)
    fates = {(outcome.kind, outcome.node): outcome.fate for outcome in market.record.outcomes}
    assert fates[(remove, "m1")] is fates[(notice, "m1")] is fates[(add, "m1")] is Fate.DONE
    assert fates[(remove, "m2")] is Fate.SKIPPED, "it was taken before its turn to come up"
    assert [node.name for node in cluster.nodes()] == [cluster.first.name]


def test_two_nodes_of_a_machine_may_have_the_same_gpu(cluster: LocalCluster) -> None:
    def gpus() -> list[int]:
        return list(ray.get_gpu_ids())

    for name in ("one", "other"):
        node = cluster.add_node(name, NodeKind.SPOT, 1, "GPU")
        on = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
        asked = ray.remote(num_gpus=1, num_cpus=0)(gpus).options(scheduling_strategy=on).remote()
        assert ray.get(asked, timeout=60) == [0]
    for name in ("one", "other"):
        cluster.kill(name)
    # Else Ray gives the next test's actors to nodes that it has not missed yet.
    wait_until(lambda: len(read_view(ray.nodes()).nodes) == 1)


# -- nothing is left ----------------------------------------------------------------------------------------


@pytest.mark.slow  # test_ray_run.py kills a head, and looks for what is left of its Ray
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_owner_that_is_ended(end: signal.Signals) -> None:
    program = textwrap.dedent(
        """
        import signal, subprocess, time
        from spotlight_fleet.emulated.local_cluster import local_cluster
        from spotlight.scheduler.types import NodeKind
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        with local_cluster(1) as cluster:
            print(cluster.id, cluster.session, flush=True)
            cluster.add_node("x", NodeKind.SPOT, 1)
            print("up", flush=True)
            time.sleep(600)
        """
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    name, session = owner.stdout.readline().split()
    if end is signal.SIGKILL:
        assert owner.stdout.readline() == "up\n"
    else:
        wait_until(lambda: bool(guard.marked(f"{name}/1")))  # in the middle of bringing a node up
    assert guard.marked(f"{name}/")
    owner.send_signal(end)
    owner.wait(120)
    wait_until(lambda: not guard.marked(f"{name}/"))
    wait_until(lambda: not Path(session).parent.exists())
    owner.stdout.close()


def test_a_later_run_ends_what_an_earlier_one_left(tmp_path: Path) -> None:
    dead = "999999999.1.0"
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, guard.MARK: f"{dead}/0"})
    (tmp_path / dead).mkdir()
    (tmp_path / f"{guard.owner_of(os.getpid())}.7").mkdir()
    wait_until(lambda: dead in guard.clusters())
    assert guard.sweep(tmp_path) == 1
    assert left.wait(60) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [f"{guard.owner_of(os.getpid())}.7"]
