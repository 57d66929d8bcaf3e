"""Whenever the power goes, what the disk holds is a run that goes on, and ends like any other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kept_tiles import read_tiles
from safetensors.torch import load_file
from store_history import SCRATCH
from tests.power_cut import watched, write_tree

from spotlight.report.model_card import _pictures
from spotlight.runtime.conclusion import compare
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.images import Tile, drawn_iterations, drop_pictures, write_grid
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.metrics import MetricsRow, MetricsWriter, read_metrics
from spotlight.store.run_directory import RunDirectory
from spotlight.store.run_summary import RunSummary, SampleCounts, read_summary, write_summary
from spotlight_files.pipeline_export import save_lora

ITERATIONS = 2


def live(root: Path) -> Iterator[int]:
    """A run as far as files go, from where it stands to its end; yields what is committed."""
    with RunDirectory.open(root, "run", "iterations: 3\n") as run:
        checkpoints = CheckpointStore(run.checkpoints, keep=1)
        newest = checkpoints.newest_valid()
        begun = newest.header.iteration if newest else 0
        with MetricsWriter(run, resume_at=begun) as metrics:
            drop_pictures(run, resume_at=begun)
            assert [row.iteration for row in read_metrics(run.path)] == [i // 2 for i in range(2 * begun)]
            assert drawn_iterations(run) == list(range(begun))
            for iteration in range(begun, ITERATIONS):
                metrics.write(MetricsRow(iteration, iteration, 1.0, {"reward": 0.5}))
                write_grid(run, iteration, [tile(iteration, each) for each in "ab"], columns=1, title="t")
                metrics.write(MetricsRow(iteration, iteration, 1.0, {"validation/graded": 0.5}))
                metrics.sync()
                header = CheckpointHeader(iteration + 1, 0, "", "")
                with checkpoints.writer(header) as directory:
                    (directory / "state").write_text(str(iteration))
                yield iteration + 1
        compare(run)
        adapter = {"to_q.lora_A.weight": torch.ones(1, 2), "to_q.lora_B.weight": torch.ones(2, 1)}
        save_lora(run.path / "lora", adapter, {"r": 1, "lora_alpha": 1})
        write_summary(run.summary, SUMMARY)


SUMMARY = RunSummary(ITERATIONS, (), None, 1.0, {}, 0.0, SampleCounts(0, 0, {}), "lora", 0)


def tile(iteration: int, prompt: str) -> Tile:
    picture = np.full((4, 4, 3), iteration, np.uint8)
    reference = np.full((4, 4, 3), ord(prompt), np.uint8)
    return Tile(picture, prompt, float(iteration), references=(reference,), member=0)


def test_after_a_power_cut_at_any_write_a_run_goes_on_to_its_end() -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        root = Path(scratch) / "runs"
        root.mkdir()
        committed: list[tuple[int, int]] = []
        with watched(root) as disk:
            for iteration in live(root):
                committed.append((disk.moments, iteration))
        assert len(disk.left) > 60
        for number, (tree, moment) in enumerate(disk.left.items()):
            left = write_tree(tree, Path(scratch) / str(number))
            safe = max((iteration for at, iteration in committed if at < moment), default=0)
            if (left / "run/summary.json").exists():  # such a run is not taken up again
                assert read_summary(left / "run/summary.json") == SUMMARY
                assert load_file(left / "run/lora/pytorch_lora_weights.safetensors")
                assert (left / "run/images/before-after.png").stat().st_size > 0
            again = list(live(left))
            assert len(again) <= ITERATIONS - safe, (moment, again)
            for iteration in range(ITERATIONS):
                assert [each.score for each in read_tiles(RunDirectory(left / "run", -1, ""), iteration)] == [
                    iteration
                ] * 2
            assert (left / "run/images/before-after.png").stat().st_size > 0
            shutil.rmtree(left)


def test_a_lost_picture_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDirectory.open(tmp_path, "run", "iterations: 3\n") as run:
        for iteration in (0, 1, 2):
            write_grid(run, iteration, [tile(iteration, each) for each in "ab"], columns=1, title="t")
        lost, *others = sorted((run.images / "tiles").iterdir())
        lost.write_bytes(b"")
        compare(run)
        assert (run.images / "before-after.png").exists()
        for each in others:
            each.write_bytes(b"")
        compare(run)
        record: Any = SimpleNamespace(paths=run, config=SimpleNamespace(name="run"))
        assert not list(_pictures(record)), "nor does its card need them"
    assert "no prompt in common" in caplog.text
