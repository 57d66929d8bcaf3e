from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_history import SCRATCH

from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.store_errors import DamagedCheckpointError
from spotlight_rewards.base.file_errors import StoreError


def header(iteration: int) -> CheckpointHeader:
    return CheckpointHeader(
        iteration, ledger_position=10 * iteration, config_digest="c0ffee", package_version="1"
    )


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    best = {1: [1], 2: [1], 3: [1], 4: [3, 1], 5: [9, 3, 1], 6: [5, 3]}
    kept = {}
    for iteration, order in best.items():
        with store.writer(header(iteration), order) as directory:
            (directory / "weights").write_text(str(iteration))
        kept[iteration] = store.iterations
    assert kept == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [5, 6]}
    made = store.made_after(5)
    assert made is not None
    assert (made.directory / "weights").read_text() == "5"
    assert store.made_after(4) is None
    (made.directory / "weights").write_text("6")
    with pytest.raises(DamagedCheckpointError, match="weights"):
        store.made_after(5)


def save(store: CheckpointStore, iteration: int, size_bytes: int = 300) -> None:
    with store.writer(header(iteration)) as directory:
        (directory / "weights").mkdir()
        (directory / "weights" / "lora.safetensors").write_bytes(bytes([iteration % 256]) * size_bytes)
        (directory / "state.json").write_text(str(iteration))
        (directory / "empty").touch()


def found(directory: Path) -> int | None:
    """Iteration of the newest valid checkpoint, after checking that its content is of that iteration."""
    checkpoint = CheckpointStore(directory, keep=2).newest_valid()
    if checkpoint is None:
        return None
    iteration = checkpoint.header.iteration
    assert checkpoint.header == header(iteration)
    assert (checkpoint.directory / "state.json").read_text() == str(iteration)
    assert set((checkpoint.directory / "weights/lora.safetensors").read_bytes()) == {iteration}
    return iteration


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with the checkpoints of iterations 1 and 2."""
    directory = tmp_path / "two"
    directory.mkdir()
    for iteration in (1, 2):
        save(CheckpointStore(directory, keep=2), iteration)
    return directory


def test_a_checkpoint_that_a_run_replaces_while_it_is_read_is_read_again(two: Path) -> None:
    run, reader = CheckpointStore(two, keep=1), CheckpointStore(two, keep=1)
    later = iter((3, 4))

    def read(newest: Checkpoint) -> str:
        for iteration in later:
            save(run, iteration)  # removes what is being read
            break
        return (newest.directory / "state.json").read_text()

    assert reader.read_newest(read) == "4"
    with pytest.raises(ZeroDivisionError):  # not because it was replaced: at once
        reader.read_newest(lambda _: 1 // 0)

    def replaced(newest: Checkpoint) -> str:
        save(run, newest.header.iteration + 1)
        return (newest.directory / "state.json").read_text()

    with pytest.raises(StoreError, match="replaced its checkpoint 10 times while it was being read"):
        reader.read_newest(replaced)


def test_what_is_written_is_found_and_old_ones_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest_valid() is None
    for iteration in range(1, 5):
        save(store, iteration)
        assert found(tmp_path) == iteration
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000003-iteration-000003",
        "000004-iteration-000004",
        "latest",
    ]
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_detected_and_named(data: st.DataObject, two: Path) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        directory = shutil.copytree(two, Path(name) / "checkpoints")
        newest = [path for path in files_below(directory / "000002-iteration-000002") if path.stat().st_size]
        victim = data.draw(st.sampled_from([*newest, directory / "latest"]))
        content = bytearray(victim.read_bytes())
        offset = data.draw(st.integers(0, len(content) - 1))
        content[offset] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes(content)
        checkpoint = CheckpointStore(directory, keep=2).newest_valid()
        assert checkpoint is not None
        assert checkpoint.header.iteration == (2 if victim.name == "latest" else 1)
        (damage,) = checkpoint.damages
        assert (directory / damage.checkpoint / damage.file) == victim
        assert damage.expected != damage.found
        assert damage.file in str(damage)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [Path.unlink, _cut])
@pytest.mark.parametrize("file", ["weights/lora.safetensors", "manifest.json", "state.json"])
def test_missing_and_cut_files_are_detected_and_the_damaged_one_is_replaced(
    tmp_path: Path, harm: Callable[[Path], None], file: str
) -> None:
    for iteration in (1, 2):
        save(CheckpointStore(tmp_path, keep=2), iteration)
    harm(tmp_path / "000002-iteration-000002" / file)
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = store.newest_valid()
    assert checkpoint is not None
    assert checkpoint.header.iteration == 1
    assert [damage.file for damage in checkpoint.damages] == [file]
    save(store, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000001-iteration-000001", "000003-iteration-000002", "latest"]
    assert found(tmp_path) == 2


def test_when_all_are_damaged_it_says_so_rather_than_start_over(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save(CheckpointStore(tmp_path, keep=2), iteration)
    for path in tmp_path.rglob("state.json"):
        _cut(path)
    with pytest.raises(DamagedCheckpointError) as raised:
        CheckpointStore(tmp_path, keep=2).newest_valid()
    for part in (
        "000001-iteration-000001/state.json",
        "000002-iteration-000002/state.json",
        "1 bytes",
        "0 bytes",
    ):
        assert part in str(raised.value)


def test_a_checkpoint_never_named_is_neither_loaded_nor_kept(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save(CheckpointStore(tmp_path, keep=9), iteration)
    pointer = (tmp_path / "latest").read_bytes()
    save(CheckpointStore(tmp_path, keep=9), 3)
    (tmp_path / "latest").write_bytes(pointer)  # as if cut just before the pointer was replaced
    assert found(tmp_path) == 2
    save(CheckpointStore(tmp_path, keep=9), 4)
    assert [path.name[-1] for path in sorted(tmp_path.glob("0*"))] == ["1", "2", "4"]


def test_an_error_in_the_body_commits_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def write(content: Callable[[Path], object]) -> None:
        with store.writer(header(2)) as directory:
            (directory / "half").write_bytes(b"half")
            content(directory)

    with pytest.raises(ZeroDivisionError):
        write(lambda directory: 1 // 0)
    with pytest.raises(StoreError, match="regular files only"):
        write(lambda directory: (directory / "link").symlink_to("/etc/passwd"))
    assert found(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 2


class PowerCutError(BaseException):
    """Raised again by cleaning up, so that none happens, as when the process dies."""


@contextmanager
def failing_at(step: int, error: BaseException) -> Iterator[list[str]]:
    """Let the step-th file operation raise; yields the names of the operations done."""
    done: list[str] = []
    originals = {
        name: getattr(os, name) for name in ("fsync", "rename", "replace", "mkdir", "open", "rmdir", "unlink")
    }

    def wrap(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if len(done) == step:
                raise error
            done.append(name)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, original in originals.items():
            patch.setattr(os, name, wrap(name, original))
        yield done


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), PowerCutError()], ids=["full", "cut"]
)
def test_an_error_at_every_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, two: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    whole = CheckpointStore(shutil.copytree(two, tmp_path / "whole"), keep=2)
    with failing_at(-1, error) as operations:
        save(whole, 3)
    expected = PowerCutError if isinstance(error, PowerCutError) else StoreError
    outcomes = []
    for step in range(len(operations)):
        directory = shutil.copytree(two, tmp_path / str(step))
        with failing_at(step, error), pytest.raises(expected, match=r"no space left|^$"):
            save(CheckpointStore(directory, keep=2), 3)
        outcomes.append(found(directory))
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        save(CheckpointStore(directory, keep=2), 4)
        assert found(directory) == 4
        assert not list(directory.glob(".*"))
    assert set(outcomes) == {2, 3}
    assert outcomes == sorted(outcomes)


def test_all_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is synced before the rename, the rename before the pointer, it at the end."""
    log: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_fsync(descriptor: int) -> None:
        log.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().relative_to(tmp_path)}")
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        log.append(f"name {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(
        os, "replace", lambda source, target: (log.append("name latest"), replace(source, target))
    )
    save(CheckpointStore(tmp_path, keep=2), 1)
    name = "000001-iteration-000001"
    inside = ["", "/manifest.json", "/weights", "/weights/lora.safetensors", "/state.json", "/empty"]
    renamed = log.index(f"name {name}")
    assert set(log[:renamed]) == {f"fsync .writing-{name}{file}" for file in inside}
    assert log[renamed:] == [f"name {name}", "fsync .", "fsync .writing-latest", "name latest", "fsync ."]


