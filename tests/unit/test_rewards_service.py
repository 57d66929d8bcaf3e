"""Rewards served over real HTTP: what clients get, and that what goes wrong is an error, never a zero."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.types import Message
from tests.unit.reward_server import Reply, as_json, decoded, reward_server
from tests.unit.reward_world import give_up_soon

from spotlight_rewards.endpoints.flow_factory import FlowFactory
from spotlight_rewards.endpoints.json_client import png_base64
from spotlight_rewards.endpoints.service_scores import Http
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.reward import RewardSetupError, SampleError
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.service import score_service
from spotlight_rewards.service.guarded_connections import guarded
from spotlight_rewards.service.score_service import ScoreService, decode, service_app

OWN = """
import os, time
def level(images, prompts, metadata):
    for image in images:
        if image[0, 0, 0] == 255: os._exit(9)
        if image[0, 0, 0] == 254: time.sleep(60)
        if image[0, 0, 0] == 253:
            open("waiting", "w").close()
            while not os.path.exists("go"): time.sleep(0.01)
    return {"score": [float(image.mean()) for image in images],
            "asked": [float(record.get("asked", 0)) for record in metadata]}
def scored_by(): return "own level"
"""
WRITES = """
def writes(images, prompts, metadata):
    level = int(images[0][0, 0, 0])
    with open(os.environ["SCORED"], "a") as file: print(level, file=file)
    while level == 100 and not os.path.exists("left"): time.sleep(0.01)
    return [float(level)]
"""
UNSAFE = """
from spotlight_rewards.reward import RewardSetupError, reads_files

def plain(images, prompts, metadata):
    return [0.0] * len(images)

reads, jpeg_size = reads_files(lambda images, prompts, metadata: plain(images, prompts, metadata)), plain

def check(prompts, metadata):
    raise RewardSetupError("the reward is not ready")
