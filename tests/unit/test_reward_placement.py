"""Where rewards run, how many processes they have, and what those share."""

from __future__ import annotations

import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_server import Reply, as_json, completion, reward_server

from spotlight.cluster.nodes.listing import read_view
from spotlight.cluster.scorers.scorer_places import (
    ScorerNode,
    ScorerPlace,
    beside_learner,
    choose_node,
    has_spot,
    placed_by_ray,
    preferred_cores,
    require_places,
    scorer_nodes,
)
from spotlight.config.load import dump_config, load_config
from spotlight.dry_run.reward_plan import reward_places
from spotlight.runtime.resuming.course import Resuming
from spotlight.scheduler.types import NodeKind
from spotlight.store.run_directory import RunDirectory
from spotlight.store.store_errors import OtherConfigurationError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.pool.channel import Sample, Score, Values, encode
from spotlight_rewards.pool.gpu_placement import LocalGpus, place_on_gpus, visible_names
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.reward_process import ProcessLost, RewardProcess
from spotlight_rewards.pool.scoring import PREEMPTIONS_MAX, SharedSample, score_batch
from spotlight_rewards.registry import REWARDS
from spotlight_rewards.results import ScoredSample
from spotlight_rewards.reward import RewardScore, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig

REWARD = """
import os

from spotlight_rewards.reward import best_with

@best_with(batch_size=1, cores_per_process=1)
def whoami(images, prompts, metadata):
    return {"score": [float(len(images))] * len(images), "pid": [os.getpid()] * len(images)}
"""


def pictures(number: int) -> list[np.ndarray]:
    return [np.full((4, 4, 3), level, np.uint8) for level in range(number)]


def judge(url: str, **settings: Any) -> dict[str, Any]:
    endpoint = {"base_url": url, "model": "judge", "retries": 0, **settings}
    return {"answer": "grade", "endpoint": endpoint}


def test_processes_and_batches_are_as_configured_or_else_as_the_reward_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whoami.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    chosen = {"replicas": 1, "batch_size": 3}
    specs = [RewardConfig(name="whoami:whoami"), RewardConfig(name="whoami:whoami", label="b", **chosen)]
    with RewardPool(specs) as pool:
        assert len(pool.pids) == 2 + 1
        samples = pool.score(pictures(5), ["a"] * 5, [{}] * 5).samples
    found = [each.scores for each in samples if isinstance(each, ScoredSample)]
    assert [each["whoami"].value for each in found] == [1.0] * 5
    assert [each["b"].value for each in found] == [3.0, 3.0, 3.0, 2.0, 2.0]


