"""Many processes of a node, and the death of the one that fetches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from weights_children import Child

from spotlight_weights.bundle import WeightsManifest, pack
from spotlight_weights.node_cache import NodeCache
from spotlight_weights.weight_errors import WeightsError

Say = Callable[[str], None]


def version(size: int = 300_000) -> tuple[WeightsManifest, bytes]:
    return pack(7, 0, {"policy": {"w": torch.arange(size, dtype=torch.float32)}}, 1)


def total(cache: NodeCache, manifest: WeightsManifest, fetch: Callable[[], bytes]) -> float:
    return float(cache.get(manifest, fetch).tensors["policy"]["w"].double().sum())


def test_all_processes_together_fetch_once(tmp_path: Path) -> None:
    manifest, data = version()
    count, go = tmp_path / "fetches", tmp_path / "go"

    def work(say: Say) -> str:
        say("ready")
        while not go.exists():
            time.sleep(0.001)

        def fetch() -> bytes:
            with count.open("a") as file:
                file.write("x")
            while len([*tmp_path.glob("asks-*")]) < 6:  # the others come meanwhile
                time.sleep(0.001)
            return data

        with NodeCache("run", parent=tmp_path) as cache:
            (tmp_path / f"asks-{os.getpid()}").touch()
            return str(total(cache, manifest, fetch))

    children = [Child(work) for _ in range(6)]
    try:
        expected = str(float(torch.arange(300_000).double().sum()))
        assert {child.receive() for child in children} == {"ready"}
        go.touch()
        assert {child.receive() for child in children} == {expected}
    finally:
        for child in children:
            child.kill()
    assert count.read_text() == "x"


def test_a_killed_fetcher_leaves_lock_and_rubbish_to_the_next(tmp_path: Path) -> None:
    manifest, data = version()

    def die(say: Say) -> str:
        cache = NodeCache("run", parent=tmp_path)

        def fetch() -> bytes:
            # What a writer leaves that dies halfway.
            (cache.directory / f"{manifest.digest}.part").write_bytes(data[: len(data) // 2])
            say("fetching")
            time.sleep(60)
            return data

        return str(total(cache, manifest, fetch))

    def wait(say: Say) -> str:
        with NodeCache("run", parent=tmp_path) as cache:
            say("waiting")
            return str(total(cache, manifest, lambda: data))

    with NodeCache("run", parent=tmp_path) as cache, Child(die) as child:
        assert child.receive() == "fetching"
        with Child(wait) as waiting:
            assert waiting.receive() == "waiting"
            assert not list(cache.directory.glob("*.safetensors"))
            child.kill()
            assert float(waiting.receive()) > 0
        assert not list(cache.directory.glob("*.part"))


@pytest.mark.parametrize("moment", range(8))
def test_killed_at_any_moment_of_writing_no_half_file_is_read(tmp_path: Path, moment: int) -> None:
    manifest, data = version(3_000_000)

    def work(say: Say) -> str:
        cache = NodeCache("run", parent=tmp_path)
        fetched = time.monotonic()
        say("go")
        total(cache, manifest, lambda: data)
        return str(time.monotonic() - fetched)

    with Child(work) as child:
        assert child.receive() == "go"
        time.sleep(0.006 * moment)
        child.kill()
    with NodeCache("run", parent=tmp_path) as cache:
        found = total(cache, manifest, lambda: data)
        assert found == float(torch.arange(3_000_000, dtype=torch.float32).double().sum())
        assert not list(cache.directory.glob("*.part"))


def test_a_stopped_fetcher_keeps_others_waiting_until_the_deadline_only(tmp_path: Path) -> None:
    manifest, data = version()

    def hang(say: Say) -> str:
        cache = NodeCache("run", parent=tmp_path)
        return str(total(cache, manifest, lambda: say("fetching") or time.sleep(60) or data))

    with NodeCache("run", parent=tmp_path, deadline_s=0.3) as cache, Child(hang) as child:
        assert child.receive() == "fetching"
        child.signal(signal.SIGSTOP)
        with pytest.raises(WeightsError, match=f"locked by process {child.pid} for 0.3 s"):
            total(cache, manifest, lambda: data)


def test_a_killed_process_releases_its_runs_directory(tmp_path: Path) -> None:
    manifest, data = version()

    def live(say: Say) -> str:
        cache = NodeCache("first", parent=tmp_path)
        total(cache, manifest, lambda: data)
        say(str(cache.directory))
        time.sleep(60)
        return ""

    with Child(live) as child:
        directory = Path(child.receive())
        NodeCache("second", parent=tmp_path).close()
        assert directory.exists()
        child.kill()
        NodeCache("second", parent=tmp_path).close()
        assert not directory.exists()
