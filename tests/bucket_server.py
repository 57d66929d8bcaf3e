"""A real S3 server on 127.0.0.1 (moto's), which can be told to fail as services and networks do."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "spotlight-runs"
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Fault = Callable[[dict[str, Any]], str | None]


@dataclass
class BucketServer:
    """The server, and what it was asked for.

    Attributes:
        fault: of a request: ``unavailable``, ``expired``, ``skewed``, ``cut``, ``slow`` (no answer until
            ``goes_on``), the name of a header that is not heeded, or None, for each that comes.
    """

    endpoint: str
    fault: Fault = lambda environ: None
    requests: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    goes_on: threading.Event = field(default_factory=threading.Event)
    _answered: threading.Condition = field(default_factory=threading.Condition)

    def answered(self) -> None:
        with self._answered:
            self._answered.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until it holds after an answer."""
        with self._answered:
            assert self._answered.wait_for(holds, 60)

    def vanish(self) -> None:
        """Remove the bucket with all that is in it."""
        client = self.client
        for name in self.names():
            client.delete_object(Bucket=BUCKET, Key=name)
        client.delete_bucket(Bucket=BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    @property
    def address(self) -> str:
        """Of the runs of a test."""
        return f"s3://{BUCKET}/runs"

    def make_bucket(self) -> None:
        self.client.create_bucket(Bucket=BUCKET)

    def replace(self, name: str, content: bytes) -> None:
        """Write an object, past the front."""
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def names(self) -> list[str]:
        """Of all objects, without asking through the network."""
        bucket = get_backend("s3")["123456789012"]["aws"].buckets[BUCKET]
        return sorted(bucket.keys)

    def content(self, name: str) -> bytes:
        value: bytes = get_backend("s3")["123456789012"]["aws"].buckets[BUCKET].keys[name].value
        return value


@contextmanager
def bucket_server() -> Iterator[BucketServer]:
    """Serve an empty bucket within the block."""
    get_backend("s3")["123456789012"]["aws"].reset()
    moto = DomainDispatcherApplication(create_backend_app)
    with serving(server := BucketServer(""), moto):
        yield server


@contextmanager
def serving(server: BucketServer, service: Wsgi) -> Iterator[None]:
    """Serve what counts requests and fails as it is told to, before a service, within the block."""

    def counted(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return application(environ, start)
        finally:
            server.answered()

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        server.requests[environ["REQUEST_METHOD"]] += 1
        server.received_bytes += int(environ.get("CONTENT_LENGTH") or 0)
        match server.fault(environ):
            case "unavailable":
                start("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"]
            case "expired":
                start("403 Forbidden", [("Content-Type", "application/xml")])
                return [b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"]
            case "skewed":
                start("403 Forbidden", [("Content-Type", "application/xml")])
                code, said = "RequestTimeTooSkewed", "The difference between times is too large."
                return [f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()]
            case "slow":
                server.goes_on.wait()
            case "If-Match" | "If-None-Match" | "x-goog-if-generation-match" as header:
                environ.pop(f"HTTP_{header.upper().replace('-', '_')}", None)
            case "cut":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                return []
        return service(environ, start)

    front = make_server("127.0.0.1", 0, counted, threaded=True)
    server.endpoint = f"http://127.0.0.1:{front.server_port}"
    thread = threading.Thread(target=front.serve_forever, daemon=True)
    thread.start()
    try:
        server.make_bucket()
        server.requests.clear()
        yield
    finally:
        server.goes_on.set()
        front.shutdown()
        thread.join()
