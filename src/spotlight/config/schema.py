"""The typed configuration of a run.

One strict, frozen pydantic model a section; an unknown key is an error, and every field carries its
description, from which ``docs/reference/configuration.md`` is generated. Nothing here imports torch,
so ``--help``, ``--dry-run`` and planning start at once.

Checks that need one field alone are constraints of that field; checks between fields are in
:mod:`spotlight.config.contradictions`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.exploration import ExplorationConfig
from spotlight.config.fleet import FleetConfig
from spotlight.config.pipeline import PipelineConfig
from spotlight.config.section import Section


class ModelConfig(Section):
    """Which Diffusion Transformer is trained."""

    family: Literal["qwen-image"] = "qwen-image"
    """Adapter that knows the pipeline: prompt template, guidance, schedule, decoding, LoRA targets."""
    path: str = "testbed"
    """Directory or hub id of a diffusers pipeline; ``testbed`` is the tiny Qwen-Image shipped here."""
    revision: str | None = None
    """Branch, tag or commit when ``path`` is a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage type of the frozen weights. Adapters and optimizer state are float32 in any case."""
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512
    """Prompts longer than this are cut, as the pipeline does."""


class DataConfig(Section):
    """Prompts to train on, and held-out prompts to judge by."""

    train: str = "testbed"
    """File of training prompts (.txt: one a line; .jsonl: GenEval metadata); ``testbed``: those shipped."""
    test: str = "testbed"
    """File of held-out prompts for evaluation, in the same formats."""
    tags: tuple[str, ...] = ()
    """Keep only prompts whose metadata tag is among these (empty: all)."""


class SdeWindowConfig(Section):
    """Which denoising steps are stochastic, and hence trainable by policy-gradient algorithms."""

    kind: Literal["all", "random", "sliding"] = "all"
    """``all`` steps but the last; ``random``: a window per rollout; ``sliding``: MixGRPO's, by iteration."""
    size: PositiveInt = 3
    """Steps in the window (``random``, ``sliding``)."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step the window may cover (``random``, ``sliding``)."""
    high: PositiveInt | None = None
    """One past the last step it may cover; default: half of the steps (``random``), all but the last."""
    every: PositiveInt = 25
    """Iterations between two moves (``sliding``)."""
    decay: Annotated[float, Field(ge=0)] = 0.0
    """Shortens the clean half: ``every * exp(-decay * max(position - steps / 2, 0))`` (``sliding``)."""


class RolloutConfig(Section):
    """How the samples of an iteration are made."""

    height: PositiveInt = 32
    """Picture height in pixels."""
    width: PositiveInt = 32
    """Picture width in pixels."""
    steps: Annotated[int, Field(ge=2)] = 10
    """Denoising steps of a training rollout."""
    sampler: Literal["flow-sde", "cps", "dance", "ode"] = "ode"
    """Sampler inside the SDE window; outside of it and in evaluation it is always the ODE."""
    noise_level: Annotated[float, Field(ge=0)] = 0.7
    """``a`` of flow-sde and cps, ``eta`` of dance. Unused by ode."""
    sde_window: SdeWindowConfig = SdeWindowConfig()
    """Where the sampler is stochastic. Unused by ode."""
    true_cfg_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance with a negative prompt; above 1 every step costs two forwards."""
    negative_prompt: str = " "
    """What guidance steers away from."""
    prompts_per_iteration: PositiveInt = 12
    """Groups in an iteration."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Samples a prompt; their rewards are compared with each other."""
    batch_size: PositiveInt = 64
    """Samples denoised in one forward; bound by memory, has no effect on results."""


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
    """An RL algorithm, and what it asks of rollouts and of memory."""

    @property
    def learns_from_clean_samples(self) -> bool:
        """Whether it trains on x0 alone, whatever ODE made it; else it trains a rollout's SDE steps."""
        return False

    @property
    def uses_old_policy(self) -> bool:
        """Whether a second, slower set of weights is kept and evaluated at every trained timestep."""
        return False

    @property
    def uses_reference(self) -> bool:
        """Whether the starting model is evaluated at every trained timestep."""
        return False

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the learner evaluates every trained timestep once more before the first update."""
        return False


class FlowGRPOConfig(AlgorithmSection):
    """Flow-GRPO (arXiv 2505.05470); Flow-GRPO-Fast is this with a random ``rollout.sde_window``."""

    name: Literal["flow-grpo"] = "flow-grpo"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Ratio clip. Log-probs are means over the latent, so this is far below PPO's .2."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the starting model; above 0 costs one more forward a timestep."""
    old_log_probs: Literal["recompute", "stop_gradient", "rollout"] = "recompute"
    """Denominator of the ratio: recomputed by the learner, this pass's own value, or the rollout's."""
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
    """How fast DiffusionNFT's behaviour policy follows: decay m = min(slope (n - delay), cap), 0 before."""

    slope: Annotated[float, Field(ge=0)] = 0.001
    """Growth of the decay per batch trained."""
    cap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Largest decay; 0 makes the old policy equal the trained one."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Batches before the decay starts to grow."""


