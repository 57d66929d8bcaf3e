"""Where a reward's process on a cluster goes when its node cannot load it, fills up, or never comes.

Ray's calls are answered in this process: which node is chosen, and what is raised, is the code's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from spotlight.cluster.nodes.listing import LearnerSlots, read_view
from spotlight.cluster.scorers import remote_scorer
from spotlight.cluster.scorers.remote_scorer import LostThere, RemoteScorer, ScorerNodes, ScorerOrder
from spotlight_rewards.pool.channel import Score, Values
from spotlight_rewards.pool.reward_process import PoolClosedError, ProcessLost
from spotlight_rewards.reward import RewardSetupError, RewardTraits
from spotlight_rewards.reward_config import RewardConfig

LOADED = ("weights@1", RewardTraits())
VALUES = (Values({"score": [1.0]}), b"")
Answer = Callable[[str, str], Any]
"""By node and method: what an actor there returns, or an exception."""


class Cluster:
    """The part of Ray that places and asks actors."""

    def __init__(self, answer: Answer, **nodes: str) -> None:
        self.answer, self.kinds, self.gpus = answer, nodes, 0
        self.learner_slots = LearnerSlots({})
        self.options_given: list[dict[str, Any]] = []
        self.orders: list[ScorerOrder] = []
        self.asked: list[tuple[str, str]] = []
        self.limits_s: list[float] = []

    def nodes(self) -> list[dict[str, object]]:
        return [
            {
                "NodeID": name.encode().hex().ljust(56, "0"),
                "Alive": True,
                "NodeName": name,
                "Resources": {"CPU": 2.0, f"spotlight_{kind}": 1, "GPU": self.gpus},
            }
            for name, kind in self.kinds.items()
        ]

    def remote(self, _: object) -> Cluster:
        return self

    def options(self, *, scheduling_strategy: Any, **resources: object) -> Any:
        assert resources["num_cpus"] == 0
        self.options_given.append(resources)
        return Actors(self, bytes.fromhex(scheduling_strategy.node_id).rstrip(b"\0").decode())

    def get(self, call: tuple[str, str], timeout: float) -> Any:
        self.asked.append(call)
        self.limits_s.append(timeout)
        found = self.answer(*call)
        if isinstance(found, RewardSetupError):
            raise RayTaskError("start", str(found), found)
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, _: object) -> None:
        """Actors have no process."""


class Actors:
    """Makes the handle of an actor on one node."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster, self.node = cluster, node

    def remote(self, order: ScorerOrder) -> Any:
        self.cluster.orders.append(order)
        return self

    def __getattr__(self, method: str) -> Any:
        node = self.node

        class Method:
            @staticmethod
            def remote(*arguments: object) -> tuple[str, str]:
                return node, method

        return Method


def scorer_on(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, device: str = "spot"
) -> tuple[RemoteScorer, list[str]]:
    monkeypatch.setattr(remote_scorer.ray, "nodes", cluster.nodes)
    for name in ("remote", "get", "kill"):
        monkeypatch.setattr(remote_scorer.ray, name, getattr(cluster, name))
    reward, notes = RewardConfig(name="ocr", device=device), list[str]()  # type: ignore[arg-type]
    nodes = ScorerNodes("head", cluster.learner_slots, notes.append)
    return RemoteScorer(nodes, reward, 600.0, 0, 1), notes


def test_a_new_node_that_cannot_load_a_reward_which_has_scored_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(node: str, method: str) -> Any:
        if node == "bad":
            return RewardSetupError("no weights here") if method == "start" else None
        return LOADED if method == "start" else VALUES

    monkeypatch.setattr(remote_scorer, "_LOOK_FOR_SPOT_S", 0.0)
    cluster = Cluster(answer, head="reserved")
    scorer, notes = scorer_on(monkeypatch, cluster)
    scorer.ask(Score(1.0, 1))
    cluster.kinds["bad"] = "spot"
    for _ in range(3):  # it looks for a spot node each time
        assert scorer.ask(Score(1.0, 1)) == VALUES[0]
    assert cluster.asked.count(("bad", "start")) == 1
    assert any("'bad' is left out" in each and "no weights here" in each for each in notes)
    cluster.kinds["good"] = "spot"
    scorer.ask(Score(1.0, 1))
    assert cluster.asked[-1] == ("good", "ask")