def test_processes_share_the_requests_that_may_be_under_way() -> None:
    def slow(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        while server.most_under_way < 3:  # each answer waits until as many are under way as may be
            time.sleep(0.01)
        return completion("5")

    with reward_server(slow) as server:
        spec = RewardConfig(
            name="vlm-judge", replicas=2, batch_size=8, params=judge(server.url, concurrency=3)
        )
        with RewardPool([spec]) as pool:
            samples = pool.score(pictures(16), ["a"] * 16, [{}] * 16).samples
        assert all(isinstance(each, ScoredSample) for each in samples)
        assert server.most_under_way == 3
        few = RewardConfig(name="vlm-judge", replicas=2, params=judge(server.url, concurrency=1))
        with pytest.raises(RewardSetupError, match=r"concurrency is 1, fewer than the 2 processes"):
            RewardPool([few])


def test_a_refusal_at_a_process_s_first_call_fails_no_batch() -> None:
    """The other process has had answers: key and model are right."""
    asked = 0

    def moody(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        nonlocal asked
        asked += 1
        return as_json({"error": "who are you?"}, 401) if asked == 2 else completion("5")

    with reward_server(moody) as server:
        spec = RewardConfig(name="vlm-judge", replicas=2, batch_size=1, params=judge(server.url))
        with RewardPool([spec]) as pool:
            pool.check(["a"], [{}])
            samples = [pool.score(pictures(1), ["a"], [{}]).samples[0] for _ in range(4)]
    assert all(isinstance(each, ScoredSample) for each in samples), samples


def reward(device: str, name: str = "ocr", **more: Any) -> RewardConfig:
    return RewardConfig(name=name, device=device, **more)  # type: ignore[arg-type]


class TestGpusOfThisMachine:
    def test_each_process_has_its_own_or_the_trainers(self) -> None:
        visible = visible_names({"CUDA_VISIBLE_DEVICES": "GPU-a, 3,5,MIG-x, GPU-b"}, 5)
        wanted = [reward("cuda", "one", replicas=2), reward("learner", "two"), reward("cpu", "three")]
        placed = place_on_gpus(wanted, 1, LocalGpus(visible, rank=0, ranks=1, trained_on=True))
        assert placed == {("one", 0): "3", ("one", 1): "5", ("two", 0): "GPU-a"}

    def test_ranks_never_share_a_free_gpu(self) -> None:
        visible = visible_names({}, 7)
        taken = [
            gpu
            for rank in range(3)
            for gpu in place_on_gpus([reward("cuda")], 1, LocalGpus(visible, rank, 3, True)).values()
        ]
        assert taken == ["3", "4", "5"]

    @pytest.mark.parametrize(
        ("device", "gpus", "words"),
        [
            ("cuda", LocalGpus(("0", "1"), 0, 2, True), r"at most 0, the GPUs that no trainer uses \(of 2\)"),
            ("cuda", LocalGpus((), 0, 1, False), "at most 0"),
        ],
    )
    def test_what_cannot_be_placed_is_an_error(self, device: str, gpus: LocalGpus, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            place_on_gpus([reward(device)], 1, gpus)

    def test_rewards_of_a_rank_find_the_gpu_of_that_rank_only(self) -> None:
        visible = visible_names({}, 3)
        assert [LocalGpus(visible, rank, 3, True).of_rank for rank in range(3)] == ["0", "1", "2"]
        assert LocalGpus(visible, 0, 1, trained_on=True).of_rank is None
        assert LocalGpus(visible, 1, 3, trained_on=False).of_rank is None

    def test_without_a_trainers_gpu_all_are_free_and_there_is_none_to_share(self) -> None:
        gpus = LocalGpus(("0", "1"), 0, 1, trained_on=False)
        assert gpus.free == ("0", "1")
        assert place_on_gpus([reward("learner")], 1, gpus) == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rewards=[{name: ocr, device: spot}]"], "has no spot nodes"),
        (["rewards=[{name: ocr, device: cuda}]", "fleet.driver=ray"], "name a cluster in fleet.address"),
        (["rewards=[{name: ocr, device: gpu}]"], "'auto', 'cpu', 'spot', 'cuda' or 'learner'"),
    ],
)
def test_a_place_that_there_is_not_is_refused_when_the_configuration_is_read(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        load_config(None, overrides)
    assert "rewards" in str(error.value)


class TestNodesOfACluster:
    HEAD = ScorerNode("h", "head", NodeKind.RESERVED, cpus=8, gpus=0, here=True)
    RESERVED = ScorerNode("r", "reserved", NodeKind.RESERVED, cpus=8, gpus=8, here=False)
    SPOT = (
        ScorerNode("s", "spot", NodeKind.SPOT, 4, 1, False),
        ScorerNode("t", "tiny", NodeKind.SPOT, 1, 1, False),
    )
    ASIDE = ScorerNode("a", "aside", None, cpus=4, gpus=2, here=False)

    def placed(self, device: Any, nodes: list[ScorerNode], number: int) -> list[str]:
        held: Counter[str] = Counter()
        for _ in range(number):
            if (node := choose_node(nodes, device, held)) is not None:
                held[node.ray_id] += 1
        return sorted(held.elements())

    def test_processes_go_where_their_device_is_and_to_the_head_last(self) -> None:
        every = [self.HEAD, self.RESERVED, *self.SPOT, self.ASIDE]
        assert self.placed("spot", every, 5) == ["s"] * 4 + ["t"]
        assert self.placed("spot", [self.HEAD, self.RESERVED], 2) == ["r", "r"]
        assert self.placed("cpu", every, 3) == ["a"] * 3
        assert self.placed("cpu", [self.HEAD, self.RESERVED, *self.SPOT], 3) == ["r"] * 3
        assert self.placed("cpu", [self.HEAD, *self.SPOT], 1) == ["h"]
        assert self.placed("cuda", every, 3) == ["a", "a"]
        assert self.placed("cuda", [self.HEAD, self.RESERVED], 1) == []

    def test_full_nodes_leave_the_rest_to_others_and_then_share(self) -> None:
        nodes = [self.HEAD, self.RESERVED, *self.SPOT, self.ASIDE]
        by_node = Counter(self.placed("cpu", nodes, 20))
        assert by_node == {"a": 4, "r": 8, "h": 8}
        assert Counter(self.placed("spot", nodes, 25)) == {"s": 4, "t": 1, **by_node}
        assert sum(Counter(self.placed("cpu", nodes, 60)).values()) == 60
        emulated = [ScorerNode("s", "spot", NodeKind.SPOT, 0, 0, False), self.HEAD]
        assert self.placed("spot", emulated, 30) == ["s"] * 30

    def test_a_spot_node_counts_while_it_has_a_cpu_and_has_refused_nothing(self) -> None:
        nodes = [self.HEAD, *self.SPOT]
        assert has_spot(nodes, {"s": 4}, ())
        assert not has_spot(nodes, {"s": 4}, {"t"})
        assert not has_spot(nodes, {"s": 4, "t": 1}, ())
        assert not has_spot([self.HEAD], {}, ())

    def test_processes_by_core_are_those_of_the_nodes_they_go_to(self) -> None:
        nodes = [self.HEAD, self.RESERVED, *self.SPOT]
        assert preferred_cores(nodes, "spot") == 5
        assert preferred_cores(nodes, "cpu") == 8
        assert preferred_cores([*nodes, self.ASIDE], "auto") == 4
        assert preferred_cores([], "cpu") == 0

    def test_processes_beside_the_learner_take_its_ranks_in_turn(self) -> None:
        nodes, slots = [self.HEAD, self.RESERVED, self.SPOT[0]], {"r": 2, "h": 1, "gone": 1}
        places = [beside_learner(nodes, slots, replica) for replica in range(4)]
        assert places[:3] == [
            ScorerPlace(self.HEAD, None),  # its ranks train on CPUs
            ScorerPlace(self.RESERVED, 0),
            ScorerPlace(self.RESERVED, 1),
        ]
        assert places[3] == places[0]
        assert beside_learner([self.SPOT[0]], slots, 0) is None

    def test_a_node_that_has_just_lost_a_process_comes_last(self) -> None:
        every = [*self.SPOT, self.HEAD]
        assert choose_node(every, "spot", {}, avoided={"s"}) == self.SPOT[1]
        assert choose_node(every, "spot", {}, avoided={"s", "t"}) == self.HEAD
        assert choose_node([self.SPOT[0]], "spot", {}, avoided={"s"}) == self.SPOT[0]

    def test_nodes_of_ray_are_read_with_those_set_aside(self) -> None:
        def row(name: str, **resources: float) -> dict[str, object]:
            return {"NodeID": name, "Alive": name != "dead", "NodeName": name, "Resources": resources}

        rows = [
            row("one", CPU=4, spotlight_reserved=1, GPU=1), row("two", CPU=2, GPU=2, spotlight_reward=1),
            row("three", CPU=64), row("dead", CPU=4, spotlight_spot=1),
        ]  # fmt: skip
        view = read_view(rows)
        assert not view.problems
        assert scorer_nodes(rows, view, "one") == [
            ScorerNode("one", "one", NodeKind.RESERVED, 4.0, 1.0, here=True),
            ScorerNode("two", "two", None, 2.0, 2.0, here=False),
        ]
        require_places([reward("cuda", replicas=2)], 1, scorer_nodes(rows, view, "one"))
        with pytest.raises(ConfigError, match=r"'cuda' for 3 processes.*spotlight_reward"):
            require_places([reward("cuda", replicas=3)], 1, scorer_nodes(rows, view, "one"))


@pytest.mark.parametrize("device", ["spot", "cuda", "learner"])
def test_votes_are_asked_for_beside_the_command_which_has_the_run_directory(device: str) -> None:
    cluster = ["fleet.driver=ray", "fleet.address=10.0.0.1:6379"]
    with pytest.raises(ConfigError, match=f"'{device}'.*name=vote. It needs the run directory"):
        load_config(None, [*cluster, f"rewards=[{{name: vote, device: {device}}}]"])
    config = load_config(None, [*cluster, "rewards=[{name: vote}, {name: shapes}]"])
    assert [each.name for each in placed_by_ray(config)] == ["shapes"]
    assert reward_places(config)[0].place == "beside this command"


class Doomed:
    """A scorer whose machine is preempted a few times."""

    def __init__(self, losses: int) -> None:
        self.losses, self.asked = losses, 0

    def ask(self, request: Any, samples: Any = ()) -> Values:
        self.asked += 1
        if self.asked <= self.losses:
            raise ProcessLost("its node is gone", timed_out=False, preempted=True)
        return Values({"score": [1.0] * len(samples)})


@pytest.mark.parametrize(("losses", "scored"), [(0, True), (5, True), (PREEMPTIONS_MAX, True), (99, False)])
def test_a_preemption_is_no_failure_of_the_reward(losses: int, scored: bool) -> None:
    scorer = Doomed(losses)
    samples = [SharedSample(Sample(image, "a", {})) for image in pictures(2)]
    found = score_batch(scorer, reward("spot", retries=0, isolation_s=0), samples)  # type: ignore[arg-type]
    assert all(isinstance(each, RewardScore) for each in found) is scored
    assert scorer.asked == min(losses, PREEMPTIONS_MAX) + 1


def test_machines_lost_are_counted_over_a_batch_with_its_retries() -> None:
    scorer = Doomed(10**6)
    samples = [SharedSample(Sample(image, "a", {})) for image in pictures(2)]
    score_batch(scorer, reward("spot", retries=3, isolation_s=0), samples)  # type: ignore[arg-type]
    assert scorer.asked == PREEMPTIONS_MAX + 1 + 3


def test_rewards_that_take_long_for_a_picture_limit_their_calls() -> None:
    """The deadline is per call, and on Ray a call could hold all that waits."""
    for name in set(REWARDS) - {"shapes", "motion", "jpeg_size", "vlm-rank", "vote"}:
        function = REWARDS.load(name)
        assert 1 <= function.traits.batch_size <= 64, name  # type: ignore[attr-defined]


def test_output_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talks.py").write_text(
        "def talks(images, prompts, metadata):\n    print('hello')\n    return [1]\n"
    )
    monkeypatch.chdir(tmp_path)
    process = RewardProcess(RewardConfig(name="talks:talks"), 60.0)
    try:
        process.ask(Score(10.0, 1), [encode(Sample(pictures(1)[0], "a", {}))])
        assert process.take_output(1 << 10) == b"hello\n"
        assert process.take_output(1 << 10) == b""
    finally:
        process.close()


def test_a_resumed_run_may_place_its_rewards_elsewhere_but_not_weigh_them_otherwise(tmp_path: Path) -> None:
    def opened(*overrides: str) -> None:
        config = load_config(None, list(overrides))
        with RunDirectory.open(tmp_path, "run", dump_config(config), Resuming(config)) as run:
            run.adopt()

    opened("rewards=[{name: ocr}]")
    opened("rewards=[{name: ocr, device: cpu, replicas: 3, batch_size: 2}]")
    with pytest.raises(OtherConfigurationError, match=r"rewards\.0\.weight: 1\.0 in the run, 2\.0 now"):
        opened("rewards=[{name: ocr, weight: 2.0}]")
