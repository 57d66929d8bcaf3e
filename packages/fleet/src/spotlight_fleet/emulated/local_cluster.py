"""A Ray cluster on this machine with nodes that join, get notices and are killed: for laptops, tests, demos.

Everything listens on 127.0.0.1. A node is a raylet, Ray's two helper processes and the actors on it;
:meth:`LocalCluster.kill` SIGKILLs all of them, as a cloud takes a machine. Nothing outlives this process: see
``guard.py``.

CPU slots (the resource ``spotlight_slot``) stand for GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spotlight_fleet.emulated import guard
from spotlight_fleet.emulated.guarded import guarded
from spotlight_fleet.emulated.node_processes import (
    NodeProcesses,
    NodeRequest,
    prepare_environment,
    raised_by_ray,
    start_head,
    start_node,
)
from spotlight_fleet.ray_names import KIND_RESOURCES, SLOT, pid_file
from spotlight_rewards.base.errors import ConfigError, Problem

log = logging.getLogger("spotlight.fleet.emulated.local_cluster")

_SOCKET_PATH_MAX = 107
_SOCKET_BELOW = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.9999")
_LOG_LINES, _LOG_COLUMNS = 10, 300
_FIRST = "reserved-0"
_made = itertools.count()
_SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 100,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
    "timeout_ms_task_wait_for_death_info": 100,
}
"""A killed node is declared dead after 0.25 s; a silent one (SIGSTOP) after about 16 s instead of a minute,
long enough that a busy laptop does not look dead.
"""


class LocalClusterError(Exception):
    """A local Ray or a node failed to start or does not exist; with Ray's last log lines."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A running node, ``kind`` of :data:`KIND_RESOURCES`. One that comes back under its name has a new
    ``ray_id``.
    """

    name: str
    kind: str
    slots: int
    ray_id: str


class LocalCluster:
    """A running local Ray; create it with :func:`local_cluster`. Thread-safe.

    Args:
        id: marks its processes; see ``guard.py``.
    """

    def __init__(self, id: str, directory: Path, first: LocalNode, head: NodeProcesses) -> None:
        self.id, self._directory, self._head = id, directory, head
        self._nodes: dict[str, tuple[LocalNode, NodeProcesses, str]] = {}
        self._lock = threading.Lock()
        self._count = 1
        self._starting: set[str] = set()
        self.first = first

    @property
    def address(self) -> str:
        """HOST:PORT to join it."""
        return self._head.gcs_address

    @property
    def session(self) -> Path:
        """Directory of Ray's logs and sockets."""
        return self._head.session

    def nodes(self) -> list[LocalNode]:
        """The first node and all added ones that were not killed."""
        with self._lock:
            return [self.first, *(node for node, _, _ in self._nodes.values())]

    def add_node(self, name: str, kind: str, slots: int, resource: str = SLOT) -> LocalNode:
        """Start a node; returns when Ray can use it (about a second).

        Args:
            resource: what Ray calls its slots; ``GPU``: this machine's first ones, which other nodes may have
                too.

        Raises LocalClusterError if the name is taken or the node did not start.
        """
        with self._lock:
            if name in self._nodes or name in self._starting or name == self.first.name:
                raise LocalClusterError(
                    f"node {name!r} is there already; expected another name, or a kill before"
                )
            self._starting.add(name)
            number, self._count = self._count, self._count + 1
        mark = f"{self.id}/{number}"
        try:
            handle = start_node(_request(name, kind, slots, mark, resource), self.address)
        except raised_by_ray() as error:
            guard.end(mark)
            raise self._failed(f"node {name!r} did not start", error) from error
        finally:
            with self._lock:
                self._starting.discard(name)
        node = LocalNode(name, kind, slots, handle.id)
        with self._lock:
            self._nodes[name] = (node, handle, mark)
        return node

    def notice(self, name: str) -> None:
        """Announce a node's end as Kubernetes does: SIGTERM to its agent.

        Raises LocalClusterError if there is no such node, or no agent on it yet.
        """
        node, _, _ = self._find(name)
        file = pid_file(self.session, node.ray_id)
        try:
            os.kill(int(file.read_text(encoding="utf-8")), signal.SIGTERM)
        except (OSError, ValueError) as error:
            raise LocalClusterError(
                f"node {name!r} cannot get notice: {file} names no process that watches for SIGTERM ({error})"
            ) from None

    def kill(self, name: str) -> None:
        """SIGKILL the node and every process on it, without notice.

        Raises LocalClusterError if there is no such node, or a process does not die.
        """
        _, handle, mark = self._find(name)
        with self._lock:
            self._nodes.pop(name, None)
        left = guard.end(mark)
        handle.reap()
        if left:
            raise LocalClusterError(
                f"node {name!r}: processes {sorted(left)} survive SIGKILL (in a system call?)"
            )

    def stop(self) -> None:
        """End every process and remove the directory. Idempotent."""
        left = guard.end(f"{self.id}/")
        with self._lock:
            handles = [self._head, *(handle for _, handle, _ in self._nodes.values())]
            self._nodes.clear()
        for handle in handles:
            handle.reap()
        shutil.rmtree(self._directory, ignore_errors=True)
        if left:
            log.warning("local Ray: processes %s survive SIGKILL", sorted(left))

    def _find(self, name: str) -> tuple[LocalNode, NodeProcesses, str]:
        with self._lock:
            try:
                return self._nodes[name]
            except KeyError:
                there = ", ".join(sorted(self._nodes)) or "none"
                raise LocalClusterError(f"no node {name!r} was added; there are: {there}") from None

    def _failed(self, what: str, error: BaseException) -> LocalClusterError:
        return LocalClusterError(f"{what}: {_first_line(error)}\n{_last_words(self.session / 'logs')}")


