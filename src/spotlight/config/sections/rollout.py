"""Configuration of training rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.requires import SET, Requires, That, at_most, less_than, more_than, other_than
from spotlight.config.section import Section
from spotlight.registry import FAMILIES
from spotlight_rewards.base.strict_section import COURSE, WORK

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class SdeWindowConfig(Section):
    """Which denoising steps are stochastic, and hence trainable by policy-gradient algorithms."""

    kind: Literal["all", "random", "sliding"] = "all"
    """``all`` steps but the last; ``random``: a window per rollout; ``sliding``: MixGRPO's, by iteration."""
    size: PositiveInt = 3
    """Steps in the window (``random``, ``sliding``)."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step the window may contain (``random``, ``sliding``)."""
    high: PositiveInt | None = None
    """End of the window's range, exclusive; default: half of the steps (``random``), or all but the last."""
    every: PositiveInt = 25
    """Iterations per window position (``sliding``)."""
    decay: Annotated[float, Field(ge=0)] = 0.0
    """Fewer iterations per position in the clean half (``sliding``):
    ``every * exp(-decay * max(position - steps / 2, 0))``.
    """
    per: Literal["rollout", "iteration"] = "rollout"
    """Whether each rollout has its own window, or all of an iteration share one (``random``)."""


_WINDOW = {"rollout.sampler": other_than("ode"), "rollout.sde_window.kind": other_than("all")}
_NOISY: That[RunConfig] = That(
    "with algorithm.name={algorithm.name}, which learns from a rollout's steps",
    lambda run: not run.algorithm.learns_from_clean_samples,
)


class RolloutConfig(Section):
    """How an iteration's samples are generated."""

    height: PositiveInt = 32
    """Image height in pixels."""
    width: PositiveInt = 32
    """Image width in pixels."""
    frames: PositiveInt = 1
    """Frames per video; 1 for families that make pictures."""
    fps: Annotated[float, Field(gt=0)] = 16.0
    """Frames per second of videos."""
    steps: Annotated[int, Field(ge=2), COURSE] = 10
    """Denoising steps per training rollout."""
    sampler: Annotated[Literal["flow-sde", "cps", "dance", "ode"], COURSE] = "ode"
    """Sampler inside the SDE window; outside of it and in evaluation it is always the ODE."""
    noise_level: Annotated[float, Field(ge=0), COURSE] = 0.7
    """``a`` of flow-sde and cps, ``eta`` of dance. Unused by ode."""
    sde_window: Annotated[SdeWindowConfig, COURSE] = SdeWindowConfig()
    """Where the sampler is stochastic. Unused by ode."""
    initial_noise: Literal["sample", "group"] = "sample"
    """Whether each sample starts from noise of its own, or all samples of a ``group`` from the same. These
    then differ only by the noise of their steps.
    """
    true_cfg_scale: Annotated[float, Field(ge=1), COURSE] = 1.0
    """Classifier-free guidance with a negative prompt; above 1, every step costs two forwards."""
    embedded_guidance: Annotated[float, Field(ge=0)] | None = None
    """Guidance that the model takes as an input (FLUX.1-dev, HunyuanVideo); default: the family's usual."""
    negative_prompt: str = " "
    """Negative prompt of guidance, the same for all prompts."""
    prompts_per_iteration: Annotated[PositiveInt, COURSE] = 12
    """Groups per iteration."""
    group_size: Annotated[int, Field(ge=2), COURSE] = 16
    """Samples per prompt; their rewards are compared with each other."""
    batch_size: Annotated[PositiveInt, WORK] = 64
    """Samples denoised per forward; limited by memory, does not affect results."""

    @property
    def kept_steps(self) -> int:
        """Stochastic (trainable) steps per rollout; 0 with the ODE sampler."""
        if self.sampler == "ode":
            return 0
        return self.steps - 1 if self.sde_window.kind == "all" else self.sde_window.size

    @property
    def window_end(self) -> int:
        """``sde_window.high``, decided as in :mod:`spotlight.diffusion.schedule`."""
        window, last = self.sde_window, self.steps - 1
        if window.high is not None or window.kind == "sliding":
            return window.high or last
        return min(max(window.low + window.size, self.steps // 2), last)

    requires = (
        Requires("rollout.embedded_guidance",
                 That("with model.family={model.family}, whose models take no such input",
                      lambda run: FAMILIES.load(run.model.family).embedded_guidance is None), None,
                 "Leave it out, and guide by rollout.true_cfg_scale."),
        Requires("rollout.negative_prompt", {"rollout.true_cfg_scale": 1.0},
                 That("an empty one", lambda run: not run.rollout.negative_prompt.strip()),
                 "Only guidance reads it: set rollout.true_cfg_scale above 1, or leave it out."),
        *(Requires(f"rollout.sde_window.{key}", {"rollout.sde_window.kind": other_than(kind)},
                   SdeWindowConfig.model_fields[key].default,
                   f"It is for {kind} windows: leave it out, or set rollout.sde_window.kind={kind}.")
          for key, kind in (("per", "random"), ("every", "sliding"), ("decay", "sliding"))),
        Requires("rollout.initial_noise", {"rollout.sampler": "ode"}, "sample",
                 "All samples of a group would be equal: leave it out, or set a stochastic sampler."),
        Requires("rollout.initial_noise", {"exploration": SET}, "sample",
                 "Exploration chooses the noise that samples start from: leave one of the two out."),
        Requires("rollout.sampler",
                 That("with algorithm.name={algorithm.name}, which learns from clean samples",
                      lambda run: run.algorithm.learns_from_clean_samples), "ode",
                 "SDE noise makes them worse: set rollout.sampler=ode."),
        Requires("rollout.sampler", _NOISY, other_than("ode"),
                 "Set rollout.sampler to flow-sde, cps or dance: an ODE step has no log-probability."),
        Requires("rollout.noise_level", {"rollout.sampler": "cps"}, at_most(1),
                 "At 1 all noise of a step is fresh; 0.8 is usual."),
        Requires("rollout.noise_level", _NOISY, more_than(0),
                 "Without noise a step has no log-probability; Flow-GRPO uses 0.7."),
        Requires("rollout.sde_window.high", _WINDOW, less_than("rollout.steps"),
                 "The last step is never stochastic: it would leave noise in the picture."),
        Requires("rollout.sde_window.size", _WINDOW,
                 That("at most high - low, up to step {rollout.window_end}", lambda run:
                      run.rollout.sde_window.low + run.rollout.sde_window.size <= run.rollout.window_end),
                 "Widen [low, high) or take fewer steps."),
        Requires("algorithm.train_timesteps", {"rollout.sampler": other_than("ode")},
                 That("at most the {rollout.kept_steps} stochastic steps of a rollout", lambda run:
                      (run.algorithm.train_timesteps or 0) <= run.rollout.kept_steps),
                 "Lower it, or widen rollout.sde_window."),
    )  # fmt: skip
