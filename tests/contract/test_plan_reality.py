"""What the plan of a run says without loading anything, against the tiny model loaded and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.block_costs import Alive

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.memory_plan import memory_parts, weight_copies
from spotlight.dry_run.model_plan import ModelSizes, read_sizes
from spotlight.dry_run.run_plan import count_passes, make_plan
from spotlight.models.media import MediaSize
from spotlight.models.shared.quantised import held
from spotlight.models.skeleton import base_state
from spotlight.models.slots import WeightSlots
from spotlight.runtime.assembly import components as build
from spotlight.testbed import PIPELINE_DIR
from spotlight.training.recompute import Mode, recompute

STEPS, SAMPLES, TEXT_TOKENS = 5, 8, 8


def config(pipeline: Path, **sections: object) -> RunConfig:
    rollout = {"prompts_per_iteration": 2, "group_size": 4, "steps": STEPS, **sections.pop("rollout", {})}  # type: ignore[dict-item]
    data = {"train": "testbed", "test": "testbed"}
    return build_config(
        {"model": {"path": str(pipeline)}, "data": data, "rollout": rollout, **sections}, "the test"
    )


def slots(settings: RunConfig) -> WeightSlots:
    family = build.load_family(settings, torch.device("cpu"))
    return build.make_slots(settings, family, build.make_algorithm(settings))


@pytest.mark.parametrize("learner", [{"lora": {"rank": 8}}, {"mode": "full", "ema": {}}])
def test_parameters_and_copies_are_exactly_those_of_the_loaded_model(
    random_pipeline: Path, learner: dict[str, object]
) -> None:
    settings = config(random_pipeline, learner=learner)
    plan = make_plan(settings)
    real = slots(settings)
    assert isinstance(plan.model, ModelSizes)
    assert plan.model.parameters == sum(tensor.numel() for tensor in real.merged_state("policy").values())
    assert plan.parameters_trained == sum(weight.numel() for weight in real.trainable_parameters().values())
    owning = [slot for slot in real.slots if settings.learner.mode == "full" or slot != "reference"]
    assert weight_copies(settings) == len(owning) - 1


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_takes_the_planned_bytes(random_pipeline: Path, kind: str) -> None:
    settings = config(random_pipeline, model={"path": str(random_pipeline), "quantize": kind})
    family = build.load_family(settings, torch.device("cpu"))
    real = sum(tensor.nbytes for tensor in base_state(family.transformer).values())
    parts = {each.part: each.bytes for each in make_plan(settings).memory}
    assert parts["frozen DiT"] == real
    whole = (layer.whole(torch.float32).nbytes for layer in held(family.transformer).values())
    assert parts["a layer's whole weight"] == max(whole)
    assert "merged adapters" not in parts


def test_tokens_and_channels_are_the_familys(random_pipeline: Path) -> None:
    settings = config(random_pipeline)
    sizes = read_sizes(settings)
    family = build.load_family(settings, torch.device("cpu"))
    assert isinstance(sizes, ModelSizes)
    assert (sizes.tokens(MediaSize(64, 32)), sizes.dimensions.channels) == family.latent_shape(
        MediaSize(64, 32)
    )


@pytest.mark.parametrize(
    ("recomputed", "per_pass"),
    [("none", 1), ("blocks", 1), ("none", 2), ("blocks", 3), (2, 1), ("elementwise", 2)],
)
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_activations_are_within_a_quarter_of_what_the_backward_pass_keeps(
    mode: str, recomputed: Mode | int, per_pass: int
) -> None:
    learner = {"mode": mode, "micro_batch_size": SAMPLES, "recompute": recomputed}
    learner |= {"timesteps_per_pass": per_pass}
    rows = SAMPLES * per_pass
    settings = config(PIPELINE_DIR, learner=learner)
    sizes, trained = read_sizes(settings), make_plan(settings).parameters_trained
    assert isinstance(sizes, ModelSizes)
    assert trained is not None
    parts = memory_parts(settings, sizes, trained, TEXT_TOKENS)
    (activations,) = [part.bytes for part in parts if part.part == "activations"]
    kept = _bytes_kept(slots(settings), recomputed, rows)
    if recomputed != "none":
        # While a layer is recomputed its own activations are there too.
        layer = (20.0 if mode == "lora" else 27.0) * rows * (64 + TEXT_TOKENS) * 128 * 4
        activations -= layer
    assert 0.75 < activations / kept < 1.25


def _bytes_kept(real: WeightSlots, recomputed: Mode | int, rows: int) -> int:
    """Bytes alive after one forward, weights apart."""
    with real.use("policy") as model:
        recompute(model, recomputed)
        saved: list[torch.Tensor] = []  # or the last block's text, which nothing reads, is dropped at once

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with Alive() as alive, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(
                hidden_states=torch.randn(rows, 64, 48),
                timestep=torch.rand(rows),
                encoder_hidden_states=torch.randn(rows, TEXT_TOKENS, 64),
                encoder_hidden_states_mask=None,
                img_shapes=[[(1, 8, 8)]] * rows,
                return_dict=False,
            )
    return alive.bytes


@pytest.mark.parametrize(
    ("algorithm", "sampler"),
    [
        ({"name": "diffusion-nft"}, "ode"),
        ({"name": "diffusion-nft", "reference_weight": 0.0, "train_timesteps": 1}, "ode"),
        ({"name": "diffusion-nft", "old_policy": {"cap": 0.0}}, "ode"),
        ({"name": "flow-grpo", "kl_weight": 0.1}, "flow-sde"),
        ({"name": "flow-grpo", "train_timesteps": 2, "old_log_probs": "stop_gradient"}, "cps"),
        ({"name": "grpo-guard"}, "flow-sde"),
    ],
)
@pytest.mark.parametrize("updates", [1, 2])
def test_the_loss_evaluates_what_the_plan_counts(
    random_pipeline: Path, algorithm: dict[str, object], sampler: str, updates: int
) -> None:
    settings = config(
        random_pipeline,
        algorithm=algorithm,
        rollout={"sampler": sampler},
        learner={"updates_per_batch": updates, "micro_batch_size": 1},
    )
    passes = count_passes(settings, evaluation_images=1)
    updates = settings.learner.updates_per_batch
    first, later = (_calls_of_one_sample(settings, first_update=first) for first in (True, False))
    calls = [*first * (SAMPLES // updates), *later * (SAMPLES - SAMPLES // updates)]
    assert calls.count("policy") == passes.policy + passes.old_log_probs
    assert calls.count("old") == passes.old
    assert calls.count("reference") == passes.reference


def _calls_of_one_sample(settings: RunConfig, *, first_update: bool) -> list[str]:
    """The weight slots evaluated to train one sample, in order."""
    from dataclasses import replace

    from spotlight.algorithms.base import TrainBatch

    calls: list[str] = []

    class Counting:
        def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, slot: str = "policy") -> torch.Tensor:
            calls.append(slot)
            return torch.zeros_like(latents)

    algorithm, kept = build.make_algorithm(settings), settings.rollout.kept_steps
    levels = torch.linspace(1, 0, STEPS + 1)[None]
    states = torch.randn(1, kept + 1, 4, 3) if kept else None
    batch = TrainBatch(
        final=torch.randn(1, 4, 3),
        latents=states,
        sigmas=levels[:, : kept + 1] if kept else levels,
        rollout_log_probs=torch.zeros(1, kept) if kept else None,
        old_log_probs=None,
        advantages=torch.ones(1),
        seeds=(1,),
        versions=(0,),
        first_update=first_update,
        old_is_policy=first_update and settings.algorithm.old_policy_starts_batch,
    )
    timesteps = range(algorithm.timesteps(kept))
    asked = () if first_update else timesteps
    columns = [algorithm.old_log_probs(Counting(), batch, timestep) for timestep in asked]  # type: ignore[arg-type]
    old = [column for column in columns if column is not None]
    batch = replace(batch, old_log_probs=torch.stack(old, 1) if old else None)
    for timestep in timesteps:
        algorithm.loss(Counting(), batch, timestep)  # type: ignore[arg-type]
    return calls
