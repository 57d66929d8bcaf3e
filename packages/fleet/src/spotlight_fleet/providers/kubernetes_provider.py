"""Spot nodes as pods of a KubeRay worker group: the number of its replicas, by the Kubernetes API.

Nodes are ended by name (``scaleStrategy.workersToDelete``), in the same patch that lowers the number: lowered
alone, the operator would delete any pod. The names stay until the next patch, as Ray's own autoscaler leaves
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import PositiveFloat, field_validator

from spotlight_fleet.providers.json_api import LOOPBACK, JsonApi, RefusedError
from spotlight_fleet.providers.node_provider import (
    ClusterNode,
    NodeProviderKind,
    ProviderError,
    ProviderSetting,
)
from spotlight_rewards.base.strict_section import StrictSection

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONFLICT = 409
_CONFLICTS_MAX = 5
_REMEDIES = {
    401: "The service account's token is refused: see fleet.target.params.account.",
    403: "Give the head's service account the role of launch/kuberay-scaling.yaml.",
    404: "See fleet.target.params.cluster and namespace: `kubectl get rayclusters` lists them.",
    422: "See that the group's minReplicas and maxReplicas allow for it.",
}


class KubernetesSettings(StrictSection):
    """The worker group, and how the API is reached from the head's pod."""

    group: str = "spot"
    """Name of the worker group whose replicas are spot nodes."""
    cluster: str | None = None
    """Name of the RayCluster; default: the environment variable RAY_CLUSTER_NAME."""
    namespace: str | None = None
    """Its namespace; default: that of the service account."""
    server: str | None = None
    """Address of the API; default: the pod's own (KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT_HTTPS)."""
    account: Path = _ACCOUNT
    """Folder with the service account's ``token``, ``ca.crt`` and ``namespace``."""
    timeout_s: PositiveFloat = 10.0
    """Limit for one attempt of a call; there are four."""

    @field_validator("server")
    @classmethod
    def _keeps_the_token(cls, server: str | None) -> str | None:
        if server is not None:
            try:
                parts = urlsplit(server)
                safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
                plain = bool(parts.hostname) and not (parts.username or parts.query or parts.fragment)
            except ValueError:
                safe = plain = False
            if not (safe and plain):
                raise ValueError("expected https://HOST[:PORT], or http:// of this machine (kubectl proxy)")
        return server


@dataclass(frozen=True, slots=True)
class _WorkerGroup:
    """What the cluster says of the group."""

    index: int
    spec: Mapping[str, Any]
    version: str

    def number(self, key: str, default: int) -> int:
        value = self.spec.get(key)
        return default if value is None else int(value)

    @property
    def least(self) -> int:
        return self.number("minReplicas", 0)

    @property
    def most(self) -> int:
        return self.number("maxReplicas", 2**31 - 1)

    @property
    def replicas(self) -> int:
        """As the operator reads it."""
        return min(max(self.number("replicas", 0), self.least), self.most)


