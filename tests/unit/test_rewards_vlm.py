"""Rewards that ask a VLM: what they score, and that a bad server gives an error and never a zero."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from tests.unit.reward_server import (
    Reply,
    as_json,
    completion,
    drip,
    hang,
    picture_in,
    question_in,
    reward_server,
)

from spotlight_rewards import reward_registry
from spotlight_rewards.endpoints.chat import ChatEndpoint
from spotlight_rewards.endpoints.json_client import BYTES_MAX, parse_server
from spotlight_rewards.endpoints.ocr_vlm import NO_TEXT, OcrVlm, reading
from spotlight_rewards.endpoints.vlm_judge import VlmJudge, parse_grade, probability_of_yes
from spotlight_rewards.frames import OverFrames
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import AwayError, RewardContext, RewardInputError, RewardSetupError, SampleError
from spotlight_rewards.reward_config import RewardConfig

YES = {"Yes": math.log(0.7), " yes": math.log(0.1), "No": math.log(0.15), "Maybe": math.log(0.05)}


def grays(*levels: int) -> list[np.ndarray]:
    return [np.full((8, 12, 3), level, np.uint8) for level in levels]


def settings(url: str, **more: Any) -> dict[str, Any]:
    quick = {"timeout_s": 10.0, "batch_timeout_s": 15.0, "retries": 1, "backoff_s": 0.01}
    return {"base_url": f"{url}/v1", "model": "judge-8b", **quick, **more}


def judge(url: str, levels: tuple[int, ...] = (0,), *, endpoint: dict[str, Any] | None = None, **params: Any):
    images = grays(*levels)
    prompts = [f'a sign "{level}"' for level in levels]
    place = settings(url, **(endpoint or {}))
    return VlmJudge(endpoint=place, **params)(images, prompts, [{}] * len(images))


def test_yes_is_summed_over_its_spellings() -> None:
    with reward_server(lambda request, body: completion("Yes", top=YES)) as server:
        found = judge(server.url)
    assert found["score"] == [pytest.approx(0.8)]
    assert found["no"] == [pytest.approx(0.15)]
    path, _, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["logprobs"], body["temperature"]) == ("judge-8b", True, 0)
    assert 'a sign "0"' in question_in(body)
    assert (picture_in(body) == grays(0)[0]).all()


def test_scores_keep_the_order_of_pictures_whatever_the_order_of_answers() -> None:
    answered = threading.Event()

    def grade_by_level(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        level = int(picture_in(body)[0, 0, 0])
        if level == 3:
            assert answered.wait(60)  # the first is answered after the third, which is under way beside it
        if level == 0:
            answered.set()
        return completion(f"{level}/10")

    levels = (3, 10, 0, 7, 5, 1)
    with reward_server(grade_by_level) as server:
        found = judge(server.url, levels, answer="grade", endpoint={"concurrency": 3})
    assert found["grade"] == list(levels)
    assert found["score"] == [level / 10 for level in levels]
    assert server.most_under_way <= 3


def test_tokens_and_their_price_are_curves() -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 10}
    prices = {"usd_per_million_prompt_tokens": 2.0, "usd_per_million_completion_tokens": 50.0}
    with reward_server(lambda request, body: completion("7", usage=usage)) as server:
        found = judge(server.url, answer="grade", endpoint=prices)
        free = judge(server.url, answer="grade")
        server.behaviour = lambda request, body: as_json({"choices": [{"message": {"content": "7"}}]})
        with pytest.raises(RewardSetupError, match="Remove the prices"):
            judge(server.url, answer="grade", endpoint={**prices, "concurrency": 3})  # has not answered yet
        silent = judge(server.url, answer="grade")
    assert found["prompt_tokens"] == [1000.0]
    assert found["completion_tokens"] == [10.0]
    assert found["cost_usd"] == [pytest.approx(0.0025)]
    assert "cost_usd" not in free
    assert set(silent) == {"score", "grade"}


def test_without_logprobs_the_remedy_is_named_before_any_work() -> None:
    with (
        reward_server(lambda request, body: completion("Yes")) as server,
        pytest.raises(RewardSetupError, match=r"Set params\.answer: grade"),
    ):
        VlmJudge(endpoint=settings(server.url)).check(["a cat"], [{}])


BAD: dict[str, tuple[Callable[[BaseHTTPRequestHandler, Any], Reply | None], str]] = {
    "hangs": (hang, "timeout_s=0.5"),
    "drips": (drip, "timeout_s=0.5"),
    "500": (lambda request, body: (500, b"CUDA out of memory"), "500 .*CUDA.*last of 2 attempts"),
    "429": (lambda request, body: (429, b"slow down"), "429"),
    "400": (lambda request, body: as_json({"error": "context too long"}, 400), "400.*context too long"),
    "closes": (lambda request, body: request.connection.close(), "last of 2 attempts"),
    "html": (lambda request, body: (200, b"<html>Welcome</html>"), "no JSON"),
    "nan": (lambda request, body: (200, b'{"choices": NaN}'), "NaN"),
    "deep": (lambda request, body: (200, b"[" * 100_000), "no JSON"),
    "huge": (lambda request, body: (200, b" " * (BYTES_MAX + 1)), "sent more"),
    "no choices": (lambda request, body: as_json({"choices": []}), "expected choices"),
    "empty": (lambda request, body: completion(""), "is empty"),
    "empty, cut off": (lambda request, body: completion("", finish="length"), "expected choices"),
    "no list of candidates": (
        lambda request, body: as_json(
            {"choices": [{"message": {"content": "7"}, "logprobs": {"content": [{"top_logprobs": 5}]}}]}
        ),
        "cannot be read",
    ),
    "a logprob too large": (lambda request, body: completion("7", top={"7": -(10**400)}), "cannot be read"),
    "tokens too large": (lambda request, body: completion("7", usage={"prompt_tokens": 10**400}), "usage"),
    "null": (lambda request, body: completion(None), "expected choices"),
    "list": (lambda request, body: as_json([1, 2]), "expected choices"),
    "no number": (lambda request, body: completion("It is lovely."), "It is lovely"),
    "two numbers": (lambda request, body: completion("7 or 8"), "7 or 8"),
    "nan in words": (lambda request, body: completion("nan"), "'nan'"),
    "too high": (lambda request, body: completion("11"), "'11'"),
    "other scale": (lambda request, body: completion("4/5"), "4/5"),
    "cut off": (lambda request, body: completion("1", finish="length"), "cut off"),
    "tokens": (lambda request, body: completion("7", usage={"prompt_tokens": -1}), "usage"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_an_error_and_the_next_sample_is_scored(case: str) -> None:
    behaviour, expected = BAD[case]

    def first_is_bad(request: BaseHTTPRequestHandler, body: Any) -> Reply | None:
        return behaviour(request, body) if picture_in(body)[0, 0, 0] == 0 else completion("7")

    with reward_server(first_is_bad) as server:
        if "timeout_s" in expected:  # a limit that is short for the one would be short for the other
            (bad,) = judge(server.url, (0,), endpoint={"timeout_s": 0.5}, answer="grade")["score"]
            (good,) = judge(server.url, (9,), answer="grade")["score"]
        else:
            bad, good = judge(server.url, (0, 9), answer="grade")["score"]
    assert good == 0.7
    assert isinstance(bad, SampleError)
    assert re.search(expected, str(bad)), bad


@pytest.mark.parametrize(
    "top",
    [
        {"The": math.log(0.9), "Yes": math.log(0.05)},  # a model that does not answer the question
        {"Yes": 0.5},
        {"Yes": math.log(0.9), "No": math.log(0.9)},
    ],
)
def test_logprobs_that_say_nothing_or_cannot_be_true(top: dict[str, float]) -> None:
    with reward_server(lambda request, body: completion("Yes", top=top)) as server:
        (found,) = judge(server.url)["score"]
    assert isinstance(found, SampleError)


def test_a_server_that_recovers_costs_only_time() -> None:
    attempts = iter([(503, b"loading"), (429, b""), completion("10")])
    with reward_server(lambda request, body: next(attempts)) as server:
        assert judge(server.url, answer="grade", endpoint={"retries": 2})["score"] == [1.0]


def test_a_whole_batch_has_a_deadline() -> None:
    limits = {"timeout_s": 60, "batch_timeout_s": 0.3, "concurrency": 2}
    with reward_server(hang) as server:
        found = judge(server.url, (0, 1, 2, 3), answer="grade", endpoint=limits)["score"]
    assert all("batch_timeout_s=0.3" in str(each) for each in found)


def test_who_answers_none_of_a_batch_is_away_also_to_requests_that_waited_for_their_turn() -> None:
    limits = {"timeout_s": 1.0, "batch_timeout_s": 1.5, "concurrency": 1, "retries": 0}
    with reward_server(hang) as server:
        found = judge(server.url, (0, 1, 2), answer="grade", endpoint=limits)["score"]
    assert ["batch_timeout_s" in str(each) for each in found] == [False, True, True]
    assert all(isinstance(each, AwayError) for each in found)


def test_a_server_that_freezes_in_the_middle_of_a_batch_is_away_to_what_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = asyncio.wait

    async def until_the_first(tasks: list[asyncio.Task[Any]], **_: Any) -> None:
        await wait(tasks[:1])

    monkeypatch.setattr(asyncio, "wait", until_the_first)  # the batch's time is over with the first answer
    limits = {"concurrency": 1, "retries": 0}
    answered = iter([completion("10")])
    with reward_server(lambda request, body: next(answered, None) or hang(request, body)) as server:
        first, *others = judge(server.url, (0, 1, 2), answer="grade", endpoint=limits)["score"]
    assert first == 1.0
    assert all(isinstance(each, AwayError) for each in others)


def test_nobody_there() -> None:
    with reward_server(hang) as server:
        url = server.url
    (found,) = judge(url, answer="grade")["score"]
    assert "last of 2 attempts" in str(found)
    with pytest.raises(RewardSetupError, match="did not answer"):
        VlmJudge(endpoint=settings(url)).check(["a cat"], [{}])


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_would_fail_for_every_sample_stops_at_once(status: int) -> None:
    with reward_server(lambda request, body: (status, b"no")) as server, pytest.raises(RewardSetupError):
        judge(server.url, tuple(range(20)), endpoint={"concurrency": 1})
    assert len(server.seen) == 1


def test_the_key_is_sent_and_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-very-secret-0123"
    monkeypatch.setenv("JUDGE_KEY", key)
    caplog.set_level(0)

    def repeats_the_key(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        return 401, f"Incorrect API key provided: {key}".encode()

    with reward_server(repeats_the_key) as server, pytest.raises(RewardSetupError, match=r"\[key\]") as error:
        judge(server.url, endpoint={"api_key_env": "JUDGE_KEY"})
    assert server.seen[0][1]["Authorization"] == f"Bearer {key}"
    assert "JUDGE_KEY" in str(error.value)
    assert key not in str(error.value) + caplog.text
    with reward_server(lambda request, body: completion(f"your key is {key}")) as server:
        (found,) = judge(server.url, answer="grade", endpoint={"api_key_env": "JUDGE_KEY"})["score"]
    assert "[key]" in str(found)
    assert key not in str(found)
    monkeypatch.setenv("JUDGE_KEY", f"{key}\nX-Other: 1")
    with pytest.raises(RewardSetupError) as error:
        VlmJudge(endpoint=settings("http://h", api_key_env="JUDGE_KEY")).scored_by()
    assert key not in str(error.value)


@pytest.mark.parametrize("key", ["EMPTY", "token", "1", "choices"])
def test_a_key_that_is_also_a_word_of_the_answer_leaves_it_as_it_is(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with reward_server(lambda request, body: completion("EMPTY", top={"Yes": -0.1})) as server:
        place = settings(server.url, api_key_env="JUDGE_KEY")
        found = OcrVlm(endpoint=place)(grays(0), ['a bin "EMPTY"'], [{}])
        judged = VlmJudge(endpoint=place)(grays(0), ["a bin"], [{}])
    assert (found["score"], found["prompt_tokens"]) == ([1.0], [100.0])
    assert judged["score"] == [pytest.approx(math.exp(-0.1))]


@pytest.mark.parametrize(
    "key", ["sk-ab/cd+ef", 'sk-"qu\'ote"d', "sk-back\\sl\\\\ash", "token", "sk-plain.0*"]
)
@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_key_is_cut_out_however_it_is_escaped(
    key: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    escaped = "".join(f"\\u{ord(each):04X}" for each in key)
    slashed = json.dumps(key)[1:-1].replace("/", "\\/")
    for spelled in (json.dumps(key)[1:-1], slashed, escaped, key[:3] + escaped[18:]):
        for padding in ("", "x" * 590):
            text = f'{{"choices": [{{"message": {{"content": "{padding}{spelled}{padding}"}}}}]}}'
            with reward_server(lambda request, body, text=text: (status, text.encode())) as server:
                place = {"api_key_env": "JUDGE_KEY", "retries": 0}
                (found,) = judge(server.url, answer="grade", endpoint=place)["score"]
            for form in (key, repr(key)[1:-1], spelled, repr(spelled)[1:-1]):
                assert form not in str(found), found
            assert len(str(found)) < 1100


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_has_answered_can_only_fail_single_samples(status: int) -> None:
    def one_refused(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        return (status, b"no") if picture_in(body)[0, 0, 0] == 1 else completion("7")

    with reward_server(one_refused) as server:
        judge(server.url, answer="grade")
        good, bad = judge(server.url, (0, 1), answer="grade")["score"]
    assert good == 0.7
    assert str(status) in str(bad)


def test_one_answer_without_logprobs_or_usage_fails_its_sample() -> None:
    def one_silent(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        level = picture_in(body)[0, 0, 0]
        if level == 1:
            return completion("Yes")
        if level == 2:
            return as_json({"choices": [{"message": {"content": "Yes"}}]})
        return completion("Yes", top={"Yes": -0.1})

    prices = {"usd_per_million_prompt_tokens": 1.0}
    with reward_server(one_silent) as server:
        judge(server.url, endpoint=prices)
        good, *bad = judge(server.url, (0, 1, 2), endpoint=prices)["score"]
    assert good == pytest.approx(math.exp(-0.1))
    assert "logprobs" in str(bad[0])
    assert "Remove the prices" in str(bad[1])


@given(st.sampled_from(["[No text]", "no text.", " [NO  TEXT].\n", "[no text]", "", "\n"]))
def test_no_text_is_an_empty_reading_in_any_spelling(answer: str) -> None:
    assert reading(answer) == ""


@pytest.mark.parametrize("text", ["No Text", "[no text]", "NO TEXT."])
def test_a_text_that_reads_as_none_is_refused(text: str) -> None:
    prompts, place = [f'a sign "{text}"'], settings("http://127.0.0.1:1")
    with pytest.raises(RewardInputError, match=r"ocr-vlm reward: .*the score could only be 0"):
        OcrVlm(endpoint=place).check(prompts, [{}])
    with pytest.raises(RewardInputError):
        OcrVlm(endpoint=place)(grays(0), prompts, [{}])


def test_an_empty_transcription_is_read_and_a_model_that_reads_nothing_is_refused() -> None:
    with reward_server(lambda request, body: completion("")) as server:
        found = OcrVlm(endpoint=settings(server.url))(grays(0), ['a sign "OPEN"'], [{}])
        with pytest.raises(RewardSetupError, match="read nothing"):
            OcrVlm(endpoint=settings(server.url)).check(['a sign "OPEN"'], [{}])
    assert found["score"] == [0.0]
    sign = picture_in(server.seen[-1][2])
    assert sign.min() == 0
    assert sign.max() == 255
    assert reading("There is [no text] here") != ""
    with reward_server(lambda request, body: completion("", finish="length")) as server:
        (cut,) = OcrVlm(endpoint=settings(server.url))(grays(0), ['a sign "OPEN"'], [{}])["score"]
    assert isinstance(cut, SampleError)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ({"base_url": "http://h"}, "model"),
        ({"base_url": "ftp://h", "model": "m"}, "base_url"),
        ({"base_url": "http://user:pw@h", "model": "m"}, "api_key_env"),
        ({"base_url": "http://h?key=1", "model": "m"}, "api_key_env"),
        ({"base_url": "http://h:99999", "model": "m"}, "not a URL"),
        ({"base_url": "http://h", "model": "m", "timeout": 3}, r"endpoint\.timeout"),
        ({"base_url": "http://h", "model": "m", "timeout_s": 0}, r"endpoint\.timeout_s"),
        ({"base_url": "http://h", "model": "m", "api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ("http://h", "params.endpoint"),
    ],
)
def test_settings_are_strict_and_name_the_key(endpoint: Any, words: str) -> None:
    with pytest.raises(RewardSetupError, match=words) as error:
        VlmJudge(endpoint=endpoint).scored_by()
    assert "pw@" not in str(error.value)


@pytest.mark.parametrize("name", ["vlm-judge", "ocr-vlm", "geneval2", "unified-reward", "edit-score", "http"])
def test_a_batch_may_not_take_longer_than_the_call_and_costs_add(name: str) -> None:
    place = {"base_url": "http://h", "batch_timeout_s": 40}
    params = {"server": place, "reward": "r"} if name == "http" else {"endpoint": {**place, "model": "m"}}
    reward = reward_registry.load(name, params, context=RewardContext(40))
    assert isinstance(reward.function, OverFrames)
    assert "cost_usd" in reward.function.added_curves
    assert reward.scored_by is not None
    assert "http://h" in reward.scored_by()
    with (
        pytest.raises(RewardSetupError, match=r"batch_timeout_s is 40.*deadline_s, 30"),
        RewardPool([RewardConfig(name=name, deadline_s=30, params=params)]),
    ):
        pass


@pytest.mark.parametrize("field", sorted(set(ChatEndpoint.model_fields) | {"api_key"}))
def test_messages_show_the_value_found_unless_it_may_hold_a_key(field: str) -> None:
    value = ["sk-found"]
    place = {"base_url": "http://h", "model": "m", field: value}
    with pytest.raises(RewardSetupError, match=rf"endpoint\.{field}") as error:
        parse_server(ChatEndpoint, "params.endpoint", place)
    assert (repr(value) in str(error.value)) == (field not in ("base_url", "extra_body", "api_key"))


@pytest.mark.parametrize("params", [{"answer": "maybe"}, {"scale": [1]}, {"scale": [5, 1]}, {"scale": "0-5"}])
def test_settings_of_the_judge(params: dict[str, Any]) -> None:
    with pytest.raises(RewardSetupError, match=f"params.{next(iter(params))}"):
        judge("http://h", **params)


@given(st.floats(0, 1), st.floats(0, 1))
def test_probabilities_are_read_or_refused_never_made_up(yes: float, no: float) -> None:
    tokens = {"▁YES": yes * (1 - no), "No.": no, "x": 0.0}
    if yes * (1 - no) + no < 0.5:
        with pytest.raises(SampleError):
            probability_of_yes(tokens)
    else:
        assert probability_of_yes(tokens) == (yes * (1 - no), no)


@given(st.integers(1, 5), st.sampled_from(["{}", " {}\n", "Score: {}", "{}/5", "{}.0", "**{}**", "{}."]))
def test_grades_are_read_in_their_usual_forms(grade: int, form: str) -> None:
    assert parse_grade(form.format(grade), 1, 5) == grade


@settings_of_hypothesis(max_examples=40)
@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    try:
        assert 1 <= parse_grade(text, 1, 5) <= 5
    except SampleError:
        pass
    else:
        assert any(digit.isdecimal() for digit in text)


def test_ocr_scores_what_the_model_reads_like_ocr() -> None:
    texts = ["Closed", "The sign:\nO P E N", "OPNE", NO_TEXT]

    def read(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        assert "OPEN" not in question_in(body)  # it must not be told what to read
        level = int(picture_in(body)[0, 0, 0]) % 176  # the sign of the first question hangs on a gray wall
        return completion(texts[level], finish="length" if level == 2 else "stop")

    with reward_server(read) as server:
        found = OcrVlm(endpoint=settings(server.url))(grays(0, 1, 2, 3), ['a sign "OPEN"'] * 4, [{}] * 4)
        OcrVlm(endpoint=settings(server.url)).check(['a sign "OPEN"'], [{}])
        with pytest.raises(RewardInputError, match="double"):
            OcrVlm(endpoint=settings(server.url)).check(["a sign"], [{}])
    assert found["score"] == [0.0, 1.0, 0.5, 0.0]
    assert found["exact"] == [0.0, 1.0, 0.0, 0.0]
    assert found["cut_off"] == [0.0, 0.0, 1.0, 0.0]
    assert found["prompt_tokens"] == [100.0] * 4


def test_in_the_pool_one_sample_fails_with_its_reason_and_no_question_is_asked_twice() -> None:
    def second_is_bad(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        return completion("lovely" if picture_in(body)[0, 0, 0] == 1 else "5")

    with reward_server(second_is_bad) as server:
        spec = RewardConfig(name="vlm-judge", params={"endpoint": settings(server.url), "answer": "grade"})
        with RewardPool([spec]) as pool:
            batch = pool.score(grays(0, 1, 2), ["a", "b", "c"], [{}] * 3)
            video = np.stack(grays(2, 1, 0))
            (of_video,) = pool.score([video], ["a"], [{}]).samples
    first, second, third = batch.samples
    assert isinstance(first, ScoredSample)
    assert isinstance(third, ScoredSample)
    assert first.curves()["vlm-judge"] == 0.5
    assert first.curves()["vlm-judge/prompt_tokens"] == 100
    assert first.scores["vlm-judge"].scored_by == f"judge-8b at {server.url}/v1"
    assert isinstance(second, RewardFailure)
    assert "lovely" in second.message
    assert isinstance(of_video, RewardFailure)
    assert len(server.seen) == 6


def test_parsed_settings_pass() -> None:
    endpoint = ChatEndpoint(base_url="http://h/v1/", model="m")
    assert parse_server(ChatEndpoint, "x", endpoint) is endpoint
    assert endpoint.base_url == "http://h/v1"
