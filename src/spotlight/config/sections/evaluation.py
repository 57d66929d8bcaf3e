"""Configuration of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.requires import UNSET, Requires, That, at_most
from spotlight.config.section import Section
from spotlight_rewards.base.strict_section import EXTENT
from spotlight_rewards.reward_config import REWARD

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


_GRID_IMAGES = 4


class EvaluationConfig(Section):
    """Evaluation on fixed held-out prompts and seeds, with the ODE sampler."""

    every: Annotated[int, Field(ge=0), EXTENT] = 10
    """Iterations between evaluations; 0: none between the start and the end."""
    at_start: Annotated[bool, EXTENT] = True
    """Evaluate before the first iteration."""
    at_end: Annotated[bool, EXTENT] = True
    """Evaluate after the last iteration."""
    prompts: PositiveInt | None = None
    """Number of held-out prompts, evenly spaced over the file; default: all."""
    images_per_prompt: PositiveInt = 4
    """Fixed seeds per prompt. The dry run compares an evaluation's cost with an iteration's rollouts."""
    steps: Annotated[int, Field(ge=1)] = 10
    """Denoising steps."""
    weights: Literal["policy", "ema", "old"] = "policy"
    """Which weights are evaluated and exported."""
    strict: str | None = None
    """Curve of the strict score (``shapes/strict``); default: the first reward's ``strict``, if any."""
    grid_prompts: Annotated[PositiveInt, EXTENT] = 8
    """Held-out prompts shown in the image grids."""
    grid_images: Annotated[PositiveInt | None, EXTENT] = None
    """Images per prompt in the grids; default: 4, or ``images_per_prompt`` if that is less."""

    @property
    def grid(self) -> tuple[int, int]:
        """(prompts, images per prompt) shown in the grids."""
        return self.grid_prompts, self.grid_images or min(_GRID_IMAGES, self.images_per_prompt)

    def is_due(self, iteration: int, iterations: int) -> bool:
        """Whether the weights before ``iteration`` (at ``iterations``: the final ones) are evaluated."""
        if iteration in (0, iterations):
            return self.at_start if iteration == 0 else self.at_end
        return self.every > 0 and iteration % self.every == 0

    def count(self, iterations: int) -> int:
        """Number of evaluations in a whole run."""
        between = (iterations - 1) // self.every if self.every else 0
        return self.at_start + between + self.at_end

    def notes(self, run: RunConfig) -> Iterator[str]:
        """Pictures are judged, and later made, as they are evaluated."""
        if self.steps == type(self).model_fields["steps"].default != run.rollout.steps:
            yield (
                f"evaluation.steps is {self.steps}, the default, but rollout.steps is {run.rollout.steps}: "
                "training pictures are made in a different number of steps than evaluation, `spotlight "
                "generate` and the printed lines use. If that is not intended, set evaluation.steps too."
            )

    requires = (
        Requires("evaluation.weights", {"learner.ema": UNSET},
                 That("'policy'", lambda run: run.evaluation.weights != "ema"),
                 "Set learner.ema.cap=0.9 or evaluate the policy."),
        Requires("evaluation.weights",
                 That("with algorithm.name={algorithm.name}", lambda run: not run.algorithm.uses_old_policy),
                 ("policy", "ema"), "This algorithm keeps no old policy: leave it out."),
        Requires("evaluation.grid_images", {}, at_most("evaluation.images_per_prompt"),
                 "Grids show evaluation images; lower it or evaluate more."),
        # A reward's details are known only after scoring; check the reward's name now.
        Requires("evaluation.strict", {},
                 That(f"{REWARD}, or a curve that the rewards make", lambda run: run.evaluation.strict is None
                      or run.evaluation.strict.partition("/")[0] in {REWARD, *_curves(run)}),
                 lambda run: f"Name one, such as {_curves(run)[0]!r}, or leave the key out."),
    )  # fmt: skip


def _curves(run: RunConfig) -> list[str]:
    return [reward.curve for reward in run.rewards]


NO_EVALUATION = EvaluationConfig(every=0, at_start=False, at_end=False)
