"""A hub model's files on their way between two caches: whole, known by content, resumed, never half there."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from huggingface_hub import snapshot_download
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.power_cut import watched

from spotlight_files.hub_list import asked_hub, cached_list
from spotlight_files.hub_snapshot import (
    ModelFileServer,
    PendingBytes,
    SnapshotManifest,
    SourceLostError,
    WantedModel,
    model_directory,
    on_disk,
)
from spotlight_files.snapshot_copy import copy_files, fetch_snapshot

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
            blob = directory / "blobs" / name_of(path.read_bytes(), large=path.suffix == ".safetensors")
            link = root / path.relative_to(made)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(blob)
            link.symlink_to(Path(*[".."] * len(link.relative_to(directory).parts[:-1]), "blobs", blob.name))
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(COMMIT)
    return root


def name_of(data: bytes, *, large: bool) -> str:
    """As the hub names blobs: large files by their SHA-256, others as git does."""
    if large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


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


def test_after_a_power_cut_no_file_is_called_by_what_it_does_not_hold(there: Path, here: Path) -> None:
    here.mkdir()
    with watched(here) as disk:
        assert fetch(here, Near(there)) == COMMIT
    left = {(Path(name), data) for tree in disk.left for name, data in tree if data is not None}
    blobs = [(path.name, data) for path, data in left if path.parent.name == "blobs" and not path.suffix]
    assert blobs
    assert all(name == name_of(data, large=len(name) == 64) for name, data in blobs)


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
        {"path": "transformer/"},
        {"path": "transformer/./a.safetensors"},
        {"path": "transformer/\0.safetensors"},
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


# -- against the hub's own list ----------------------------------------------------------------------


def hub_list(cache: Path) -> dict[str, object]:
    """As huggingface_hub keeps it."""
    files: dict[str, object] = {}
    for path, data in content(model_directory(cache, HUB_ID) / "snapshots" / COMMIT).items():
        entry: dict[str, object] = {"size": len(data), "blob_id": name_of(data, large=False)}
        if path.endswith(".safetensors"):
            entry |= {"lfs_sha256": name_of(data, large=True), "lfs_size": len(data)}
        files[path] = entry
    return {"format_version": 1, "files": files}


def keep_list(there: Path, here: Path) -> None:
    kept = model_directory(here, HUB_ID) / "trees" / f"{COMMIT}.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(hub_list(there)))


def fetch_checked(here: Path, *sources: Near) -> str | None:
    directory = model_directory(here, HUB_ID)
    return fetch_snapshot(WANTED, sources, directory, CHUNK, hub_list=asked_hub(WANTED, directory))


@pytest.mark.parametrize("false", ["transformer/a.safetensors", "vae/config.json", "model_index.json"])
def test_a_node_whose_files_are_not_the_hubs_is_refused_and_leaves_none(
    false: str, there: Path, here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It offers hashes that fit its own files: only the hub's list tells."""
    keep_list(there, here)
    fill_cache(tmp_path / "liar")
    link = model_directory(tmp_path / "liar", HUB_ID) / "snapshots" / COMMIT / false
    honest = link.read_bytes()
    data = honest + b" " if false.endswith("json") else honest[:-1] + bytes([honest[-1] ^ 1])
    blob = link.resolve().with_name(name_of(data, large=false.endswith(".safetensors")))
    blob.write_bytes(data)
    link.unlink()
    link.symlink_to(blob)
    liar = Near(tmp_path / "liar", "liar")
    assert liar.offer(WANTED) is not None
    caplog.set_level(logging.INFO)
    assert fetch_checked(here, liar, Near(there)) == COMMIT, "from the next node"
    assert f"not from node liar: {false} is not the file that the hub lists" in caplog.text
    assert not (model_directory(here, HUB_ID) / "blobs" / blob.name).exists()
    assert content(model_directory(here, HUB_ID) / "snapshots" / COMMIT)[false] != data


@pytest.mark.parametrize("cut", ["transformer/a.safetensors", "vae/config.json"])
def test_a_node_whose_file_is_cut_costs_no_whole_one_that_is_here(
    cut: str, there: Path, here: Path, tmp_path: Path
) -> None:
    keep_list(there, here)
    fill_cache(tmp_path / "other")
    damaged = (model_directory(tmp_path / "other", HUB_ID) / "snapshots" / COMMIT / cut).resolve()
    kept = model_directory(here, HUB_ID) / "blobs" / damaged.name
    kept.parent.mkdir()
    whole = damaged.read_bytes()
    kept.write_bytes(whole)
    damaged.write_bytes(whole[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotlight_files.hub_snapshot.check_weights", lambda folder: None)
        fetch_checked(here, Near(tmp_path / "other"))
    assert kept.read_bytes() == whole


def test_without_the_hubs_list_it_is_told_what_was_not_checked(
    there: Path, here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    caplog.set_level(logging.INFO)
    assert fetch_checked(here, Near(there)) == COMMIT
    assert "the hub does not list the files of somebody/model: OfflineModeIsEnabled" in caplog.text
    assert "checked against the hashes that node near gave, not the hub's" in caplog.text


class Lists(BaseHTTPRequestHandler):
    """Answers what the hub's API answers to a request for a commit's files."""

    files: ClassVar[list[dict[str, object]]]

    def do_GET(self) -> None:
        body = json.dumps(self.files).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_the_hub_is_asked_where_no_list_is_cached(
    there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = hub_list(there)["files"]
    assert isinstance(entries, dict)
    Lists.files = [
        {"type": "file", "path": path, "size": each["size"], "oid": each["blob_id"]}
        | (
            {"lfs": {"oid": each["lfs_sha256"], "size": each["size"], "pointerSize": 130}}
            if "lfs_sha256" in each
            else {}
        )
        for path, each in entries.items()
    ]
    with ThreadingHTTPServer(("127.0.0.1", 0), Lists) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        listed = asked_hub(WANTED, model_directory(here, HUB_ID))()
        server.shutdown()
    keep_list(there, here)
    assert listed is not None
    assert listed == cached_list(model_directory(here, HUB_ID), COMMIT)
