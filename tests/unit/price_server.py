"""A small HTTP server on 127.0.0.1 that answers as it is told: prices in tests come from real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    answer: ClassVar[Answer]
    paths: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        try:
            type(self).answer(self)
        except (BrokenPipeError, ConnectionResetError):  # the client has had enough
            self.close_connection = True

    def say(self, body: str | bytes, status: int = 200, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def trickle(self, until_s: float) -> None:
        """Send a header byte by byte, and never the end of it."""
        end = time.monotonic() + until_s
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while time.monotonic() < end:
            self.wfile.write(b"a")
            self.wfile.flush()
            time.sleep(0.02)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """The address, and the paths asked for so far."""
    paths: list[str] = []

    class Answering(Handler):
        pass

    Answering.answer, Answering.paths = staticmethod(answer), paths
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
