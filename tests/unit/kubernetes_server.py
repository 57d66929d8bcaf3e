"""A Kubernetes API server on 127.0.0.1, as far as KubeRay's worker groups are concerned.

It answers as the real one does: tokens are checked, a JSON patch is applied as a whole or not at all, one
that names an old ``resourceVersion`` conflicts, and an operator makes and ends pods as KubeRay's does: those
in ``workersToDelete`` first, then any, so that a careless patch loses a pod that works.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP = "spot"
CLUSTER_PATH = "/apis/ray.io/v1/namespaces/train/rayclusters/qwen"
Answer = tuple[int, Any]


@dataclass
class Kubernetes:
    """What the server holds.

    Attributes:
        capacity: pods that find a node; others stay pending, without an address.
        faults: taken before each request; one that returns an answer, or sleeps, stands in for the server.
        requests: (method, path), and the bodies of patches.
    """

    replicas: int = 2
    least: int = 0
    most: int = 8
    capacity: int = 100
    token: str = "first-token"
    version: int = 100
    hosts: int = 1
    autoscaler: bool = False
    pods: dict[str, str | None] = field(default_factory=dict)
    to_delete: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    made: int = 0
    faults: list[Callable[[str], Answer | None]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    patches: list[Any] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def operate(self) -> None:
        """Make and end pods until there are as many as replicas."""
        for name in self.to_delete:
            if self.pods.pop(name, "gone") != "gone":
                self.deleted.append(name)
        wanted = min(max(self.replicas, self.least), self.most)
        while len(self.pods) > wanted:
            victim = next(iter(self.pods))
            del self.pods[victim]
            self.deleted.append(victim)
        while len(self.pods) < wanted:
            self.made += 1
            running = sum(address is not None for address in self.pods.values())
            self.pods[f"pod-{self.made:02}"] = f"10.0.0.{self.made}" if running < self.capacity else None
        self.version += 1

    def lose(self, name: str) -> None:
        """A node is preempted, and its pod is not made again yet."""
        del self.pods[name]

    def cluster(self) -> Any:
        head = {"groupName": "trainer", "replicas": 1, "minReplicas": 1, "maxReplicas": 1}
        spot = {
            "groupName": GROUP, "replicas": self.replicas,
            "minReplicas": self.least, "maxReplicas": self.most,
            "numOfHosts": self.hosts, "scaleStrategy": {"workersToDelete": self.to_delete},
        }  # fmt: skip
        return {
            "metadata": {"name": "qwen", "resourceVersion": str(self.version)},
            "spec": {"workerGroupSpecs": [head, spot], "enableInTreeAutoscaling": self.autoscaler},
        }

    def answer(self, method: str, path: str, token: str, body: bytes) -> Answer:
        url = urlsplit(path)
        if token != f"Bearer {self.token}":
            return 401, {"kind": "Status", "reason": "Unauthorized", "code": 401}
        if url.path == CLUSTER_PATH and method == "GET":
            return 200, self.cluster()
        if url.path == CLUSTER_PATH and method == "PATCH":
            return self.patch(json.loads(body))
        if url.path == "/api/v1/namespaces/train/pods" and method == "GET":
            assert parse_qs(url.query)["labelSelector"] == [f"ray.io/cluster=qwen,ray.io/group={GROUP}"]
            return 200, {"items": [self.pod(name) for name in self.pods]}
        return 404, {"kind": "Status", "reason": "NotFound", "code": 404}

    def pod(self, name: str) -> Any:
        address = self.pods[name]
        status = {"phase": "Pending"} if address is None else {"phase": "Running", "podIP": address}
        made_at = f"2026-11-25T00:00:{name[-2:]}Z"
        return {"metadata": {"name": name, "creationTimestamp": made_at}, "status": status}

    def patch(self, changes: Any) -> Answer:
        self.patches.append(changes)
        found: dict[str, Any] = {}
        for change in changes:
            if change["path"] == "/metadata/resourceVersion" and change["value"] != str(self.version):
                return 409, {"kind": "Status", "reason": "Conflict", "code": 409}
            found[change["path"].rpartition("/")[2]] = change["value"]
            assert change["path"] == "/metadata/resourceVersion" or "/workerGroupSpecs/1/" in change["path"]
        if not self.least <= found["replicas"] <= self.most:
            return 422, {"kind": "Status", "reason": "Invalid", "code": 422}
        self.replicas, self.to_delete = found["replicas"], found["scaleStrategy"]["workersToDelete"]
        self.operate()
        return 200, self.cluster()


@contextmanager
def serving_kubernetes(state: Kubernetes, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond("GET")

        def do_PATCH(self) -> None:
            self.respond("PATCH")

        def respond(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with state.lock:
                state.requests.append((method, self.path))
                if method == "PATCH":
                    state.kinds.append(self.headers["Content-Type"])
                fault = state.faults.pop(0) if state.faults else None
            found = fault(method) if fault is not None else None
            with state.lock:
                if found is None:
                    found = state.answer(method, self.path, self.headers.get("Authorization", ""), body)
            data = found[1] if isinstance(found[1], bytes) else json.dumps(found[1]).encode()
            try:
                self.send_response(found[0])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def says(status: int, body: Any = None) -> Callable[[str], Answer]:
    """A fault: an answer."""
    return lambda _: (status, {"message": "out of order"} if body is None else body)


def slow(seconds: float) -> Callable[[str], Answer | None]:
    """A fault: the answer comes late."""

    def wait(_: str) -> None:
        time.sleep(seconds)

    return wait


def meanwhile(change: Callable[[], None]) -> Callable[[str], Answer | None]:
    """A fault: something else happens first."""

    def do(_: str) -> None:
        change()

    return do