class DiffusionNFTConfig(AlgorithmSection):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process; any ODE sampler."""

    name: Literal["diffusion-nft"] = "diffusion-nft"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages; ``clip`` is A_max."""
    beta: PositiveFloat = 1.0
    """Interpolation between the old and the implicit positive / negative policies."""
    reference_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the distance to the starting model; above 0 costs one more forward a timestep."""
    train_timesteps: PositiveInt = 3
    """Noise levels trained per sample, stratified."""
    noise_levels: Literal["uniform", "schedule"] = "uniform"
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

    name: Literal["grpo-guard"] = "grpo-guard"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 2e-6
    """Ratio clip."""
    train_timesteps: PositiveInt | None = None
    """Trained steps a sample, drawn among its stochastic steps; default: all of them."""

    @property
    def uses_old_policy(self) -> bool:
        """Always."""
        return True


class AWMConfig(AlgorithmSection):
    """AWM: advantage-weighted flow matching on clean samples; any ODE sampler."""

    name: Literal["awm"] = "awm"
    """Selects this algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
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
    noise_levels: Literal["uniform", "schedule"] = "uniform"
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


AlgorithmConfig = Annotated[
    FlowGRPOConfig | FlowGRPOFastConfig | GRPOGuardConfig | DiffusionNFTConfig | AWMConfig,
    Field(discriminator="name"),
]


class RewardConfig(Section):
    """One reward; the run's reward is the weighted sum of all."""

    name: str
    """A built-in reward (``spotlight rewards`` lists them) or ``module:function`` of your own."""
    weight: float = 1.0
    """Factor in the sum."""
    deadline_s: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """A call that takes longer is ended and counts as failed."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts after a failure."""
    isolation_s: Annotated[float, Field(ge=0)] | None = None
    """How long a failed batch is tried image by image, to lose only the bad one; default: 4 deadlines."""
    label: str = ""
    """Name of the reward's curves; default: the function's name."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Keyword arguments for the function."""


class RewardPolicyConfig(Section):
    """What happens when a sample cannot be scored. It never becomes a zero."""

    on_failure: Literal["stop", "drop"] = "stop"
    """``stop`` ends the run with the reward's own error; ``drop`` records the sample as dropped, and why."""
    max_drop_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """With ``drop``: the run stops when more than this share of an iteration was dropped."""
    workers: PositiveInt = 1
    """Processes per reward."""
    start_deadline_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """How long a reward's process may take to start and load what it needs, and to check the prompts."""


class LoraConfig(Section):
    """Low-rank adapters (peft)."""

    rank: PositiveInt = 32
    """Inner dimension."""
    alpha: PositiveFloat = 64.0
    """Scale: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers to adapt (suffixes); default: the family's attention and MLP layers."""


