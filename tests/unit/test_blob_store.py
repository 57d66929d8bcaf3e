"""Values outlive their makers: bounded memory, the rest on disk, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from types import NoneType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spotlight.cluster.blobs.blob_store import BlobStore, StoredBlob, _Index
from spotlight_rewards.base.file_errors import StoreError

KINDS = st.sampled_from(["progress", "sample"])
NAMES = st.sampled_from(["r0", "r1", "r2", "r3", "r4"])
KEYS = st.tuples(KINDS, NAMES, st.sampled_from(["", "a"]))
PUTS = st.tuples(
    KEYS, st.integers(0, 9), st.sampled_from([0, 60, 124, 125, 126, 500, 5000]), st.integers(0, 255)
)
MEMORY = 1000


def on_disk(directory: Path) -> list[Path]:
    """Every file with a value."""
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]


def stored(index: _Index) -> int:
    """How many values it knows."""
    return sum(len(versions) for names in index.kinds.values() for versions in names.values())


class VaultLikeADict(RuleBasedStateMachine):
    """Memory for a few values: most of what is done here goes over the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp())
        self.store = BlobStore(self.directory, MEMORY)
        self.model: dict[tuple[str, str, str], StoredBlob] = {}
        self.recent: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self.marked, self.since = 0, set[tuple[str, str, str]]()

    def teardown(self) -> None:
        self.store.close()
        assert on_disk(self.directory) == []
        shutil.rmtree(self.directory)

    def _forget(self, key: tuple[str, str, str]) -> None:
        del self.model[key]
        self.recent.pop(key, None)

    @rule(puts=st.lists(PUTS, min_size=1, max_size=12))
    def put(self, puts: list[tuple[tuple[str, str, str], int, int, int]]) -> None:
        for key, step, size, fill in puts:
            kind, name, mark = key
            data = bytes([fill]) * size
            self.since.add(key)
            newer = key not in self.model or self.model[key].step < step
            assert self.store.put(kind, name, data, weights_digest=mark, step=step) is newer
            if not newer:
                continue
            self.model[key] = StoredBlob(step, data)
            self.recent.pop(key, None)
            if size * 8 <= MEMORY:
                self.recent[key] = size
                while sum(self.recent.values()) > MEMORY:
                    self.recent.popitem(last=False)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12))
    def get(self, keys: list[tuple[str, str, str]]) -> None:
        for key in keys:
            assert self.store.get(*key) == self.model.get(key)
            if key in self.recent:
                self.recent.move_to_end(key)

    @rule()
    def mark(self) -> None:
        self.marked = self.store.puts
        self.since.clear()

    def _gone(self, kind: str, names: set[str], spares: bool) -> list[tuple[str, str, str]]:
        spared = self.since if spares else ()
        return [key for key in self.model if key[0] == kind and key[1] in names and key not in spared]

    @rule(kind=KINDS, names=st.sets(NAMES, max_size=1), spares=st.booleans())
    def drop(self, kind: str, names: set[str], spares: bool) -> None:
        self.store.drop(kind, [*names, "never there"], self.marked if spares else None)
        for key in self._gone(kind, names, spares):
            self._forget(key)

    @rule(kind=KINDS, others=st.sets(NAMES, max_size=1), spares=st.booleans())
    def keep_only(self, kind: str, others: set[str], spares: bool) -> None:
        stay, gone = {"r0", "r1", "r2", "r3", "r4"} - others, self._gone(kind, others, spares)
        assert self.store.keep_only(kind, stay, self.marked if spares else None) == len(gone)
        for key in gone:
            self._forget(key)

    @invariant()
    def says_what_it_holds(self) -> None:
        index = self.store._index
        for kind in ("progress", "sample"):
            names = {name for other, name, _ in self.model if other == kind}
            assert index.kinds.get(kind, {}).keys() == names
        for key, kept in self.model.items():
            entry = index.find(key)
            assert entry is not None
            assert entry.step == kept.step
        assert stored(index) == len(self.model)
        # The least recently used, and no others, are on disk.
        assert list(index.recent) == list(self.recent)
        assert index.memory_bytes == sum(self.recent.values()) <= MEMORY
        assert len(self.model) - len(self.recent) == len(on_disk(self.directory))


TestVaultLikeADict = VaultLikeADict.TestCase
TestVaultLikeADict.settings = settings(max_examples=20, stateful_step_count=12)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, MEMORY)


