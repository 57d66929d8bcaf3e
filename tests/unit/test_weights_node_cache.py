"""A node's cache in one process: fetch once, verify, keep few, say clearly what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spotlight_weights import bundle as bundles_module
from spotlight_weights import node_cache as cache_module
from spotlight_weights.bundle import Bundle, WeightsManifest, content_digest, pack
from spotlight_weights.locks import private_directory, try_lock
from spotlight_weights.node_cache import SHARED_MEMORY, NodeCache
from spotlight_weights.weight_errors import NoSpaceError, WeightsError


def version(number: int, size: int = 1000) -> tuple[WeightsManifest, bytes]:
    tensors = {"w": torch.full((size,), float(number))}
    return pack(number, 0, {"policy": tensors}, 1)


def never() -> bytes:
    raise AssertionError("fetched again")


def value(bundle: Bundle) -> float:
    return float(bundle.tensors["policy"]["w"].mean())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache("run", parent=tmp_path) as cache:
        yield cache


def test_a_version_is_fetched_once(cache: NodeCache) -> None:
    manifest, data = version(1)
    assert value(cache.get(manifest, lambda: data)) == 1
    assert value(cache.get(manifest, never)) == 1
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in cache.directory.iterdir()) == [
        f"{manifest.digest}.hashed",
        f"{manifest.digest}.safetensors",
        "alive",
        "fetch.lock",
    ]


def test_a_node_hashes_a_version_once_and_again_if_its_file_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, data = version(1)
    hashed: list[int] = []

    def counted(tensors: Mapping[str, torch.Tensor]) -> str:
        hashed.append(len(tensors))
        return content_digest(tensors)

    monkeypatch.setattr(bundles_module, "content_digest", counted)
    with NodeCache("run", parent=tmp_path) as first, NodeCache("run", parent=tmp_path) as other:
        path = first.directory / f"{manifest.digest}.safetensors"
        first.get(manifest, lambda: data)
        os.utime(path, ns=(0, 0))  # hashing a large file takes long; this one was written just now
        assert value(other.get(manifest, never)) == 1
        before = len(hashed)
        for cache in (first, other, other):
            assert value(cache.get(manifest, never)) == 1
        assert len(hashed) == before, "its times tell that nobody wrote it"
        body = bytearray(path.read_bytes())
        body[-5] ^= 4
        path.write_bytes(body)
        assert value(other.get(manifest, lambda: data)) == 1
        assert "is damaged and is fetched again" in caplog.text


def test_what_is_written_while_it_is_hashed_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, data = version(1)
    hashed: list[int] = []

    def slow(tensors: Mapping[str, torch.Tensor]) -> str:
        hashed.append(len(tensors))
        if path.exists():
            os.utime(path, ns=(len(hashed), len(hashed)))  # as whoever writes it meanwhile does
        return content_digest(tensors)

    monkeypatch.setattr(bundles_module, "content_digest", slow)
    with NodeCache("run", parent=tmp_path) as cache:
        path = cache.directory / f"{manifest.digest}.safetensors"
        cache.get(manifest, lambda: data)
        os.utime(path, ns=(0, 0))
        for _ in range(2):
            before = len(hashed)
            cache.get(manifest, never)
            assert len(hashed) > before


def test_few_versions_are_kept_and_what_is_mapped_stays(tmp_path: Path) -> None:
    with NodeCache("run", parent=tmp_path, keep=2) as cache:
        bundles = []
        for number in range(5):
            manifest, data = version(number)
            bundles.append(cache.get(manifest, lambda data=data: data))
            os.utime(cache.directory / f"{manifest.digest}.safetensors", ns=(number, number))
            (cache.directory / f"{manifest.digest}.hashed-1").touch()  # of a process that died meanwhile
        there = {path.name.partition(".")[0] for path in cache.directory.glob("*.safetensors")}
        assert there == {version(3)[0].digest, version(4)[0].digest}
        assert len(list(cache.directory.glob("*.hashed"))) == 2
        assert len(list(cache.directory.glob("*.hashed-*"))) == 2
        assert [value(bundle) for bundle in bundles] == [0, 1, 2, 3, 4]
    with pytest.raises(WeightsError, match="keep is 0"):
        NodeCache("run", parent=tmp_path, keep=0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_file_is_fetched_again(
    cache: NodeCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, data = version(1)
    cache.get(manifest, lambda: data)
    path = cache.directory / f"{manifest.digest}.safetensors"
    body = bytearray(path.read_bytes())
    body[-5] ^= 4
    path.write_bytes({"cut": body[:-1], "flipped": body, "emptied": b""}[damage])
    assert value(cache.get(manifest, lambda: data)) == 1
    assert "is damaged and is fetched again" in caplog.text
    assert value(cache.get(manifest, never)) == 1


def test_a_wrong_fetch_is_an_error_and_leaves_nothing(cache: NodeCache) -> None:
    (manifest, data), (_, other) = version(1), version(2)
    with pytest.raises(WeightsError, match=f"expected {manifest.digest}"):
        cache.get(manifest, lambda: other)
    with pytest.raises(OSError, match="store is gone"):
        cache.get(manifest, lambda: (_ for _ in ()).throw(OSError("store is gone")))
    assert not list(cache.directory.glob(f"{manifest.digest}*"))
    assert value(cache.get(manifest, lambda: data)) == 1


def test_directories_of_dead_runs_are_removed_and_of_living_ones_not(tmp_path: Path) -> None:
    manifest, data = version(1)
    dead = NodeCache("dead", parent=tmp_path)
    dead.get(manifest, lambda: data)
    (dead.directory / "of others" / "a").mkdir(parents=True)
    dead.close()  # as the kernel does for a process that dies
    living = NodeCache("living", parent=tmp_path)
    foreign = tmp_path / f"spotlight-{os.getuid()}-notacache"
    foreign.mkdir()
    (foreign / "file").touch()
    with NodeCache("mine", parent=tmp_path) as mine:
        assert not dead.directory.exists()
        assert living.directory.exists()
        assert (foreign / "file").exists()
        assert value(mine.get(manifest, lambda: data)) == 1
        with NodeCache("living", parent=tmp_path):  # a second process of a run finds its own
            assert mine.directory.exists()
    living.close()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_dead_run_that_another_process_removes_at_the_same_time_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    manifest, data = version(1)
    dead = NodeCache("dead", parent=tmp_path)
    dead.close()
    restarted: list[NodeCache] = []

    def late(descriptor: int) -> bool:
        if dead.directory.exists() and not restarted:
            shutil.rmtree(dead.directory)  # as another process does that has opened the same file
            restarted.extend(NodeCache("dead", parent=tmp_path) for _ in range(restarts))
        return try_lock(descriptor)

    monkeypatch.setattr(cache_module, "try_lock", late)
    NodeCache("mine", parent=tmp_path).close()
    for cache in restarted:
        assert value(cache.get(manifest, lambda: data)) == 1
        cache.close()
    assert dead.directory.exists() == restarts


def test_a_directory_that_is_removed_while_it_is_entered_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, make = tmp_path / "run", os.mkdir
    folder.mkdir(mode=0o700)

    def too_late(*arguments: Any) -> None:
        try:
            make(*arguments)
        except FileExistsError:
            folder.rmdir()  # as who removes a dead run's does
            raise

    monkeypatch.setattr(os, "mkdir", too_late)
    assert private_directory(folder).is_dir()


def test_a_version_that_goes_as_it_is_opened_is_fetched_again(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, data = version(1)
    cache.get(manifest, lambda: data)
    read = torch.from_file

    def evicted(path: str, **options: Any) -> torch.Tensor:
        monkeypatch.undo()
        Path(path).unlink()  # as a process does that has newer versions
        return read(path, **options)

    monkeypatch.setattr(torch, "from_file", evicted)
    assert value(cache.get(manifest, lambda: data)) == 1


def test_a_run_that_starts_again_finds_what_it_had(tmp_path: Path) -> None:
    manifest, data = version(1)
    with NodeCache("run", parent=tmp_path) as cache:
        cache.get(manifest, lambda: data)
    with NodeCache("run", parent=tmp_path) as cache:
        assert value(cache.get(manifest, never)) == 1


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"spotlight-{os.getuid()}-run"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    with pytest.raises(WeightsError, match=r"found drwxrwxrwx of user .* expected a directory drwx------"):
        NodeCache("run", parent=tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(WeightsError, match="found lrwxrwxrwx"):
        NodeCache("run", parent=tmp_path)
    with pytest.raises(WeightsError, match="No such file or directory; name one below"):
        NodeCache("run", parent=tmp_path / "none")
    with pytest.raises(WeightsError, match="expected one without '/'"):
        NodeCache("a/b", parent=tmp_path)


FILL = """
import resource, sys
from pathlib import Path
import torch
from spotlight_weights.bundle import pack
from spotlight_weights.weight_errors import NoSpaceError
from spotlight_weights.node_cache import NodeCache

