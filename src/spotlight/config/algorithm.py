"""The RL algorithms, their settings, and what each asks of rollouts and of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, SerializeAsAny
from pydantic_core import PydanticKnownError

from spotlight.config.section import Section
from spotlight.registry import ALGORITHMS

OldLogProbs = Literal["recompute", "stop_gradient", "rollout"]
NoiseLevels = Literal["uniform", "schedule"]


class AdvantageConfig(Section):
    """From rewards to advantages."""

    std: Literal["global", "group"] = "global"
    """Spread used to scale: of the whole batch, or of each prompt's group."""
    ddof: Literal[0, 1] = 0
    """0: population standard deviation (Flow-GRPO); 1: unbiased (DanceGRPO)."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""
    clip: PositiveFloat = 5.0
    """Advantages are clipped to +- this."""
    combine: Literal["sum", "normalise_each"] = "sum"
    """Several rewards: weighted sum first, or normalise each by ``std`` and then sum (MixGRPO: by group)."""


class AlgorithmSection(Section):
    """An RL algorithm, and what it asks of rollouts and of memory.

    Attributes:
        implementation: ``module:attribute`` of what makes a
            :class:`~spotlight.algorithms.base.Algorithm` from this section and the rollouts' sampler.
    """

    implementation: ClassVar[str]

    name: str
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    train_timesteps: PositiveInt | None = None
    """Trained timesteps per sample; default: all stochastic steps of its rollout."""

    @property
    def learns_from_clean_samples(self) -> bool:
        """Whether it trains on x0 alone, whatever ODE made it; else it trains a rollout's SDE steps."""
        return False

    @property
    def uses_old_policy(self) -> bool:
        """Whether a second, slower set of weights is kept and evaluated at every trained timestep."""
        return False

    @property
    def old_policy_starts_batch(self) -> bool:
        """Whether those weights are the policy as of before a batch, so that its first update skips them."""
        return False

    @property
    def uses_reference(self) -> bool:
        """Whether the starting model is evaluated at every trained timestep."""
        return False

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the learner evaluates timesteps of later updates than a batch's first once more."""
        return False


class FlowGRPOConfig(AlgorithmSection):
    """Flow-GRPO (arXiv 2505.05470); Flow-GRPO-Fast is this with a random ``rollout.sde_window``."""

    implementation = "spotlight.algorithms.flow_grpo:FlowGRPO"

    name: Literal["flow-grpo"] = "flow-grpo"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Ratio clip. Log-probs are means over the latent, so this is far below PPO's .2."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the starting model; above 0 costs one more forward a timestep."""
    old_log_probs: OldLogProbs = "recompute"
    """Denominator of the ratio: by the weights before the batch, this pass's own value, or the rollout's."""
    train_timesteps: PositiveInt | None = None
    """Trained steps a sample, drawn among its stochastic steps; default: all of them."""

    @property
    def uses_reference(self) -> bool:
        """With a KL term."""
        return self.kl_weight > 0

    @property
    def recomputes_log_probs(self) -> bool:
        """With ``old_log_probs: recompute``."""
        return self.old_log_probs == "recompute"


class FlowGRPOFastConfig(FlowGRPOConfig):
    """Flow-GRPO-Fast: few stochastic steps a rollout, ODE elsewhere, no KL."""

    name: Literal["flow-grpo-fast"] = "flow-grpo-fast"  # type: ignore[assignment]
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Ratio clip."""


class OldPolicyConfig(Section):
    """How fast the old policy follows: decay m = min(slope · max(n - delay, 0), cap) after n batches.

    DiffusionNFT: 0.001, 0.5, 0; for OCR 0.0075, 0.999, 75.
    """

    slope: Annotated[float, Field(ge=0)] = 0.001
    """Growth of the decay per batch trained."""
    cap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Largest decay; 0 makes the old policy equal the trained one."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Batches before the decay starts to grow."""

    def decay(self, batches_trained: int) -> float:
        """m of ``old <- m old + (1 - m) policy`` after so many batches."""
        return min(self.slope * max(batches_trained - self.delay, 0), self.cap)


