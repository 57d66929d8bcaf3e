from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence
from store_history import SCRATCH
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spotlight.config.load import build_config
from spotlight.registry import SINKS
from spotlight.scheduler.types import DropReason, Phase
from spotlight.store.images import Tile, keep_tiles, write_grid
from spotlight.store.metrics import MetricsRow, MetricsWriter, best_iterations, read_metrics
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import (
    RunSummary,
    SampleCounts,
    ValidationPoint,
    final_table,
    read_summary,
    write_summary,
)
from spotlight.store.shown_media import shown_media
from spotlight.store.sinks import TensorBoard, check_sinks
from spotlight_dashboard.trackers.wandb_sink import WeightsAndBiases
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.file_errors import StoreError


def row(iteration: int, **values: float) -> MetricsRow:
    return MetricsRow(iteration, 48 * iteration, 1.5 * iteration, values)


finite = st.floats(allow_nan=False, allow_infinity=False)
curves = st.dictionaries(st.text(min_size=1, max_size=5), finite, max_size=3)
rows = st.lists(
    st.builds(MetricsRow, st.integers(0, 9), st.integers(0, 2**53), finite, curves), max_size=6
).map(lambda found: sorted(found, key=lambda each: each.iteration))


@given(before=rows, after=rows, resume_at=st.integers(0, 10), cut=st.integers(0, 400))
@settings(deadline=None, max_examples=50)
def test_resuming_repairs_and_truncates(
    before: list[MetricsRow], after: list[MetricsRow], resume_at: int, cut: int
) -> None:
    """However much of the file a kill left: whole rows before ``resume_at`` stay, and new ones follow."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        paths = RunPaths(Path(name))
        with MetricsWriter(paths, resume_at=0) as writer:
            for each in before:
                writer.write(each)
        content = paths.metrics.read_bytes()
        paths.metrics.write_bytes(content[: len(content) - cut] if cut else content)
        whole = before[: paths.metrics.read_bytes().count(b"\n")]
        assert read_metrics(paths.path) == whole
        with MetricsWriter(paths, resume_at=resume_at) as writer:
            for each in after:
                writer.write(each)
        assert read_metrics(paths.path) == [each for each in whole if each.iteration < resume_at] + after


def test_rows_are_plain_json_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsWriter(RunPaths(tmp_path), resume_at=0) as writer:
        writer.write(MetricsRow(3, 144, 4.5, {"train/loss": 0.25, "train/kl": math.inf}))
        writer.sync()
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == {
        "iteration": 3,
        "samples_trained": 144,
        "wall_s": 4.5,
        "train/loss": 0.25,
        "train/kl": None,
    }
    assert math.isnan(read_metrics(tmp_path)[0].values["train/kl"])


def test_a_spoilt_line_is_named(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with MetricsWriter(paths, resume_at=0) as writer:
        writer.write(row(0))
    for spoilt in ("not json", "[1]", '{"iteration": 1}'):
        paths.metrics.write_text(paths.metrics.read_text().splitlines()[0] + f"\n{spoilt}\n")
        with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2"):
            read_metrics(tmp_path)


def test_no_metrics_yet_are_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_the_best_iterations_are_found_beside_rows_of_training() -> None:
    curve = {0: 0.5, 1: 0.9, 2: math.nan, 3: 0.9}
    rows = [
        row(iteration, **values)
        for iteration, value in curve.items()
        for values in ({"validation/strict": value}, {"rollout/reward": 0.1})
    ]
    assert best_iterations(rows) == [3, 1, 0]
    assert best_iterations(rows, "graded") == []


def test_the_table_names_no_reward_beside_the_strict_score() -> None:
    points = (ValidationPoint(0, 0, 0.0, None, 0.31), ValidationPoint(4, 9, 1.0, 0.9, 0.35))
    shown = final_table(dataclasses.replace(SUMMARY, validation=points)).rows
    assert [row for row in shown if row[0].startswith("validation")] == [
        ("validation at iteration 4", "0.9000")
    ]


SCORES = {"reward": 0.5, "judge": -1.0}


def test_tensorboard_reads_the_curves_and_purges_what_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, now = RunPaths(tmp_path), time.time
    paths.images.mkdir()
    for resume_at, loss in ((0, 1.0), (2, 2.0)):
        # Files are read by name: seconds, then a counter as text (9 after 10).
        monkeypatch.setattr(time, "time", lambda later_s=10 * resume_at: now() + later_s)
        with MetricsWriter(
            paths, resume_at=resume_at, sinks=(TensorBoard(paths, resume_at=resume_at),)
        ) as writer:
            for iteration in range(resume_at, 4):
                writer.write(row(iteration, **{"train/loss": loss}))
                if iteration % 2 == 0:
                    write_grid(paths, iteration, [Tile(PICTURE, "a", 0.5), Tile(VIDEO, "b", 0.25)], **GRID)
                    writer.pictures(iteration)
                    keep_tiles(
                        paths, iteration, [Tile(PICTURE, "a", 0.5, scores=SCORES, rollout="r")], TRAINING
                    )
                    writer.training_pictures(iteration, shown_media(paths, iteration, TRAINING))
                if (iteration, loss) == (3, 1.0):
                    writer.rewind(1)  # a learner that was lost, in the same attempt
                    writer.write(row(1, **{"train/loss": 1.0}))
            writer.sync()
            if resume_at:
                writer.table(4, final_table(SUMMARY))
    board = EventAccumulator(str(paths.tensorboard))
    board.Reload()
    curve = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert curve == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]
    for tag in ("pictures/000", "pictures/001", "training_pictures/0-best"):
        shown = [(event.step, event.width, event.height) for event in board.Images(tag)]
        assert shown == [(0, 8, 8), (2, 8, 8)]
    with Image.open(io.BytesIO(board.Images("pictures/001")[-1].encoded_image_string)) as played:
        frames = [np.asarray(frame.convert("L")).mean() for frame in ImageSequence.Iterator(played)]
    assert frames == pytest.approx([0, 200], abs=5)
    (table,) = board.Tensors("summary")
    assert b"| iterations | 40 |" in table.tensor_proto.string_val[0]


def test_wandb_missing_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(StoreError, match=r"pip install 'spotlight-rl\[wandb\]'"):
        WeightsAndBiases(RunPaths(tmp_path), project="p", entity=None)


def test_a_line_that_was_cut_off_makes_wandb_log_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []
    there = {"offline": True, "disabled": False, "entity": "e", "project": "p"}
    started = SimpleNamespace(log=lambda values, step: logged.append(step), **there)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: started))
    for iteration in (0, 1, 1):
        WeightsAndBiases(RunPaths(tmp_path), project="p", entity=None).write(row(iteration, loss=1.0))
        if iteration == 0:
            remembered = tmp_path / "wandb-logged"
            remembered.write_bytes(remembered.read_bytes()[:-3])
    assert logged == [0, 1]


PICTURE = np.zeros((8, 8, 3), np.uint8)
VIDEO = np.stack([PICTURE, PICTURE + 200])
GRID: dict[str, Any] = {"columns": 1, "title": "evaluation"}
SUMMARY = RunSummary(
    iterations=40,
    validation=(ValidationPoint(0, 0, 1.0, 0.49, 0.6), ValidationPoint(40, 1920, 90.5, None, 0.9)),
    validation_stderr=0.02,
    wall_s=100.0,
    gpu_seconds_by_phase={Phase.ROLLOUT: 40.0, Phase.TRAINING: 60.0},
    cost_usd=0.001,
    samples=SampleCounts(1930, 1920, {DropReason.GROUP_TOO_SMALL: 10}),
    lora="lora",
    run_seed=3,
)


def test_summary_round_trips_under_its_public_keys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    assert read_summary(path) == SUMMARY
    fields = json.loads(path.read_text())
    assert set(fields) == {
        "validation", "validation_stderr", "wall_s", "gpu_seconds_by_phase", "cost_usd", "samples", "lora",
        "run_seed", "iterations",
    }  # fmt: skip
    assert fields["samples"] == {"issued": 1930, "trained": 1920, "dropped": {"group_too_small": 10}}
    assert fields["validation"][0] == {
        "iteration": 0, "samples_trained": 0, "wall_s": 1.0, "strict": 0.49, "graded": 0.6
    }  # fmt: skip


def test_a_missing_or_foreign_summary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with pytest.raises(StoreError, match="not come to its end"):
        read_summary(path)
    wrong = json.dumps({**dataclasses.asdict(SUMMARY), "wall_s": "x", "name": 3})
    for content in ("{}", "[]", "{", '{"samples": {}}', "[" * 100_000, wrong):
        path.write_text(content)
        with pytest.raises(StoreError, match="not a summary") as caught:
            read_summary(path)
        assert "\n" not in str(caught.value)


class FullSink:
    """A sink that fails as TensorBoard does on a full disk, at one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.closed = False

    def _fail(self, now: str) -> None:
        if now == self.at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, row: MetricsRow) -> None:
        self._fail("write")

    def flush(self) -> None:
        self._fail("flush")

    def close(self) -> None:
        self.closed = True
        self._fail("close")


