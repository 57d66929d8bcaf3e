"""The run directory of a learner rank: shared with the head, or carried through the blob store's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spotlight.cluster.blobs.run_files import RunFiles
from spotlight.cluster.learner import rank_folder
from spotlight.cluster.learner.rank_folder import RankFolder, write_token
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight_rewards.base.file_errors import StoreError


class HeadsNode:
    """What the blob store's process does with the head's files, without Ray between."""

    def __init__(self, run: Path) -> None:
        files = RunFiles(run)
        self.file_sizes, self.read_file, self.write_file = files.sizes, files.read, files.write


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_folder, "_STORAGE_SETTLES_S", 0.0)
    monkeypatch.setattr("spotlight.cluster.learner.rank_folder.PIECE_BYTES", 4)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    return load_config(None, [f"runs_dir={tmp_path}/runs", "name=demo"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_files_that_a_rank_elsewhere_writes_are_the_heads_and_come_back(
    config: RunConfig, tmp_path: Path, stack: ExitStack
) -> None:
    run = tmp_path / "runs" / "demo"
    write_token(config, "of another head")
    rank = RankFolder(config, "abc", HeadsNode(run), stack)
    assert not rank.shared
    state = run / "checkpoints" / "learner"
    content = {"index.json": b"", "sharded/0.distcp": b"0123456789", "sharded/.metadata": b"1234"}
    with rank.written(state) as here:
        assert here != state
        for name, data in content.items():
            (here / name).parent.mkdir(exist_ok=True)
            (here / name).write_bytes(data)
    assert {name: (state / name).read_bytes() for name in content} == content
    with rank.read(state) as here:
        assert {name: (here / name).read_bytes() for name in content} == content
    assert not here.exists()

    exported = rank.config.runs_dir / "demo" / "lora" / "weights"
    exported.parent.mkdir(parents=True)
    for data in (b"longer than before", b"short"):
        exported.write_bytes(data)
        assert rank.deliver(exported) == run / "lora" / "weights"
        assert (run / "lora" / "weights").read_bytes() == data


def test_a_rank_that_sees_the_heads_run_directory_works_in_it(
    config: RunConfig, tmp_path: Path, stack: ExitStack
) -> None:
    write_token(config, "abc")
    rank = RankFolder(config, "abc", HeadsNode(tmp_path / "nowhere"), stack)
    state = tmp_path / "runs" / "demo" / "state"
    assert rank.shared
    assert rank.config is config
    with rank.written(state) as here, rank.read(state) as there:
        assert here == there == state
    assert rank.deliver(state) == state


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "lora/../../other", ""])
def test_nothing_but_the_run_directory_is_reached(tmp_path: Path, path: str) -> None:
    files = RunFiles(tmp_path / "run")
    calls = lambda: files.read(path, 0, 1), lambda: files.write(path, 0, b"x"), lambda: files.sizes(path)
    for call in calls:
        with pytest.raises(StoreError, match="expected a path below it"):
            call()
    assert not list(tmp_path.iterdir())