class DiffusionNFTConfig(AlgorithmSection):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process; any ODE sampler."""

    implementation = "spotlight.algorithms.diffusion_nft:DiffusionNFT"

    name: Literal["diffusion-nft"] = "diffusion-nft"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages; ``clip`` is A_max."""
    beta: PositiveFloat = 1.0
    """Distance of the implicit positive and negative policies from the old one; 0.1 for OCR and several
    rewards."""
    reference_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the distance to the starting model; above 0 costs one more forward a timestep."""
    train_timesteps: PositiveInt = 3
    """Noise levels trained per sample, stratified."""
    noise_levels: NoiseLevels = "uniform"
    """Their distribution: uniform over (0, 1), or that of the rollout's schedule (shifted like it)."""
    old_policy: OldPolicyConfig = OldPolicyConfig()
    """How fast the behaviour policy follows the trained one."""

    @property
    def learns_from_clean_samples(self) -> bool:
        """Always."""
        return True

    @property
    def uses_old_policy(self) -> bool:
        """Always."""
        return True

    @property
    def uses_reference(self) -> bool:
        """With a weight."""
        return self.reference_weight > 0


class GRPOGuardConfig(AlgorithmSection):
    """GRPO-Guard: Flow-GRPO with a ratio that is normalised per sample and step."""

    implementation = "spotlight.algorithms.grpo_guard:GRPOGuard"

    name: Literal["grpo-guard"] = "grpo-guard"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 2e-6
    """Ratio clip."""
    train_timesteps: PositiveInt | None = None
    """Trained steps a sample, drawn among its stochastic steps; default: all of them."""

    @property
    def uses_old_policy(self) -> bool:
        """Always."""
        return True

    @property
    def old_policy_starts_batch(self) -> bool:
        """Always."""
        return True


class AWMConfig(AlgorithmSection):
    """AWM: advantage-weighted flow matching on clean samples; any ODE sampler."""

    implementation = "spotlight.algorithms.awm:AWM"

    name: Literal["awm"] = "awm"
    """Selects this algorithm."""
    power: PositiveFloat = 0.25
    """Exponent of the pseudo log-prob; 1 is plain flow matching."""
    advantage_scale: PositiveFloat = 5.0
    """Advantages are divided by this."""
    reference_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the distance to the starting model; above 0 costs one more forward a timestep."""
    old_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distance to the moving average; above 0 costs one more forward a timestep."""
    train_timesteps: PositiveInt = 3
    """Noise levels trained per sample, stratified."""
    noise_levels: NoiseLevels = "uniform"
    """Their distribution: uniform over (0, 1), or that of the rollout's schedule (shifted like it)."""
    old_policy: OldPolicyConfig = OldPolicyConfig(cap=0.3)
    """How fast the moving average follows."""

    @property
    def learns_from_clean_samples(self) -> bool:
        """Always."""
        return True

    @property
    def uses_old_policy(self) -> bool:
        """With a weight."""
        return self.old_weight > 0

    @property
    def uses_reference(self) -> bool:
        """With a weight."""
        return self.reference_weight > 0


def _choose(value: object) -> AlgorithmSection:
    """The section that the value's ``name`` registers, validated strictly."""
    if isinstance(value, AlgorithmSection):
        return value
    name = value.get("name") if isinstance(value, Mapping) else None
    if name is None:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'name'"})
    if not isinstance(name, str) or name not in ALGORITHMS:
        context = {"discriminator": "'name'", "tag": str(name), "expected_tags": ALGORITHMS.expected()}
        raise PydanticKnownError("union_tag_invalid", context)
    # Through JSON: strict validation then takes lists for tuples.
    return ALGORITHMS.load(name).model_validate_json(json.dumps(value), strict=True)


AlgorithmConfig = Annotated[SerializeAsAny[AlgorithmSection], PlainValidator(_choose)]
"""The section of any registered algorithm."""
