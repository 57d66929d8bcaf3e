"""Settings and reports of seed exploration.

Builds the plan of :mod:`spotlight.scheduler.exploration.explorer`, and turns its reports into metrics and
notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.rollout.state import Recipe
from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.selection import SelectionPolicy
from spotlight.scheduler.plan import ExplorationPlan, Explore

ROW = "exploration/"
"""Prefix of exploration metrics."""
_MISSING: Mapping[str, object] = {}


def exploration_plan_of(config: RunConfig) -> ExplorationPlan | None:
    """The controller's view of ``exploration``; None if disabled."""
    if (exploration := config.exploration) is None:
        return None
    (seeds, *_), (steps, *_) = exploration.arms(config.rollout.group_size, config.rollout.steps)
    return ExplorationPlan(
        where=Explore(exploration.where),
        seeds_per_prompt=seeds,
        steps=steps,
        policy=SelectionPolicy(exploration.policy),
        contrast_min=exploration.contrast_min,
        spare_prompts=exploration.spare_prompts,
        sampled_prompts=exploration.sampled_prompts,
        drawn_seeds=exploration.drawn_seeds,
        fidelity_min=exploration.fidelity_min,
        undo_selection=exploration.undo_selection,
        planner=exploration.planner,
        seeds_per_prompt_max=exploration.seeds_max(config.rollout.group_size, config.rollout.steps),
    )


def preview_recipe(config: RunConfig, train: Recipe) -> Recipe:
    """The recipe for previews of rollouts made by ``train``, for any number of steps."""
    exploration = config.exploration or ExplorationConfig()
    return train.preview(
        config.rollout.steps,
        exploration.guidance,
        step_cache=exploration.step_cache or 1,
        autocast=None if exploration.dtype is None else torch.bfloat16,
    )


def preview_steps(config: RunConfig) -> tuple[int, ...]:
    """Numbers of denoising steps that previews may use."""
    if config.exploration is None:
        return ()
    return config.exploration.arms(config.rollout.group_size, config.rollout.steps)[1]


# -- reports -----------------------------------------------------------------------------------------------


def report_row(report: Mapping[str, object]) -> dict[str, float]:
    """A report's numbers as metrics; booleans become 0 or 1, unknown values are omitted."""
    row = {f"{ROW}{name}": value for name, value in _numbers(report)}
    if isinstance(played := report.get("arm"), str):
        arm = Arm.parse(played)
        row |= {f"{ROW}seeds_per_prompt": float(arm.seeds_per_prompt), f"{ROW}steps": float(arm.steps)}
    return row


def _numbers(tree: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{deeper}", number) for deeper, number in _numbers(value))
        elif isinstance(value, int | float) and name != "iteration":
            yield name, float(value)


def report_note(report: Mapping[str, object]) -> str | None:
    """A planner's decision, reason and gain in one line; None without decision."""
    decision = _part(report, "decision")
    arm = report.get("arm")
    if "arms" not in decision and arm is not None:
        return None
    said = f"iteration {decision.get('iteration')} "
    said += f"explored {arm} (seeds x steps)" if arm is not None else "explored nothing"
    said += f": {decision.get('why')}"
    contrast, fidelity = _part(report, "contrast"), _part(_part(report, "fidelity"), "reward")
    if "gain" in contrast and "random" in contrast:
        said += f"; contrast {contrast['gain']:+.4f} to {contrast['random']:.4f} of random seeds"
    if "tau_by_slope" in fidelity:
        said += f"; previews rank with tau {fidelity['tau_by_slope']:.2f}"
    return said


def _part(tree: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else _MISSING
