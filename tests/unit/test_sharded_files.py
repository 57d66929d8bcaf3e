"""Distributed checkpoints of somebody else's run: tensors are read, code is not run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from spotlight.training.learner_state import StateError, _read_sharded
from spotlight.training.sharded_files import INDEX

VALUES = {
    "a": torch.arange(12.0).view(3, 4),
    "b.c": torch.ones(2, dtype=torch.bfloat16),
    "s": torch.tensor(3),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(dict(VALUES), checkpoint_id=tmp_path / "learner.dcp", no_dist=True)
    return tmp_path / "learner.dcp"


def targets() -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in VALUES.items()}


def rewrite(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    index = pickle.loads((checkpoint / INDEX).read_bytes())
    (checkpoint / INDEX).write_bytes(pickle.dumps(change(index)))


class Run:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_tensors_are_read(checkpoint: Path) -> None:
    found = targets()
    _read_sharded(checkpoint, found)
    assert all(torch.equal(found[name], value) for name, value in VALUES.items())


@pytest.mark.parametrize("hidden", [False, True])
def test_code_in_an_index_is_not_run(checkpoint: Path, tmp_path: Path, hidden: bool) -> None:
    """As the index, or within one that is otherwise right."""
    run = Run(f"touch {tmp_path / 'ran'}")

    def plant(index: Any) -> Any:
        index.planner_data = run
        return index

    rewrite(checkpoint, plant if hidden else lambda _: run)
    with pytest.raises(StateError, match=r"posix\.system|names"):
        _read_sharded(checkpoint, targets())
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_claims_to_be_bytes_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """torch reads such an entry with the whole of pickle."""
    code = pickle.dumps(Run(f"touch {tmp_path / 'ran'}"))
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(code)

    def disguise(index: Any) -> Any:
        index.state_dict_metadata["a"] = BytesStorageMetadata()
        for key, place in index.storage_data.items():
            if key.fqn == "a":
                place.offset, place.length = 0, len(code)
        return index

    rewrite(checkpoint, disguise)
    with pytest.raises(StateError, match="BytesStorageMetadata"):
        _read_sharded(checkpoint, targets())
    assert not (tmp_path / "ran").exists()


def test_files_outside_of_the_checkpoint_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    data.rename(tmp_path / data.name)

    def outside(index: Any) -> Any:
        for place in index.storage_data.values():
            place.relative_path = f"../{place.relative_path}"
        return index

    rewrite(checkpoint, outside)
    with pytest.raises(StateError, match="outside of its directory"):
        _read_sharded(checkpoint, targets())


def test_a_damaged_file_is_named(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_bytes(b"no pickle")
    with pytest.raises((StateError, CheckpointException), match=r"learner\.dcp"):
        _read_sharded(checkpoint, targets())
