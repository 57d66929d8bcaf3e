"""A hub model on a new node of a real Ray, from nodes that have it; each node here has its own hub cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotlight.cluster.model_fetch import (
    NodeSource,
    fetch_model_files,
    node_sources,
    pinned,
    wanted_model,
)
from spotlight.cluster.nodes.listing import read_view
from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.scheduler.types import NodeKind
from spotlight_files.hub_snapshot import (
    PendingBytes,
    SnapshotManifest,
    WantedModel,
    model_directory,
)
from spotlight_files.snapshot_copy import fetch_snapshot
from spotlight_fleet.connection import connected
from spotlight_fleet.emulated.local_cluster import LocalCluster, local_cluster

HUB_ID, COMMIT = "somebody/tiny-qwen", "d" * 40
ANSWER_S = 120.0
"""Generous: on a busy machine a process takes long to start."""


def config(path: str = HUB_ID, revision: str | None = COMMIT) -> RunConfig:
    model = {"path": path, "revision": revision}
    return build_config({"model": model, "fleet": {"answer_s": ANSWER_S}}, "the test")


def fill_cache(cache: Path, pipeline: Path) -> None:
    """The pipeline in a hub cache, as the hub's own code leaves it."""
    directory = model_directory(cache, HUB_ID)
    for path in (path for path in pipeline.rglob("*") if path.is_file()):
        blob = directory / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        link = directory / "snapshots" / COMMIT / path.relative_to(pipeline)
        for each in (blob, link):
            each.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link.symlink_to(blob)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(COMMIT)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, random_pipeline: Path) -> Path:
    """One hub cache a node: those of alpha and beta have the model."""
    folder = tmp_path_factory.mktemp("caches")
    for name in ("alpha", "beta"):
        fill_cache(folder / name, random_pipeline)
    return folder


@pytest.fixture(scope="module")
def cluster(caches: Path) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(caches / "first"))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(caches / "first"))
        with local_cluster(1) as cluster, connected(cluster.address):
            for name in ("alpha", "beta", "fresh"):
                patch.setenv("HF_HUB_CACHE", str(caches / name))
                cluster.add_node(name, NodeKind.SPOT, 1)
            yield cluster


@ray.remote(num_cpus=0)
def arrive(config: RunConfig) -> tuple[list[str], str]:
    """As a worker begins: have the files, then locate them; no hub is reachable."""
    from spotlight.registry import FAMILIES

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("spotlight.files")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fetch_model_files(config)
    family = FAMILIES.load(config.model.family)
    files = family.locate(config.model.path, config.model.revision)
    return lines, str(files.root)


class Counted:
    """A node's source, which counts bytes asked for; ``lose`` is called when they exceed ``lose_at``."""

    def __init__(self, source: NodeSource, lose_at: float = float("inf"), lose: object = None) -> None:
        self.name, self._source, self._lose_at, self._lose = source.name, source, lose_at, lose
        self.arrived = 0

    def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
        return self._source.offer(wanted)

    def read(self, path: str, start: int, length: int) -> PendingBytes:
        pending = self._source.read(path, start, length)

        def arrive() -> bytes:
            if self.arrived > self._lose_at and callable(self._lose):
                self._lose()
                self._lose = None
            data = pending()
            self.arrived += len(data)
            return data

        return arrive


def source(cluster: LocalCluster, name: str) -> NodeSource:
    nodes = read_view(ray.nodes()).nodes.values()
    return NodeSource(next(node for node in nodes if node.name == name), ANSWER_S)


def test_two_workers_of_a_new_node_have_the_files_and_one_fetched_them(
    cluster: LocalCluster, caches: Path, random_pipeline: Path
) -> None:
    (fresh,) = [node.ray_id for node in cluster.nodes() if node.name == "fresh"]
    there = arrive.options(scheduling_strategy=NodeAffinitySchedulingStrategy(fresh, soft=False))
    arrived = ray.get([there.remote(config()) for _ in range(2)], timeout=2 * ANSWER_S)
    assert sum("were fetched from node" in line for lines, _ in arrived for line in lines) == 1
    root = model_directory(caches / "fresh", HUB_ID) / "snapshots" / COMMIT
    assert {place for _, place in arrived} == {str(root)}
    fetched = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert Path("text_encoder/model.safetensors") not in fetched, "workers need no text encoder"
    assert Path("transformer/config.json") in fetched
    assert all((random_pipeline / name).read_bytes() == data for name, data in fetched.items())
    ((lines, _),) = ray.get([there.remote(config())], timeout=2 * ANSWER_S)
    assert lines == [], "they are here: nobody is asked"


def test_a_model_that_no_node_has_comes_from_the_hub_and_the_log_says_so(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fetch_model_files(config("somebody/else"))
    assert "somebody/else comes from the model hub: no other node of the cluster gave it" in caplog.text
    caplog.clear()
    for path in ("testbed", str(Path(__file__).parent)):
        fetch_model_files(config(path, None))
    assert caplog.text == ""
    fetch_model_files(config("somebody/else", "main"))
    assert "model.revision names no commit" in caplog.text


def test_the_head_names_the_commit_that_is_here(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned(config(HUB_ID, None)) == config(HUB_ID, None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(caches / "alpha"))
    assert pinned(config(HUB_ID, None)) == config(HUB_ID, COMMIT)
    for other in (config("somebody/else", None), config("testbed", None)):
        assert pinned(other) == other


def test_when_a_source_is_killed_another_goes_on_where_it_stopped(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = wanted_model(config())
    assert wanted is not None
    assert {each.name for each in node_sources(ANSWER_S)} == {"alpha", "beta", "fresh"}, (
        "not this node itself"
    )
    first, second = source(cluster, "alpha"), source(cluster, "beta")
    offer = second.offer(wanted)
    assert offer is not None
    dying = Counted(first, offer.bytes // 2, lambda: cluster.kill("alpha"))
    heir = Counted(second)
    directory = model_directory(tmp_path, HUB_ID)
    chunk_bytes = 64 * 2**10
    assert fetch_snapshot(wanted, [dying, heir], directory, chunk_bytes) == COMMIT
    assert "alpha" not in [node.name for node in cluster.nodes()]
    assert f"{HUB_ID}: not from node alpha" in caplog.text
    assert dying.arrived > offer.bytes // 2
    assert dying.arrived + heir.arrived == offer.bytes, "nothing was sent twice"
    for file in offer.files:
        data = (directory / "snapshots" / COMMIT / file.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == file.sha256
