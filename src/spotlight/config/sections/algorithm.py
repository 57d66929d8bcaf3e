"""The RL algorithms' settings, and their requirements on rollouts and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, SerializeAsAny, ValidationInfo
from pydantic_core import PydanticKnownError

from spotlight.config.requires import UNSET, Computed, Requirement, Requires, That, at_most, other_than
from spotlight.config.section import Section
from spotlight.registry import ALGORITHMS
from spotlight_rewards.base.errors import Problem
from spotlight_rewards.registry import ANY_NAME

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

OldLogProbs = Literal["recompute", "stop_gradient", "rollout"]
NoiseLevels = Literal["uniform", "schedule", "steps", "stratified_steps"]
TrainPolicy = Literal["max_variance", "top_and_bottom", "farthest", "random"]
AdvantagesOver = Literal["trained", "generated"]
SilentGroups = Literal["train", "skip", "as_zero"]


_GDPO = {"algorithm.advantage.combine": "gdpo"}
_TOTAL = (
    "It goes by the total reward, which then does not determine the advantage: change it, or set "
    "algorithm.advantage.combine=sum."
)


class AdvantageConfig(Section):
    """From rewards to advantages."""

    std: Literal["global", "group"] = "global"
    """Standard deviation to divide by: of the whole batch, or of each prompt's group."""
    ddof: Literal[0, 1] = 0
    """0: population standard deviation (Flow-GRPO); 1: unbiased (DanceGRPO)."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""
    clip: PositiveFloat = 5.0
    """Advantages are clipped to ± this."""
    over: AdvantagesOver = "trained"
    """Which samples the standard deviation is taken over where ``algorithm.train_samples`` leaves some out:
    the trained ones, or all that were generated in their groups. The mean is always over the trained ones.
    """
    combine: Literal["sum", "normalise_each", "gdpo"] = "sum"
    """How to combine several rewards. ``sum``: normalise the weighted sum; ``normalise_each``: normalise each
    by ``std``, then sum (MixGRPO: by group); ``gdpo``: each by group, then their sum over the batch
    (GDPO, arXiv 2601.05242).
    """

    requires = (
        Requires("algorithm.advantage.std", _GDPO, "group",
                 "GDPO normalises each reward by its group: set algorithm.advantage.std=group."),
        Requires("algorithm.advantage.combine", {"pipeline.axis": other_than("none")},
                 ("sum", "normalise_each"),
                 "The spread over the batch is known only once it is complete: set pipeline.axis=none, "
                 "or another combination."),
        *(Requires(key, _GDPO, wanted,
                   "GDPO divides by the spread over all trained samples: leave it out, or choose another "
                   "combination.")
          for key, wanted in (("algorithm.advantage.over", "trained"), ("algorithm.silent_groups", "train"))),
        *(Requires(key, {"algorithm.train_samples": UNSET}, wanted,
                   "All samples are trained: leave it out, or set algorithm.train_samples.")
          for key, wanted in (
              ("algorithm.advantage.over", "trained"), ("algorithm.train_policy", "max_variance"))),
    )  # fmt: skip


def _ranked_by_total(run: RunConfig) -> bool:
    """Whether the total reward, by which samples are chosen, does not tell their advantages."""
    several = sum(reward.weight != 0 for reward in run.rewards) > 1
    return several and run.algorithm.advantage.combine != "sum"


def _reads_old_policy(run: RunConfig) -> bool:
    algorithm = run.algorithm
    field, given = type(algorithm).model_fields.get("old_policy"), getattr(algorithm, "old_policy", None)
    return field is None or algorithm.uses_old_policy or given == field.default


def _cut_groups(run: RunConfig) -> Iterator[Problem]:
    if run.fleet.driver == "ray":  # otherwise torchrun knows the ranks: see rank_problems
        yield from micro_batch_problems(run, run.fleet.learner_ranks)


def micro_batch_problems(run: RunConfig, ranks: int) -> Iterator[Problem]:
    """Micro-batches, of all ranks together, that would cut groups the loss compares."""
    algorithm, learner, group = run.algorithm, run.learner, run.trained_per_prompt
    if not algorithm.compares_groups:
        return
    micro, key = learner.micro_batch_size * ranks, run.trained_per_prompt_key
    update = run.rollout.prompts_per_iteration // learner.updates_per_batch * group
    if group % ranks:
        yield Problem(
            key, str(group),
            f"a multiple of the {ranks} ranks with algorithm.name={algorithm.name}",
            f"The ranks share each group evenly: set {-(-group // ranks) * ranks}, or change their number.",
        )  # fmt: skip
    elif micro < update and micro % group:
        wanted = max(micro // group, 1) * group // ranks
        yield Problem(
            "learner.micro_batch_size", str(learner.micro_batch_size),
            f"a multiple of {group // ranks} with algorithm.name={algorithm.name}, so that a micro-batch of "
            f"the {ranks} rank(s) together holds whole groups of {group}",
            f"Its loss compares the samples of a group: set {wanted}, or change {key}.",
        )  # fmt: skip


_STORED: That[RunConfig] = That(
    "with algorithm.name={algorithm.name} on pictures of data.train",
    lambda run: run.algorithm.trains_on_stored,
)

KEYS_OF_GROUPS = ("advantage", "train_samples", "train_policy", "silent_groups")
"""Keys that mean the same with every algorithm, and stay when another is chosen."""


class AlgorithmSection(Section):
    """An RL algorithm's settings, and its requirements on rollouts and memory.

    Attributes:
        implementation: ``module:attribute`` of the constructor that makes a
            :class:`~spotlight.algorithms.base.Algorithm` from this section and the rollouts' sampler.
    """

    implementation: ClassVar[str]
    learns_from_clean_samples: ClassVar[bool] = False
    """Whether it trains on x0 alone, generated by any ODE; otherwise on a rollout's SDE steps."""
    needs_gradients: ClassVar[bool] = False
    """Whether its loss needs the reward's gradient by the clean prediction where a rollout stopped."""
    shares_draws: ClassVar[bool] = False
    """Whether a group's samples are trained at the same noise levels with the same noise."""
    compares_groups: ClassVar[bool] = False
    """Whether its loss compares the samples of a group, which must be whole in a micro-batch then."""

    name: str
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    train_timesteps: PositiveInt | None = None
    """Timesteps trained per sample, drawn from the stochastic steps of its rollout; default: all of them."""
    train_samples: Annotated[int, Field(ge=2)] | None = None
    """Samples to train of each group's ``rollout.group_size``; default: all. The others are generated and
    scored only to choose from (PODS, arXiv 2504.13818).
    """
    train_policy: TrainPolicy = "max_variance"
    """Which samples to train: the subset with the largest reward variance, half the best and half the worst
    (``top_and_bottom``), those ``farthest`` from the group's mean (largest ``|advantage|``), or ``random``
    ones, as a control. All but ``random`` rank by the total reward. Needs ``train_samples``.
    """
    silent_groups: SilentGroups = "train"
    """What to do with groups whose trained rewards are all equal, so that their advantages are 0: ``train``
    them, ``skip`` them (the mean loss is over the others, as in flow_grpo), or count them ``as_zero`` in that
    mean without training them.
    """

    def stops_at(self, steps: int) -> int:
        """Denoising steps of a training rollout; if fewer than a schedule's ``steps``, the last goes to 0."""
        return steps

    @property
    def trains_on_stored(self) -> bool:
        """Whether its samples are pictures of the training data, in place of rollouts."""
        return False

    @property
    def uses_old_policy(self) -> bool:
        """Whether a second, slower set of weights is evaluated at every trained timestep."""
        return False

    @property
    def old_policy_starts_batch(self) -> bool:
        """Whether those weights are the policy before a batch; the batch's first update skips them then."""
        return self.follows is not None and 0 in (self.follows.slope, self.follows.cap)

    @property
    def follows(self) -> OldPolicyConfig | None:
        old_policy = getattr(self, "old_policy", None)
        return old_policy if isinstance(old_policy, OldPolicyConfig) else None

    @property
    def uses_reference(self) -> bool:
        """Whether the initial model is evaluated at every trained timestep; here, if it has a weight."""
        return bool(getattr(self, "reference_weight", 0) > 0)

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether updates after a batch's first need an extra forward per trained timestep."""
        return bool(getattr(self, "old_log_probs", None) == "recompute")

    @property
    def decays_by_steps(self) -> bool:
        """Whether the old policy's decay is a function of optimizer steps, not of batches."""
        return self.follows is not None and self.follows.count == "steps"

    requires: ClassVar[Sequence[Requirement[RunConfig]]] = (
        Requires("algorithm.train_samples", {}, at_most("rollout.group_size"),
                 "They are chosen from the generated samples: lower it, or raise rollout.group_size."),
        Requires("algorithm.train_policy",
                 That("with several rewards and algorithm.advantage.combine={algorithm.advantage.combine}",
                      lambda run: run.algorithm.train_samples is not None and _ranked_by_total(run)),
                 "random", _TOTAL),
        Requires("algorithm.silent_groups",
                 That("with several rewards and algorithm.advantage.combine={algorithm.advantage.combine}",
                      lambda run: run.algorithm.advantage.combine != "gdpo" and _ranked_by_total(run)),
                 "train", _TOTAL),
        Requires("algorithm.old_policy", {},
                 That("nothing where {algorithm.name} uses no old policy", _reads_old_policy),
                 "Leave it out, or give the old policy a weight or a clip."),
        Requires("pipeline.axis",
                 That("with algorithm.name={algorithm.name}, whose loss compares the samples of a group",
                      lambda run: run.algorithm.compares_groups), "none",
                 "Parts of a batch could cut groups: set pipeline.axis=none."),
        Requires("pipeline.axis",
                 That("with algorithm.name={algorithm.name}, which trains a group on the same noise",
                      lambda run: run.algorithm.shares_draws and not run.algorithm.compares_groups),
                 ("none", "prompt"),
                 "Set pipeline.axis=prompt for whole groups."),
        *(Requires(key, _STORED, wanted, f"{why}: {remedy}.")
          for key, wanted, why, remedy in (
              ("fleet.driver", "inline", "Pictures are read and encoded where they are trained",
               "set fleet.driver=inline"),
              ("exploration", UNSET, "Nothing is generated to choose from", "leave it out"),
              ("algorithm.train_samples", UNSET, "All pictures are trained", "leave it out"),
              ("algorithm.silent_groups", "train", "Rewards do not affect what is trained", "leave it out"),
              ("pipeline.axis", "none", "There is nothing to wait for", "leave it out"))),
        Computed("learner.micro_batch_size", "whole groups, of all ranks together, where the loss compares "
                 "the samples of a group", _cut_groups),
    )  # fmt: skip


