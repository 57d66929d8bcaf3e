"""The forwards that a plan counts are those of a walk through an iteration."""

from __future__ import annotations

import pytest
from planned_config import ROLLOUT, config

from spotlight.config.schema import RunConfig
from spotlight.dry_run.run_plan import count_passes


def walk(settings: RunConfig, timesteps: int, per_timestep: int) -> int:
    """Forwards of an iteration, counted one by one."""
    guidance = 2 if settings.rollout.true_cfg_scale > 1 else 1
    forwards = 0
    for _prompt in range(3):
        for _member in range(4):
            forwards += sum(guidance for _step in range(5))
            forwards += sum(guidance * per_timestep for _timestep in range(timesteps))
    return forwards


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(
    ("algorithm", "sampler", "timesteps", "per_timestep"),
    [
        ({"name": "diffusion-nft", "train_timesteps": 2}, "ode", 2, 3),
        ({"name": "diffusion-nft", "train_timesteps": 2, "reference_weight": 0.0}, "ode", 2, 2),
        ({"name": "flow-grpo"}, "cps", 4, 1),
        ({"name": "flow-grpo", "kl_weight": 0.1, "train_timesteps": 3}, "cps", 3, 2),
        ({"name": "flow-grpo", "old_log_probs": "rollout"}, "cps", 4, 1),
    ],
)
def test_forwards_are_those_of_a_walk_through_the_iteration(
    algorithm: dict[str, object], sampler: str, timesteps: int, per_timestep: int, guidance: float
) -> None:
    rollout = {**ROLLOUT, "sampler": sampler, "true_cfg_scale": guidance}
    settings = config(algorithm=algorithm, rollout=rollout)
    passes = count_passes(settings, evaluation_images=10)
    assert settings.trained_timesteps == timesteps
    assert passes.forwards == walk(settings, timesteps, per_timestep)
    assert passes.backward == passes.policy == walk(settings, timesteps, 1) - passes.rollout
    assert passes.evaluation == 10 * settings.evaluation.steps * (2 if guidance > 1 else 1)


@pytest.mark.parametrize(
    ("exploration", "previews"),
    [
        ({"seeds_per_prompt": 6, "steps": 4}, 3 * 6 * 4 * 2),
        ({"guidance": 1.0}, 3 * 8 * 5),  # by default twice the group, and all steps
        ({"planner": {"seed_counts": [5, 9], "step_counts": [2, 3]}}, 3 * 9 * 3 * 2),
    ],
)
def test_previews_cost_forwards(exploration: dict[str, object], previews: int) -> None:
    rollout = {**ROLLOUT, "true_cfg_scale": 4.0}
    explores = count_passes(config(rollout=rollout, exploration=exploration), 1)
    assert explores.previews == previews
    assert explores.forwards - count_passes(config(rollout=rollout), 1).forwards == previews


def test_recomputed_activations_cost_one_more_forward() -> None:
    plain, again = (
        count_passes(config(learner={"recompute": what}), 1) for what in ("elementwise", "blocks")
    )
    assert again.forwards - plain.forwards == again.recomputed == plain.policy
