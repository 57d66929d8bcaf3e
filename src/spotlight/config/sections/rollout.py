"""Configuration of training rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.section import Section
from spotlight.registry import FAMILIES
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class SdeWindowConfig(Section):
    """Which denoising steps are stochastic, and hence trainable by policy-gradient algorithms."""

    kind: Literal["all", "random", "sliding"] = "all"
    """``all`` but the last step; ``random``: one window per rollout; ``sliding``: MixGRPO's, by iteration."""
    size: PositiveInt = 3
    """Steps in the window (``random``, ``sliding``)."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step the window may contain (``random``, ``sliding``)."""
    high: PositiveInt | None = None
    """End of its range, exclusive; default: half of the steps (``random``), or all but the last."""
    every: PositiveInt = 25
    """Iterations per window position (``sliding``)."""
    decay: Annotated[float, Field(ge=0)] = 0.0
    """Shortens the clean half: ``every * exp(-decay * max(position - steps / 2, 0))`` (``sliding``)."""
    per: Literal["rollout", "iteration"] = "rollout"
    """Which rollouts share a window: none, or all of an iteration (``random``)."""


_WINDOW_KEYS = {"per": "random", "every": "sliding", "decay": "sliding"}
"""Of keys that one kind of window alone reads, the kind."""


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
    steps: Annotated[int, Field(ge=2)] = 10
    """Denoising steps per training rollout."""
    sampler: Literal["flow-sde", "cps", "dance", "ode"] = "ode"
    """Sampler inside the SDE window; outside of it and in evaluation it is always the ODE."""
    noise_level: Annotated[float, Field(ge=0)] = 0.7
    """``a`` of flow-sde and cps, ``eta`` of dance. Unused by ode."""
    sde_window: SdeWindowConfig = SdeWindowConfig()
    """Where the sampler is stochastic. Unused by ode."""
    initial_noise: Literal["sample", "group"] = "sample"
    """Whose own the noise is that denoising starts from. The samples of a ``group`` that share it differ by
    the noise of their steps alone (as do those of a prompt that is drawn twice).
    """
    true_cfg_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance with a negative prompt; above 1, every step costs two forwards."""
    embedded_guidance: Annotated[float, Field(ge=0)] | None = None
    """Guidance that the model takes as an input (FLUX.1-dev, HunyuanVideo); default: the family's usual."""
    negative_prompt: str = " "
    """The negative prompt of guidance."""
    prompts_per_iteration: PositiveInt = 12
    """Groups per iteration."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Samples per prompt; their rewards are compared with each other."""
    batch_size: PositiveInt = 64
    """Samples denoised per forward; limited by memory, does not affect results."""

    @property
    def kept_steps(self) -> int:
        """Stochastic (trainable) steps per rollout; 0 with the ODE sampler."""
        if self.sampler == "ode":
            return 0
        return self.steps - 1 if self.sde_window.kind == "all" else self.sde_window.size

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Guidance the family does not take; a sampler or SDE window that does not suit the algorithm."""
        if self.embedded_guidance is not None and FAMILIES.load(run.model.family).embedded_guidance is None:
            yield Problem(
                "rollout.embedded_guidance", f"{self.embedded_guidance:g}",
                f"nothing with model.family={run.model.family}",
                "Its models take no scale as an input: leave it out, and guide by rollout.true_cfg_scale.",
            )  # fmt: skip
        for key, kind in _WINDOW_KEYS.items():
            value = getattr(self.sde_window, key)
            if self.sde_window.kind != kind and value != SdeWindowConfig.model_fields[key].default:
                yield Problem(
                    f"rollout.sde_window.{key}", repr(value),
                    f"nothing with rollout.sde_window.kind={self.sde_window.kind}",
                    f"It is for {kind} windows: leave it out, or set rollout.sde_window.kind={kind}.",
                )  # fmt: skip
        yield from self._sharing_problems(run)
        name = run.algorithm.name
        if not run.algorithm.learns_from_clean_samples:
            yield from self._noise_problems(name)
        elif self.sampler != "ode":
            yield Problem(
                "rollout.sampler", repr(self.sampler), f"'ode' with algorithm.name={name}",
                "It learns from clean samples, which SDE noise makes worse: set rollout.sampler=ode.",
            )  # fmt: skip
        if self.sampler == "ode":
            return
        if self.sde_window.kind != "all":
            yield from self._window_problems()
        wanted = run.algorithm.train_timesteps
        if wanted is not None and wanted > self.kept_steps:
            yield Problem(
                "algorithm.train_timesteps", str(wanted),
                f"at most {self.kept_steps}, the stochastic steps of a rollout",
                "Lower it, or widen rollout.sde_window.",
            )  # fmt: skip

    def _sharing_problems(self, run: RunConfig) -> Iterator[Problem]:
        if self.initial_noise == "sample":
            return
        if self.sampler == "ode":
            yield Problem(
                "rollout.initial_noise", "'group'", "'sample' with rollout.sampler=ode",
                "All samples of a group would be equal: leave it out, or set a stochastic sampler.",
            )  # fmt: skip
        if run.exploration is not None:
            yield Problem(
                "rollout.initial_noise", "'group'", "'sample' with exploration",
                "What is explored is the noise that samples start from: leave one of the two out.",
            )  # fmt: skip

    def _noise_problems(self, algorithm: str) -> Iterator[Problem]:
        if self.sampler == "cps" and self.noise_level > 1:
            yield Problem(
                "rollout.noise_level", str(self.noise_level), "at most 1 with rollout.sampler=cps",
                "At 1 all noise of a step is fresh; 0.8 is usual.",
            )  # fmt: skip
        if self.sampler == "ode":
            yield Problem(
                "rollout.sampler", "'ode'", f"a stochastic sampler with algorithm.name={algorithm}",
                "Set rollout.sampler to flow-sde, cps or dance: an ODE step has no log-probability.",
            )  # fmt: skip
        if self.noise_level == 0:
            yield Problem(
                "rollout.noise_level", "0", f"above 0 with algorithm.name={algorithm}",
                "Without noise a step has no log-probability; Flow-GRPO uses 0.7.",
            )  # fmt: skip

    def _window_problems(self) -> Iterator[Problem]:
        window, last = self.sde_window, self.steps - 1
        high = window.high
        if high is None:  # as in spotlight.diffusion.schedule
            high = (
                last
                if window.kind == "sliding"
                else min(max(window.low + window.size, self.steps // 2), last)
            )
        if high > last:
            yield Problem(
                "rollout.sde_window.high", str(high), f"at most rollout.steps - 1 = {last}",
                "The last step is never stochastic: it would leave noise in the picture.",
            )  # fmt: skip
        if window.low + window.size > high:
            yield Problem(
                "rollout.sde_window.size", str(window.size), f"at most high - low = {high - window.low}",
                "Widen [low, high) or take fewer steps.",
            )  # fmt: skip