class FlowGRPOConfig(AlgorithmSection):
    """Flow-GRPO (arXiv 2505.05470); with a random ``rollout.sde_window`` it is Flow-GRPO-Fast."""

    implementation = "spotlight.algorithms.flow_grpo:FlowGRPO"

    name: Literal["flow-grpo"] = "flow-grpo"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Ratio clip. Log-probs are means over the latent, so this is far below PPO's 0.2."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the initial model; above 0 costs one more forward per timestep."""
    kl_scale: Literal["rate", "step"] = "rate"
    """What the KL's squared distance between means is divided by. ``rate``: twice the squared noise rate, as
    in Flow-GRPO and DanceGRPO; ``step``: twice the step's variance (rate² times length), as in the true KL.
    """
    old_log_probs: OldLogProbs = "recompute"
    """Denominator of the ratio. ``recompute``: computed with the weights before the batch;
    ``stop_gradient``: this pass's own value; ``rollout``: the value stored by the rollout.
    """
    step_weights: Literal["equal", "noise"] = "equal"
    """Weights of the steps in the clipped term. ``noise``: in proportion to the noise that a step adds, with
    mean 1 (TempFlow-GRPO, arXiv 2508.04324); only without an SDE window.
    """

    requires = (
        Requires("algorithm.kl_scale", {"algorithm.kl_weight": 0}, "rate",
                 "There is no KL to scale: set algorithm.kl_weight, or leave it out."),
        Requires("algorithm.kl_scale", {"rollout.sampler": "cps"}, "rate",
                 "The KL of cps is always divided by the step's variance: leave it out."),
        Requires("algorithm.step_weights", {"rollout.sampler": "cps"}, "equal",
                 "Weights undo the 1/k of a normal density's gradient, which cps's log-probs lack: set "
                 "rollout.sampler=flow-sde, or leave it out."),
        Requires("algorithm.step_weights", {"rollout.sde_window.kind": other_than("all")}, "equal",
                 "Weights have mean 1 over all stochastic steps, of which a window has only some: set "
                 "rollout.sde_window.kind=all, or leave it out."),
    )  # fmt: skip

    @property
    def uses_reference(self) -> bool:
        return self.kl_weight > 0


