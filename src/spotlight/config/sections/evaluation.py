"""Configuration of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.section import Section
from spotlight_rewards.base.errors import Problem
from spotlight_rewards.reward_config import REWARD

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


_GRID_IMAGES = 4


class EvaluationConfig(Section):
    """Evaluation on fixed held-out prompts and seeds, with the ODE sampler."""

    every: Annotated[int, Field(ge=0)] = 10
    """Iterations between evaluations; 0: none between the start and the end."""
    at_start: bool = True
    """Evaluate before the first iteration."""
    at_end: bool = True
    """Evaluate after the last iteration."""
    prompts: PositiveInt | None = None
    """Number of held-out prompts, evenly spaced over the file; default: all."""
    images_per_prompt: PositiveInt = 16
    """Fixed seeds per prompt."""
    steps: Annotated[int, Field(ge=1)] = 10
    """Denoising steps."""
    weights: Literal["policy", "ema", "old"] = "policy"
    """Which weights are evaluated and exported."""
    strict: str | None = None
    """Curve of the strict score (``shapes/strict``); default: the first reward's ``strict``, if any."""
    grid_prompts: PositiveInt = 8
    """Held-out prompts shown in the image grids."""
    grid_images: PositiveInt | None = None
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

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Weights, curves or images that the run does not produce."""
        if self.weights == "ema" and run.learner.ema is None:
            yield Problem(
                "evaluation.weights", "'ema'", "'policy', while learner.ema is not set",
                "Set learner.ema.cap=0.9 or evaluate the policy.",
            )  # fmt: skip
        if self.weights == "old" and not run.algorithm.uses_old_policy:
            yield Problem(
                "evaluation.weights", "'old'", f"'policy' or 'ema' with algorithm.name={run.algorithm.name}",
                "This algorithm keeps no old policy.",
            )  # fmt: skip
        if self.grid_images is not None and self.grid_images > self.images_per_prompt:
            yield Problem(
                "evaluation.grid_images", str(self.grid_images),
                f"at most evaluation.images_per_prompt = {self.images_per_prompt}",
                "Grids show evaluation images; lower it or evaluate more.",
            )  # fmt: skip
        curves = [reward.curve for reward in run.rewards]
        # A reward's details are known only after scoring; check the reward's name now.
        if self.strict is not None and self.strict.partition("/")[0] not in {REWARD, *curves}:
            yield Problem(
                "evaluation.strict", repr(self.strict),
                f"{REWARD!r}, or a curve of {' or '.join(map(repr, curves))}",
                f"Name a curve that the rewards make, such as {curves[0]!r}, or leave the key out.",
            )  # fmt: skip


NO_EVALUATION = EvaluationConfig(every=0, at_start=False, at_end=False)
