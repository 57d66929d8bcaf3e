"""Rewards that compare a group: which samples they see and when, and the built-in one that ranks by a VLM."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_server import Reply, as_json, completion, decoded, reward_server

from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId
from spotlight_rewards.endpoints.vlm_rank import FACTS, VlmRank, pairings, still, tournament
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.waiting import SampleGroup, WaitingSamples
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import RewardSetupError, SampleError
from spotlight_rewards.reward_check import check_reward
from spotlight_rewards.reward_config import RewardConfig

REWARD = """
from spotlight_rewards.reward import best_with, takes_groups

@takes_groups
def ranks(images, prompts, metadata):
    if prompts[0] == "raise":
        raise ValueError("no opinion")
    assert len(set(prompts)) == 1, prompts
    levels = [int(image[0, 0, 0]) for image in images]
    return {"score": [sum(other < level for other in levels) for level in levels]}

@best_with(batch_size=2)
def by_twos(images, prompts, metadata):
    return [float(len(images))] * len(images)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comparing.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)


def pictures(*levels: int) -> list[np.ndarray]:
    return [np.full((4, 4, 3), level, np.uint8) for level in levels]


def rollout(prompt: str, member: int, iteration: int = 0, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    name = RolloutId(f"{purpose}{iteration}-{prompt}-{member}")
    return Rollout(name, purpose, iteration, PromptId(prompt), member, member, 4, PolicyVersion(0))


class TestBatchesOfWhatWaits:
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        limit=st.none() | st.integers(1, 5),
        merges=st.booleans(),
        data=st.data(),
    )
    def test_every_sample_is_taken_once_in_order_within_the_limit(
        self, sizes: list[int], limit: int | None, merges: bool, data: st.DataObject
    ) -> None:
        waiting: WaitingSamples[tuple[int, int]] = WaitingSamples(limit, merges, by_group=False)
        put: list[tuple[int, int]] = []
        taken: list[tuple[int, int]] = []
        for submission, size in enumerate(sizes):
            items = [(submission, index) for index in range(size)]
            waiting.put((item, SampleGroup("any", size)) for item in items)
            put += items
            for _ in range(data.draw(st.integers(0, 2))):
                taken += self.taken(waiting, limit, merges)
        while batch := self.taken(waiting, limit, merges):
            taken += batch
        assert taken == put

    def taken(
        self, waiting: WaitingSamples[tuple[int, int]], limit: int | None, merges: bool
    ) -> list[tuple[int, int]]:
        batch, group = waiting.take()
        assert group is None
        assert limit is None or len(batch) <= limit
        assert merges or len({submission for submission, _ in batch}) <= 1
        return batch

    def test_a_batch_of_a_comparing_reward_is_one_group_however_its_members_are_mixed(self) -> None:
        waiting: WaitingSamples[str] = WaitingSamples(2, True, by_group=True)
        one, two = SampleGroup("one", 3), SampleGroup("two", 4)
        waiting.put([("a", one), ("x", two), ("b", one), ("y", two), ("c", one)])
        waiting.put([("z", one)])
        assert waiting.take() == (["a", "b", "c"], one)
        assert waiting.take() == (["x", "y"], two)
        assert waiting.take() == (["z"], one)
        assert waiting.take() == ([], None)


class TestPool:
    def test_a_comparing_reward_gets_each_group_whole_and_says_who_is_missing(self) -> None:
        specs = [RewardConfig(name="comparing:ranks"), RewardConfig(name="comparing:by_twos", weight=0)]
        groups = [SampleGroup("a", 4), SampleGroup("b", 2)] * 2 + [SampleGroup("a", 4)]
        with RewardPool(specs, 2, merges=True) as pool:
            assert pool.compares_groups == ("ranks",)
            batch = pool.score(pictures(7, 1, 9, 2, 8), list("ababa"), [{}] * 5, groups)
            again = pool.score(pictures(1, 2, 3), ["raise", "fine", "fine"], [{}] * 3)
        found = [each for each in batch.samples if isinstance(each, ScoredSample)]
        assert [each.total for each in found] == [0.0, 0.0, 2.0, 1.0, 1.0]
        counts = [(each.curves()["ranks/members"], each.curves()["ranks/missing"]) for each in found]
        assert counts == [(3.0, 1.0), (2.0, 0.0), (3.0, 1.0), (2.0, 0.0), (3.0, 1.0)]
        assert all(each.scores["by_twos"].value <= 2 for each in found)
        bad, *good = again.samples
        assert isinstance(bad, RewardFailure)
        assert "no opinion" in bad.message
        assert [each.total for each in good if isinstance(each, ScoredSample)] == [0.0, 1.0]


def brighter(request: BaseHTTPRequestHandler, body: Any) -> Reply:
    """Prefers the brighter picture; of equal ones, the first."""
    *pictures, _ = body["messages"][0]["content"]
    urls = [each["image_url"]["url"].removeprefix("data:image/png;base64,") for each in pictures]
    first, second = (decoded(url).mean() for url in urls)
    return completion("First" if first >= second else "Second.")


