"""Configuration of seed exploration: how many seeds are previewed, when, and which are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.section import Section
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


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
        """Worker-seconds of so many previews."""
        return previews * (steps * self.step_s + self.fixed_s)


class BanditConfig(Section):
    """A bandit that decides every iteration how many seeds to preview with how many steps.

    In idle time it only considers what fits into the time that training leaves. On the critical path, which
    waits for previews, every choice fits, random seeds among them: it seeks the largest contrast per second.
    """

    seed_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (24, 32, 48)
    """Choices for the number of previews per prompt."""
    step_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (6, 8, 10)
    """Choices for the number of denoising steps per preview."""
    alpha: Annotated[float, Field(ge=0)] = 0.5
    """Weight of exploring uncertain choices; 0 always takes the best so far."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Factor per iteration on past evidence: the gain of seeds and steps drifts with the model."""
    sharing: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """How much evidence a choice shares with its neighbours on the grid: 0 none, towards 1 nearly all."""
    maximises: Literal["contrast_per_second", "contrast"] = "contrast_per_second"
    """On the critical path: contrast over the time of an iteration, so that previews have to pay for
    themselves, or contrast whatever it costs.
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
    """Denoising steps per preview; default: as many as rollouts have. Fewer cost less, rank worse. Not with
    ``planner``.
    """
    policy: SeedPolicy = "max_variance"
    """Which previews form the group. ``max_variance``: the subset with the largest reward variance (PODS).
    ``top_and_bottom``: half the best, half the worst. ``top``: the best. ``random``: any (the control).
    """
    contrast_min: Annotated[float, Field(ge=0)] = 0.0
    """Previews of a prompt whose rewards lie within a range of this width do not select its seeds."""
    spare_prompts: Annotated[int, Field(ge=0)] = 0
    """Up to this many prompts per iteration whose previews show no contrast may be replaced by others."""
    sampled_prompts: Annotated[int, Field(ge=0)] = 0
    """Groups per iteration that keep some randomly drawn seeds, to measure how well previews rank."""
    drawn_seeds: Annotated[int, Field(ge=0)] = _DRAWN_SEEDS
    """Number of randomly drawn seeds in each such group, at least 2 for measuring."""
    planner: BanditConfig | None = None
    """Decides how much to explore; default: the same in every iteration."""

    @property
    def draws(self) -> bool:
        """Whether ``policy`` selects by chance rather than by rank."""
        return self.policy == "random"

    def arms(self, group_size: int, rollout_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Possible (previews per prompt, steps per preview), defaults resolved."""
        if self.planner is not None:
            return self.planner.seed_counts, self.planner.step_counts
        return (self.seeds_per_prompt or 2 * group_size,), (self.steps or rollout_steps,)

    def seed_problems(self, group_size: int, steps: int, section: str) -> Iterator[Problem]:
        """Conflicts among these keys, or with groups of ``group_size`` and rollouts of ``steps``.

        Args:
            section: that holds the keys ``group_size`` and ``steps``.
        """
        seed_counts, step_counts = self.arms(group_size, steps)
        if self.seeds_per_prompt_max is not None:
            yield from self._pool_problems(self.seeds_per_prompt_max, max(seed_counts))
        if max(step_counts) > steps:
            yield Problem(
                self.steps_key, str(max(step_counts)), f"at most {section}.steps = {steps}",
                "Previews follow the noise path of the rollouts that they choose seeds for: lower it.",
            )  # fmt: skip
        if self.drawn_seeds > group_size:
            yield Problem(
                "exploration.drawn_seeds", str(self.drawn_seeds),
                f"at most {section}.group_size = {group_size}", "Two are enough to measure with.",
            )  # fmt: skip
        elif self.drawn_seeds != _DRAWN_SEEDS and not self.sampled_prompts:
            yield Problem(
                "exploration.drawn_seeds", str(self.drawn_seeds),
                "nothing without exploration.sampled_prompts",
                "No group keeps drawn seeds then: leave it out, or set that key.",
            )  # fmt: skip
        if self.sampled_prompts and (self.draws or self.drawn_seeds < 2):
            yield Problem(
                "exploration.sampled_prompts", str(self.sampled_prompts),
                "0 with exploration.drawn_seeds below 2, or with exploration.policy=random",
                "What a group measures it measures by pairs: set exploration.drawn_seeds=2, or leave it out.",
            )  # fmt: skip

    def _pool_problems(self, limit: int, planned: int) -> Iterator[Problem]:
        if limit < planned:
            yield Problem(
                "exploration.seeds_per_prompt_max", str(limit), f"at least {self.seeds_key} = {planned}",
                "So many are planned: raise it, or leave it out.",
            )  # fmt: skip

    @property
    def seeds_key(self) -> str:
        """The key that sets the planned number of seeds."""
        return f"exploration.{'planner.seed_counts' if self.planner else 'seeds_per_prompt'}"

    @property
    def steps_key(self) -> str:
        """The key that sets the steps of previews."""
        return f"exploration.{'planner.step_counts' if self.planner else 'steps'}"