class KubernetesProvider:
    """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings

    def asked(self, present: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        with self._reading():
            return self._group().replicas

    def ask(self, nodes: int, present: Sequence[ClusterNode], leaving: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        with self._reading():
            return self._patch(nodes, {node.address for node in present}, {node.address for node in leaving})

    def close(self) -> None:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        with self._reading():
            self._patch(self._group().least, set(), set())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ProviderError(
                f"{self._where}: the answer cannot be read ({type(error).__name__}: {error}); expected "
                "objects of ray.io/v1 and pods. See that the address is the API server's own."
            ) from error

    def _patch(self, nodes: int, present: set[str], leaving: set[str]) -> int:
        for _ in range(_CONFLICTS_MAX):
            group = self._group()
            now = group.replicas
            self._require_allowed(group, nodes)
            ending, without = ([], 0) if nodes >= now else self._to_end(now, nodes, present, leaving)
            nodes_then = nodes if nodes >= now else now - len(ending) - without
            if nodes_then == now:
                return now
            try:
                self._call(
                    "PATCH", self._path, _changes(group, nodes_then, ending), "application/json-patch+json"
                )
            except RefusedError as error:
                if error.status == _CONFLICT:
                    continue  # another has changed the cluster meanwhile: look again
                raise self._explained(error) from None
            return nodes_then
        raise ProviderError(
            f"{self._where}: changed by others {_CONFLICTS_MAX} times while it was changed; expected quiet. "
            "Another autoscaler may own this group: turn that off. It is tried again later."
        )

    def _to_end(self, now: int, nodes: int, present: set[str], leaving: set[str]) -> tuple[list[str], int]:
        """Pods to end, and how many replicas without a pod: their nodes were lost, or are still to be made.

        First those of ``leaving``, then those whose node has not joined, the newest first.
        """
        selector = quote(f"ray.io/cluster={self._cluster},ray.io/group={self._settings.group}")
        found = self._get(f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={selector}")
        pods = [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]
        pods.sort(key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)
        by_address = [(pod["status"].get("podIP"), pod["metadata"]["name"]) for pod in pods]
        emptied = [name for address, name in by_address if address in leaving]
        coming = [name for address, name in by_address if address not in present]
        ending = [*emptied, *coming][: now - nodes]
        return ending, min(now - nodes - len(ending), max(0, now - len(pods)))

    def _require_allowed(self, group: _WorkerGroup, nodes: int) -> None:
        least, most = group.least, group.most
        hosts = group.number("numOfHosts", 1)
        if hosts != 1:
            raise ProviderError(
                f"{self._where}: numOfHosts is {hosts}; expected 1, a pod for each replica. Make it a group "
                "of single pods."
            )
        if not least <= nodes <= most:
            raise ProviderError(
                f"{self._where}: {nodes} replicas are wanted, its minReplicas and maxReplicas are {least} "
                f"and {most}; expected bounds around fleet.target.nodes_min and nodes_max. Change either."
            )

    # -- the API ---------------------------------------------------------------------------------------

    def _group(self) -> _WorkerGroup:
        cluster = self._get(self._path)
        if cluster["spec"].get("enableInTreeAutoscaling"):
            raise ProviderError(
                f"{self._where}: enableInTreeAutoscaling is true; expected false, since two would change the "
                "number of replicas. Turn it off."
            )
        groups = cluster["spec"].get("workerGroupSpecs") or []
        for index, spec in enumerate(groups):
            if spec["groupName"] == self._settings.group:
                return _WorkerGroup(index, spec, str(cluster["metadata"]["resourceVersion"]))
        names = ", ".join(spec["groupName"] for spec in groups) or "none"
        raise ProviderError(
            f"{self._where}: there is no such group; expected one of {names}. Set fleet.target.params.group."
        )

    def _get(self, path: str) -> Any:
        try:
            return self._call("GET", path)
        except RefusedError as error:
            raise self._explained(error) from None

    def _call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        settings = self._settings
        api = JsonApi(self._server, settings.account / "ca.crt", self._token, settings.timeout_s)
        return api.call(method, path, body, kind)

    def _explained(self, error: RefusedError) -> ProviderError:
        return ProviderError(
            f"{error}; expected 200 OK. {_REMEDIES.get(error.status, 'It is tried again later.')}"
        )

    @property
    def _path(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters/{self._cluster}"

    @property
    def _where(self) -> str:
        return f"worker group {self._settings.group!r} of RayCluster {self._cluster!r}"

    @property
    def _cluster(self) -> str:
        return self._settings.cluster or _environment("RAY_CLUSTER_NAME", "cluster")

    @property
    def _namespace(self) -> str:
        return self._settings.namespace or self._read("namespace")

    @property
    def _server(self) -> str:
        if self._settings.server is not None:
            return self._settings.server.rstrip("/")
        host = _environment("KUBERNETES_SERVICE_HOST", "server")
        port = _environment("KUBERNETES_SERVICE_PORT_HTTPS", "server")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _token(self) -> str:
        token = self._read("token")
        if not token or not token.isascii() or any(not each.isprintable() or each == " " for each in token):
            # Sent nevertheless, it would be shown in the error of the HTTP library.
            raise ProviderError(
                f"{self._settings.account / 'token'}: found no token, expected one line without spaces. See "
                "fleet.target.params.account."
            )
        return token

    def _read(self, name: str) -> str:
        path = self._settings.account / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ProviderError(
                f"{path} cannot be read ({error}); expected a pod's service account. Run the head in a pod "
                "that mounts one (automountServiceAccountToken), or set fleet.target.params.account."
            ) from error


def _changes(group: _WorkerGroup, nodes: int, ending: Sequence[str]) -> list[dict[str, object]]:
    """A JSON patch that fails with a conflict if the cluster has changed since it was read."""
    path = f"/spec/workerGroupSpecs/{group.index}"
    # `add` also replaces; both fields may be absent.
    return [
        {"op": "replace", "path": "/metadata/resourceVersion", "value": group.version},
        {"op": "add", "path": f"{path}/replicas", "value": nodes},
        {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": list(ending)}},
    ]


def _environment(name: str, key: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ProviderError(
            f"the environment variable {name} is not set; expected it in the head's pod. Set "
            f"fleet.target.params.{key}."
        )
    return value


def _open(settings: KubernetesSettings, setting: ProviderSetting) -> KubernetesProvider:
    return KubernetesProvider(settings)


KUBERNETES = NodeProviderKind(KubernetesSettings, _open)
