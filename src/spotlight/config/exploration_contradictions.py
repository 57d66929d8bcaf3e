"""Settings of seed exploration that contradict each other, or what is explored for."""

from __future__ import annotations

from collections.abc import Iterator

from spotlight.config.errors import Problem
from spotlight.config.exploration import ExplorationConfig, PlannerConfig
from spotlight.config.fleet_contradictions import nobody_only_rolls_out
from spotlight.config.schema import RunConfig


def exploration_problems(config: RunConfig) -> Iterator[Problem]:
    """Every contradiction of ``exploration``."""
    if (exploration := config.exploration) is None:
        return
    if exploration.where == "idle" and config.fleet.driver == "inline":
        yield Problem(
            "exploration.where", "'idle'", "'critical_path' with fleet.driver=inline",
            "One process trains and denoises in turn, so nothing idles: set fleet.driver=ray, or explore on "
            "the critical path.",
        )  # fmt: skip
    elif exploration.where == "idle" and nobody_only_rolls_out(config.fleet):
        yield Problem(
            "exploration.where", "'idle'", "'critical_path' where all slots train",
            "The learner's slots preview nothing beside training: set exploration.where=critical_path, "
            "fleet.local.rollout_slots or fleet.spot.nodes to at least 1, or name a fleet.spot.trace.",
        )  # fmt: skip
    yield from _arms(config, exploration)
    yield from _drawn(config, exploration)
    guidance, scale = exploration.guidance, config.rollout.true_cfg_scale
    if guidance is not None and guidance > scale:
        yield Problem(
            "exploration.guidance", f"{guidance:g}", f"at most rollout.true_cfg_scale = {scale:g}",
            "Previews stand for rollouts and may only be cheaper: leave it out, or set 1 for none.",
        )  # fmt: skip
    yield from _shortcuts(config, exploration)


def _arms(config: RunConfig, exploration: ExplorationConfig) -> Iterator[Problem]:
    group, steps = config.rollout.group_size, config.rollout.steps
    planned = exploration.planner is not None
    if planned:
        for name in ("seeds_per_prompt", "steps"):
            if (value := getattr(exploration, name)) is not None:
                yield Problem(
                    f"exploration.{name}", str(value), "nothing with exploration.planner",
                    "The planner decides: leave one of the two keys out.",
                )  # fmt: skip
        yield from _unread(exploration)
    seeds_key, steps_key = (
        ("exploration.planner.seed_counts", "exploration.planner.step_counts")
        if planned
        else ("exploration.seeds_per_prompt", "exploration.steps")
    )
    seed_counts, step_counts = exploration.arms(group, steps)
    if min(seed_counts) <= group:
        yield Problem(
            seeds_key, str(min(seed_counts)), f"more than rollout.group_size = {group}",
            "Of no more seeds than a group has members, none can be left out: preview more, twice as many or "
            "so.",
        )  # fmt: skip
    limit = exploration.seeds_per_prompt_max
    if limit is not None and exploration.where != "idle":
        yield Problem(
            "exploration.seeds_per_prompt_max", str(limit), "nothing with exploration.where=critical_path",
            "Only idle time previews more seeds than were planned: leave it out.",
        )  # fmt: skip
    elif limit is not None and exploration.undo_selection and not exploration.draws:
        yield Problem(
            "exploration.seeds_per_prompt_max", str(limit),
            f"nothing with exploration.undo_selection and policy={exploration.policy}",
            "Drawn seeds stand for most of the pool, and weigh the more, the deeper it is: leave it out, or "
            "set exploration.policy=proportional.",
        )  # fmt: skip
    elif limit is not None and limit < max(seed_counts):
        yield Problem(
            "exploration.seeds_per_prompt_max", str(limit), f"at least {seeds_key} = {max(seed_counts)}",
            "So many are planned: raise it, or leave it out.",
        )  # fmt: skip
    if max(step_counts) > steps:
        yield Problem(
            steps_key, str(max(step_counts)), f"at most rollout.steps = {steps}",
            "Previews follow the noise path of the rollouts that they choose seeds for: lower it.",
        )  # fmt: skip