class FlowGRPOFastConfig(FlowGRPOConfig):
    """Flow-GRPO-Fast: few stochastic steps per rollout, ODE elsewhere, no KL."""

    name: Literal["flow-grpo-fast"] = "flow-grpo-fast"  # type: ignore[assignment]
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Ratio clip."""

    def notes(self, run: RunConfig) -> Iterator[str]:
        """Without an SDE window it is not the fast one."""
        if run.rollout.sde_window.kind == "all":
            yield (
                "algorithm.name=flow-grpo-fast is plain flow-grpo while all steps are stochastic: to make "
                "only a few stochastic, set rollout.sde_window={kind: random, size: 2, high: 5}."
            )


class ForwardProcessSection(AlgorithmSection):
    """Settings common to the algorithms that add noise to final latents again; any ODE sampler."""

    train_timesteps: PositiveInt = 3
    """Noise levels trained per sample."""
    noise_levels: NoiseLevels = "uniform"
    """How the noise levels are drawn: one from each of ``train_timesteps`` equal parts, ``uniform`` over
    (0, 1) or distributed as in the rollout's (shifted) ``schedule``; or from that schedule's own levels,
    without 0: distinct ones at random (``steps``), or one from each part (``stratified_steps``).
    """

    learns_from_clean_samples: ClassVar[bool] = True

    @property
    def levels(self) -> int | None:
        """How many of the schedule's levels, from pure noise on, are trained; None: all."""
        return None

    requires: ClassVar[Sequence[Requirement[RunConfig]]] = (
        Requires("algorithm.train_timesteps", {"algorithm.noise_levels": ("steps", "stratified_steps")},
                 That("at most the number of levels to draw from",
                      lambda run: (run.algorithm.train_timesteps or 1) <= _levels(run)),
                 lambda run: f"Lower it to {_levels(run)}, or allow more levels (rollout.steps)."),
    )  # fmt: skip