@pytest.fixture
def judge() -> Iterator[Any]:
    with reward_server(brighter) as world:
        yield world


class TestVlmRank:
    def rank(self, url: str, *levels: int, **params: Any) -> dict[str, list[float | SampleError]]:
        endpoint = {"base_url": url, "model": "judge", "retries": 0, **params.pop("endpoint", {})}
        prompts = ["a bright square"] * len(levels)
        return VlmRank(endpoint=endpoint, **params)(pictures(*levels), prompts, [{}] * len(levels))

    def test_the_score_is_the_share_of_wins_over_all_others(self, judge: Any) -> None:
        prices = {"usd_per_million_prompt_tokens": 10.0}
        found = self.rank(judge.url, 50, 200, 100, opponents=9, endpoint=prices)
        assert found["score"] == [0.0, 1.0, 0.5]
        assert found["comparisons"] == [4.0] * 3
        assert found["undecided"] == [0.0] * 3
        assert found["cost_usd"] == pytest.approx([600 * 10e-6 / 3] * 3)
        assert len(judge.seen) == 6
        assert {body["messages"][0]["content"][-1]["text"] for _, _, body in judge.seen} == {
            'Two pictures were made for the text "a bright square". Which one shows it better, the first or '
            "the second? Answer with the single word First or Second."
        }

    def test_a_preference_for_a_position_decides_nothing(self, judge: Any) -> None:
        found = self.rank(judge.url, 70, 70, 70, 70)
        assert found["score"] == [0.5] * 4
        assert found["undecided"] == [1.0] * 4

    def test_one_that_is_alone_is_an_error_and_asks_nothing(self, judge: Any) -> None:
        (score,) = self.rank(judge.url, 70)["score"]
        assert "no other member of its group" in str(score)
        assert not judge.seen

    def test_answers_that_fail_count_neither_way(self, judge: Any) -> None:
        def partly(request: BaseHTTPRequestHandler, body: Any) -> Reply:
            first = decoded(body["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2])
            if first.mean() == 200:
                return completion("Both are fine")
            return brighter(request, body)

        judge.behaviour = partly
        found = self.rank(judge.url, 50, 200, 100, opponents=2)
        assert found["score"] == [0.0, 1.0, pytest.approx(2 / 3)]
        assert found["comparisons"] == [3.0, 2.0, 3.0]

        judge.behaviour = lambda request, body: as_json({"error": "overloaded"}, 503)
        assert all(isinstance(each, SampleError) for each in self.rank(judge.url, 50, 200)["score"])

    def test_the_check_shows_it_a_group_of_two(self, judge: Any) -> None:
        def judges(request: BaseHTTPRequestHandler, body: Any) -> Reply:
            darker_is_better = "OPEN" in body["messages"][0]["content"][-1]["text"]  # the sign on its wall
            answer = brighter(request, body)
            if not darker_is_better:
                return answer
            return completion("Second" if b"First" in answer[1] else "First")

        judge.behaviour = judges
        endpoint = {"base_url": judge.url, "model": "judge"}
        reward = RewardConfig(name="vlm-rank", params={"endpoint": endpoint})
        report = check_reward(reward, FACTS, start_deadline_s=60)
        assert report.good, report.findings
        assert len(report.findings) == 3

    def test_videos_are_compared_by_frames_side_by_side(self) -> None:
        video = np.stack(pictures(*range(10)))
        assert still(video)[0, ::4, 0].tolist() == [0, 3, 6, 9]
        assert still(video[0]) is not None

    @given(members=st.integers(2, 40), opponents=st.integers(1, 50))
    def test_all_meet_about_equally_many_others(self, members: int, opponents: int) -> None:
        pairs = pairings(members, opponents)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs)
        met = [sum(one in pair for pair in pairs) for one in range(members)]
        assert len(set(met)) == 1
        assert min(opponents, members - 1) <= met[0] <= min(opponents + 1, members - 1)

    @given(st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda p: p[0] != p[1]),
                           st.booleans()))  # fmt: skip
    def test_wins_are_shared_out(self, answers: dict[tuple[int, int], bool]) -> None:
        found = tournament(5, answers)
        wins = sum(
            score * count
            for score, count in zip(found["score"], found["comparisons"], strict=True)
            if not isinstance(score, SampleError) and not isinstance(count, SampleError)
        )
        assert wins == pytest.approx(len(answers))

    @pytest.mark.parametrize("params", [{"opponents": 0}, {"opponents": True}, {"question": " "}])
    def test_settings_of_another_kind_are_refused(self, judge: Any, params: dict[str, Any]) -> None:
        with pytest.raises(RewardSetupError, match=f"params.{next(iter(params))} is"):
            self.rank(judge.url, 1, 2, **params)