def _unread(exploration: ExplorationConfig) -> Iterator[Problem]:
    """What the planner reads only where time is short."""
    planner, default = exploration.planner, PlannerConfig()
    if planner is None or exploration.where == "idle":
        return
    for name in ("caution", "costs"):
        if (value := getattr(planner, name)) != getattr(default, name):
            yield Problem(
                f"exploration.planner.{name}", str(value), "nothing with exploration.where=critical_path",
                "Previews are waited for there, and nothing has to fit: leave it out, and name only "
                "seed_counts and step_counts whose time you would spend.",
            )  # fmt: skip


def step_cache_problem(config: RunConfig, why: str) -> Problem | None:
    """What to say where previews are to reuse blocks of a model that cannot; None where they are not to."""
    if config.exploration is None or config.exploration.step_cache is None:
        return None
    return Problem(
        "exploration.step_cache", str(config.exploration.step_cache),
        f"nothing with model.path={config.model.path}",
        f"{why}: leave it out; previews of fewer exploration.steps are cheaper with any model.",
    )  # fmt: skip


def _shortcuts(config: RunConfig, exploration: ExplorationConfig) -> Iterator[Problem]:
    fewest = min(exploration.arms(config.rollout.group_size, config.rollout.steps)[1])
    if exploration.step_cache is not None and exploration.step_cache > fewest:
        yield Problem(
            "exploration.step_cache", str(exploration.step_cache),
            f"at most the fewest steps of a preview, {fewest}",
            "Only the first of them would run all blocks: lower it, 2 ranks best.",
        )  # fmt: skip
    for key, value in (("model.dtype", config.model.dtype), ("learner.autocast", config.learner.autocast)):
        if exploration.dtype == value:
            yield Problem(
                "exploration.dtype", f"'{exploration.dtype}'", f"a lower precision than {key}={value}",
                "Rollouts are of that precision already, and so are their previews: leave it out.",
            )  # fmt: skip
            return


def _drawn(config: RunConfig, exploration: ExplorationConfig) -> Iterator[Problem]:
    group, prompts = config.rollout.group_size, config.rollout.prompts_per_iteration
    draws = exploration.draws
    if exploration.drawn_seeds > group:
        yield Problem(
            "exploration.drawn_seeds", str(exploration.drawn_seeds), f"at most rollout.group_size = {group}",
            "Two are enough to measure with.",
        )  # fmt: skip
    if exploration.sampled_prompts > prompts:
        yield Problem(
            "exploration.sampled_prompts", str(exploration.sampled_prompts),
            f"at most rollout.prompts_per_iteration = {prompts}", "Lower it.",
        )  # fmt: skip
    if exploration.sampled_prompts and (draws or exploration.drawn_seeds < 2):
        yield Problem(
            "exploration.sampled_prompts", str(exploration.sampled_prompts),
            "0 with exploration.drawn_seeds below 2, or with a policy that draws by itself",
            "What a group measures it measures by pairs: set exploration.drawn_seeds=2, or leave it out.",
        )  # fmt: skip
    if exploration.undo_selection and not draws and exploration.drawn_seeds == 0:
        yield Problem(
            "exploration.undo_selection", "true",
            f"false with exploration.policy={exploration.policy} and drawn_seeds=0",
            "Seeds that are never chosen cannot be weighted: set exploration.drawn_seeds=2 or "
            "exploration.policy=proportional.",
        )  # fmt: skip
    if exploration.undo_selection and exploration.spare_prompts:
        yield Problem(
            "exploration.spare_prompts", str(exploration.spare_prompts), "0 with exploration.undo_selection",
            "No weights undo that a prompt is replaced for its rewards: leave one of the two keys out.",
        )  # fmt: skip