"""
QUICK = {"timeout_s": 20.0, "batch_timeout_s": 25.0, "retries": 0}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "service_rewards.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(folder)
        configs = [
            RewardConfig(name="service_rewards:level", deadline_s=60, retries=0),
            RewardConfig(name="jpeg_size", deadline_s=60),
        ]
        pools = {each.curve: stack.enter_context(RewardPool([each])) for each in configs}
        with served(pools, "secret") as url:
            yield url


@contextmanager
def served(pools: dict[str, RewardPool], token: str, **more: int) -> Iterator[str]:
    server = uvicorn.Server(guarded(service_app(ScoreService(pools, **more), token), port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "secret")


def place(url: str, **more: Any) -> dict[str, Any]:
    return {"base_url": url, "api_key_env": "SERVICE_KEY", **QUICK, **more}


def grays(*levels: int) -> list[np.ndarray]:
    return [np.full((8, 12, 3), level, np.uint8) for level in levels]


def request_of(image_b64: str, *rewards: str) -> dict[str, Any]:
    return {"history": [{"text": "a", "image_b64": image_b64}], "required_rewards": list(rewards)}


def post(url: str, body: object) -> httpx2.Response:
    return httpx2.post(f"{url}/score", json=body, headers={"Authorization": "Bearer secret"}, timeout=30)


def test_the_http_reward_gets_the_same_scores_as_a_pool_here(service: str) -> None:
    images = grays(10, 20, 30)
    records = [{"asked": index} for index in range(3)]
    Http(server=place(service), reward="level").check(["a"], [{}])
    found = Http(server=place(service), reward="level", batch_size=2)(images, ["a"] * 3, records)
    assert found == {"score": [10.0, 20.0, 30.0], "asked": [0.0, 1.0, 2.0]}


def test_a_picture_that_kills_or_hangs_the_reward_fails_alone(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch, bytes([254]) * 24, 2.0)
    found = Http(server=place(service), reward="level")(grays(10, 255, 20, 254), ["a"] * 4, [{}] * 4)["score"]
    assert (found[0], found[2]) == (10.0, 20.0)
    assert isinstance(found[1], SampleError)
    assert isinstance(found[3], SampleError)
    assert "timeout" in str(found[3])


def test_every_sample_has_the_rewards_it_asked_for_or_the_reason(service: str) -> None:
    good = png_base64(grays(7)[0])
    bad = [good[:40], "no base64!", base64.b64encode(b"no picture").decode()]
    body = {
        "requests": [request_of(good, "level", "jpeg_size", "other"), *(request_of(b, "level") for b in bad)]
    }
    answer = post(service, body).json()
    first, *others = zip(answer["results"], answer["errors"], strict=True)
    assert first[0]["level"] == {"level": 7.0, "asked": 0.0}
    assert first[0]["jpeg_size"]["jpeg_size"] < 0
    assert list(first[1]) == ["other"]
    assert "expected one of level, jpeg_size" in first[1]["other"]
    for scores, errors in others:
        assert scores == {}
        assert "the picture cannot be read" in errors["level"]


@pytest.mark.parametrize(
    "body",
    [{}, [], {"requests": []}, {"requests": [{"history": [], "required_rewards": ["level"]}]},
     {"requests": [request_of("", "level") | {"required_rewards": []}]}],
)  # fmt: skip
def test_a_malformed_body_is_refused_whole(service: str, body: object) -> None:
    assert post(service, body).status_code == 422


def test_the_token_guards_all_but_health(service: str) -> None:
    assert httpx2.get(f"{service}/health").json() == {"status": "ok"}
    for path in ("/rewards", "/metrics"):
        assert httpx2.get(service + path).status_code == 401
    assert httpx2.post(f"{service}/score", json={}).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    answer = httpx2.get(f"{service}/rewards", headers=headers).json()
    assert answer == {"rewards": ["level", "jpeg_size"], "scored_by": {"level": "own level", "jpeg_size": ""}}
    post(service, {"requests": [request_of(png_base64(grays(1)[0]), "jpeg_size")]})
    metrics = httpx2.get(f"{service}/metrics", headers=headers).text
    assert 'spotlight_reward_pictures_total{reward="jpeg_size",outcome="scored"}' in metrics


def test_a_body_without_an_end_or_too_long_is_refused(service: str) -> None:
    headers = {"Authorization": "Bearer secret"}
    assert httpx2.post(f"{service}/score", content=iter([b"{}"]), headers=headers).status_code == 411
    address = urlsplit(service)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        lines = [
            "POST /score HTTP/1.1",
            "Host: h",
            "Authorization: Bearer secret",
            "Content-Length: 99999999999",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert b" 413 " in connection.recv(100)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        both = [*lines[:-1], "Content-Length: 2", "Transfer-Encoding: chunked"]
        connection.sendall("\r\n".join([*both, "", ""]).encode())
        assert connection.recv(100).split()[1] in (b"400", b"411")


def test_a_body_that_does_not_arrive_is_not_waited_for(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_service, "_BODY_TIMEOUT_S", 0.2)
    address = urlsplit(service)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        lines = ["POST /score HTTP/1.1", "Host: h", "Authorization: Bearer secret", "Content-Length: 200"]
        connection.sendall("\r\n".join([*lines, "", "{"]).encode())
        assert b" 408 " in connection.recv(100)


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error_of_the_service() -> None:
    sent: list[Message] = []
    parts: list[Message] = [
        {"type": "http.request", "body": b'{"requests"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    headers = [(b"host", b"localhost"), (b"content-length", b"99")]
    scope = {"type": "http", "method": "POST", "path": "/score", "headers": headers, "query_string": b""}

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(service_app(ScoreService({}))(scope, receive, send))
    assert (parts, sent) == ([], [])


def test_pictures_may_be_data_urls_of_any_kind() -> None:
    buffer = io.BytesIO()
    Image.new("L", (4, 3), 9).save(buffer, format="PNG")
    found = decode("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    assert isinstance(found, np.ndarray)
    assert found.shape == (3, 4, 3)


def in_base64(picture: Image.Image, form: str) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format=form)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_small_file_of_many_pixels_is_not_decoded(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_file = in_base64(Image.new("1", (4097, 4096)), "PNG")
    assert len(small_file) < 20_000
    assert "4097 x 4096 pixels; expected at most 16,777,216" in str(decode(small_file))
    assert "cannot be read" in str(decode(in_base64(Image.new("L", (4, 4)), "BMP")))
    monkeypatch.setattr(score_service, "REQUEST_PIXELS_MAX", 200)
    answer = post(service, {"requests": [request_of(png_base64(each), "level") for each in grays(1, 2, 3)]})
    assert [bool(each) for each in answer.json()["errors"]] == [False, False, True]
    assert "12 x 8 pixels" in answer.json()["errors"][2]["level"]


def until(path: Path) -> None:
    """Wait for a file that a reward writes."""
    while not path.exists():
        time.sleep(0.01)


def test_more_pictures_than_may_wait_are_refused_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_reward.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    hung, quick = (request_of(png_base64(grays(level)[0]), "level") for level in (253, 1))
    reward = RewardConfig(name="slow_reward:level", deadline_s=60, retries=0)
    with RewardPool([reward]) as pool, served({"level": pool}, "secret", waiting_max=1) as url:
        with ThreadPoolExecutor() as threads:
            # One request is taken whatever it holds, and until it is done no other.
            first = threads.submit(post, url, {"requests": [hung, hung]})
            until(tmp_path / "waiting")
            busy = post(url, {"requests": [quick]})
            (tmp_path / "go").touch()
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "5")
        assert "2 pictures wait here; expected at most 1" in busy.json()["detail"]
        assert first.result().status_code == 200
        assert post(url, {"requests": [quick]}).json()["results"][0]["level"]["level"] == 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"pixels_max": 150}, "96 pixels wait here; expected at most 150 with these 96"),
     ({"bytes_max": 300}, "bytes wait here; expected at most 300")],
)  # fmt: skip
def test_the_memory_of_all_requests_together_is_bounded(
    limits: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bounded_reward.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    hung, quick = (request_of(png_base64(grays(level)[0]), "level") for level in (253, 1))
    reward = RewardConfig(name="bounded_reward:level", deadline_s=60, retries=0)
    with RewardPool([reward]) as pool, served({"level": pool}, "secret", **limits) as url:
        with ThreadPoolExecutor() as threads:
            first = threads.submit(post, url, {"requests": [hung]})
            until(tmp_path / "waiting")
            busy = post(url, {"requests": [quick]})
            assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
            (tmp_path / "go").touch()
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "5")
        assert words in busy.json()["detail"]
        assert first.result().status_code == 200
        assert post(url, {"requests": [quick]}).json()["results"][0]["level"]["level"] == 1  # all given back


def test_pictures_that_a_client_gave_up_on_are_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_reward.py").write_text(OWN + WRITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCORED", str(tmp_path / "scored"))
    reward = RewardConfig(name="left_reward:writes", deadline_s=20, retries=0, batch_size=1)

    def asked(*levels: int) -> dict[str, Any]:
        return {"requests": [request_of(png_base64(image), "writes") for image in grays(*levels)]}

    async def watch(request: Any, gone: threading.Event) -> None:
        await watches(request, gone)
        (tmp_path / "left").touch()

    watches = score_service._watch
    monkeypatch.setattr(score_service, "_watch", watch)
    headers = {"Authorization": "Bearer secret"}
    with RewardPool([reward]) as pool, served({"writes": pool}, "secret") as url:
        request = httpx2.Request("POST", f"{url}/score", json=asked(100, 2, 3), headers=headers)
        lines = [f"{name}: {value}" for name, value in request.headers.items()]
        with socket.create_connection((request.url.host, request.url.port)) as client:
            client.sendall("\r\n".join(["POST /score HTTP/1.1", *lines, "", ""]).encode() + request.read())
            until(tmp_path / "scored")
        answer = post(url, asked(4)).json()
        metrics = httpx2.get(f"{url}/metrics", headers=headers).text
    assert answer["results"][0]["writes"]["writes"] == 4
    assert (tmp_path / "scored").read_text().split() == ["100", "4"]
    assert 'spotlight_reward_pictures_total{reward="writes",outcome="abandoned"} 3' in metrics


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "other machines reach, without a token"),
        (["--token-env", "NOT_SET"], "not set in the environment"),
        (["-p", "ocr.language=eng"], "expected it to begin with a served reward and a dot"),
        (["--reward", "jpeg_size"], "expected each once"),
        (["--reward", "unsafe:reads"], "'reads', which opens the files that metadata names"),
        (["--reward", "unsafe:plain"], "the reward is not ready"),
        (["--reward", "unsafe:jpeg_size"], "jpeg_size and unsafe:jpeg_size, which clients would both call"),
    ],
)
def test_the_command_refuses_what_is_unsafe_or_unclear(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsafe.py").write_text(UNSAFE)
    monkeypatch.chdir(tmp_path)
    from typer.testing import CliRunner

    from spotlight.cli.main import app

    found = CliRunner().invoke(app, ["rewards", "serve", "--reward", "jpeg_size", *arguments])
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


def test_the_command_serves(tmp_path: Path) -> None:
    with uvicorn_port() as port:
        command = [sys.executable, "-m", "spotlight.cli", "rewards", "serve", "--reward", "jpeg_size"]
        command += ["-p", "jpeg_size.quality=50", "--port", str(port)]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        assert f"jpeg_size at http://127.0.0.1:{port}" in process.stdout.readline()
        server = {"base_url": f"http://127.0.0.1:{port}", **QUICK, "retries": 6}
        (score,) = Http(server=server, reward="jpeg_size")(grays(3), ["a"], [{}])["score"]
        assert not isinstance(score, SampleError)
        assert score < 0
    finally:
        process.terminate()
        assert process.wait(20) == 0


@contextmanager
def uvicorn_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


BAD: dict[str, Callable[[BaseHTTPRequestHandler, Any], Reply | None]] = {
    "nan": lambda request, body: (200, b'{"rewards": [NaN]}'),
    "too few": lambda request, body: as_json({"rewards": []}),
    "too many": lambda request, body: as_json({"rewards": [1, 2]}),
    "text": lambda request, body: as_json({"rewards": ["0.5"]}),
    "huge": lambda request, body: as_json({"rewards": [10**400]}),
    "null": lambda request, body: as_json(None),
    "pickle": lambda request, body: (200, b"\x80\x04."),
}


@pytest.mark.parametrize("case", BAD)
def test_a_flow_factory_server_scores_or_fails_one_sample(case: str) -> None:
    def behave(request: BaseHTTPRequestHandler, body: Any) -> Reply | None:
        assert request.path == "/compute"
        level = int(decoded(body["image"][0])[0, 0, 0])
        return BAD[case](request, body) if level == 255 else as_json({"rewards": [level / 10]})

    server = {"retries": 0}
    with reward_server(behave) as world:
        reward = FlowFactory(server=server | {"base_url": world.url})
        reward.check([], []) if case == "nan" else None
        good, bad = reward(grays(5, 255), ["a", "b"], [{}] * 2)
    assert good == 0.5
    assert isinstance(bad, SampleError)


def test_a_flow_factory_server_that_is_none_is_refused_before_any_work() -> None:
    server = {"base_url": "http://127.0.0.1:1", "timeout_s": 0.5, "retries": 0}
    with pytest.raises(RewardSetupError, match="did not score a first picture"):
        FlowFactory(server=server).check(["a"], [{}])