def _levels(run: RunConfig) -> int:
    return min(run.rollout.steps, getattr(run.algorithm, "levels", None) or run.rollout.steps)


class OldPolicyConfig(Section):
    """How fast the old policy follows: decay m = min(slope · max(n - delay, 0), cap) after each batch.

    DiffusionNFT uses slope 0.001, cap 0.5, delay 0; for OCR 0.0075, 0.999, 75, counting optimizer steps.
    """

    slope: Annotated[float, Field(ge=0)] = 0.001
    """Growth of the decay for each n."""
    cap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Largest decay; 0 makes the old policy equal the trained one."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Value of n from which the decay grows."""
    count: Literal["batches", "steps"] = "batches"
    """What n counts: trained batches, or optimizer steps (``learner.updates_per_batch`` per batch)."""

    def decay(self, n: float) -> float:
        """m of ``old <- m old + (1 - m) policy``; n as ``learner.schedule_samples`` counts."""
        return min(self.slope * max(n - self.delay, 0), self.cap)


class DiffusionNFTConfig(ForwardProcessSection):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process; any ODE sampler."""

    implementation = "spotlight.algorithms.diffusion_nft:DiffusionNFT"

    name: Literal["diffusion-nft"] = "diffusion-nft"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages; ``clip`` is A_max."""
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one; 0.1 for OCR and several rewards."""
    reference_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the distance to the initial model; above 0 costs one more forward per timestep."""
    old_policy: OldPolicyConfig = OldPolicyConfig()
    """How fast the behaviour policy follows the trained one."""

    uses_old_policy: ClassVar[bool] = True