class EmaConfig(Section):
    """Exponential moving average of the policy: decay min((1 + n)/(10 + n), cap)."""

    cap: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Largest decay."""
    every: PositiveInt = 8
    """Optimizer steps between two updates of the average."""


class LearnerConfig(Section):
    """How the policy is updated."""

    mode: Literal["lora", "full"] = "lora"
    """Train adapters, or every weight of the DiT."""
    lora: LoraConfig = LoraConfig()
    """Adapters' shape. Unused by ``mode: full``."""
    learning_rate: PositiveFloat = 3e-4
    """AdamW's, after warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's; the gradients' RMS is logged beside it, because mean-reduced log-probs can fall below it."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """AdamW's."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    decay_iterations: PositiveInt | None = None
    """After warm-up the learning rate falls along half a cosine, to 0 after so many iterations; default: it
    stays."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps an iteration; its groups are divided among them, so a sample is in exactly one."""
    micro_batch_size: PositiveInt = 64
    """Samples in one forward/backward of one rank; bound by memory, gradients accumulate."""
    ema: EmaConfig | None = None
    """Keep a moving average of the policy."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    timesteps_per_pass: PositiveInt | Literal["auto"] = 1
    """Training timesteps of a micro-batch in one forward and backward, at most. Activations grow in
    proportion; sharded weights are gathered once for all of them. ``auto``: as many as fit into memory,
    measured when a shape is first seen."""
    pass_memory_gib: PositiveFloat | None = None
    """With ``timesteps_per_pass: auto``, memory that a pass may take; default: what is free."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Precision of the DiT's matrix products; sampler maths and losses stay float32."""


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


class CheckpointConfig(Section):
    """When a run commits."""

    every: PositiveInt = 1
    """Iterations between checkpoints; a kill loses at most this much."""
    keep: PositiveInt = 2
    """Checkpoints kept; the older one serves when the newest is damaged."""


class WandbConfig(Section):
    """Weights & Biases (extra ``wandb``)."""

    project: str = "spotlight"
    """Project to log to."""
    entity: str | None = None
    """Team or user."""


class MetricsConfig(Section):
    """Where curves go besides ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""


class RunConfig(Section):
    """A whole run: ``spotlight train CONFIG.yaml [key.subkey=value ...]``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "demo"
    """Name of the run directory."""
    runs_dir: Annotated[Path, Field(validate_default=False)] = Path("runs")
    """Parent of the run directories."""
    cache_dir: Path | None = None
    """Where prompt embeddings are cached; default: ``~/.cache/spotlight`` (or XDG_CACHE_HOME)."""
    run_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Fixes prompts' order, seeds of all rollouts, adapters' initial values."""
    iterations: PositiveInt = 40
    """Iterations to train; raise it to continue a finished run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; ``auto`` takes CUDA when there is one."""
    deterministic: bool = False
    """Bit-exact resume also on GPUs (torch's deterministic algorithms: slower). CPU runs are so anyway."""
    model: ModelConfig = ModelConfig()
    """Which Diffusion Transformer is trained."""
    data: DataConfig = DataConfig()
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """How samples are made."""
    algorithm: AlgorithmConfig = DiffusionNFTConfig()
    """What is learnt from them."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (RewardConfig(name="shapes"),)
    """What is maximised."""
    reward_policy: RewardPolicyConfig = RewardPolicyConfig()
    """What happens when a reward fails."""
    learner: LearnerConfig = LearnerConfig()
    """How the policy is updated."""
    exploration: ExplorationConfig | None = None
    """Which seeds are trained on; default: random ones."""
    pipeline: PipelineConfig = PipelineConfig()
    """What of generation and training overlaps."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How progress is judged."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run commits."""
    metrics: MetricsConfig = MetricsConfig()
    """Where curves go."""
    fleet: FleetConfig = FleetConfig()
    """The hardware, and what it costs."""


RESUMABLE_KEYS = frozenset(
    {"iterations", "evaluation.every", "checkpoint.every", "checkpoint.keep", "fleet", "runs_dir",
     "cache_dir", "metrics.tensorboard", "metrics.wandb", "device", "rollout.batch_size",
     "learner.micro_batch_size", "learner.gradient_checkpointing", "learner.timesteps_per_pass",
     "learner.pass_memory_gib", "pipeline.trainers_generate", "pipeline.switch_s", "reward_policy.workers",
     "reward_policy.start_deadline_s"}
)  # fmt: skip
"""Keys that may change between two attempts of a run without making it another run.

Those from ``device`` on, which a run out of memory or time needs, change rounding at most: not what is
sampled, trained or scored."""
