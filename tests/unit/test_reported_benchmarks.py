"""Benchmarks that print tables of plain rows write the same rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import ocr_readings, ocr_sizes, plan_grid, reward_throughput, state_bytes
from benchmarks._measure import report


def saved(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert content["machine"]["cores"] > 0
    return content


def test_tables_are_printed_and_written_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "[a]", "usd": 23385.4, "share": 0.00378, "limit": None}]
    report(tmp_path / "made" / "a.json", "Costs", of_all=rows, left_out=[])
    printed = capsys.readouterr().out
    assert "Costs: of all" in printed
    for shown in ("[a]", "23,385", "0.00378", "None"):
        assert shown in printed
    assert "left out" not in printed
    content = saved(tmp_path / "made" / "a.json")
    assert (content["benchmark"], content["of_all"], content["left_out"]) == ("Costs", rows, [])


def test_a_commit_with_all_latents_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_bytes, "CASES", state_bytes.CASES[-2:-1])
    state_bytes.main(tmp_path / "a.json")
    (row,) = saved(tmp_path / "a.json")["rows"]
    assert row["all_kept_mb"] == pytest.approx(4 * row["commit_mb"], rel=0.02)


def test_a_reward_that_cannot_run_here_is_left_out_and_told_why(tmp_path: Path) -> None:
    reward_throughput.main(["http"], json=tmp_path / "a.json")
    content = saved(tmp_path / "a.json")
    assert content["measured"] == []
    (row,) = content["left_out"]
    assert row["reward"] == "http"
    assert "server" in row["why"]


@pytest.fixture
def reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of Tesseract: all words are read, and in noise an "a"."""

    def score(images: Sequence[Any], *_: object, **__: object) -> dict[str, list[float]]:
        return {"score": [1.0] * len(images)}

    def readings(image: np.ndarray, **_: object) -> Iterator[str]:
        yield "a"

    monkeypatch.setattr(ocr_readings, "readings", readings)
    for bench in (ocr_readings, ocr_sizes):
        monkeypatch.setattr(bench, "ocr", score)


@pytest.mark.usefixtures("reads_all")
def test_what_is_read_in_noise_and_scenes_is_written(tmp_path: Path) -> None:
    ocr_readings.main(pictures=1, json=tmp_path / "a.json")
    content = saved(tmp_path / "a.json")
    in_noise = content["targets_read_in_white_noise"]
    assert [row["letters"] for row in in_noise] == [1, 2, 3, 4, 5]
    assert [row["contained"] > 0 for row in in_noise] == [True, *[False] * 4]
    words = content["mean_score_of_a_word"]
    assert [(row["picture"], row["noise"]) for row in words] == [*ocr_readings.KINDS]
    assert all(row[way] == 1 for row in words for way in ocr_readings.WAYS)


@pytest.mark.usefixtures("reads_all")
def test_every_limit_is_compared_with_the_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr_sizes, "LETTERS", (0.05,))
    monkeypatch.setattr(ocr_sizes.ocr_module, "_READABLE_SIDE_PX", 0)  # set back in the end
    monkeypatch.setattr(ocr_sizes, "LIMITS_PX", (128,))
    ocr_sizes.main(side=256, pictures=2, json=tmp_path / "a.json")
    rows = saved(tmp_path / "a.json")["rows"]
    assert [row["limit_px"] for row in rows] == [256, 128]
    assert all((row["letters_px"], row["score"], row["difference"]) == (13, 1, 0) for row in rows)


def test_the_plan_is_compared_with_a_grid(tmp_path: Path) -> None:
    tiny = [
        "workload.prompts=2",
        "workload.group_size=8",
        "workload.evaluation=null",
        "run.starts=1",
        "iterations_to_target.spotlight={value: [40, 50, 60], source: 'assumed: for a test'}",
        "plan={iterations: 2, strategies: [spotlight], reserved_nodes: [2], spot_nodes: [4], parts: [gap]}",
    ]
    plan_grid.main(tiny, scenario="paper-512", deadline_h=1e4, jobs=1, json=tmp_path / "a.json")
    content = saved(tmp_path / "a.json")
    assert content["recommended"] == content["cheapest"][:1]
