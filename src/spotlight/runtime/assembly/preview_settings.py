"""Settings and reports of seed exploration.

Builds the plan of :mod:`spotlight.scheduler.policies.exploration`, and turns its reports into metrics and
notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.rollout.state import Recipe

ROW = "exploration/"
"""Prefix of exploration metrics."""


def preview_recipe(config: RunConfig, train: Recipe) -> Recipe:
    """The recipe for previews of rollouts made by ``train``, for any number of steps."""
    exploration = config.exploration or ExplorationConfig()
    return train.preview(
        config.rollout.steps,
        exploration.guidance,
        keeps=train.keeps if exploration.makes_rollouts(config.rollout.true_cfg_scale) else "final",
        step_cache=exploration.step_cache or 1,
        autocast=None if exploration.dtype is None else torch.bfloat16,
    )


# -- reports -----------------------------------------------------------------------------------------------


def report_row(report: Mapping[str, object]) -> dict[str, float]:
    """A report's numbers as metrics; booleans become 0 or 1, unknown values are omitted."""
    row = {f"{ROW}{name}": value for name, value in _numbers(report)}
    if isinstance(played := report.get("arm"), str):
        seeds, _, steps = played.partition("x")
        row |= {f"{ROW}seeds_per_prompt": float(seeds), f"{ROW}steps": float(steps)}
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
    return found if isinstance(found, Mapping) else {}
