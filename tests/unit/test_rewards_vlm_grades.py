"""``geneval2``, ``unified-reward`` and ``edit-score`` at real servers: formulas, no zero for bad answers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.unit.reward_server import (
    Reply,
    as_json,
    completion,
    decoded,
    picture_in,
    question_in,
    reward_server,
)

from spotlight_rewards.endpoints.chat import ChatAnswer
from spotlight_rewards.endpoints.edit_score import FACTS, EditScore, parse_grade_pair
from spotlight_rewards.endpoints.geneval2 import GenEval2, answer_probability, geometric_mean
from spotlight_rewards.endpoints.unified_reward import UnifiedReward, parse_grades
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.reading.legibility import legibility
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import RewardInputError, RewardSetupError, SampleError
from spotlight_rewards.reward_check import check_reward
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import load

ATOMS = [["How many dogs are there?", "two"], ["What is striped?", "zebra"], ["Is it day?", "Yes"]]
GRADES = "Alignment Score (1-5): 4.5\nCoherence Score (1-5): 3\nStyle Score (1-5): **2**"


def grays(*levels: int) -> list[np.ndarray]:
    return [np.full((8, 12, 3), level, np.uint8) for level in levels]


def settings(url: str, **more: Any) -> dict[str, Any]:
    quick = {"timeout_s": 10.0, "batch_timeout_s": 15.0, "retries": 1, "backoff_s": 0.01}
    return {"base_url": f"{url}/v1", "model": "judge-8b", **quick, **more}


def logs(**probabilities: float) -> dict[str, float]:
    return {token: math.log(probability) for token, probability in probabilities.items()}


def by_question(request: BaseHTTPRequestHandler, body: Any) -> Reply:
    """The first atom is right with .6, the second with .3, the third as far as the picture is bright."""
    question = question_in(body)
    if "dogs" in question:
        return completion("two", top=logs(Two=0.4, **{"2": 0.2}, three=0.4))
    if "striped" in question:
        return completion("ze", top=logs(ze=0.3, z=0.1, cat=0.6))
    bright = picture_in(body)[0, 0, 0] / 255
    return completion("Yes", top=logs(Yes=max(bright, 1e-9), No=max(1 - bright, 1e-9)))


def test_geneval2_is_the_mean_over_atoms_and_the_geometric_mean_over_a_prompt() -> None:
    with reward_server(by_question) as world:
        place = settings(world.url, usd_per_million_prompt_tokens=2.0)
        found = GenEval2(endpoint=place)(grays(51, 204), ["a", "b"], [{"vqa_list": ATOMS}] * 2)
        plain = GenEval2(endpoint=place, mean="arithmetic")(grays(51), ["a"], [{"vqa_list": ATOMS}])
    assert found["arithmetic"] == pytest.approx([(0.6 + 0.3 + 0.2) / 3, (0.6 + 0.3 + 0.8) / 3])
    assert found["score"] == found["geometric"] == pytest.approx([0.036 ** (1 / 3), 0.144 ** (1 / 3)])
    assert found["weakest"] == pytest.approx([0.2, 0.3])
    assert plain["score"] == pytest.approx(found["arithmetic"][:1])
    assert found["prompt_tokens"] == [300.0, 300.0]
    assert found["cost_usd"] == pytest.approx([600e-6] * 2)
    assert all(body["max_tokens"] == 1 and body["logprobs"] for _, _, body in world.seen)
    assert question_in(world.seen[0][2]).endswith("Answer in one word.")


@pytest.mark.parametrize(
    ("answer", "token", "counts"),
    [
        ("two", "2", True),
        ("7", " seven", True),
        ("Yes", "yes.", True),
        ("striped", "str", True),
        ("seventy", "sevent", True),
        ("no", "not", False),
        ("red", "reddish", False),
        ("no", "", False),
    ],
)
def test_a_token_counts_if_it_begins_the_answer(answer: str, token: str, counts: bool) -> None:
    assert answer_probability({token: 0.7, "other": 0.3}, answer) == (0.7 if counts else 0.0)


@pytest.mark.parametrize(
    ("answer", "token"), [("12", "1"), ("120", "12"), ("seventeen", "seven"), ("striped", "s")]
)
def test_a_token_that_may_begin_another_answer_fails_the_sample(answer: str, token: str) -> None:
    with pytest.raises(SampleError, match=r"may as well be another answer"):
        answer_probability({token: 0.7, "other": 0.3}, answer)
    assert answer_probability({token: 0.3, answer: 0.7}, answer) == 0.7
    assert answer_probability({token: 0.05, "other": 0.95}, answer) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_geometric_mean_lies_between_the_least_and_the_arithmetic_mean(values: list[float]) -> None:
    found = geometric_mean(values)
    assert min(values) - 1e-9 <= found <= np.mean(values) + 1e-9


def test_unified_reward_is_a_grade_of_five() -> None:
    with reward_server(lambda request, body: completion(GRADES)) as world:
        found = UnifiedReward(endpoint=settings(world.url))(grays(1), ["a {low} cat"], [{}])
        style = UnifiedReward(endpoint=settings(world.url), train_on="style")(grays(1), ["a"], [{}])
        UnifiedReward(endpoint=settings(world.url)).check(["a"], [{}])
    assert found["score"] == pytest.approx([(4.5 + 3 + 2) / 15])
    assert (found["alignment"], found["coherence"], found["style"]) == ([4.5], [3.0], [2.0])
    assert style["score"] == [0.4]
    assert "Text Caption: [a {low} cat]" in question_in(world.seen[0][2])


@pytest.mark.parametrize(
    "text",
    [
        "4",
        GRADES.replace("Style", "Charm"),
        GRADES.replace("4.5", "6"),
        GRADES.replace("4.5", "0"),
        GRADES + GRADES,
        GRADES[:40],
    ],
)
def test_grades_that_are_not_all_there_are_an_error(text: str) -> None:
    with reward_server(lambda request, body: completion(text)) as world:
        found = UnifiedReward(endpoint=settings(world.url))(grays(1), ["a"], [{}])
    assert isinstance(found["score"][0], SampleError)


def edited(request: BaseHTTPRequestHandler, body: Any) -> Reply:
    content = body["messages"][0]["content"]
    pictures = [each["image_url"]["url"].partition(",")[2] for each in content if each["type"] == "image_url"]
    levels = [int(decoded(each)[0, 0, 0]) for each in pictures]
    if len(levels) == 2:  # faithful as far as the second is brighter
        return completion(json.dumps({"reasoning": "so", "score": [25, (levels[1] - levels[0]) / 10]}))
    return completion('Here: ```json\n{"reasoning": "{", "score": [16, 20.5]}\n```')


def test_edit_score_compares_with_the_original(tmp_path: Path) -> None:
    for level in (10, 20):
        Image.fromarray(grays(level)[0]).save(tmp_path / f"{level}.png")
    ten, twenty = (str(tmp_path / f"{level}.png") for level in (10, 20))
    records: list[dict[str, object]] = [{"reference": ten}, {"references": [twenty, ten], "reference": "x"}]
    with reward_server(edited) as world:
        place = settings(world.url)
        EditScore(endpoint=place).check(["brighter"] * 2, records)
        found = EditScore(endpoint=place)(grays(100, 110), ["brighter", "more"], records)
    assert found["score"] == pytest.approx([12.0, 12.0])
    assert (found["faithfulness"], found["quality"]) == ([9.0, 9.0], [16.0, 16.0])
    assert found["prompt_tokens"] == [200.0, 200.0]


def test_the_check_of_edit_score_writes_an_original() -> None:
    def judge(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        return completion(json.dumps({"score": [0 if "whole sign red" in json.dumps(body) else 25, 20]}))

    with reward_server(judge) as world:
        reward = RewardConfig(name="edit-score", params={"endpoint": settings(world.url)})
        report = check_reward(reward, FACTS, start_deadline_s=60)
    assert report.good, report.findings
    assert len(report.findings) == 3


@pytest.mark.parametrize(
    "text",
    [
        "25",
        "{[",
        '{"score": 20}',
        '{"score": [20, 26]}',
        '{"score": [NaN, 1]}',
        '{"score": ["20", 20]}',
        '{"score": [true, 20]}',
        '{"score": [1, 2',
    ],
)
def test_an_answer_without_two_grades_is_an_error(text: str, tmp_path: Path) -> None:
    Image.fromarray(grays(1)[0]).save(tmp_path / "a.png")
    with reward_server(lambda request, body: completion(text, finish="length")) as world:
        record = {"reference": str(tmp_path / "a.png")}
        found = EditScore(endpoint=settings(world.url))(grays(1), ["a"], [record])
    assert isinstance(found["score"][0], SampleError)
    assert "cut off" in str(found["score"][0])


def test_an_original_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    for record, words in (
        ({}, "'references' of the prompt 'a' is None"),
        ({"references": []}, "'references' of the prompt 'a' is "),
        ({"reference": str(tmp_path / "none.png")}, "cannot be read as a picture"),
        ({"reference": str(tmp_path / "broken.png")}, "cannot be read as a picture"),
    ):
        with pytest.raises(RewardInputError, match=words):
            EditScore(endpoint=settings("http://127.0.0.1:1")).check(["a"], [record])


@pytest.mark.parametrize("atoms", [None, [], "two", [["only a question"]], [["q", ""]], [["q", 2]]])
def test_atoms_are_required(atoms: object) -> None:
    with pytest.raises(RewardInputError, match="'vqa_list' of the prompt 'a dog' is"):
        GenEval2(endpoint=settings("http://127.0.0.1:1")).check(["a dog"], [{"vqa_list": atoms}])


def test_an_endpoint_without_logprobs_is_refused_before_any_work() -> None:
    with (
        reward_server(lambda request, body: completion("Yes")) as world,
        pytest.raises(RewardSetupError, match="geneval2 reward: the endpoint sends no logprobs"),
    ):
        GenEval2(endpoint=settings(world.url)).check([], [])
    for words, params in (("params.mean", {"mean": "median"}), ("params.instruction", {"instruction": "?"})):
        with pytest.raises(RewardSetupError, match=words):
            GenEval2(endpoint=settings("http://h"), **params).check([], [])
    with pytest.raises(RewardSetupError, match=r"params.train_on is 'all'; expected one of mean"):
        UnifiedReward(endpoint=settings("http://h"), train_on="all").check([], [])  # type: ignore[arg-type]


BAD: dict[str, Callable[[BaseHTTPRequestHandler, Any], Reply | None]] = {
    "500": lambda request, body: as_json({"error": "overloaded"}, 500),
    "nan": lambda request, body: (200, b'{"choices": [{"message": {"content": NaN}}]}'),
    "empty": lambda request, body: as_json({"choices": []}),
    "lies": lambda request, body: completion("Yes", top={"Yes": 2.0}),
    "mumbles": lambda request, body: completion("Yes", top={"Yes": math.log(0.2)}),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", ["geneval2", "unified-reward", "edit-score"])
def test_one_bad_answer_fails_its_sample_and_no_other(case: str, name: str, tmp_path: Path) -> None:
    Image.fromarray(grays(7)[0]).save(tmp_path / "a.png")
    record = {"vqa_list": ATOMS, "reference": str(tmp_path / "a.png")}

    def behave(request: BaseHTTPRequestHandler, body: Any) -> Reply | None:
        if picture_in(body)[0, 0, 0] == 255:
            return BAD[case](request, body)
        if name == "geneval2":
            return by_question(request, body)
        return completion(GRADES) if name == "unified-reward" else completion('{"score": [9, 16]}')

    with reward_server(behave) as world:
        reward = load(name, {"endpoint": settings(world.url)}).function
        found = reward(grays(0, 255), ["a", "b"], [record] * 2)["score"]  # type: ignore[call-overload]
    assert isinstance(found[1], SampleError)
    assert not isinstance(found[0], SampleError)


def test_in_the_pool_a_failed_atom_fails_its_sample() -> None:
    def behave(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        if "gray?" in question_in(body):
            return completion("Yes", top=logs(Yes=1.0))
        if picture_in(body)[0, 0, 0] == 255 and "dogs" in question_in(body):
            return as_json({"error": "broken"}, 400)
        return by_question(request, body)

    with reward_server(behave) as world:
        params = {"endpoint": settings(world.url)}
        with RewardPool([RewardConfig(name="geneval2", params=params, deadline_s=20)]) as pool:
            pool.check(["a", "b"], [{"vqa_list": ATOMS}] * 2)
            first, second = pool.score(grays(51, 255), ["a", "b"], [{"vqa_list": ATOMS}] * 2).samples
    assert isinstance(first, ScoredSample)
    assert first.scores["geneval2"].scored_by == f"judge-8b at {world.url}/v1"
    assert isinstance(second, RewardFailure)
    assert "400" in second.message


@pytest.mark.parametrize(
    ("read", "piece"),
    [
        (parse_grade_pair, "{"),
        (parse_grades, " "),
        (lambda answer: legibility("open" * 10, answer.text), "po"),
        (lambda answer: legibility("open", answer.text), "\u0301\u0316"),
    ],
    ids=["edit-score", "unified-reward", "ocr-vlm", "accents"],
)
def test_a_long_answer_is_read_or_refused_at_once(read: Callable[[ChatAnswer], object], piece: str) -> None:
    text = "alignment score" + (piece * 200_000)[:200_000]
    began_s = time.process_time()
    with suppress(SampleError):
        read(ChatAnswer(text, False, None, None))
    assert time.process_time() - began_s < 2
