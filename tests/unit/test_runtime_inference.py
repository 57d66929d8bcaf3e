"""What a trained run submits to its rewards; ``tests/contract/test_old_run.py`` loads and generates."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spotlight.config.schema import RunConfig
from spotlight.rollout.state import FailedRollout, FinishedRollout, SampleTensors
from spotlight.runtime.inference import TrainedRun, _transformer_aside
from spotlight.runtime.observer import Observer
from spotlight.scheduler.types import Rollout

REWARD = """
from spotlight_rewards.reward import takes_groups

@takes_groups
def first(images, prompts, metadata):
    return {"score": [float(len({record["line"] for record in metadata}))] * len(images)}
"""


def test_an_evaluation_gives_a_comparing_reward_whole_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compared.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    # Two prompts of one text, which are two groups all the same.
    lines = [{"caption": text, "line": line} for line, text in enumerate(("a dog", "a dog", "a cat"))]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def in_pairs(_: TrainedRun, rollouts: Sequence[Rollout], *__: Any) -> Iterator[list[Any]]:
        nothing = SampleTensors(torch.zeros(0), torch.zeros(0))
        for start in range(0, len(rollouts), 2):
            yield [
                FailedRollout(each, "not finite")
                if each.id == "e0001-002"
                else FinishedRollout(each, np.zeros((4, 4, 3), np.uint8), nothing)
                for each in rollouts[start : start + 2]
            ]

    monkeypatch.setattr(TrainedRun, "_denoise", in_pairs)
    data = {"prompt_column": "caption"}  # read as the run's own files are
    config = RunConfig.model_validate({"rewards": [{"name": "compared:first"}], "data": data})
    nobody: Any = None
    run = TrainedRun(tmp_path, config, 1, "policy", nobody, nobody)
    found = run.evaluate(Observer(), images_per_prompt=3, prompts_file=tmp_path / "p.jsonl").curves
    assert found["first"].mean == 1
    assert found["first/members"].mean == pytest.approx((3 * 3 + 2 * 2 + 3 * 3) / 8)
    assert found["first/missing"].mean == pytest.approx(2 / 8)


def test_an_evaluation_keeps_no_picture_that_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("a dog\na cat\na hat\n")

    def one_by_one(_: TrainedRun, rollouts: Sequence[Rollout], *__: Any) -> Iterator[list[Any]]:
        nothing = SampleTensors(torch.zeros(0), torch.zeros(0))
        made: list[weakref.ref[Any]] = []
        for rollout in rollouts:
            deadline = time.monotonic() + 60
            while any(each() is not None for each in made[:-1]):  # the last one's batch may still be named
                assert time.monotonic() < deadline, "a picture outlives its scores"
                time.sleep(0.02)
            picture = np.zeros((4, 4, 3), np.uint8)
            made.append(weakref.ref(picture))
            yield [FinishedRollout(rollout, picture, nothing)]
            del picture

    monkeypatch.setattr(TrainedRun, "_denoise", one_by_one)
    config = RunConfig.model_validate({"rewards": [{"name": "jpeg_size"}]})
    nobody: Any = None
    run = TrainedRun(tmp_path, config, 1, "policy", nobody, nobody)
    found = run.evaluate(Observer(), images_per_prompt=1, prompts_file=tmp_path / "p.txt")
    assert len(found.curves) > 0


@pytest.mark.parametrize(
    ("device", "text_device", "missing", "moved"),
    [
        ("cuda", "cuda", ["a cat"], ["cpu", "cuda"]),
        ("cuda", "cuda", [], []),
        ("cuda", "cpu", ["a cat"], []),
        ("cpu", "cpu", ["a cat"], []),
    ],
)
def test_a_gpu_holds_the_text_encoder_or_the_transformer(
    device: str, text_device: str, missing: list[str], moved: list[str]
) -> None:
    """Where there is no GPU, its moves alone can be seen."""
    places: list[str] = []
    family: Any = SimpleNamespace(
        device=torch.device(device),
        text_device=torch.device(text_device),
        not_embedded=lambda wanted: missing,
        transformer=SimpleNamespace(to=lambda place: places.append(str(place))),
    )
    with _transformer_aside(family, ["a cat"]):
        assert places == moved[:1]
    assert places == moved