def test_a_real_full_disk_stops_with_nothing_lost(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {mount.stderr.decode().strip()}")
    try:
        store = CheckpointStore(tmp_path, keep=1)
        save(store, 1, size_bytes=400_000)
        with pytest.raises(StoreError, match=r"no space left .*Nothing committed before was lost"):
            save(store, 2, size_bytes=800_000)
        assert found(tmp_path) == 1
        save(store, 3, size_bytes=400_000)
        assert found(tmp_path) == 3
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_size_limit_stops_with_nothing_lost(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="file-size limit was reached"):
            save(store, 2, size_bytes=200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found(tmp_path) == 1


def test_an_error_that_hides_its_number_is_recognised_by_the_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotlight_rewards.base.file_errors.free_bytes", lambda path: 0)
    with (
        pytest.raises(StoreError, match="no space left"),
        CheckpointStore(tmp_path, keep=1).writer(header(1)),
    ):
        raise RuntimeError("write failed")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), StoreError),
        (RuntimeError("[enforce fail] . unexpected pos 704 vs 598"), StoreError),  # torch, of any short write
        (RuntimeError("a bug"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_whatever_ends_the_writing_nothing_of_it_stays(
    tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    def write() -> None:
        with CheckpointStore(tmp_path, keep=1).writer(header(1)) as directory:
            (directory / "half").write_bytes(b"half")
            raise error

    with pytest.raises(expected) as raised:
        write()
    assert not list(tmp_path.iterdir())
    assert type(raised.value) is expected
    assert expected is not StoreError or "quota or file-size limit was reached" in str(raised.value)