class BatchStartSection(AlgorithmSection):
    """Compares the policy with the one before the batch, which the ``old`` slot holds."""

    uses_old_policy: ClassVar[bool] = True
    old_policy_starts_batch: ClassVar[bool] = True


class GRPOGuardConfig(BatchStartSection):
    """GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio normalised per sample and step."""

    implementation = "spotlight.algorithms.grpo_guard:GRPOGuard"

    name: Literal["grpo-guard"] = "grpo-guard"
    """Selects this algorithm."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 2e-6
    """Ratio clip."""


class AWMConfig(ForwardProcessSection):
    """AWM (arXiv 2509.25050): advantage-weighted flow matching on clean samples; any ODE sampler."""

    implementation = "spotlight.algorithms.awm:AWM"

    name: Literal["awm"] = "awm"
    """Selects this algorithm."""
    power: PositiveFloat = 0.25
    """Exponent of the pseudo log-prob; 1: plain flow matching."""
    advantage_scale: PositiveFloat = 5.0
    """Advantages are divided by this."""
    reference_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the distance to the initial model; above 0 costs one more forward per timestep."""
    old_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distance to the moving average; above 0 costs one more forward per timestep."""
    old_policy: OldPolicyConfig = OldPolicyConfig(cap=0.3)
    """How fast the moving average follows."""
    old_log_probs: Literal["stop_gradient", "recompute"] = "stop_gradient"
    """Denominator of the ratio. ``stop_gradient``: this pass's own value, so the ratio is 1; ``recompute``:
    computed with the weights before the batch, so the ratio leaves 1 in a batch's later updates.
    """
    clip_range: PositiveFloat | None = None
    """Ratio clip with ``old_log_probs: recompute``; default: none."""

    requires = (
        Requires("algorithm.clip_range", {"algorithm.old_log_probs": other_than("recompute")}, UNSET,
                 "The ratio is always 1 then: set algorithm.old_log_probs=recompute, or leave it out."),
    )  # fmt: skip

    @property
    def uses_old_policy(self) -> bool:
        return self.old_weight > 0


class AbsentAlgorithmConfig(AlgorithmSection, extra="allow"):
    """What a run recorded of an algorithm whose package is not installed."""


def _choose(value: object, info: ValidationInfo) -> AlgorithmSection:
    if isinstance(value, AlgorithmSection):
        return value
    name = value.get("name") if isinstance(value, Mapping) else None
    if name is None:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'name'"})
    if isinstance(name, str) and name not in ALGORITHMS and (info.context or {}).get(ANY_NAME):
        return AbsentAlgorithmConfig.model_validate_json(json.dumps(value), strict=True)
    if not isinstance(name, str) or name not in ALGORITHMS:
        context = {"discriminator": "'name'", "tag": str(name), "expected_tags": ALGORITHMS.expected()}
        raise PydanticKnownError("union_tag_invalid", context)
    # Through JSON: strict mode then accepts lists as tuples.
    return ALGORITHMS.load(name).model_validate_json(json.dumps(value), strict=True)


AlgorithmConfig = Annotated[SerializeAsAny[AlgorithmSection], PlainValidator(_choose)]
"""The section of any registered algorithm."""
