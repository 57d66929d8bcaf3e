"""Settings of algorithms newer than those of :mod:`spotlight.config.sections.algorithm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.requires import UNSET, Requires, That, more_than, other_than
from spotlight.config.sections.algorithm import (
    BatchStartSection,
    ForwardProcessSection,
    NoiseLevels,
    OldPolicyConfig,
)

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class FlowDPPOConfig(BatchStartSection):
    """Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a divergence mask in place of the ratio's clip."""

    implementation = "spotlight.algorithms.flow_dppo:FlowDPPO"

    name: Literal["flow-dppo"] = "flow-dppo"
    """Selects this algorithm."""
    divergence_max: PositiveFloat = 1e-5
    """A step is not pushed further from the policy before the batch than this KL divergence of the step's
    distributions, a mean over the latent.
    """


def _together(run: RunConfig) -> bool:
    per_pass = run.learner.timesteps_per_pass
    return per_pass != "auto" and per_pass >= (run.algorithm.train_timesteps or 1)


class VGRPOConfig(ForwardProcessSection):
    """V-GRPO (arXiv 2604.23380): clipped policy gradient with the ELBO as log-prob, on final latents."""

    implementation = "spotlight.algorithms.v_grpo:VGRPO"

    name: Literal["v-grpo"] = "v-grpo"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-2
    """Ratio clip."""
    soft_clip: PositiveFloat | None = None
    """Advantages become ``soft_clip * tanh(A / soft_clip)``; 3 to 5 with one update per batch. Default: no
    soft clip.
    """
    train_timesteps: PositiveInt = 4
    """Noise levels per sample, whose mean is the log-prob."""
    noise_levels: NoiseLevels = "stratified_steps"
    """How the noise levels are drawn; see ``diffusion-nft``."""

    shares_draws: ClassVar[bool] = True
    recomputes_log_probs: ClassVar[bool] = True

    requires = (
        Requires("learner.timesteps_per_pass", {"learner.updates_per_batch": more_than(1)},
                 That("at least algorithm.train_timesteps = {algorithm.train_timesteps}", _together),
                 "A ratio compares means over a sample's noise levels, which are evaluated together: set "
                 "{algorithm.train_timesteps} (and a smaller learner.micro_batch_size), or "
                 "learner.updates_per_batch=1."),
    )  # fmt: skip


class PreferenceSection(ForwardProcessSection):
    """Compares the samples of a group with each other, relative to the reference, at the same noise draws."""

    uses_reference: ClassVar[bool] = True
    shares_draws: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True


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
    """How the noise levels are drawn; see ``diffusion-nft``."""
    noisiest_steps: PositiveInt | None = None
    """With ``noise_levels: steps``: draw from this many of the schedule's first levels; default: from all."""
    old_policy: OldPolicyConfig = OldPolicyConfig(cap=0.3)
    """How fast the old policy, which makes the rollouts, follows."""

    @property
    def levels(self) -> int | None:
        return self.noisiest_steps

    @property
    def uses_old_policy(self) -> bool:
        return self.clip_range is not None

    requires = (
        Requires("algorithm.noisiest_steps",
                 {"algorithm.noise_levels": other_than("steps", "stratified_steps")}, UNSET,
                 "Only levels of the schedule can be counted: set algorithm.noise_levels=steps, or leave it "
                 "out."),
    )  # fmt: skip


class DiffusionDPOConfig(PreferenceSection):
    """Online Diffusion-DPO (arXiv 2311.12908): preferences between pairs of a group, on final latents."""

    implementation = "spotlight.algorithms.preference.diffusion_dpo:DiffusionDPO"

    name: Literal["diffusion-dpo"] = "diffusion-dpo"
    """Selects this algorithm."""
    beta: PositiveFloat = 2000.0
    """Sharpness of the preference."""
    stored: bool = False
    """Train on pairs of pictures of ``data.train``, the preferred one first (``pictures``, or Pick-a-Pic's
    columns), instead of rollouts.
    """
    pairs: Literal["extremes", "ranks"] = "extremes"
    """``extremes``: each group's best with its worst sample; ``ranks``: also the second best with the second
    worst, and so on. Pairs of equal advantage and samples without a pair teach nothing: with ``extremes``,
    set ``algorithm.train_samples: 2``, which trains the same pairs in 2/K of the time, for K samples.
    """
    train_timesteps: PositiveInt = 1
    """Noise levels trained per pair."""

    @property
    def trains_on_stored(self) -> bool:
        return self.stored


class SFTConfig(ForwardProcessSection):
    """Supervised fine-tuning: flow matching on pictures of ``data.train``, without rewards."""

    implementation = "spotlight.algorithms.sft:SFT"

    name: Literal["sft"] = "sft"
    """Selects this algorithm."""

    trains_on_stored: ClassVar[bool] = True


class RVMConfig(ForwardProcessSection):
    """RVM (arXiv 2608.23664): velocities towards rewarded samples and away from others, on final latents."""

    implementation = "spotlight.algorithms.rvm:RVM"

    name: Literal["rvm"] = "rvm"
    """Selects this algorithm."""
    reward_scale: PositiveFloat = 0.1
    """Factor of the advantage."""
    anchor: Literal["reference", "old"] = "reference"
    """What velocities are held to: the initial model, or a moving average of the policy, which then makes
    the rollouts.
    """
    anchor_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance to the anchor; above 0 costs one more forward per timestep."""
    anchor_rule: Literal["constant", "complement"] = "constant"
    """``complement``: the anchor's weight minus the scaled advantage, as in DiffusionNFT."""
    normalise: bool = False
    """Divide by the mean absolute error, as DiffusionNFT does, so that noise levels count equally."""
    old_policy: OldPolicyConfig = OldPolicyConfig()
    """How fast the moving average follows."""

    requires = (
        *(
            Requires(f"algorithm.{key}", {"algorithm.anchor_weight": 0}, default,
                     "There is no anchor: set algorithm.anchor_weight, or leave it out.")
            for key, default in (("anchor", "reference"), ("anchor_rule", "constant"))
        ),
    )  # fmt: skip

    def notes(self, run: RunConfig) -> Iterator[str]:
        """Without an anchor nothing holds it."""
        if self.anchor_weight == 0:
            yield (
                "algorithm.anchor_weight=0: nothing holds velocities, and negative advantages push them away "
                "without bound; pictures may break down (docs/benchmarks.md). Lower "
                "learner.learning_rate; `spotlight export --best` takes the best checkpoint."
            )

    @property
    def uses_old_policy(self) -> bool:
        return self.anchor == "old" and self.anchor_weight > 0

    @property
    def uses_reference(self) -> bool:
        return self.anchor == "reference" and self.anchor_weight > 0


class RAMConfig(RVMConfig):
    """RAM, reinforce adjoint matching (arXiv 2605.10759): RVM anchored to the initial model."""

    name: Literal["ram"] = "ram"  # type: ignore[assignment]
    """Selects this algorithm."""
    reward_scale: PositiveFloat = 100.0
    """Factor of the advantage; 1,000 for preferences. The larger, the weaker the anchor."""
    anchor: Literal["reference"] = "reference"
    """What velocities are held to; for a moving average use ``rvm``."""
    anchor_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distance to the anchor."""
