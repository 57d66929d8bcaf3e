"""Starts the processes of one Ray node on this machine. Isolates Ray's private ``Node``.

``ray start`` costs a Python process and two CPU-seconds per node. ``ray.cluster_utils.Cluster`` publishes its
address to every other program on the machine and cannot omit the autoscaler's monitor, the log monitor, the
dashboard and prestarted workers, as is done here.

Nodes use the loopback interface only. Ray's sole switch for that is the one against firewall prompts:
``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0``. Anyone who can reach Ray can run code as this user, so access needs a
token that only this process's children know.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # its stubs lack them

_QUIET = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default Ray lowers its workers' priority
    "SPT_NOENV": "1",  # keep Ray's process renaming from overwriting the environment and our mark in it
}
_LOOPBACK = "127.0.0.1"
_STORE_BYTES = 80 << 20
"""Ray's minimum is 75 MiB. Values travel in messages and the blob store, hardly through Ray's object store.
"""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a node is started with.

    Attributes:
        environment: added to this process's.
        system_config: Ray's own settings; head node only.
    """

    name: str
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    system_config: Mapping[str, int]


class NodeProcesses:
    """A started node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def id(self) -> str:
        """Ray's id of the node."""
        return str(self._node.node_id)

    @property
    def gcs_address(self) -> str:
        """Cluster address, HOST:PORT."""
        return str(self._node.gcs_address)

    @property
    def session(self) -> Path:
        """Directory of the cluster's logs and sockets."""
        return Path(self._node.get_session_dir_path())

    def reap(self) -> None:
        """Kill what is left of its processes and reap them."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def start_head(request: NodeRequest, directory: Path) -> NodeProcesses:
    """Start a cluster's first node and the cluster's own processes. Raises whatever Ray raises."""
    with _environment(request.environment):
        node = _start(
            request,
            head=True,
            include_dashboard=False,
            dashboard_host=_LOOPBACK,
            no_monitor=True,
            temp_dir=str(directory),
            _system_config=dict(request.system_config),
        )
    node.kill_dashboard(check_alive=False)  # Ray starts it even if excluded
    return NodeProcesses(node)


def start_node(request: NodeRequest, gcs_address: str) -> NodeProcesses:
    """Start another node; returns when it is usable. Raises whatever Ray raises."""
    return NodeProcesses(_start(request, head=False, gcs_address=gcs_address, node_manager_port=0))


def prepare_environment() -> None:
    """Set the environment variables that Ray and its processes read. Call before using Ray."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Ray read these at import: make it read them again.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    services.ConsolePopen = _OfItsOwnSession
    ray_constants.ENABLE_RAY_CLUSTER = os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def raised_by_ray() -> tuple[type[BaseException], ...]:
    """Exceptions of a failed start or join. Ray has no class for it: a timeout is a bare ``Exception``."""
    return (Exception, SystemExit)


class _OfItsOwnSession(services.ConsolePopen):  # type: ignore[misc]
    """Shields Ray from signals to our process group (Ctrl-C, ``timeout``): the head decides what ends."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "start_new_session": True})


def _start(request: NodeRequest, *, head: bool, **more: object) -> Node:
    resources = dict(request.resources)
    parameters = RayParams(
        node_ip_address=_LOOPBACK,
        node_name=request.name,
        num_cpus=0,
        num_gpus=resources.pop("GPU", 0),  # Ray wants it apart
        resources=resources,
        env_vars=dict(request.environment),
        object_store_memory=_STORE_BYTES,
        min_worker_port=0,
        max_worker_port=0,
        include_log_monitor=False,
        **more,
    )
    if not head:
        parameters.dashboard_agent_listen_port = None
    return Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=False)


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Add ``extra`` to this process's environment for the block: Ray's head node accepts no other."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
