"""The reward ``http``: what it sends to a reward service, and that a bad one gives errors, never zeros."""

from __future__ import annotations

import base64
import io
import re
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import av
import numpy as np
import pytest
from tests.unit.reward_server import Reply, as_json, decoded, drip, hang, reward_server

from spotlight_rewards.endpoints.service_scores import Http, HttpVideo
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import RewardSetupError, SampleError
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import load

IMAGES = [np.full((6, 5, 3), level, np.uint8) for level in range(5)]
PROMPTS = [f"prompt {index}" for index in range(5)]
METADATA = [{"tag": index} for index in range(5)]


def place(url: str) -> dict[str, Any]:
    return {"base_url": url, "timeout_s": 10.0, "batch_timeout_s": 15.0, "retries": 1, "backoff_s": 0.01}


def ask(url: str, limits: dict[str, Any] | None = None, **params: Any) -> dict[str, list[Any]]:
    return Http(server={**place(url), **(limits or {})}, reward="align", **{"batch_size": 2, **params})(
        IMAGES, PROMPTS, METADATA
    )


def brightness(request: BaseHTTPRequestHandler, body: Any) -> Reply:
    """A service that is as it should be."""
    if body is None:
        return as_json({"rewards": ["align", "other"]})
    levels = [int(decoded(each["history"][0]["image_b64"])[0, 0, 0]) for each in body["requests"]]
    return as_json({"results": [{"align": {"align": level, "VQ": -level}} for level in levels], "errors": []})


def test_every_picture_is_sent_with_its_prompt_and_metadata_and_gets_its_score() -> None:
    with reward_server(brightness) as server:
        Http(server=place(server.url), reward="align").check(PROMPTS, METADATA)
        found = ask(server.url)
        other = ask(server.url, score="VQ")
    assert found == {"score": [0, 1, 2, 3, 4], "VQ": [0, -1, -2, -3, -4]}
    assert other == {"score": [0, -1, -2, -3, -4], "align": [0, 1, 2, 3, 4]}
    posts = [each for each in server.seen if each[2] is not None][:3]
    assert {path for path, _, _ in posts} == {"/score"}
    sent = [each for _, _, body in posts for each in body["requests"]]
    assert sorted(len(body["requests"]) for _, _, body in posts) == [1, 2, 2]
    assert sorted(each["history"][0]["text"] for each in sent) == PROMPTS
    assert all(each["required_rewards"] == ["align"] for each in sent)
    assert all(each["history"][0]["text"] == f"prompt {each['metadata']['tag']}" for each in sent)