class ExplorationConfig(SeedChoiceConfig):
    """Preview more seeds per prompt than its group has members, and train on those whose rewards differ most.

    Selected seeds are generated again with the current weights, unless their previews were made just so;
    advantages use only the rewards of these samples.
    """

    where: PreviewTime = "critical_path"
    """``critical_path``: before an iteration's rollouts. ``idle``: while the learner trains the previous
    iteration, on workers that would otherwise wait (``fleet.driver: ray``).
    """
    guidance: Annotated[float, Field(ge=1)] | None = None
    """Classifier-free guidance scale of previews; default: as in rollouts; 1: none, half the cost per
    step.
    """
    step_cache: Annotated[int, Field(ge=2)] | None = None
    """In every run of this many consecutive preview steps, the first runs all transformer blocks; the others
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
        return self.seeds_per_prompt_max or deepest_pool(group_size, self.arms(group_size, rollout_steps)[0])

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Conflicts with the fleet, the batch, the model or the rollouts."""
        if self.where == "idle" and run.fleet.driver == "inline":
            yield Problem(
                "exploration.where", "'idle'", "'critical_path' with fleet.driver=inline",
                "One process trains and denoises in turn, so nothing idles: set fleet.driver=ray, or explore "
                "on "
                "the critical path.",
            )  # fmt: skip
        elif self.where == "idle" and run.fleet.only_learner_slots:
            yield Problem(
                "exploration.where", "'idle'", "'critical_path' where all slots train",
                "The learner's slots preview nothing beside training: set exploration.where=critical_path, "
                "fleet.local.rollout_slots or fleet.spot.nodes to at least 1, or name a fleet.spot.trace.",
            )  # fmt: skip
        rollout = run.rollout
        yield from self._arm_problems(run)
        yield from self.seed_problems(rollout.group_size, rollout.steps, "rollout")
        if self.sampled_prompts > rollout.prompts_per_iteration:
            yield Problem(
                "exploration.sampled_prompts", str(self.sampled_prompts),
                f"at most rollout.prompts_per_iteration = {rollout.prompts_per_iteration}", "Lower it.",
            )  # fmt: skip
        guidance, scale = self.guidance, rollout.true_cfg_scale
        if guidance is not None and guidance > scale:
            yield Problem(
                "exploration.guidance", f"{guidance:g}", f"at most rollout.true_cfg_scale = {scale:g}",
                "Previews stand for rollouts and may only be cheaper: leave it out, or set 1 for none.",
            )  # fmt: skip
        yield from self._shortcut_problems(run)

    def _arm_problems(self, run: RunConfig) -> Iterator[Problem]:
        group = run.rollout.group_size
        if self.planner is not None:
            for name in ("seeds_per_prompt", "steps"):
                if (value := getattr(self, name)) is not None:
                    yield Problem(
                        f"exploration.{name}", str(value), "nothing with exploration.planner",
                        "The planner decides: leave one of the two keys out.",
                    )  # fmt: skip
            yield from self._unread_problems()
        fewest = min(self.arms(group, run.rollout.steps)[0])
        if fewest <= group:
            yield Problem(
                self.seeds_key, str(fewest), f"more than rollout.group_size = {group}",
                "Of no more seeds than a group has members, none can be left out: preview more, twice as "
                "many or so.",
            )  # fmt: skip

    def _pool_problems(self, limit: int, planned: int) -> Iterator[Problem]:
        if self.where == "idle":
            yield from super()._pool_problems(limit, planned)
        else:
            yield Problem(
                "exploration.seeds_per_prompt_max", str(limit),
                "nothing with exploration.where=critical_path",
                "Only idle time previews more seeds than were planned: leave it out.",
            )  # fmt: skip

    def _unread_problems(self) -> Iterator[Problem]:
        planner, default = self.planner, PlannerConfig()
        if planner is None:
            return
        if self.where == "idle":
            if planner.maximises != default.maximises:
                yield Problem(
                    "exploration.planner.maximises", planner.maximises, "nothing with exploration.where=idle",
                    "Idle time costs nothing: leave it out.",
                )  # fmt: skip
            return
        for name in ("caution", "costs") if planner.maximises == "contrast" else ("caution",):
            if (value := getattr(planner, name)) != getattr(default, name):
                yield Problem(
                    f"exploration.planner.{name}", str(value), "nothing with exploration.where=critical_path",
                    "Previews are waited for there, and nothing has to fit: leave it out, and name only "
                    "seed_counts and step_counts whose time you would spend.",
                )  # fmt: skip

    def step_cache_problem(self, model_path: str, why: str) -> Problem:
        """The problem of reusing blocks of a model that does not support it."""
        return Problem(
            "exploration.step_cache", str(self.step_cache), f"nothing with model.path={model_path}",
            f"{why}: leave it out; previews of fewer exploration.steps are cheaper with any model.",
        )  # fmt: skip

    def _shortcut_problems(self, run: RunConfig) -> Iterator[Problem]:
        fewest = min(self.arms(run.rollout.group_size, run.rollout.steps)[1])
        if self.step_cache is not None and self.step_cache > fewest:
            yield Problem(
                "exploration.step_cache", str(self.step_cache),
                f"at most the fewest steps of a preview, {fewest}",
                "Only the first of them would run all blocks: lower it, 2 ranks best.",
            )  # fmt: skip
        for key, value in (("model.dtype", run.model.dtype), ("learner.autocast", run.learner.autocast)):
            if self.dtype == value:
                yield Problem(
                    "exploration.dtype", f"'{self.dtype}'", f"a lower precision than {key}={value}",
                    "Rollouts are of that precision already, and so are their previews: leave it out.",
                )  # fmt: skip
                return


_DEEPEST = 16


def deepest_pool(group_size: int, seed_counts: Iterable[int]) -> int:
    """Pool size at which idle time stops adding seeds: a group's contrast grows with its logarithm only."""
    return max(_DEEPEST * group_size, *seed_counts)