def test_threads_lose_nothing_and_never_pass_the_bound(store: BlobStore, tmp_path: Path) -> None:
    """Eight writers of their own values and of shared ones, readers beside them."""
    errors: list[BaseException] = []
    peak, start = 0, threading.Barrier(8)
    over = threading.Event()

    def write(me: int) -> None:
        draw = random.Random(me)
        start.wait(10)
        for step in range(200):
            name = f"{me}.{step % 15}"
            assert store.put("own", name, f"{name} {step} ".encode() * draw.randrange(1, 12), step=step)
            store.put("shared", str(step % 3), f"{step:03d}".encode() * 30, step=step)
            kept = store.get("own", name)
            assert kept is not None
            assert (kept.step, kept.data.split()[:2]) == (step, [name.encode(), str(step).encode()])
            shared = store.get("shared", str(step % 3))
            assert shared is not None
            assert shared.step >= step
            assert shared.data == f"{shared.step:03d}".encode() * 30
            if step % 7 == 0:
                store.drop("own", [f"{me}.{(step + 1) % 15}"])

    def guarded(me: int) -> None:
        try:
            write(me)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.0005):  # a busy loop would keep the others from running
            peak = max(peak, store._index.memory_bytes)

    threads = [threading.Thread(target=guarded, args=(me,)) for me in range(8)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    assert errors == []
    assert 0 < peak <= MEMORY
    assert 10 < len(on_disk(tmp_path)) == stored(store._index) - len(store._index.recent)
    store.keep_only("own", [])
    store.keep_only("shared", [])
    assert (store._index.memory_bytes, on_disk(tmp_path)) == (0, [])


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone", "other", "unreadable"])
def test_a_damaged_file_is_absent_and_logged(
    store: BlobStore, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("progress", "r1", b"x" * 900, weights_digest="m", step=3)
    store.put("progress", "r2", b"y" * 900, weights_digest="m", step=3)
    first, second = sorted(on_disk(tmp_path))
    content = first.read_bytes()
    match harm:
        case "flip":
            first.write_bytes(content[:-1] + b"z")
        case "cut":
            first.write_bytes(content[:-100])
        case "empty":
            first.write_bytes(b"")
        case "gone":
            first.unlink()
        case "other":
            first.write_bytes(second.read_bytes())
        case "unreadable":
            first.unlink()
            first.mkdir()
    with caplog.at_level(logging.ERROR):
        assert store.get("progress", "r1", "m") is None
    assert str(first) in caplog.text
    assert "progress of r1 at step 3 (weights m)" in caplog.text
    assert stored(store._index) == 1
    assert store.get("progress", "r2", "m") == StoredBlob(3, b"y" * 900)
    assert store.put("progress", "r1", b"again", weights_digest="m", step=1)  # made again where it is needed


FULL_DISK = """
import errno, resource, sys
from pathlib import Path
from spotlight_rewards.base.file_errors import StoreError
from spotlight.cluster.blobs.blob_store import StoredBlob, BlobStore

directory, filler = Path(sys.argv[1]), Path(sys.argv[1], "filler")

def fill():
    if sys.argv[2] == "file-size-limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error

def free():
    if sys.argv[2] == "file-size-limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        filler.unlink()

store = BlobStore(directory, 100_000)
acknowledged = {}
def put(name, size, step=0):
    data = name.encode()[:1] * size
    store.put("progress", name, data, step=step)
    acknowledged[name] = StoredBlob(step, data)
for i in range(12):
    put(f"{i} before", 10_000)                            # ten in memory, two on disk
fill()
refused = []
later = [("new", 10_000, 0), ("5 before", 12_000, 1), ("large", 90_000, 0), ("0 before", 90_000, 7)]
for name, size, step in later:
    try:
        put(name, size, step)
    except StoreError as error:
        refused.append(name)
        assert "no space left" in str(error) and f"progress of {name} at step {step}" in str(error), error
        assert sys.argv[1] in str(error), error
assert refused == ["new", "5 before", "large", "0 before"], refused
put("6 before", 10_000, 2)                                # in place of an older step: needs no room
assert {name: store.get("progress", name) for name in acknowledged} == acknowledged
assert sum(len(each) for kind in store._index.kinds.values() for each in kind.values()) == len(acknowledged)
assert store._index.memory_bytes <= 100_000
free()
for name, size, step in later:
    put(name, size, step)
assert {name: store.get("progress", name) for name in acknowledged} == acknowledged
left = sorted(path.name for path in directory.rglob(".writing-*"))
assert left == [], left
print("sound")
"""


UNSHARE = ["unshare", "-rm"]
MAY_MOUNT = shutil.which("unshare") and not subprocess.call([*UNSHARE, "true"], stderr=subprocess.DEVNULL)
NEEDS_MOUNT = pytest.mark.skipif(not MAY_MOUNT, reason="needs the right to mount a small file system")


@pytest.mark.parametrize("full", ["file-size-limit", pytest.param("no-space", marks=NEEDS_MOUNT)])
def test_a_full_disk_refuses_the_new_value_and_loses_no_other(full: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), full]
    if full == "no-space":
        mounted = 'mount -t tmpfs -o size=400k none "$1" && shift && exec "$@"'
        command = [*UNSHARE, "sh", "-c", mounted, "sh", str(tmp_path), *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("sound\n", "")


@dataclass
class SlowDisk:
    """Holds each write until it may go on, or fail."""

    write: Callable[[bytes, str], Path]
    during: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    full: bool = False

    def __call__(self, data: bytes, label: str) -> Path:
        self.during.set()
        assert self.go_on.wait(10)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(data, label)


@pytest.fixture
def disk(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk(store._folder.write)
    monkeypatch.setattr(store._folder, "write", slow)
    return slow


@pytest.mark.parametrize("full", [False, True], ids=["disk", "full-disk"])
def test_values_that_go_while_they_are_written_free_their_memory_and_leave_no_file(
    store: BlobStore, tmp_path: Path, disk: SlowDisk, full: bool
) -> None:
    disk.full = full
    for name in "abcdefgh":
        store.put("progress", name, name.encode() * 120)
    with ThreadPoolExecutor() as threads:
        putting = threads.submit(store.put, "progress", "new", b"n" * 125)
        assert disk.during.wait(10)
        store.drop("progress", ["a", "b"])  # of which "a" is being written
        assert store._index.memory_bytes == 7 * 120  # its bytes are still there
        assert store.put("progress", "c", b"", step=1)  # fits: does not wait for the disk
        disk.go_on.set()
        assert isinstance(putting.exception(10), StoreError if full else NoneType)
    assert on_disk(tmp_path) == []
    assert store._index.memory_bytes == 5 * 120 + (0 if full else 125)
    assert store.get("progress", "a") is None
    assert store.get("progress", "new") == (None if full else StoredBlob(0, b"n" * 125))


def test_a_later_step_that_comes_while_a_large_one_is_written_stays(
    store: BlobStore, tmp_path: Path, disk: SlowDisk
) -> None:
    with ThreadPoolExecutor() as threads:
        putting = threads.submit(store.put, "progress", "r1", b"n" * 2000, step=1)
        assert disk.during.wait(10)
        assert store.put("progress", "r1", b"later", step=2)
        disk.go_on.set()
        assert putting.result(10) is False
    assert store.get("progress", "r1") == StoredBlob(2, b"later")
    assert on_disk(tmp_path) == []


LIVES = """
import sys, time
from pathlib import Path
from spotlight.cluster.blobs.blob_store import BlobStore
store = BlobStore(Path(sys.argv[1]), 0)
store.put("progress", "r1", b"theirs")
print("ready", flush=True)
time.sleep(60)
"""


def test_leftovers_of_the_dead_are_deleted_and_the_living_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", LIVES, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (theirs,) = on_disk(tmp_path)
        ours = BlobStore(tmp_path, 0)
        ours.put("progress", "r1", b"ours")
        assert theirs.exists()
        assert len(on_disk(tmp_path)) == 2
        assert ours.get("progress", "r1") == StoredBlob(0, b"ours")
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    third = BlobStore(tmp_path, 0)
    assert not theirs.exists()
    assert not theirs.parent.exists()
    assert ours.get("progress", "r1") == StoredBlob(0, b"ours")
    third.close()
    ours.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["lock"]


def test_what_lies_there_and_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("precious")
    (tmp_path / "blobs-notes").write_text("a file, not a folder")
    BlobStore(tmp_path, 0).close()
    assert (tmp_path / "config.yaml").read_text() == "precious"
    assert (tmp_path / "blobs-notes").exists()


def test_misuse_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_bytes is -1; expected 0"):
        BlobStore(tmp_path, -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot use the directory .*/file"):
        BlobStore(tmp_path / "file", 10)
    store = BlobStore(tmp_path, 10)
    store.close()
    store.close()
    assert store.get("progress", "r1") is None
    for size in (1, 100):
        with pytest.raises(StoreError, match=r"cannot keep progress of r1 at step 0: .* is closed"):
            store.put("progress", "r1", b"x" * size)
