"""Float32 adapters of a bfloat16 model train under copies in its dtype as under autocast, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import World, algorithm, cut, make_learner, make_slots, roll_out
from torch import Tensor

from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.training.learner import Learner, TrainingSample
from spotlight_files.model_errors import ModelError

HALF = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

CASES: dict[str, dict[str, Any]] = {
    "flow-grpo-fast": {"guidance": 3.0, "recompute": "elementwise"},
    "diffusion-nft": {"ema_cap": 0.9, "timesteps_per_pass": 2},
}


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


def copying(world: World, name: str) -> Learner:
    return make_learner(world, algorithm(name), dtype=HALF, autocast="bfloat16", **CASES[name])


def under_autocast(world: World, name: str) -> Learner:
    """The same without copies: every forward under autocast, which rounds the adapters."""
    learner = make_learner(world, algorithm(name), dtype=HALF, autocast="none", **CASES[name])
    learner.autocast = HALF
    return learner


def iterations(world: World, learner: Learner, name: str, which: range) -> list[tuple[Any, ...]]:
    """Of two updates each: reports, and what the rollouts were."""
    found = []
    for iteration in which:
        samples = roll_out(
            world,
            learner,
            guidance=CASES[name].get("guidance", 1.0),
            iteration=iteration,
            autocast=learner.autocast,
        )
        learner.prepare(samples, cut(samples, 1))
        reports = []
        for update in (samples[:4], samples[4:]):
            for (key,) in cut(update, 1):
                learner.accumulate([key], len(update))
            reports.append(learner.step().flat())
        learner.finish_batch()
        metrics = [{k: v for k, v in report.items() if not _of_speed(k)} for report in reports]
        found.append((metrics, *tensors_of(samples)))
    return found


def _of_speed(key: str) -> bool:
    return key.endswith("_s") or key.startswith("throughput/")


def tensors_of(samples: list[TrainingSample]) -> tuple[list[Tensor], list[Tensor | None]]:
    kept = [sample.tensors for sample in samples]
    assert None not in kept
    return [each.final for each in kept if each], [each.log_probs for each in kept if each]


@pytest.mark.parametrize("name", CASES)
def test_rollouts_reports_and_states_are_those_under_autocast_to_the_bit(
    world: World, name: str, tmp_path: Path
) -> None:
    ours, theirs = copying(world, name), under_autocast(world, name)
    assert ours.autocast is None
    for (metrics, *made), (expected, *as_made) in zip(
        iterations(world, ours, name, range(2)), iterations(world, theirs, name, range(2)), strict=True
    ):
        assert metrics == expected
        for one, two in zip(made, as_made, strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert ours.digest() == theirs.digest()
    # Float32 weights are what is saved; a resumed learner goes on bit for bit, with copies of its own.
    ours.save(tmp_path / "state")
    again = copying(world, name)
    iterations(world, again, name, range(1))  # it has copies of other weights by now
    again.load(tmp_path / "state")
    assert again.digest() == ours.digest()
    iterations(world, again, name, range(2, 3))
    iterations(world, ours, name, range(2, 3))
    assert again.digest() == ours.digest() != theirs.digest()


def test_slots_that_compute_in_another_type_than_configured_are_refused(world: World) -> None:
    algo, family = algorithm("diffusion-nft"), world.fresh(HALF)
    slots = make_slots(family, algo, "lora")
    with pytest.raises(ModelError, match=r"apply adapters in None; expected torch\.bfloat16"):
        Learner(family, slots, algo, LearnerConfig(autocast="bfloat16"), size=world.size)
