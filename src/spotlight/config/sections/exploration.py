"""Configuration of seed exploration: how many seeds are previewed, when, and which are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.requires import (
    SET,
    UNSET,
    Requirement,
    Requires,
    That,
    at_most,
    less_than,
    more_than,
    value_at,
)
from spotlight.config.section import Section
from spotlight_rewards.base.errors import Problem

_DRAWN_SEEDS = 2


class PreviewCostsConfig(Section):
    """Profiled cost of previews: the planner's initial estimate, corrected by what it measures."""

    step_s: PositiveFloat = 1.0
    """Worker-seconds per denoising step of one preview in a full batch."""
    fixed_s: Annotated[float, Field(ge=0)] = 0.0
    """Worker-seconds per preview on top of that, for decoding."""
    reward_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from the last preview to its score."""
    window_s: PositiveFloat | None = None
    """Expected seconds of training per iteration, until one has been measured; default: unknown, so the first
    iteration uses the cheapest choice.
    """

    def work_s(self, steps: int, previews: int) -> float:
        return previews * (steps * self.step_s + self.fixed_s)


class BanditConfig(Section):
    """A bandit that decides every iteration how many seeds to preview with how many steps.

    In idle time it considers only choices that fit into that time. On the critical path, which waits for
    previews, every choice fits, random seeds included: it seeks the largest contrast per second.
    """

    seed_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (24, 32, 48)
    """Choices for the number of previews per prompt."""
    step_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (6, 8, 10)
    """Choices for the number of denoising steps per preview."""
    alpha: Annotated[float, Field(ge=0)] = 0.5
    """Weight of exploring uncertain choices; 0 always takes the best so far."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Factor on past evidence per iteration, as the gain of seeds and steps drifts with the model."""
    sharing: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """How much evidence a choice shares with its neighbours on the grid: 0 none, towards 1 nearly all."""
    maximises: Literal["contrast_per_second", "contrast"] = "contrast_per_second"
    """On the critical path: contrast per second of an iteration, so that previews have to pay for
    themselves, or contrast at any cost.
    """
    caution: Annotated[float, Field(ge=0)] = 1.0
    """Safety margin, in standard deviations, subtracted from the time that training is expected to leave.
    Only for previews in idle time.
    """


class PlannerConfig(BanditConfig):
    """A run's bandit, which learns what previews cost."""

    costs: PreviewCostsConfig = PreviewCostsConfig()
    """Cost of previews. Not with ``maximises: contrast`` on the critical path."""


PreviewTime: TypeAlias = Literal["critical_path", "idle"]
"""Before the rollouts whose seeds previews choose, or while the learner trains."""


SeedPolicy: TypeAlias = Literal["max_variance", "top_and_bottom", "top", "random"]
"""Which previewed seeds form a group."""


