"""How progress is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.errors import Problem
from spotlight.config.rewards import TOTAL
from spotlight.config.section import Section

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class EvaluationConfig(Section):
    """Judging on fixed held-out prompts and seeds, with the ODE sampler."""

    every: PositiveInt = 10
    """Iterations between evaluations; the start and the end are always evaluated."""
    prompts: PositiveInt | None = None
    """Use so many held-out prompts, evenly spaced over the file; default: all."""
    images_per_prompt: PositiveInt = 16
    """Fixed seeds a prompt."""
    steps: Annotated[int, Field(ge=1)] = 10
    """Denoising steps."""
    weights: Literal["policy", "ema", "old"] = "policy"
    """Which weights are judged and exported."""
    strict: str | None = None
    """Curve that judges strictly (``shapes/strict``); default: the first reward's ``strict``, if any."""
    grid_prompts: PositiveInt = 8
    """Held-out prompts shown in the image grids."""
    grid_images: PositiveInt = 4
    """Images a prompt in the grids."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Weights, curves and pictures that the run does not make."""
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
        if self.grid_images > self.images_per_prompt:
            yield Problem(
                "evaluation.grid_images", str(self.grid_images),
                f"at most evaluation.images_per_prompt = {self.images_per_prompt}",
                "Grids show evaluation images; lower it or evaluate more.",
            )  # fmt: skip
        curves = [reward.curve for reward in run.rewards]
        # Which details a reward gives is known only when it has scored; which rewards there are is known now.
        if self.strict is not None and self.strict.partition("/")[0] not in {TOTAL, *curves}:
            yield Problem(
                "evaluation.strict", repr(self.strict),
                f"{TOTAL!r}, or a curve of {' or '.join(map(repr, curves))}",
                f"Name a curve that the rewards make, such as {curves[0]!r}, or leave the key out.",
            )  # fmt: skip
