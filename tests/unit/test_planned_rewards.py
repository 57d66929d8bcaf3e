"""Where a plan says that each reward runs, and with which weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from planned_config import config
from safetensors.numpy import save_file

from spotlight.dry_run.reward_plan import reward_places
from spotlight.dry_run.run_plan import make_plan
from spotlight_rewards.reward import RewardSetupError


def test_a_reward_that_is_none_is_found_by_planning() -> None:
    with pytest.raises(RewardSetupError, match="Did you mean 'shapes'"):
        make_plan(config(rewards=[{"name": "shape"}]))


def test_the_plan_says_where_each_reward_runs(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"a": np.zeros((10, 3), np.float16), "b": np.zeros(5, np.float32)}, weights / "m.safetensors")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "m.safetensors").write_bytes(b"\xff" * 20)
    endpoint = {"base_url": "http://user:secret@10.0.0.7:8000/v1", "model": "m"}
    model = {"path": str(weights)}
    judge, here, own, clip, broken = reward_places(config(rewards=[
        {"name": "vlm-judge", "replicas": 2, "params": {"endpoint": endpoint}},
        {"name": "vlm-judge", "label": "here", "device": "learner", "params": {"model": model}},
        {"name": "mine:own"},
        {"name": "clip-score", "device": "cuda", "params": {"model": str(weights)}},
        {"name": "clip-score", "label": "c2", "device": "cpu", "params": {"model": str(tmp_path / "broken")}},
    ]))  # fmt: skip
    assert (judge.replicas, judge.asks, judge.weights_bytes) == (2, "10.0.0.7:8000", 0)
    assert (here.replicas, here.place, here.weights_bytes) == (
        1,
        "beside the trainer, on its GPU if it has one",
        2 * 35,
    )
    assert (own.replicas, own.weights_bytes) == (None, 0)
    assert (clip.place, clip.weights_bytes) == ("a GPU each that no trainer uses", 4 * 35)
    assert (broken.weights_bytes, broken.missing) == (None, (str(tmp_path / "broken"),))
    part = tmp_path / "whole" / "part"
    part.mkdir(parents=True)
    for name in ("m-00001-of-00001", "m.fp16"):
        save_file({"a": np.zeros(7, np.float32)}, part / f"{name}.safetensors")
    index = {"weight_map": {"a": "m-00001-of-00001.safetensors"}}
    (part / "m.safetensors.index.json").write_text(json.dumps(index))
    (indexed,) = reward_places(
        config(rewards=[{"name": "clip-score", "params": {"model": str(part.parent)}}])
    )
    assert indexed.weights_bytes == 4 * 7
    cluster = {"driver": "ray", "address": "10.0.0.5:6379"}
    (ocr,) = reward_places(config(fleet=cluster, rewards=[{"name": "ocr", "device": "spot"}]))
    assert (ocr.replicas, ocr.place) == (None, "idle CPUs of spot nodes")
