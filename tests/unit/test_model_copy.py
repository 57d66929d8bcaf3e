"""A hub model's files on their way between two caches: whole, known by content, resumed, never half there."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import snapshot_download
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from spotlight.cluster.model_files.hub_snapshot import (
    ModelFileServer,
    PendingBytes,
    SnapshotManifest,
    SourceLostError,
    WantedModel,
    model_directory,
    on_disk,
)
from spotlight.cluster.model_files.snapshot_copy import copy_files, fetch_snapshot

HUB_ID, COMMIT = "somebody/model", "c" * 40
WANTED = WantedModel(HUB_ID, COMMIT, ("model_index.json", "transformer/*", "vae/*"), ("transformer", "vae"))
CHUNK = 1000


def fill_cache(cache: Path, seed: int = 0) -> Path:
    """A model in a hub cache as the hub's own code leaves it; its snapshot."""
    directory = model_directory(cache, HUB_ID)
    root = directory / "snapshots" / COMMIT
    made = cache / "made"
    (made / "transformer").mkdir(parents=True)
    (made / "vae").mkdir()
    values = np.random.default_rng(seed)
    for name in ("transformer/a.safetensors", "transformer/b.safetensors", "vae/a.safetensors"):
        save_file({name: values.random(700 + len(name), dtype=np.float32)}, made / name)
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (made / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(index)
    for part in ("transformer", "vae"):
        (made / part / "config.json").write_text(f'{{"of": "{part}"}}')
        (made / part / "old.bin").write_bytes(b"pickled")
    (made / "model_index.json").write_text('{"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}')
    (directory / "blobs").mkdir(parents=True)
    for path in sorted(made.rglob("*")):
        if path.is_file():
            kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
            blob = directory / "blobs" / kind(path.read_bytes()).hexdigest()
            link = root / path.relative_to(made)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(blob)
            link.symlink_to(Path(*[".."] * len(link.relative_to(directory).parts[:-1]), "blobs", blob.name))
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(COMMIT)
    return root


def content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


class Near:
    """A source in this process; ``spoil`` sees each chunk, and what it returns arrives."""

    def __init__(
        self, cache: Path, name: str = "near", spoil: Callable[[str, int, bytes], bytes] | None = None
    ) -> None:
        self.name, self._server, self._spoil = name, ModelFileServer(cache), spoil
        self.sent = 0

    def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
        return self._server.offer(wanted)

    def read(self, path: str, start: int, length: int) -> PendingBytes:
        def arrive() -> bytes:
            data = self._server.read(path, start, length)
            self.sent += len(data)
            return data if self._spoil is None else self._spoil(path, start, data)

        return arrive


@pytest.fixture
def there(tmp_path: Path) -> Path:
    fill_cache(tmp_path / "there")
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def fetch(here: Path, *sources: Near) -> str | None:
    return fetch_snapshot(WANTED, sources, model_directory(here, HUB_ID), CHUNK)


def test_what_arrives_is_what_the_hubs_own_code_finds(there: Path, here: Path) -> None:
    assert on_disk(WANTED, here) is None
    assert fetch(here, Near(there)) == COMMIT
    root = on_disk(WANTED, here)
    assert root is not None
    whole = content(model_directory(there, HUB_ID) / "snapshots" / COMMIT)
    assert content(root) == {name: data for name, data in whole.items() if not name.endswith(".bin")}
    assert Path(snapshot_download(HUB_ID, revision=COMMIT, cache_dir=here, local_files_only=True)) == root
    again = Near(there)
    assert fetch(here, again) == COMMIT
    assert again.sent == 0, "all of it was here"
    assert Near(here).offer(WANTED) == Near(there).offer(WANTED), "and it can go on to the next node"


def test_a_node_with_a_part_of_it_is_no_source(there: Path, here: Path) -> None:
    (model_directory(there, HUB_ID) / "snapshots" / COMMIT / "transformer" / "b.safetensors").unlink()
    assert fetch(here, Near(there)) is None
    assert on_disk(WANTED, here) is None


def test_no_other_files_are_read_than_those_offered(there: Path) -> None:
    server = ModelFileServer(there)
    server.offer(WANTED)
    for path in ("../../refs/main", "/etc/hostname", "vae/old.bin"):
        with pytest.raises(KeyError):
            server.read(path, 0, 1)


@settings(max_examples=15)
@given(lost_after=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_lost_source_costs_what_was_under_way_only(
    lost_after: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("caches")
    root = fill_cache(folder / "there")

    def dying(chunks: int) -> Near:
        left = [chunks]

        def spoil(path: str, start: int, data: bytes) -> bytes:
            if left[0] == 0:
                source.sent -= len(data)
                raise SourceLostError("it is dead")
            left[0] -= 1
            return data

        source = Near(folder / "there", "dying", spoil)
        return source

    sources = [*(dying(chunks) for chunks in lost_after), Near(folder / "there")]
    assert fetch(folder / "here", *sources) == COMMIT
    offer = sources[-1].offer(WANTED)
    assert offer is not None
    assert sum(source.sent for source in sources) == offer.bytes, "nothing was sent twice"
    found = content(model_directory(folder / "here", HUB_ID) / "snapshots" / COMMIT)
    assert found == {name: data for name, data in content(root).items() if name in found}


@pytest.mark.parametrize("damage", ["flipped", "short", "long"])
def test_a_damaged_chunk_is_refused(
    damage: str, there: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(path: str, start: int, data: bytes) -> bytes:
        if path != "transformer/b.safetensors" or start != CHUNK:
            return data
        return {"flipped": bytes([data[0] ^ 1]) + data[1:], "short": data[1:], "long": data + b"x"}[damage]

    with caplog.at_level(logging.WARNING):
        assert fetch(here, Near(there, "bad", spoil)) is None
    assert "not from node bad: transformer/b.safetensors" in caplog.text
    assert on_disk(WANTED, here) is None
    offer = Near(there).offer(WANTED)
    assert offer is not None
    (refused,) = [file for file in offer.files if file.path == "transformer/b.safetensors"]
    assert not (model_directory(here, HUB_ID) / "blobs" / refused.blob).exists()
    good = Near(there)
    assert fetch(here, good) == COMMIT
    assert good.sent < offer.bytes, "what arrived whole from the bad node was kept"


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../../.bashrc"},
        {"path": "/etc/passwd"},
        {"path": "transformer/../../refs/main"},
        {"path": "transformer/old.bin"},
        {"path": "tokenizer/other.json"},
        {"blob": "../../refs/main"},
        {"sha256": "0"},
        {"bytes": -1},
    ],
)
def test_names_that_are_no_files_of_the_model_are_refused(
    there: Path, here: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    class Lying(Near):
        def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
            offer = super().offer(wanted)
            assert offer is not None
            first, *others = offer.files
            return replace(offer, files=(*others, replace(first, **change)))  # type: ignore[arg-type]

    lying = Lying(there)
    assert fetch_snapshot(WANTED, [lying], model_directory(here, HUB_ID), CHUNK) is None
    assert lying.sent == 0
    assert "no file of the model" in caplog.text
    assert not [path for path in here.rglob("*") if path.is_file()]
    assert fetch_snapshot(WANTED, [lying, Near(there)], model_directory(here, HUB_ID), CHUNK) == COMMIT


def test_damage_left_by_one_source_is_not_blamed_on_the_next(there: Path, here: Path) -> None:
    def spoil(path: str, start: int, data: bytes) -> bytes:
        if start:
            raise SourceLostError("it is dead")
        return bytes(len(data))

    assert fetch(here, Near(there, "bad", spoil), Near(there)) == COMMIT
    assert on_disk(WANTED, here) is not None


def test_a_full_disk_is_reported_before_anything_is_sent(there: Path, here: Path) -> None:
    source = Near(there)
    offer = source.offer(WANTED)
    assert offer is not None
    vast = replace(offer, files=tuple(replace(file, blob="x", bytes=2**62) for file in offer.files[:1]))
    with pytest.raises(OSError, match="enlarge the disk or set HF_HOME"):
        copy_files(vast, source, here / "blobs", CHUNK)
    assert source.sent == 0


def test_readers_never_see_half_a_model(there: Path, here: Path) -> None:
    seen: list[Path | None] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(on_disk(WANTED, here))

    reader = threading.Thread(target=look)
    reader.start()
    assert fetch(here, Near(there)) == COMMIT
    done.set()
    reader.join()
    whole = content(model_directory(here, HUB_ID) / "snapshots" / COMMIT)
    assert all(root is None or content(root) == whole for root in seen)