def test_a_reward_that_never_loaded_or_that_no_node_loads_is_the_user_s_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [LOADED, VALUES]
    cluster = Cluster(
        lambda node, method: answers.pop(0) if answers else RewardSetupError("no"), head="reserved"
    )
    scorer, _ = scorer_on(monkeypatch, cluster)
    scorer.ask(Score(1.0, 1))
    with pytest.raises(ProcessLost) as lost:  # its restart beside the actor failed: elsewhere it may load
        scorer.ask(Score(1.0, 1))
    assert lost.value.preempted
    with pytest.raises(RewardSetupError, match="no"):
        scorer.ask(Score(1.0, 1))
    fresh, _ = scorer_on(monkeypatch, cluster)
    with pytest.raises(RewardSetupError, match="no"):
        fresh.start()


def test_only_a_machine_that_is_gone_is_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [LOADED, OutOfMemoryError("killed"), LOADED, ActorDiedError(), LOADED]
    answers += [(LostThere("its process ended", timed_out=False), b"")]
    scorer, _ = scorer_on(monkeypatch, Cluster(lambda *_: answers.pop(0), head="reserved"))
    for preempted in (False, True, False):
        with pytest.raises(ProcessLost) as lost:
            scorer.ask(Score(1.0, 1))
        assert lost.value.preempted is preempted
    failed = ActorDiedError(RayTaskError("__init__", "no such module", ValueError("no such module")))
    scorer, _ = scorer_on(monkeypatch, Cluster(lambda *_: failed, head="reserved"))
    with pytest.raises(RewardSetupError, match="did not start on node 'head'"):
        scorer.start()


def test_a_call_has_time_to_restart_the_process_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lambda node, method: LOADED if method == "start" else VALUES, head="reserved")
    scorer, _ = scorer_on(monkeypatch, cluster)
    scorer.ask(Score(7.0, 1))
    assert cluster.limits_s[-1] >= 600.0 + 7.0


def test_closing_ends_the_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lambda *_: LOADED, head="reserved")
    looked, nodes = threading.Event(), cluster.nodes

    def seen() -> list[dict[str, object]]:
        looked.set()
        return nodes()

    cluster.nodes = seen  # type: ignore[method-assign]
    scorer, _ = scorer_on(monkeypatch, cluster, "cuda")
    found: list[BaseException] = []

    def waits() -> None:
        try:
            scorer.start()
        except PoolClosedError as error:
            found.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    assert looked.wait(60)
    scorer.interrupt()
    thread.join(timeout=60)
    assert found


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_reward_on_the_learner_s_device_goes_with_the_learner(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """Its node dies, and some other is made the learner's: however long that takes."""
    monkeypatch.setattr(remote_scorer, "_LOOK_AGAIN_S", 0.01)
    answers: list[Any] = [LOADED, ActorDiedError(), LOADED, VALUES]
    cluster = Cluster(lambda *_: answers.pop(0), head="reserved", trains="reserved", rolls="spot")
    cluster.gpus = gpus

    def slots_on(name: str) -> dict[str, Any]:
        rows = read_view(cluster.nodes()).nodes
        return {ray_id: (node, 1) for ray_id, node in rows.items() if node.name == name}

    cluster.learner_slots.by_node = slots_on("trains")
    scorer, notes = scorer_on(monkeypatch, cluster, "learner")
    scorer._start_deadline_s = 0.05
    scorer.start()
    del cluster.kinds["trains"]  # its slots are still planned there
    with pytest.raises(ProcessLost) as lost:
        scorer.ask(Score(1.0, 1))
    assert lost.value.preempted
    cluster.kinds["other"] = "reserved"
    moves = threading.Timer(0.3, lambda: setattr(cluster.learner_slots, "by_node", slots_on("other")))
    moves.start()
    assert scorer.ask(Score(1.0, 1)) == VALUES[0]
    moves.join()
    assert [node for node, _ in cluster.asked] == ["trains", "trains", "other", "other"]
    assert [each["num_gpus"] for each in cluster.options_given] == [0, 0]  # Ray gives the GPU to the rank
    assert [order.gpu for order in cluster.orders] == [0 if gpus else None] * 2
    assert ("the learner's GPU 0" in notes[-1]) == bool(gpus)
