"""Settings of algorithms newer than those of :mod:`spotlight.config.sections.algorithm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.sections.algorithm import (
    BatchStartSection,
    ForwardProcessSection,
    NoiseLevels,
    OldPolicyConfig,
)
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class FlowDPPOConfig(BatchStartSection):
    """Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a divergence mask in place of the ratio's clip."""

    implementation = "spotlight.algorithms.flow_dppo:FlowDPPO"

    name: Literal["flow-dppo"] = "flow-dppo"
    """Selects this algorithm."""
    divergence_max: PositiveFloat = 1e-5
    """A step whose policy is further from the one before the batch is not pushed further: KL divergence of
    its kick, a mean over the latent.
    """
    train_timesteps: PositiveInt | None = None
    """Trained steps per sample, drawn from its stochastic steps; default: all of them."""


class VGRPOConfig(ForwardProcessSection):
    """V-GRPO (arXiv 2604.23380): clipped policy gradient with the ELBO as log-prob, on final latents."""

    implementation = "spotlight.algorithms.v_grpo:VGRPO"

    name: Literal["v-grpo"] = "v-grpo"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-2
    """Ratio clip."""
    soft_clip: PositiveFloat | None = None
    """Advantages become ``soft_clip * tanh(A / soft_clip)``; 3 to 5 with one update per batch. Default: they
    stay.
    """
    train_timesteps: PositiveInt = 4
    """Noise levels per sample, whose mean is the log-prob."""
    noise_levels: NoiseLevels = "stratified_steps"
    """Their distribution; see ``diffusion-nft``."""

    @property
    def shares_draws(self) -> bool:
        """Always."""
        return True

    @property
    def recomputes_log_probs(self) -> bool:
        """Always."""
        return True

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Later updates whose ratio is cut into passes."""
        per_pass, learner = run.learner.timesteps_per_pass, run.learner
        together = per_pass != "auto" and per_pass >= self.train_timesteps
        if learner.updates_per_batch > 1 and not together:
            yield Problem(
                "learner.timesteps_per_pass", repr(per_pass),
                f"at least algorithm.train_timesteps = {self.train_timesteps} with learner.updates_per_batch="
                f"{learner.updates_per_batch} and algorithm.name={self.name}",
                "A ratio is of the mean over a sample's noise levels, so they are evaluated together: set "
                f"{self.train_timesteps} (and a smaller learner.micro_batch_size), or one update per batch.",
            )  # fmt: skip


class PreferenceSection(ForwardProcessSection):
    """Compares the samples of a group with each other, relative to the reference, at the same noise draws."""

    @property
    def uses_reference(self) -> bool:
        """Always."""
        return True

    @property
    def shares_draws(self) -> bool:
        """Always."""
        return True

    @property
    def compares_groups(self) -> bool:
        """Always."""
        return True


class DGPOConfig(PreferenceSection):
    """DGPO (arXiv 2510.08425): preferences between the better and the worse half of a group, on final
    latents.
    """

    implementation = "spotlight.algorithms.preference.dgpo:DGPO"

    name: Literal["dgpo"] = "dgpo"
    """Selects this algorithm."""
    beta: PositiveFloat = 100.0
    """Sharpness of the preference."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = 1e-2
    """A sample whose ratio to the old policy has left 1 ± this in the direction of its advantage is not
    pushed further; null: no clip, and no old policy.
    """
    reference_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance to the initial model, which is evaluated in any case."""
    train_timesteps: PositiveInt = 4
    """Noise levels trained per sample, the same for a whole group."""
    noise_levels: NoiseLevels = "steps"
    """Their distribution; see ``diffusion-nft``."""
    noisiest_steps: PositiveInt | None = None
    """With ``noise_levels: steps``: of the schedule's first so many levels; default: of all."""
    old_policy: OldPolicyConfig = OldPolicyConfig(cap=0.3)
    """How fast the old policy, which makes the rollouts, follows."""

    @property
    def levels(self) -> int | None:
        """``noisiest_steps``."""
        return self.noisiest_steps

    @property
    def uses_old_policy(self) -> bool:
        """With a clip."""
        return self.clip_range is not None

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Levels without a schedule to take them from."""
        if self.noisiest_steps is not None and self.noise_levels not in ("steps", "stratified_steps"):
            yield Problem(
                "algorithm.noisiest_steps", str(self.noisiest_steps),
                f"nothing with algorithm.noise_levels={self.noise_levels}",
                "Only levels of the schedule can be counted: set algorithm.noise_levels=steps, or leave it "
                "out.",
            )  # fmt: skip


class DiffusionDPOConfig(PreferenceSection):
    """Online Diffusion-DPO (arXiv 2311.12908): preferences between pairs of a group, on final latents."""

    implementation = "spotlight.algorithms.preference.diffusion_dpo:DiffusionDPO"

    name: Literal["diffusion-dpo"] = "diffusion-dpo"
    """Selects this algorithm."""
    beta: PositiveFloat = 2000.0
    """Sharpness of the preference."""
    pairs: Literal["extremes", "ranks"] = "extremes"
    """``extremes``: each group's best with its worst sample; ``ranks``: also the second best with the second
    worst, and so on. Pairs of equal advantage teach nothing, nor do samples in no pair: with ``extremes``,
    set ``algorithm.train_samples: 2``, which trains the same pairs in 2 of K of the time.
    """
    train_timesteps: PositiveInt = 1
    """Noise levels trained per pair."""
