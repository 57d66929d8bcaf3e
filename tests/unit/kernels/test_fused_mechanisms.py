"""Fused operators where parts of a forward are replaced, repeated or skipped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.captured import record
from fused_world import CPU, FusedWorld, Predicting, far
from tests.invariant import learner_world
from tests.invariant.learner_world import (
    Wide,
    algorithm,
    first_update,
    gradients,
    make_learner,
    roll_out,
    train_batch,
)
from torch import Tensor

from spotlight.cluster.workers.worker_process import WorkerPlace, WorkerProcess
from spotlight.config.load import load_config
from spotlight.diffusion.samplers import ODE
from spotlight.models import peft_layers
from spotlight.models.kernels.cuda_graphs import CapturedForward, capture_forwards
from spotlight.models.kernels.fused import is_fused
from spotlight.models.skeleton import base_state
from spotlight.models.slots import Slot
from spotlight.rollout.engine import Engine
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.runtime.assembly import components as build
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.training.learner import Learner
from spotlight.training.recompute import recompute
from spotlight_kernels import fuse as fusing
from spotlight_rewards.base.prompts import PromptId
from spotlight_weights.flat import digest_of

HALF = torch.bfloat16
ROUNDING: Mapping[torch.dtype | None, float] = {None: 1e-5, HALF: 5e-2}
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def families(*names: str) -> list[Any]:
    """All but the first are slow."""
    return [*names[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@pytest.mark.parametrize("name", ["qwen-image", "wan"])
@pytest.mark.parametrize("autocast", ROUNDING)
def test_previews_reuse_fused_blocks(name: str, autocast: torch.dtype | None, tmp_path: Path) -> None:
    finals = []
    for fused in (False, True):
        predicting = Predicting(name, tmp_path, fused=fused)
        condition = predicting.conditions[-1]
        engine = Engine(predicting.family, max_batch=1, negative=condition)
        recipe = Recipe(predicting.size, ODE(), None, 1.0, "final")
        recipe = recipe.preview(3, step_cache=2, autocast=autocast)
        rollout = Rollout(RolloutId("r"), Purpose.EXPLORE, 0, PromptId("p"), 0, 1, 3, PolicyVersion(0))
        states = engine.start([rollout], [condition], recipe)
        before = [set(vars(part)) for part in predicting.model.modules()]
        with predicting.slots.use("policy") as model:
            (finished,) = engine.run(model, states)
        assert isinstance(finished, FinishedRollout)
        assert [set(vars(part)) for part in predicting.model.modules()] == before, "fused as ever"
        finals.append(finished.tensors.final)
    assert 0 < far(finals[1], finals[0]) < ROUNDING[autocast]


@pytest.mark.parametrize("name", families("qwen-image", "krea-2"))
def test_captured_forwards_of_fused_blocks_read_weights_written_since(name: str, tmp_path: Path) -> None:
    predicting = Predicting(name, tmp_path, fused=True, dtype=HALF)

    @torch.no_grad()
    def run() -> list[Tensor]:
        found = []
        for turn in range(4):
            predicting.slots.load_state("policy", predicting.weights(turn % 3))
            with predicting.slots.use("policy"):
                found.append(predicting(slice(1, 2)))
        return found

    eager = run()
    capture_forwards(predicting.slots, CPU, record)
    assert all(map(torch.equal, run(), eager))
    assert isinstance(predicting.model.forward, CapturedForward)
    assert predicting.model.forward.captured == 1
    assert not torch.equal(eager[1], eager[2])


@pytest.mark.parametrize("name", families("qwen-image", "krea-2", "hunyuan-video-1.5"))
def test_recomputing_fused_blocks_changes_no_gradient_and_repeats_products_only_of_whole_blocks(
    name: str, tmp_path: Path
) -> None:
    predicting = Predicting(name, tmp_path, fused=True, dtype=HALF)
    found: dict[Any, list[Tensor]] = {}
    counts: dict[Any, int] = {}
    for setting in ("none", "elementwise", 2, "blocks"):
        recompute(predicting.model, setting)  # type: ignore[arg-type]
        with Wide(narrow=2) as wide, predicting.slots.use("policy"):
            found[setting] = predicting.gradients(slice(1, 2))
        counts[setting] = wide.count
    for each in found.values():
        assert all(map(torch.equal, each, found["none"]))
    assert counts["elementwise"] == counts["none"] < counts[2] < counts["blocks"]


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> FusedWorld:
    return FusedWorld(random_pipeline, tmp_path_factory.mktemp("cache"))


def learner_of(world: FusedWorld, **settings: Any) -> Learner:
    learner = make_learner(
        world, algorithm("flow-grpo", train_timesteps=1), dtype=HALF, autocast="bfloat16", **settings
    )
    peft_layers.fuse(learner.family.transformer)
    return learner


def test_a_learner_repeats_the_log_probs_of_rollouts_to_the_bit(
    world: FusedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_world, "STEPS", 3)
    monkeypatch.setattr(learner_world, "PROMPTS", learner_world.PROMPTS[:1])
    learner = learner_of(world)
    samples = roll_out(world, learner, batch=2)
    report = train_batch(learner, samples, 2).flat()
    replayed = [value for name, value in report.items() if name.startswith("replay/")]
    assert replayed == [0.0] * len(replayed)
    assert len(replayed) > 0
    whole, sums = first_update(learner_of(world), samples, 2, evaluated=True)
    assert sums.ratio_max == 1.0
    split = gradients(learner_of(world), samples, 1)
    size = max(float(each.norm()) for each in whole.values())
    assert max(float((split[name] - each).norm()) for name, each in whole.items()) < 3e-2 * size


SLOTS: tuple[Slot, ...] = ("policy", "old", "ema", "reference")


def by_slot(predicting: Predicting, merged: bool = False) -> list[Tensor]:
    found = []
    with torch.no_grad():
        for slot in SLOTS:
            with predicting.slots.use(slot, merged=merged):
                found.append(predicting(slice(1, 2)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_slots_are_those_of_the_reference_whatever_was_written_between_forwards(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    plain, fused = (
        Predicting("qwen-image", tmp_path, fused=each, dtype=dtype, extra=("old", "ema"))
        for each in (False, True)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for turn in range(2):
        wanted, found = by_slot(plain), by_slot(fused)
        assert max(map(far, found, wanted)) < tolerance
        assert min(far(a, b) for i, a in enumerate(found) for b in found[:i]) > 3 * tolerance
        if turn == 0:  # the same for both, in every way that training writes
            for each in (plain, fused):
                each.slots.load_state("policy", each.weights(7))
                each.slots.copy("old", "policy")
                each.slots.load_state("policy", each.weights(8))
                each.slots.blend("ema", "policy", 0.5)
    if dtype == torch.float32:
        assert max(map(far, by_slot(fused, merged=True), wanted)) < 1e-5
    states = [each.slots.merged_state("policy") for each in (plain, fused)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


def test_a_worker_hands_its_model_over_as_it_was_loaded_and_it_can_be_fused_again(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusing, "distance", lambda *_: 0.0)
    caplog.set_level(logging.INFO)
    config = load_config(
        None, [f"model.path={random_pipeline}", f"cache_dir={tmp_path}", "device=cpu", "model.kernels=fused",
               "data={train: testbed, test: testbed}", "rollout={width: 16, height: 16}"]
    )  # fmt: skip
    family = build.load_family(config, CPU)
    names = [set(vars(part)) for part in family.transformer.modules()]
    place = WorkerPlace(WorkerId("n/0"), 1, CPU, Address("127.0.0.1", 1), f"test-{id(config)}")
    worker: Any = WorkerProcess(config, place, None, lambda config: None)
    worker._held = family, digest_of(base_state(family.transformer))
    build.make_slots(config, family, build.make_algorithm(config))
    assert sum(map(is_fused, family.transformer.transformer_blocks)) == 2
    assert worker.hand_over()[0] is family
    assert [set(vars(part)) for part in family.transformer.modules()] == names
    build.make_slots(config, family, build.make_algorithm(config))
    assert sum(map(is_fused, family.transformer.transformer_blocks)) == 2
    said = "fused operators: 2 QwenImageTransformerBlock, layers with adapters"
    assert [each.message for each in caplog.records if "operators" in each.message] == [said, said]
