"""Settings of algorithms that follow the gradient of a reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from spotlight.config.requires import UNSET, Requires, at_most
from spotlight.config.sections.algorithm import AdvantageConfig, AlgorithmSection, OldPolicyConfig


class GradientSection(AlgorithmSection):
    """Rollouts stop at a query, and the reward is differentiated at the clean prediction there."""

    query_steps: Annotated[int, Field(ge=2)] | None = None
    """Denoising steps of a training rollout; the last goes from its noise level, the query, straight to the
    clean picture. Default: one less than ``rollout.steps``.
    """
    train_timesteps: Literal[1] = 1
    """Only the query is trained."""

    learns_from_clean_samples: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = True

    def stops_at(self, steps: int) -> int:
        return max(2, steps - 1) if self.query_steps is None else self.query_steps

    requires = (
        Requires("algorithm.query_steps", {}, at_most("rollout.steps"),
                 "They are the first steps of the schedule: lower it."),
        *(Requires(key, {}, wanted, f"With a reward's gradient {why}: {remedy}.")
          for key, wanted, why, remedy in (
              ("fleet.driver", "inline", "pictures are decoded where they are trained",
               "set fleet.driver=inline"),
              ("exploration", UNSET, "previews would have other steps", "leave it out"),
              ("rollout.frames", 1, "only pictures can be differentiated", "leave it out"),
              ("pipeline.axis", "none", "whole batches are trained", "leave it out"))),
    )  # fmt: skip


class OPSDConfig(GradientSection):
    """DiffusionOPSD: bounded targets up and down the reward's gradient, which the policy fits."""

    implementation = "spotlight.algorithms.gradient.opsd:OPSD"

    name: Literal["opsd"] = "opsd"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages; ``clip`` is A_max."""
    radius: PositiveFloat = 0.1
    """Distance of the targets from the clean prediction, relative to its norm."""
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one; 0.1 for several rewards."""
    old_policy: OldPolicyConfig = OldPolicyConfig()
    """How fast the behaviour policy follows the trained one."""

    uses_old_policy: ClassVar[bool] = True


class ReFLConfig(GradientSection):
    """ReFL and DRaFT-1: up the reward's gradient through one denoising step."""

    implementation = "spotlight.algorithms.gradient.refl:ReFL"

    name: Literal["refl"] = "refl"
    """Selects this algorithm."""
    reference_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance to the initial model; above 0 costs one more forward."""