@pytest.mark.parametrize("at", ["write", "flush", "close"])
def test_a_sink_on_a_full_disk_is_reported_as_ours(tmp_path: Path, at: str) -> None:
    full, other = FullSink(at), FullSink("never")

    def write_all() -> None:
        with MetricsWriter(RunPaths(tmp_path), resume_at=0, sinks=(full, other)) as writer:
            writer.write(row(0))
            writer.sync()

    with pytest.raises(StoreError, match="no space left"):
        write_all()
    assert full.closed
    assert other.closed


def test_closing_a_full_sink_does_not_hide_the_first_error(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="the first"),
        MetricsWriter(RunPaths(tmp_path), resume_at=0, sinks=(FullSink("close"),)),
    ):
        raise KeyError("the first")


def test_tensorboard_that_cannot_be_written_is_reported_as_ours(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write the curves"):
        TensorBoard(RunPaths(tmp_path), resume_at=0)


def test_a_summary_without_a_standard_error_is_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    alone = dataclasses.replace(SUMMARY, validation_stderr=None)
    write_summary(path, alone)
    assert read_summary(path) == alone


def test_an_older_summary_ended_with_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    fields = json.loads(path.read_text())
    del fields["iterations"]
    path.write_text(json.dumps(fields))
    assert read_summary(path) == SUMMARY


@pytest.mark.parametrize("metrics", [{"wandb": {}}, {"sinks": {"trackio": {}}}])
def test_a_tracker_whose_package_is_not_installed_is_an_error_with_the_remedy(
    metrics: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SINKS.__dict__, "_added", {})
    with pytest.raises(UserError, match=r"pip install 'spotlight-rl\[(wandb|trackio)\]' adds it\."):
        check_sinks(build_config({"metrics": metrics}, "the test").metrics.chosen)
