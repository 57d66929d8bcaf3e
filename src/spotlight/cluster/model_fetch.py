"""Have a hub model's files on this node before it is loaded: from another node rather than from the hub.

A process that is to load the model starts an actor (:class:`ModelFileServer`, without resources) on a node of
the cluster, copies chunks of bytes through Ray's object store, and ends the actor. Every call has a deadline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from spotlight.cluster.nodes.drain import draining_nodes
from spotlight.cluster.nodes.listing import RayNode, read_view
from spotlight.cluster.nodes.node_list import NodeList
from spotlight.cluster.remote_calls import cause_of, on_node
from spotlight.config.schema import RunConfig
from spotlight.dry_run.model_plan import planned_files
from spotlight.registry import FAMILIES
from spotlight.scheduler.types import NodeKind
from spotlight.testbed import pipeline_directory
from spotlight_files.hub_list import asked_hub
from spotlight_files.hub_snapshot import (
    ModelFileServer,
    PendingBytes,
    SnapshotManifest,
    SourceLostError,
    WantedModel,
    cache_directory,
    is_commit,
    model_directory,
    on_disk,
    wanted_of,
)
from spotlight_files.pipeline_files import PipelineFiles, is_hub_id, without_transformer_weights
from spotlight_files.snapshot_copy import fetch_snapshot
from spotlight_rewards.base.files import at_home
from spotlight_weights.locks import held
from spotlight_weights.weight_errors import WeightsError

log = logging.getLogger("spotlight.files")

_START_S = 60.0


def fetch_model_files(config: RunConfig) -> None:
    """Fetch the model's files from another node if this node's disk lacks them.

    Of a node's processes one fetches, and the others wait for it, ``fleet.start_s`` at most. Where the files
    are not here then, the log says why, and loading the model downloads them.
    """
    wanted = wanted_model(config)
    cache = cache_directory()
    if wanted is None or on_disk(wanted, cache) is not None:
        return
    if not is_commit(wanted.revision):
        # Another node's branch may be older than the learner's.
        log.warning("%s comes from the model hub: model.revision names no commit", wanted.hub_id)
        return
    try:
        commit = _fetch(wanted, cache, config)
    except (WeightsError, OSError) as error:
        log.warning("%s is not fetched from another node: %s", wanted.hub_id, error)
        commit = None
    if commit is None:
        log.warning("%s comes from the model hub: no other node of the cluster gave it", wanted.hub_id)


def pinned(config: RunConfig) -> RunConfig:
    """With the commit of a hub model that is on this node, so that all processes of a run load the same."""
    files = None if wanted_model(config) is None else planned_files(config)
    if not isinstance(files, PipelineFiles) or not is_commit(files.root.name):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"revision": files.root.name})})


def wanted_model(config: RunConfig) -> WantedModel | None:
    """What the configuration needs of a hub model, but for text encoders' weights; None: it names none."""
    model = config.model
    path = pipeline_directory(model.path)
    if at_home(path).exists() or not is_hub_id(path):
        return None
    components = FAMILIES.load(model.family).components
    if model.transformer is not None:
        components = without_transformer_weights(components)
    return wanted_of(path, model.revision, components)


def _fetch(wanted: WantedModel, cache: Path, config: RunConfig) -> str | None:
    directory = model_directory(cache, wanted.hub_id)
    locks = cache / ".locks" / directory.name  # beside the hub's own locks
    locks.mkdir(parents=True, exist_ok=True)
    with held(locks / "spotlight.lock", config.fleet.start_s):
        root = on_disk(wanted, cache)
        if root is not None:  # by another process, while this one waited
            return root.name
        hub_list = asked_hub(wanted, directory)
        with closing(node_sources(config.fleet.answer_s)) as sources:
            return fetch_snapshot(
                wanted, sources, directory, limit_s=config.fleet.start_s / 2, hub_list=hub_list
            )


class NodeSource:
    """A :class:`FileSource`: the server that it starts on a node.

    Args:
        answer_s: for every chunk; for the first answer, which waits for a process to start, 60 s at least.
    """

    def __init__(self, node: RayNode, answer_s: float) -> None:
        self.name, self._answer_s = node.name, answer_s
        make = ray.remote(ModelFileServer).options(**on_node(node.ray_id), max_concurrency=2)
        self._actor: Any = make.remote()

    def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
        """See :class:`FileSource`."""
        offered: SnapshotManifest | None = self._answer(
            self._actor.offer.remote(wanted), max(_START_S, self._answer_s)
        )
        return offered

    def read(self, path: str, start: int, length: int) -> PendingBytes:
        """See :class:`FileSource`."""
        reference = self._actor.read.remote(path, start, length)
        return lambda: self._answer(reference, self._answer_s)

    def close(self) -> None:
        """End the server."""
        with suppress(RayError):
            ray.kill(self._actor)

    def _answer(self, reference: Any, limit_s: float) -> Any:
        try:
            return ray.get(reference, timeout=limit_s)
        except RayError as error:  # its time-out is one, too
            raise SourceLostError(f"{type(error).__name__}: {cause_of(error)}") from error


def node_sources(answer_s: float) -> Generator[NodeSource]:
    """The cluster's other nodes: reserved ones first, which stay, then the others in random order.

    Nodes that will be preempted are left out. Each source is closed when the next is asked for.
    """
    rows = NodeList().ask(answer_s)
    if rows is None:
        log.warning("Ray has not listed its nodes for %g s", answer_s)
        return
    leaving = {ray.get_runtime_context().get_node_id()}
    try:
        leaving |= set(draining_nodes())
    except Exception as error:  # noqa: BLE001 - a private call may fail in any way; such a node is merely lost
        log.info("Ray does not tell which nodes it drains: %r", error)
    nodes = [node for ray_id, node in read_view(rows).nodes.items() if ray_id not in leaving]
    random.shuffle(nodes)
    for node in sorted(nodes, key=lambda node: node.kind is not NodeKind.RESERVED):
        source = NodeSource(node, answer_s)
        try:
            yield source
        finally:
            source.close()