small, big = (pack(1, 0, {"policy": {"w": torch.ones(n)}}, 1) for n in (1_000, 1_000_000))
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
cache = NodeCache("run", parent=Path(sys.argv[1]), keep=3)
cache.get(small[0], lambda: small[1])
try:
    cache.get(big[0], lambda: big[1])
except NoSpaceError as error:
    print(error)
there = sorted(path.name for path in cache.directory.iterdir())
print(there == [*(small[0].digest + end for end in (".hashed", ".safetensors")), "alive", "fetch.lock"])
print(float(cache.get(small[0], lambda: 1 / 0).tensors["policy"]["w"].mean()))
"""


def in_full_memory(directory: Path, how: str) -> list[str]:
    command = [sys.executable, "-c", FILL, str(directory), how]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.splitlines()


def test_no_space_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    error, clean, value = in_full_memory(tmp_path, "limit")
    assert f"{tmp_path}/spotlight-{os.getuid()}-run: cannot store weights of version 1" in error
    assert "File too large; 4000" in error
    assert "--shm-size" in error
    assert (clean, value) == ("True", "1.0")


@pytest.mark.slow  # another cause of the error above, in a process with torch
def test_full_shared_memory_is_reported_with_what_is_free(tmp_path: Path) -> None:
    mount = shutil.which("mount")
    target = tmp_path / "shm"
    target.mkdir()
    tried = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("may not mount a small tmpfs")
    try:
        error, clean, value = in_full_memory(target, "mount")
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert "No space left on device; 4000" in error
    assert "of 1048576 are free" in error
    assert (clean, value) == ("True", "1.0")


def test_the_error_is_one_of_weights() -> None:
    assert issubclass(NoSpaceError, WeightsError)
    assert Path("/dev/shm") == SHARED_MEMORY