class SeedChoiceConfig(Section):
    """How many seeds are previewed and which are kept: what runs and simulations have in common."""

    seeds_per_prompt: PositiveInt | None = None
    """Previews per prompt; default: twice the group's size. Not with a ``planner``."""
    seeds_per_prompt_max: PositiveInt | None = None
    """Workers still idle when all planned previews are done continue up to this many seeds per prompt.
    Default: 16 times the group's size, or the planned number if larger. Only for previews in idle time.
    """
    steps: PositiveInt | None = None
    """Denoising steps per preview; default: as many as rollouts have. Fewer cost less but rank worse. Not
    with a ``planner``.
    """
    policy: SeedPolicy = "max_variance"
    """Which previews form the group. ``max_variance``: the subset with the largest reward variance (PODS).
    ``top_and_bottom``: half the best, half the worst. ``top``: the best. ``random``: any (the control).
    """
    contrast_min: Annotated[float, Field(ge=0)] = 0.0
    """If the rewards of a prompt's previews lie within a range of this width, they do not select seeds."""
    spare_prompts: Annotated[int, Field(ge=0)] = 0
    """Most prompts per iteration that others may replace if their previews show no contrast."""
    sampled_prompts: Annotated[int, Field(ge=0)] = 0
    """Groups per iteration that keep some randomly drawn seeds, to measure how well previews rank."""
    drawn_seeds: Annotated[int, Field(ge=0)] = _DRAWN_SEEDS
    """Randomly drawn seeds in each of the ``sampled_prompts`` groups, at least 2 for measuring."""
    planner: BanditConfig | None = None
    """Decides how much to explore; default: the same in every iteration."""

    def arms(self, group_size: int, rollout_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Possible (previews per prompt, steps per preview), defaults resolved."""
        if self.planner is not None:
            return self.planner.seed_counts, self.planner.step_counts
        return (self.seeds_per_prompt or 2 * group_size,), (self.steps or rollout_steps,)

    @property
    def steps_key(self) -> str:
        """The key that sets the steps of previews."""
        return f"exploration.{'planner.step_counts' if self.planner else 'steps'}"


_CRITICAL = {"exploration.where": "critical_path"}
_WAITED_FOR = "There the run waits for previews, so they need not fit into idle time: leave it out"


def _arms(run: Any, section: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    choice: SeedChoiceConfig = run.exploration
    return choice.arms(value_at(run, f"{section}.group_size"), value_at(run, f"{section}.steps"))


def seeds_require(section: str) -> tuple[Requirement[Any], ...]:
    """What :class:`SeedChoiceConfig` requires of a run or of a simulated one.

    Args:
        section: that holds the keys ``group_size``, ``steps``.
    """
    planned: That[Any] = That(
        "at least as many as are planned",
        lambda run: (run.exploration.seeds_per_prompt_max or 1e9) >= max(_arms(run, section)[0]),
    )
    return (
        Requires("exploration.seeds_per_prompt_max", {}, planned,
                 lambda run: f"{max(_arms(run, section)[0])} are planned: raise it, or leave it out."),
        *(Requires(key, {}, at_most(f"{section}.steps"),
                   "Previews follow the noise path of the rollouts that they choose seeds for: lower it.")
          for key in ("exploration.steps", "exploration.planner.step_counts")),
        Requires("exploration.drawn_seeds", {}, at_most(f"{section}.group_size"),
                 "Lower it: two are enough for measuring."),
        Requires("exploration.drawn_seeds", {"exploration.sampled_prompts": UNSET}, _DRAWN_SEEDS,
                 "No group keeps drawn seeds: leave it out, or set exploration.sampled_prompts."),
        *(Requires("exploration.sampled_prompts", condition, 0, f"{remedy}, or leave it out.")
          for condition, remedy in (
              ({"exploration.drawn_seeds": less_than(2)},
               "Pairs of drawn seeds are compared: set exploration.drawn_seeds=2"),
              ({"exploration.policy": "random"}, "All seeds are drawn: set another exploration.policy"))),
    )  # fmt: skip


class ExplorationConfig(SeedChoiceConfig):
    """Preview more seeds per prompt than its group has members, and train on those whose rewards differ most.

    Selected seeds are generated again with the current weights, unless their previews already are such
    rollouts; advantages use only the rewards of these samples.
    """

    where: PreviewTime = "critical_path"
    """``critical_path``: before an iteration's rollouts. ``idle``: while the learner trains the previous
    iteration, on workers that would otherwise wait (``fleet.driver: ray``).
    """
    guidance: Annotated[float, Field(ge=1)] | None = None
    """Classifier-free guidance scale of previews; default: as in rollouts; 1: none, at half the cost
    per step.
    """
    step_cache: Annotated[int, Field(ge=2)] | None = None
    """Of this many consecutive preview steps, the first runs all transformer blocks; the others
    run only the first block and reuse what the rest added. Default: every step runs all blocks.
    """
    dtype: Literal["bfloat16"] | None = None
    """Precision of the DiT's matrix products in previews (autocast); default: as in rollouts."""
    planner: PlannerConfig | None = None
    """Decides how much to explore; default: the same in every iteration."""

    def makes_rollouts(self, guidance: float) -> bool:
        """Whether a preview of all of a rollout's steps is that rollout, by the same weights and as exact.

        Args:
            guidance: classifier-free guidance scale of rollouts.
        """
        whole = self.guidance in (None, guidance) and self.step_cache is None and self.dtype is None
        return whole and self.where == "critical_path"

    def seeds_max(self, group_size: int, rollout_steps: int) -> int | None:
        """Maximum number of previewed seeds per prompt; None: only the planned ones."""
        if self.where != "idle":
            return None
        # Beyond that many idle time adds no seeds: a group's contrast grows with its logarithm only.
        deepest = max(_DEEPEST * group_size, *self.arms(group_size, rollout_steps)[0])
        return self.seeds_per_prompt_max or deepest

    def step_cache_problem(self, model_path: str, why: str) -> Problem:
        """The problem of reusing blocks of a model that does not support it."""
        return Problem(
            "exploration.step_cache", str(self.step_cache), f"nothing with model.path={model_path}",
            f"{why}: leave it out; previews of fewer exploration.steps are cheaper with any model.",
        )  # fmt: skip

    requires = (
        Requires("exploration.where", {"fleet.driver": "inline"}, "critical_path",
                 "One process trains and denoises in turn, so nothing idles: set fleet.driver=ray, or "
                 "explore on the critical path."),
        Requires("exploration.where", That("where all slots train", lambda run: run.fleet.only_learner_slots),
                 "critical_path",
                 "The learner's slots run no previews while it trains: set exploration.where=critical_path, "
                 "fleet.local.rollout_slots or fleet.spot.nodes to at least 1, or name a fleet.spot.trace."),
        *(Requires(key, {"exploration.planner": SET}, UNSET,
                   "The planner decides: leave one of the two keys out.")
          for key in ("exploration.seeds_per_prompt", "exploration.steps")),
        Requires("exploration.planner.maximises", {"exploration.where": "idle"}, "contrast_per_second",
                 "Idle time costs nothing: leave it out."),
        Requires("exploration.planner.caution", _CRITICAL, 1.0, f"{_WAITED_FOR}."),
        Requires("exploration.planner.costs", {**_CRITICAL, "exploration.planner.maximises": "contrast"},
                 PreviewCostsConfig(),
                 f"{_WAITED_FOR}, and name only seed_counts and step_counts that are worth their time."),
        *(Requires(key, {}, more_than("rollout.group_size"),
                   "With no more seeds than a group has members, there is nothing to choose: preview more, "
                   "about twice as many.")
          for key in ("exploration.seeds_per_prompt", "exploration.planner.seed_counts")),
        Requires("exploration.seeds_per_prompt_max", _CRITICAL, UNSET,
                 "Only idle time previews more seeds than were planned: leave it out."),
        *seeds_require("rollout"),
        Requires("exploration.sampled_prompts", {}, at_most("rollout.prompts_per_iteration"), "Lower it."),
        Requires("exploration.guidance", {}, at_most("rollout.true_cfg_scale"),
                 "Previews stand in for rollouts and may only be cheaper: leave it out, or set 1 for none."),
        Requires("exploration.step_cache", {},
                 That("at most the fewest steps of a preview, {preview_steps_min}", lambda run:
                      run.exploration is None or (run.exploration.step_cache or 0) <= run.preview_steps_min),
                 "Only a preview's first step would run all blocks: lower it; 2 ranks best."),
        *(Requires("exploration.dtype", {key: "bfloat16"}, UNSET,
                   "Rollouts have that precision already, and so have previews: leave it out.")
          for key in ("model.dtype", "learner.autocast")),
    )  # fmt: skip


_DEEPEST = 16
