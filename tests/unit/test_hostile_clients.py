"""Attacks on the packages' servers, real ones, by who connects to them."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.unit.dashboard_run import BEARER, served

from spotlight_dashboard.page_files import plotly_file
from spotlight_rewards.service import guarded_connections
from spotlight_rewards.service.score_body import PLAIN_BYTES_MAX, BodyError, read_body

IDLE = 1100
PICTURE = "iVBORw0KGgo" * 100


@contextmanager
def reward_server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``spotlight rewards serve``, as a user has it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "spotlight_rewards", "serve", "--reward", "jpeg_size"]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "jpeg_size at" in process.stdout.readline()
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    assert httpx2.get(f"{url}/health").status_code == 200
                    break
                except httpx2.ConnectError:
                    assert process.poll() is None
            yield url, process
        finally:
            process.terminate()


def request(metadata: object = None, image: str = PICTURE) -> dict[str, object]:
    turn = {"text": 'a "quoted" \\ image_b64', "image_b64": image}
    return {"history": [turn], "required_rewards": ["jpeg_size"], "metadata": metadata or {}}


def memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.slow
def test_a_body_of_millions_of_lists_neither_silences_the_service_nor_fills_memory() -> None:
    hostile = b'{"requests": [{"metadata": {"a": [' + b"[]," * (20 << 20) + b"[]]}}]}"
    nested = b'{"requests": ' + b"[" * (3 << 20)
    with reward_server() as (url, process), httpx2.Client(base_url=url, timeout=60) as client:
        before = memory_bytes(process.pid)
        longest_s, done = 0.0, threading.Event()

        def watch() -> None:
            nonlocal longest_s
            while not done.is_set():
                started = time.monotonic()
                assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
                longest_s = max(longest_s, time.monotonic() - started)

        with ThreadPoolExecutor() as pool:
            watching = pool.submit(watch)
            answer = client.post("/score", content=hostile)
            assert (answer.status_code, "besides the pictures" in answer.text) == (413, True)
            assert client.post("/score", content=nested).status_code == 422
            done.set()
            watching.result()
        assert longest_s < 5.0  # 18 s before; alone, it takes 0.2 s
        assert memory_bytes(process.pid) - before < 500 << 20  # the body twice; 1.7 GB before
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            assert client.post("/score", json={"requests": [request()]}, headers=headers).status_code == 403
        assert client.post("/score", json={"requests": [request()]}).status_code == 200


def test_only_pictures_may_be_large_and_are_read_as_they_are() -> None:
    large = "A" * (PLAIN_BYTES_MAX + 1)
    found = read_body(
        [json.dumps({"requests": [request({"image_b64": "other"}, large), request()]}).encode()]
    )
    assert [each.history[-1].image_b64 for each in found] == [large, PICTURE]
    assert found[0].history[-1].text == 'a "quoted" \\ image_b64'
    escaped = json.dumps({"requests": [request(image="a/b")]}).replace("a/b", "a\\/b").encode()
    assert read_body([escaped[:40], escaped[40:]])[0].history[-1].image_b64 == "a/b"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"requests": [{"metadata": "' + b"x" * PLAIN_BYTES_MAX + b'"}]}', 413),
        (b'"image_b64":"",' * (1 << 20), 413),
        (b'"image_b64"' * (1 << 20), 413),
        (b"[" * (1 << 20), 422),
        (b'{"requests": [' + b'{"history": [], "required_rewards": [' + b"0," * (1 << 20) + b"0]}]}", 422),
        (b'{"requests": [' + b"0," * (1 << 20) + b"0]}", 422),
        (b"9" * (1 << 20), 422),
        (b'{"image_b64":"', 422),
        (b"\xff", 422),
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(BodyError) as error:
        read_body([body])
    assert error.value.status == status
    assert len(str(error.value)) < 500


@pytest.mark.slow
def test_bytes_that_are_announced_and_not_sent_hold_nothing_from_others() -> None:
    announced = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 268435456\r\n\r\n{"
    with reward_server() as (url, _), ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(url)).sendall(announced)
        assert httpx2.post(f"{url}/score", json={"requests": [request()]}, timeout=60).status_code == 200


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=60)


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the other end closes it, for which this waits."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_idle_connections_leave_room_and_are_cut_off(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_connections, "SILENT_S", 0.5)
    head = b"POST /api/session HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))
    try:
        with served(places) as address, ExitStack() as stack:
            idle = [stack.enter_context(connected(address)) for _ in range(IDLE)]
            for number, each in enumerate(idle[-200:]):
                each.sendall(head[: number % (len(head) + 1)])
            assert httpx2.get(f"{address}/api/runs", headers=BEARER, timeout=30).status_code == 200
            assert all(map(is_cut_off, idle))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_does_not_read_is_cut_off(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_connections, "UNREAD_S", 0.2)
    asks = b"GET /page/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(places) as address, connected(address) as connection:
        with pytest.raises(ConnectionError):
            connection.sendall(asks * 1_000_000)
        assert httpx2.get(f"{address}/api/runs", headers=BEARER).status_code == 200


def test_who_reads_slowly_gets_the_whole(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_connections, "SILENT_S", 0.3)
    monkeypatch.setattr(guarded_connections, "UNREAD_S", 1.5)
    with served(places) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(("127.0.0.1", int(urlsplit(address).port or 0)))
        connection.sendall(
            b"GET /page/plotly.min.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        arrived = 0
        while found := connection.recv(50_000):
            arrived += len(found)
            time.sleep(0.02)
    assert arrived > plotly_file().stat().st_size


def test_metadata_may_have_keys_of_the_bodys_own() -> None:
    metadata = {"image_b64": "\u00e9", "deep": [{"image_b64": "QQ=="}, 3, "image_b64"]}
    turns = [{"text": "a", "image_b64": "QUJD"}]
    body = {"requests": [{"history": turns, "required_rewards": ["x"], "metadata": metadata}]}
    (request,) = read_body([json.dumps(body, ensure_ascii=False).encode()])
    assert request.metadata == metadata
    assert request.history[-1].image_b64 == "QUJD"


def test_metadata_nested_too_deeply_is_refused() -> None:
    deep = "[" * 900 + "]" * 900
    turns = '[{"text": "a", "image_b64": ""}]'
    request = f'{{"history": {turns}, "required_rewards": ["x"], "metadata": {{"a": {deep}}}}}'
    with pytest.raises(BodyError, match="nested too deeply"):
        read_body([f'{{"requests": [{request}]}}'.encode()])
