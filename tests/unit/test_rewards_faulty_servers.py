"""Every reward that asks a server, at servers with every fault: no sample ever gets a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from reward_server import Reply, as_json, completion, drip, hang, reward_server

from spotlight_rewards.registry import REWARDS
from spotlight_rewards.reward import RewardSetupError, SampleError
from spotlight_rewards.reward_registry import facts_of, load

QUICK = {"timeout_s": 0.3, "batch_timeout_s": 3.0, "retries": 0}
PATIENT = QUICK | {"timeout_s": 60.0, "batch_timeout_s": 60.0}
CALLS: Mapping[str, dict[str, Any]] = {
    "vlm-judge": {},
    "vlm-rank": {},
    "ocr-vlm": {},
    "geneval2": {},
    "unified-reward": {},
    "edit-score": {},
    "http": {"reward": "align"},
    "http-video": {"reward": "align", "fps": 8},
    "flow-factory": {},
}
"""Parameters by reward, the server's address apart."""
SERVICES = {"http", "http-video", "flow-factory"}


def lies_about_its_length(request: BaseHTTPRequestHandler, body: Any) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "5000")
    request.end_headers()
    request.wfile.write(b'{"rewards": [1.0, 1.0]}')


def redirects(request: BaseHTTPRequestHandler, body: Any) -> None:
    request.send_response(302)
    request.send_header("Location", "http://127.0.0.1:1/elsewhere")
    request.send_header("Content-Length", "0")
    request.end_headers()


def repeated(content: bytes) -> Callable[[BaseHTTPRequestHandler, Any], Reply]:
    return lambda request, body: (200, content)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


FAULTS: dict[str, Callable[[BaseHTTPRequestHandler, Any], Reply | None]] = {
    "hangs": hang,
    "drips": drip,
    "500": lambda request, body: as_json({"error": "CUDA out of memory"}, 500),
    "404": lambda request, body: as_json({"error": "no such model"}, 404),
    "closes": lambda request, body: request.connection.close(),
    "lies about its length": lies_about_its_length,
    "redirects": redirects,
    "nothing": repeated(b""),
    "null": repeated(b"null"),
    "HTML": repeated(b"<html>Welcome</html>"),
    "NaN": repeated(b'{"choices": [NaN], "results": [NaN], "rewards": [NaN], "scores": [NaN]}'),
    "NaN in words": lambda request, body: completion("nan", top={"nan": 0.0}),
    "impossible logprobs": lambda request, body: completion("", top={"Yes": 3.0, "A": 3.0}),
    "deep": repeated(nested(900)),
    "deeper than Python reads": repeated(nested(100_000)),
    "deep in its place": repeated(
        b'{"choices": [{"message": {"content": %b}}], "results": [%b], "rewards": [%b], "scores": [%b]}'
        % ((nested(800),) * 4)
    ),
    "millions of lists": repeated(b'{"results": [' + b"[]," * 2_700_000 + b"[]]}"),
    "too few": repeated(json.dumps({"choices": [], "results": [], "rewards": [], "scores": []}).encode()),
    "another's answer": repeated(json.dumps({"score": 0.0, "reward": 0.0, "ok": True}).encode()),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=pytest.mark.slow) if each == "millions of lists" else each for each in FAULTS],
)
def test_a_faulty_server_s_samples_have_no_score(fault: str, tmp_path: Path) -> None:
    picture = np.full((8, 12, 3), 7, np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    metadata = {"vqa_list": [["Is it day?", "Yes"]], "reference": str(tmp_path / "a.png")}
    asking = {name for name in REWARDS if "server" in (facts_of(name) or facts_of("ocr")).runs_on}  # type: ignore[union-attr]
    assert asking == set(CALLS)
    found: dict[str, object] = {}
    with reward_server(FAULTS[fault]) as world:
        for name, params in CALLS.items():
            key, url = ("server", world.url) if name in SERVICES else ("endpoint", f"{world.url}/v1")
            place = (
                (PATIENT if fault == "NaN in words" else QUICK)
                | {"base_url": url}
                | ({"model": "any"} if key == "endpoint" else {})
            )
            try:
                scores = load(name, {key: place, **params}).function(
                    [picture] * 2, ['a "word"'] * 2, [metadata] * 2
                )
            except RewardSetupError:
                continue
            values = scores["score"] if isinstance(scores, Mapping) else scores
            assert len(values) == 2
            if numbers := [each for each in values if not isinstance(each, SampleError)]:
                found[name] = numbers[0]
    # To read the word "nan", and to be sure that it is the answer, is no fault: both are wrong.
    assert found == ({"ocr-vlm": 0.0, "geneval2": 0.0} if fault == "NaN in words" else {})