def one_wrong(value: object) -> Callable[[BaseHTTPRequestHandler, Any], Reply]:
    def behaviour(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        results = [{"align": {"align": 1.0}} for _ in body["requests"]]
        return as_json({"results": [value, *results[1:]], "errors": [{} for _ in results]})

    return behaviour


BAD: dict[str, tuple[Callable[[BaseHTTPRequestHandler, Any], Reply | None], str]] = {
    "hangs": (hang, "timeout_s=0.5"),
    "drips": (drip, "timeout_s=0.5"),
    "500": (lambda request, body: (500, b"out of memory"), "500 .*out of memory"),
    "html": (lambda request, body: (200, b"<html>"), "no JSON"),
    "too few": (lambda request, body: as_json({"results": [{"align": {"align": 1}}]}), "1 results for 5"),
    "none": (lambda request, body: as_json({"results": []}), "0 results for 5"),
    "no results": (lambda request, body: as_json({"rewards": [1, 2]}), "no list of results"),
    "list": (lambda request, body: as_json([]), "no list of results"),
    "nan": (lambda request, body: (200, b'{"results": [NaN]}'), "NaN"),
    "infinity": (lambda request, body: (200, b'{"results": [1e999]}'), "1 results for 5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_service_gives_no_sample_a_score(case: str) -> None:
    behaviour, expected = BAD[case]
    with reward_server(behaviour) as server:
        limits = {"timeout_s": 0.5} if "timeout_s" in expected else {}
        found = ask(server.url, limits, batch_size=5)["score"]
    assert len(found) == 5
    for each in found:
        assert isinstance(each, SampleError)
        assert re.search(expected, str(each)), each


@pytest.mark.parametrize(
    "value",
    [
        {},
        None,
        7,
        {"align": 0.5},
        {"align": {}},
        {"align": {"align": None}},
        {"align": {"align": "0.5"}},
        {"align": {"align": True}},
        {"align": {"other": 0.5}},
        {"align": {"align": 10**400}},
        {"align": {"align": 0.5, "": 0.5}},
        {"align": {"align": 0.5, "\ud800": 0.5}},
        {"other": {"align": 0.5}},
    ],
)
def test_a_bad_result_fails_its_own_sample(value: object) -> None:
    with reward_server(one_wrong(value)) as server:
        first, *others = ask(server.url, batch_size=5, score="align")["score"]
    assert isinstance(first, SampleError)
    assert others == [1.0] * 4


def test_the_score_trained_on_does_not_depend_on_the_batch() -> None:
    with reward_server(one_wrong({"align": {"VQ": 0.5}})) as server:
        found = [each for size in (1, 5) for each in ask(server.url, batch_size=size)["score"][:1]]
    assert all("params.score" in str(each) for each in found)


def test_a_service_that_repeats_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "sk-secret")
    body_sent = {"results": [{}], "errors": [{"align": "bad key sk-secret"}], "rewards": ["sk-secret"]}
    with reward_server(lambda request, body: as_json(body_sent)) as server:
        keyed = {**place(server.url), "api_key_env": "SERVICE_KEY"}
        (found,) = Http(server=keyed, reward="align")(IMAGES[:1], ["a"], [{}])["score"]
        with pytest.raises(RewardSetupError) as error:
            Http(server=keyed, reward="align").check(["a"], [{}])
    assert "[key]" in str(found)
    assert "sk-secret" not in f"{found} {error.value}"


def test_an_error_with_half_a_character_can_be_printed() -> None:
    body_sent = {"results": [{}], "errors": [{"align": "no \ud800"}]}
    with reward_server(lambda request, body: as_json(body_sent)) as server:
        found = ask(server.url, batch_size=1)["score"]
    assert all("no \\ud800" in str(each) and str(each).encode() for each in found)


def test_numbers_too_large_for_a_float_are_refused() -> None:
    with reward_server(lambda request, body: (200, b'{"results": [{"align": {"a": 1e999}}]}')) as server:
        found = ask(server.url, batch_size=1)["score"]
    assert all("finite" in str(each) for each in found)


def test_in_the_pool_an_error_of_the_service_reaches_its_sample() -> None:
    def third_fails(request: BaseHTTPRequestHandler, body: Any) -> Reply:
        results: list[object] = [{"align": {"align": 0.5}} for _ in body["requests"]]
        errors: list[object] = [{} for _ in results]
        results[2], errors[2] = {}, {"align": "ValueError('no face')"}
        return as_json({"results": results, "errors": errors})

    with reward_server(third_fails) as server:
        params = {"server": place(server.url), "reward": "align"}
        with RewardPool([RewardConfig(name="http", params=params)]) as pool:
            samples = pool.score(IMAGES, PROMPTS, METADATA).samples
    assert len(server.seen) == 1
    failed = samples[2]
    assert isinstance(failed, RewardFailure)
    assert "no face" in failed.message
    assert all(isinstance(each, ScoredSample) for index, each in enumerate(samples) if index != 2)


def test_a_reward_that_the_service_lacks_is_reported_before_any_work() -> None:
    with reward_server(brightness) as server, pytest.raises(RewardSetupError, match="'align', 'other'"):
        Http(server=place(server.url), reward="alignment").check(PROMPTS, METADATA)
    with reward_server(brightness) as server:
        url = server.url
    with pytest.raises(RewardSetupError, match="last of 2 attempts"):
        Http(server=place(url), reward="align").check(PROMPTS, METADATA)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5])
def test_batch_size(batch_size: Any) -> None:
    with pytest.raises(RewardSetupError, match=r"params\.batch_size"):
        ask("http://h", batch_size=batch_size)


def lightest(request: BaseHTTPRequestHandler, body: Any) -> Reply:
    """A service that looks at whole videos, as VideoAlign's does."""
    results: list[Any] = []
    for each in body["requests"]:
        (turn,) = each["history"]
        with av.open(io.BytesIO(base64.b64decode(turn.pop("video_b64")))) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
            fps = file.streams.video[0].average_rate
        assert list(turn) == ["text"]
        detail = {"frames": len(frames), "fps": float(fps or 0), "side": frames[0].shape[0]}
        results.append({"videoalign": {"Overall": max(map(np.mean, frames)), **detail}})
    return as_json({"results": results, "errors": []})


def test_videos_are_sent_whole() -> None:
    video = np.stack([np.full((16, 16, 3), level, np.uint8) for level in (40, 200, 90, 10, 40)])
    with reward_server(lightest) as server:
        params = {"server": place(server.url), "reward": "videoalign", "score": "Overall", "fps": 8}
        found: Any = load("http-video", params).function([video, video[0]], ["a", "b"], [{}, {}])
    assert found["score"] == pytest.approx([200, 40], abs=4)
    assert (found["frames"], found["fps"], found["side"]) == ([5, 1], [8, 8], [16, 16])
    assert [len(body["requests"]) for _, _, body in server.seen] == [1, 1]


@pytest.mark.parametrize("fps", [0, -1, None, "8", True, float("nan")])
def test_videos_need_their_frames_per_second(fps: Any) -> None:
    params = {"server": place("http://h"), "reward": "align", "fps": fps}
    with pytest.raises(RewardSetupError, match=r"http-video reward: params\.fps is .*rollout\.fps"):
        HttpVideo(**params)


def test_without_pyav_videos_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RewardSetupError, match=r"pip install 'spotlight-rewards\[video\]'"):
        HttpVideo(server=place("http://h"), reward="align", fps=8)
    Http(server=place("http://h"), reward="align").scored_by()
