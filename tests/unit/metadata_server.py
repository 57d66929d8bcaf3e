"""A metadata service on 127.0.0.1 that plays AWS, GCP and Azure over real sockets, honestly or not.

What the clouds demand is demanded (token, headers, API versions), so a client that forgets it fails here as
it would there. A test changes the public attributes while a client watches; :meth:`FakeMetadata.change` wakes
the questions that hang.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

VM = "trainer_3"


@dataclass
class FakeMetadata:
    """What the service says.

    Attributes:
        plays: the clouds it answers as.
        skew_s: its clock is ahead of this machine's by so much.
        dated: it sends a Date header.
        statuses: path -> status it answers with instead.
        bodies: path -> what it sends instead, with status 200.
        slow_s: path -> it waits so long before each answer; ``first_slow_s``: before the first one only.
        hangs: GCP: questions hang as they should.
        asked: (method, path) of every question.
    """

    plays: tuple[str, ...] = ()
    skew_s: float = 0.0
    dated: bool = True
    statuses: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    slow_s: dict[str, float] = field(default_factory=dict)
    first_slow_s: dict[str, float] = field(default_factory=dict)
    hangs: bool = True
    flavor: str = "Google"
    action: dict[str, object] | None = None
    rebalance: dict[str, object] | None = None
    preempted: bool = False
    events: list[dict[str, object]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    _tokens: set[str] = field(default_factory=set)
    _issued: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.skew_s)

    def in_s(self, seconds: float) -> str:
        """A time on this server's clock, as AWS writes it."""
        return (self.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def http_in_s(self, seconds: float) -> str:
        """A time on this server's clock, as Azure writes it."""
        return format_datetime(self.now() + timedelta(seconds=seconds), usegmt=True)

    def event(self, **changes: object) -> dict[str, object]:
        return {
            "EventId": "602d9444",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [VM],
            "EventStatus": "Scheduled",
            "NotBefore": self.http_in_s(30),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
            **changes,
        }

    def change(self, **values: object) -> None:
        with self._changed:
            for name, value in values.items():
                assert hasattr(self, name)
                setattr(self, name, value)
            self._changed.notify_all()

    def expire_tokens(self) -> None:
        self._tokens.clear()

    def count(self, path: str, method: str = "GET") -> int:
        return sum(asked == (method, path) for asked in list(self.asked))

    # -- answers ---------------------------------------------------------------------------------------

    def answer(self, request: Handler) -> None:
        parts = urlsplit(request.path)
        path, query = parts.path, parse_qs(parts.query)
        self.asked.append((request.command, path))
        time.sleep(self.slow_s.get(path, 0.0) + self.first_slow_s.pop(path, 0.0))
        if path in self.statuses:
            request.say(self.statuses[path], b"no", Location=self.url + "/elsewhere")
        elif path in self.bodies:
            request.say(200, self.bodies[path], Metadata_Flavor="Google", ETag="0")
        elif path.startswith("/latest/") and "aws" in self.plays:
            self._aws(request, path)
        elif path.startswith("/computeMetadata/v1/") and "gcp" in self.plays:
            self._gcp(request, path, query)
        elif path.startswith("/metadata/") and "azure" in self.plays:
            self._azure(request, path, query)
        else:
            request.say(404, b"")

    def _aws(self, request: Handler, path: str) -> None:
        if path == "/latest/api/token":
            lifetime = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.command != "PUT" or not lifetime.isdecimal() or not 1 <= int(lifetime) <= 21_600:
                return request.say(400, b"")
            self._issued += 1
            token = f"AQAEA-{self._issued}=="
            self._tokens.add(token)
            return request.say(200, token.encode())
        if request.headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            return request.say(401, b"")
        known = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }
        document = known.get(path)
        return request.say(404, b"") if document is None else request.say_json(document)

    def _gcp(self, request: Handler, path: str, query: dict[str, list[str]]) -> None:
        if request.headers.get("Metadata-Flavor") != "Google":
            return request.say(403, b"")
        if path != "/computeMetadata/v1/instance/preempted":
            return request.say(404, b"")
        if query.get("wait_for_change") == ["true"] and self.hangs:
            end = time.monotonic() + float(query["timeout_sec"][0])
            with self._changed:
                while query["last_etag"] == [str(int(self.preempted))] and not self._closed:
                    if (left := end - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
        text, etag = str(self.preempted).upper(), str(int(self.preempted))
        return request.say(200, text.encode(), Metadata_Flavor=self.flavor, ETag=etag)

    def _azure(self, request: Handler, path: str, query: dict[str, list[str]]) -> None:
        if request.headers.get("Metadata") != "true" or "api-version" not in query:
            return request.say(400, b"")
        if path == "/metadata/instance/compute":
            return request.say_json({"name": VM, "vmId": "13f56399"})
        if path != "/metadata/scheduledevents" or query["api-version"] != ["2020-07-01"]:
            return request.say(404, b"")
        if request.command == "POST":
            body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            for item in body["StartRequests"]:
                self.started.append(item["EventId"])
            return request.say(200, b"")
        return request.say_json({"DocumentIncarnation": 2, "Events": self.events})


class Handler(BaseHTTPRequestHandler):
    """Passes every question to the fake."""

    fake: ClassVar[FakeMetadata]

    def do_GET(self) -> None:
        try:
            self.fake.answer(self)
        except (BrokenPipeError, ConnectionResetError):  # the client has had enough
            self.close_connection = True

    do_PUT = do_POST = do_GET  # noqa: N815

    def say_json(self, document: object) -> None:
        self.say(200, json.dumps(document).encode())

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response_only(status)
        if self.fake.dated:
            self.send_header("Date", format_datetime(self.fake.now(), usegmt=True))
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # questions that hang end with the process


@contextmanager
def serving(fake: FakeMetadata, port: int = 0) -> Iterator[FakeMetadata]:
    """The fake answers within the block; afterwards connections are refused."""

    class Answering(Handler):
        pass

    Answering.fake = fake
    server = _Server(("127.0.0.1", port), Answering)
    fake.url, fake._closed = f"http://127.0.0.1:{server.server_port}", False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.change(_closed=True)
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def metadata(*plays: str, **values: object) -> Iterator[FakeMetadata]:
    """A service that plays these clouds."""
    fake = FakeMetadata(plays=plays)
    fake.change(**values)
    with serving(fake):
        yield fake