@contextmanager
def local_cluster(slots: int) -> Iterator[LocalCluster]:
    """A local Ray with one reserved node of ``slots`` CPU slots, ended with the block.

    Join it with :func:`spotlight_fleet.connection.connected`. Remains of earlier runs are ended
    first.

    Raises:
        ConfigError: this machine is unsuitable (no /proc, a directory of another user, ports).
    """
    if not Path("/proc/self/stat").exists():
        problem = Problem(
            "fleet.address", "none, on a machine without /proc", "Linux for a local cluster",
            "Name a running Ray cluster, or set fleet.driver=inline.",
        )  # fmt: skip
        raise ConfigError("a local Ray", [problem])
    base = _base_directory()
    guard.sweep(base)
    id = f"{guard.owner_of(os.getpid())}.{next(_made)}"
    directory = base / id
    directory.mkdir(mode=0o700, exist_ok=True)
    prepare_environment()
    try:
        with guarded(id, directory):
            cluster = _first(id, directory, slots)
            try:
                yield cluster
            finally:
                cluster.stop()
    finally:
        guard.end(f"{id}/")
        shutil.rmtree(directory, ignore_errors=True)


def _first(id: str, directory: Path, slots: int) -> LocalCluster:
    request = _request(_FIRST, "reserved", slots, f"{id}/0", SLOT, _SYSTEM)
    try:
        head = start_head(request, directory)
    except raised_by_ray() as error:
        logs = next(iter(directory.glob("session_2*/logs")), directory)
        problem = Problem(
            "fleet", _first_line(error), "a local Ray that starts",
            f"It may be a port taken in between: try again. Its last words:\n{_last_words(logs)}",
        )  # fmt: skip
        raise ConfigError("a local Ray", [problem]) from error
    return LocalCluster(id, directory, LocalNode(_FIRST, "reserved", slots, head.id), head)


def _request(
    name: str, kind: str, slots: int, mark: str, slot: str, system_config: dict[str, int] | None = None
) -> NodeRequest:
    resources = {KIND_RESOURCES[kind]: 1.0} | ({slot: float(slots)} if slots else {})
    return NodeRequest(name, resources, {guard.MARK: mark}, system_config or {})


def _base_directory() -> Path:
    """A directory of this user alone, with a path short enough for sockets."""
    uid = os.getuid()
    base = Path(tempfile.gettempdir()) / f"spotlight-{uid}"
    if len(str(base)) + len("/1234567.123456789.9") + _SOCKET_BELOW > _SOCKET_PATH_MAX:
        base = Path("/tmp") / f"spotlight-{uid}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise _base_error(base, str(error)) from None
    if found.st_uid != uid or found.st_mode & 0o077 or not base.is_dir() or base.is_symlink():
        raise _base_error(base, f"owner {found.st_uid}, mode {found.st_mode & 0o777:o}")
    return base


def _base_error(base: Path, found: str) -> ConfigError:
    problem = Problem(
        "TMPDIR", f"{base}: {found}", "a directory of this user that no other can enter",
        "Remove it, or set TMPDIR to a directory of your own with a short path.",
    )  # fmt: skip
    return ConfigError("a local Ray", [problem])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _last_words(logs: Path) -> str:
    with contextlib.suppress(OSError):
        for pattern in ("raylet*", "gcs_server*"):
            files = [file for file in logs.glob(pattern) if file.stat().st_size]
            latest = max(files, key=lambda file: file.stat().st_mtime, default=None)
            if latest is not None:
                lines = latest.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                return "\n".join([f"{latest}:", *(f"  {line[:_LOG_COLUMNS]}" for line in lines)])
    return f"nothing in {logs}"
