"""Trackers of other packages, as they are: what a run shows them, offline, and once only when it is resumed.

Neither is in the lock file (Trackio wants an older Pillow): `pip install wandb trackio` in an environment of
its own runs these.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotlight.scheduler.types import Phase
from spotlight.store.images import Tile, drop_pictures, keep_tiles, write_grid
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import RunSummary, SampleCounts, ValidationPoint, final_table
from spotlight.store.shown_media import shown_media
from spotlight.store.sinks import check_sinks, open_sinks
from spotlight_rewards.base.file_errors import StoreError

ITERATIONS = 6
HOSTILE = "<script>window.hacked = 1</script>\u202e"
SUMMARY = RunSummary(
    ITERATIONS, (ValidationPoint(0, 0, 1.0, None, 0.5),), None, 9.0, {Phase.ROLLOUT: 5.0}, 0.25,
    SampleCounts(10, 10, {}), None, 3,
)  # fmt: skip


def attempt(paths: RunPaths, chosen: dict[str, dict[str, Any]], *, resume_at: int, until: int) -> None:
    """One process's share of a run, evaluated every two iterations; the last ends with a table."""
    check_sinks(chosen)
    sinks = open_sinks(chosen, paths, resume_at=resume_at)
    drop_pictures(paths, resume_at=resume_at)
    paths.images.mkdir(exist_ok=True)
    with MetricsWriter(paths, resume_at=resume_at, sinks=sinks) as writer:
        repeated = [2, 3] if until == 4 else []
        for at, iteration in enumerate([*range(resume_at, until), *repeated]):
            if repeated and at == until:
                writer.rewind(2)  # its learner was lost
            picture = np.random.default_rng(iteration).integers(0, 256, (200, 600, 3), dtype=np.uint8)
            if iteration % 2 == 0:
                writer.write(MetricsRow(iteration, iteration, iteration, {"validation/graded": 0.5}))
                tiles = [Tile(picture, HOSTILE, 0.5), Tile(np.stack([picture, picture[::-1]]), "b", 0.25)]
                write_grid(paths, iteration, tiles, columns=1, title="evaluation")
                writer.pictures(iteration)
                trained = [
                    Tile(picture, HOSTILE, at, rollout="r", scores={"judge": at}) for at in (0.5, 0.25)
                ]
                keep_tiles(paths, iteration, trained, TRAINING)
                writer.training_pictures(iteration, shown_media(paths, iteration, TRAINING))
            values = {"train/loss": 1.0 / (1 + iteration), "train/bad": float("nan")}
            writer.write(MetricsRow(iteration, iteration, iteration, values))
        if until == ITERATIONS:
            writer.table(ITERATIONS, final_table(SUMMARY))


def resumed_run(place: Path, chosen: dict[str, dict[str, Any]]) -> RunPaths:
    """Stopped after four iterations, of which the last two are repeated; resumed at the end again."""
    paths = RunPaths(place / "run")
    paths.path.mkdir()
    attempt(paths, chosen, resume_at=0, until=4)
    attempt(paths, chosen, resume_at=2, until=ITERATIONS)
    attempt(paths, chosen, resume_at=ITERATIONS, until=ITERATIONS)
    return paths


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed: pip install trackio")
def test_trackio_has_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # it reads the variable when imported
    chosen: dict[str, dict[str, Any]] = {"trackio": {"project": "tests"}}
    other = RunPaths(tmp_path / "elsewhere" / "run")  # of the same name
    other.path.mkdir(parents=True)
    attempt(other, chosen, resume_at=0, until=2)
    resumed_run(tmp_path, chosen)
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("tests"))
    assert [run.name for run in runs] == ["run", "run"]
    logs = [SQLiteStorage.get_logs("tests", run.name, run_id=run.id) for run in runs]
    shorter, logged = sorted(logs, key=len)
    assert sorted(row["step"] for row in shorter if "train/loss" in row) == [0, 1]
    assert sorted(row["step"] for row in logged if "train/loss" in row) == list(range(ITERATIONS))
    assert sorted(row["step"] for row in logged if "validation/graded" in row) == [0, 2, 4]
    shown = [row for row in logged if "pictures/000" in row]
    assert sorted(row["step"] for row in shown) == [0, 2, 4]
    assert {row["pictures/000"]["_type"] for row in shown} == {"trackio.image"}
    assert {row["pictures/001"]["_type"] for row in shown} == {"trackio.video"}
    assert HOSTILE in shown[0]["pictures/000"]["caption"]
    trained = [row for row in logged if "training_pictures/0-worst" in row]
    assert sorted(row["step"] for row in trained) == [0, 2, 4]
    assert trained[0]["training_pictures/0-best"]["caption"] == f"judge 0.500  {HOSTILE}"
    (table,) = [row["summary"] for row in logged if "summary" in row]
    assert {"figure": "dollars", "value": "0.25"} in table["_value"]


def test_trackio_with_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")
    with pytest.raises(StoreError, match="Unset it, and publish the project afterwards"):
        check_sinks({"trackio": {}})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install wandb")
def test_wandb_offline_has_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "SILENT": "true", "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    paths = resumed_run(tmp_path, {"wandb": {"project": "tests", "entity": None}})
    logged, found = in_project(paths, "tests")
    check_wandb(logged)
    assert found["pictures/000/_type"] == "image-file"
    assert found["pictures/001/_type"] == "video-file"
    assert HOSTILE in found["pictures/000/caption"]
    for _ in range(2):  # another project has nothing yet; then it has everything
        attempt(
            paths, {"wandb": {"project": "others", "entity": None}}, resume_at=ITERATIONS, until=ITERATIONS
        )
    check_wandb(in_project(paths, "others")[0])


def in_project(paths: RunPaths, project: str) -> tuple[Counter[tuple[str, int]], dict[str, Any]]:
    """What offline runs hold for a project: (name, step), how often; and the last values by name."""
    from wandb.proto.wandb_internal_pb2 import Record

    met: Counter[tuple[str, int]] = Counter()
    found: dict[str, Any] = {}
    for path in sorted((paths.path / "wandb").glob("offline-run-*/*.wandb")):
        records = list[Record]()
        for data in leveldb_records(path.read_bytes()[7:], offset=7):
            records.append(Record())
            records[-1].ParseFromString(data)
        runs = [record.run for record in records if record.HasField("run")]  # none: nothing was logged
        assert {run.run_id for run in runs} <= {(paths.path / "wandb-id").read_text()}
        for record in records if {run.project for run in runs} == {project} else ():
            items = record.history.item
            row = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}
            met.update((name, row["_step"]) for name in row if not name.startswith("_"))
            found |= row
    return met, found


def check_wandb(met: Counter[tuple[str, int]]) -> None:
    """Everything once."""
    assert sorted(step for name, step in met if name == "train/loss") == list(range(ITERATIONS))
    pictures = ("pictures/000", "pictures/001", "training_pictures/0-best", "training_pictures/0-worst")
    for name in ("validation/graded", *(f"{each}/_type" for each in pictures)):
        assert sorted(step for each, step in met if each == name) == [0, 2, 4], name
    assert [step for name, step in met if name == "summary/nrows"] == [ITERATIONS]
    assert max(met.values()) == 1


def leveldb_records(content: bytes, *, offset: int) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB with fragments of CRC, length, type (1: whole)."""
    record, at = b"", 0
    while at + 7 <= len(content):
        if (left := 32768 - (at + offset) % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
