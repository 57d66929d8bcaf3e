"""A real HTTP server on this machine that plays a VLM endpoint and a reward service, well and badly."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

Reply = tuple[int, bytes]
Behaviour = Callable[[BaseHTTPRequestHandler, Any], "Reply | None"]
"""Gets the request and its JSON; returns status and body, or None if it has written (or will not write)."""


@dataclass
class RewardServerWorld:
    """What the server does, and what it saw."""

    behaviour: Behaviour
    url: str = ""
    seen: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def reward_server(behaviour: Behaviour) -> Iterator[RewardServerWorld]:
    """Serve on a free port of 127.0.0.1."""
    world = RewardServerWorld(behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = read_body(self.rfile.read(length))
            with world.lock:
                world.seen.append((self.path, dict(self.headers), body))
                world.under_way += 1
                world.most_under_way = max(world.most_under_way, world.under_way)
            try:
                try:
                    reply = world.behaviour(self, body)
                finally:
                    with world.lock:  # before the answer, upon which the client may ask again at once
                        world.under_way -= 1
                if reply is not None:
                    send(self, *reply)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client gave up, as it should

        do_GET = do_HEAD = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield world
    finally:
        world.over.set()
        server.shutdown()
        server.server_close()


def read_body(sent: bytes) -> Any:
    """As JSON, else as it is; None: nothing."""
    try:
        return json.loads(sent) if sent else None
    except ValueError:
        return sent


def send(request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def as_json(value: object, status: int = 200) -> Reply:
    return status, json.dumps(value).encode()


def completion(
    text: str | None, *, top: dict[str, float] | None = None, finish: str = "stop", usage: object = None
) -> Reply:
    """A chat completion, in the form of vLLM; ``top``: logprobs of the first token's candidates."""
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if top is not None:
        candidates = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
        choice["logprobs"] = {"content": [{**candidates[0], "top_logprobs": candidates}]}
    counted = {"prompt_tokens": 100, "completion_tokens": 1} if usage is None else usage
    return as_json({"choices": [choice], "usage": counted})


def picture_in(body: Any) -> np.ndarray:
    """The picture of a chat request."""
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    return decoded(url.removeprefix("data:image/png;base64,"))


def decoded(image_b64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image_b64))))


def question_in(body: Any) -> str:
    return str(body["messages"][0]["content"][1]["text"])


def hang(request: BaseHTTPRequestHandler, body: Any) -> None:
    """Answers long after anyone waits."""
    time.sleep(1.5)


def drip(request: BaseHTTPRequestHandler, body: Any) -> None:
    """Always sends something, and never ends: no pause between bytes is ever long."""
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    for _ in range(40):
        request.wfile.write(b" ")
        request.wfile.flush()
        time.sleep(0.04)
