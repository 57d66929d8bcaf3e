"""Seed exploration's part of the configuration: how many seeds are previewed, when, and which are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.section import Section


class PreviewCostsConfig(Section):
    """What previews take, as profiled: the planner's first idea of what fits; windows correct it."""

    step_s: PositiveFloat = 1.0
    """Worker-seconds of one denoising step of one preview, in a full batch."""
    fixed_s: Annotated[float, Field(ge=0)] = 0.0
    """Worker-seconds of each preview besides: decoding."""
    reward_s: Annotated[float, Field(ge=0)] = 0.0
    """From the last preview to its score."""
    window_s: PositiveFloat | None = None
    """Expected seconds of training an iteration, until one was timed; default: unknown, so that the first
    window plays the cheapest arm."""


class PlannerConfig(Section):
    """A bandit that decides every iteration how many seeds to preview with how many steps.

    In idle time it weighs what fits the time that training leaves. On the critical path previews are waited
    for and every choice fits: it seeks the largest contrast, whatever that takes.
    """

    seed_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (24, 32, 48)
    """Previews of a prompt to choose among."""
    step_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (6, 8, 10)
    """Denoising steps of a preview to choose among."""
    alpha: Annotated[float, Field(ge=0)] = 0.5
    """Weight of trying what is little known; 0 always takes what was best so far."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Of what was learnt, by every later iteration: the gain of seeds and steps drifts with the model."""
    sharing: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Evidence that a choice gives of its neighbours on the grid: 0 none, towards 1 nearly all."""
    caution: Annotated[float, Field(ge=0)] = 1.0
    """Standard deviations by which the time that training leaves is taken smaller. Only with
    ``where: idle``."""
    costs: PreviewCostsConfig = PreviewCostsConfig()
    """What previews take. Only with ``where: idle``."""


class ExplorationConfig(Section):
    """Preview more seeds of a prompt than its group has members, and train those whose rewards differ most.

    Chosen seeds are generated anew with current weights, and advantages come from the new rewards alone.
    """

    where: Literal["critical_path", "idle"] = "critical_path"
    """``critical_path``: before an iteration's rollouts. ``idle``: while the learner trains the iteration
    before, on workers that would wait (``fleet.driver: ray``)."""
    seeds_per_prompt: PositiveInt | None = None
    """Previews of each prompt; default: twice ``rollout.group_size``. Not with a ``planner``."""
    seeds_per_prompt_max: PositiveInt | None = None
    """Workers that idle when all that was planned is made go on, up to so many seeds of a prompt; default: 16
    times ``rollout.group_size``, or what is planned if that is more. Only with ``where: idle``, and not with
    ``undo_selection`` unless ``policy`` draws."""
    steps: PositiveInt | None = None
    """Denoising steps of a preview; default: ``rollout.steps``. Fewer cost less and rank worse. Not with a
    ``planner``."""
    guidance: Annotated[float, Field(ge=1)] | None = None
    """True classifier-free guidance of previews; default: as the rollouts; 1: none, half the cost a step."""
    step_cache: Annotated[int, Field(ge=2)] | None = None
    """Of so many neighbouring steps of a preview the first runs all transformer blocks, the others the first
    block alone and reuse what the rest added; default: every step runs all."""
    dtype: Literal["bfloat16"] | None = None
    """Type of the DiT's matrix products in previews (autocast); default: as in rollouts."""
    policy: Literal["max_variance", "top_and_bottom", "top", "random", "proportional"] = "max_variance"
    """Which previews form the group: the subset of the largest reward variance (PODS); half the best and half
    the worst; the best; any (the control); at random, likelier the farther from the mean."""
    contrast_min: Annotated[float, Field(ge=0)] = 0.0
    """Previews of a prompt whose rewards lie within this range of each other choose nothing."""
    spare_prompts: Annotated[int, Field(ge=0)] = 0
    """So many prompts an iteration, whose previews show no contrast, may be replaced by others."""
    sampled_prompts: Annotated[int, Field(ge=0)] = 0
    """Groups an iteration that keep some seeds drawn at random, to measure how well previews rank."""
    drawn_seeds: Annotated[int, Field(ge=0)] = 2
    """So many each, 2 or more to measure with; with ``undo_selection`` 1 or more, in every group."""
    fidelity_min: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Kendall's tau between preview and regenerated rewards below which seeds are not chosen by previews (a
    planner spends more steps first); default: they always are."""
    undo_selection: bool = False
    """Weight samples so that choosing their seeds leaves no bias in the gradient; prompts whose previews show
    no contrast then train any of the previewed seeds. Not with ``spare_prompts``."""
    planner: PlannerConfig | None = None
    """Decides how much to explore; default: every iteration explores the same."""

    @property
    def draws(self) -> bool:
        """Whether ``policy`` chooses by chance; else by rank."""
        return self.policy in ("random", "proportional")

    def arms(self, group_size: int, rollout_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(previews of a prompt, steps of a preview) that may be asked for, defaults filled in."""
        if self.planner is not None:
            return self.planner.seed_counts, self.planner.step_counts
        return (self.seeds_per_prompt or 2 * group_size,), (self.steps or rollout_steps,)

    def seeds_max(self, group_size: int, rollout_steps: int) -> int | None:
        """Seeds that are previewed of a prompt at most; None: those that are planned."""
        if self.where != "idle" or (self.undo_selection and not self.draws):
            return None
        return self.seeds_per_prompt_max or deepest_pool(group_size, self.arms(group_size, rollout_steps)[0])


def deepest_pool(group_size: int, seed_counts: Iterable[int]) -> int:
    """Where idle time deepens pools no more: the contrast of a group grows with the logarithm of its pool."""
    return max(_DEEPEST * group_size, *seed_counts)


_DEEPEST = 16
