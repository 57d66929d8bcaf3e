"""The typed configuration of a run.

One strict, frozen pydantic model per section; unknown keys are errors, and every field has a description,
from which the reference is generated. Nothing here imports torch, so ``--help``, ``--dry-run`` and planning
start at once.

Checks of one field are constraints on it. What keys require of each other is data beside them:
:mod:`spotlight.config.requires`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PositiveInt, PrivateAttr

from spotlight.config.requires import problems_of
from spotlight.config.section import RUN_NAME, Section
from spotlight.config.sections.algorithm import AlgorithmConfig, DiffusionNFTConfig, micro_batch_problems
from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.config.sections.fleet import FleetConfig
from spotlight.config.sections.learner_section import LearnerConfig, batch_problems
from spotlight.config.sections.model import WHOLE, DataConfig, ModelConfig
from spotlight.config.sections.outputs import CheckpointConfig, MetricsConfig
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.config.sections.policies import AddedPolicies
from spotlight.config.sections.rewards import RewardPolicyConfig
from spotlight.config.sections.rollout import RolloutConfig
from spotlight_rewards.base.errors import Problem
from spotlight_rewards.base.files import default_cache
from spotlight_rewards.base.strict_section import COURSE, EXTENT, WORK
from spotlight_rewards.reward_config import RewardConfig


def _address(runs_dir: Path) -> str:
    """With both slashes of an address, of which a path has one."""
    return re.sub("^([a-z][a-z0-9]+):/(?!/)", r"\1://", str(runs_dir))


class RunConfig(Section):
    """A whole run: ``spotlight train CONFIG.yaml [key.subkey=value ...]``."""

    name: Annotated[str, Field(pattern=RUN_NAME.pattern)] = "demo"
    """Name of the run directory; default: the file's name without its ending, or the preset's name."""
    like: str | None = None
    """Another trainer's settings to start from; keys given here override them (docs/howto/coming-from.md)."""
    runs_dir: Annotated[Path, Field(validate_default=False), PlainSerializer(_address), WORK] = Path("runs")
    """Parent of the run directories, or a bucket: s3://BUCKET/PREFIX (docs/howto/runs-in-a-bucket.md)."""
    cache_dir: Annotated[Path | None, WORK] = None
    """Directory for prompt embeddings and pictures; default: ``~/.cache/spotlight`` (XDG_CACHE_HOME)."""
    run_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the order of prompts, all rollouts and the adapters' initial values."""
    iterations: Annotated[PositiveInt, EXTENT] = 40
    """Iterations to train; raise it to continue a finished run."""
    device: Annotated[Literal["auto", "cpu", "cuda"], WORK] = "auto"
    """Where the model runs; ``auto`` uses CUDA if available."""
    deterministic: bool = False
    """Resume bit-exactly on GPUs too, by torch's deterministic, slower algorithms. CPU runs always do."""
    model: ModelConfig = ModelConfig()
    """Which Diffusion Transformer is trained."""
    data: Annotated[DataConfig, COURSE] = DataConfig()
    """Training and held-out prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """How samples are generated."""
    algorithm: Annotated[AlgorithmConfig, COURSE] = DiffusionNFTConfig()
    """How the policy learns from them."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (RewardConfig(name="shapes"),)
    """What is maximised."""
    reward_policy: RewardPolicyConfig = RewardPolicyConfig()
    """What happens if a reward fails."""
    learner: LearnerConfig = LearnerConfig()
    """How the policy is updated."""
    exploration: ExplorationConfig | None = None
    """Which seeds are trained on; default: random ones."""
    pipeline: PipelineConfig = PipelineConfig()
    """Overlap of generation and training."""
    policies: AddedPolicies = Field(default_factory=dict)
    """Scheduling policies from installed packages, each by its name, with its keys."""
    evaluation: Annotated[EvaluationConfig, COURSE] = EvaluationConfig()
    """How progress is evaluated."""
    checkpoint: Annotated[CheckpointConfig, EXTENT] = CheckpointConfig()
    """When the run writes checkpoints."""
    metrics: MetricsConfig = MetricsConfig()
    """Where curves are written."""
    fleet: Annotated[FleetConfig, WORK] = FleetConfig()
    """The hardware, and what it costs."""

    _names_run: bool = PrivateAttr(default=False)

    @property
    def cache(self) -> Path:
        """``cache_dir``, or its default."""
        return self.cache_dir or default_cache()

    @property
    def names_run(self) -> bool:
        """Whether the command names the run that is to go on, and so may change its course."""
        return self._names_run

    def naming_run(self) -> RunConfig:
        """The same, of a command that names its run."""
        named = self.model_copy()
        named._names_run = True
        return named

    def every_problem(self) -> Iterator[Problem]:
        rows = (row for section in self.sections() for row in section.requirements())
        return problems_of(rows, self)

    def every_note(self) -> Iterator[str]:
        """What is valid, but may not be what was meant; shown when a run is planned and begins."""
        for section in self.sections():
            yield from section.notes(self)

    def rank_problems(self, ranks: int, per_node: tuple[int, ...]) -> Iterator[Problem]:
        """What does not fit the ranks there are.

        Args:
            per_node: ranks of each node; empty: all on one.
        """
        shard, quantize = self.learner.shard, self.model.quantize
        yield from batch_problems(self, ranks)
        if shard == "node" and len(set(per_node)) > 1:
            yield Problem(
                "learner.shard", "'node'",
                f"the same number of ranks on each node; they have {', '.join(map(str, per_node))}",
                "Set it to all, or to none if one GPU holds the model, or use other nodes.",
            )  # fmt: skip
        yield from micro_batch_problems(self, ranks)
        if ranks > 1 and shard != "none" and quantize != "none":
            expected = f"'none' with model.quantize={quantize}"
            yield Problem("learner.shard", repr(shard), expected, WHOLE)

    @property
    def trained_per_prompt(self) -> int:
        """Samples trained of each prompt's group."""
        return self.algorithm.train_samples or self.rollout.group_size

    @property
    def trained_per_prompt_key(self) -> str:
        """The key that sets how many."""
        return "rollout.group_size" if self.algorithm.train_samples is None else "algorithm.train_samples"

    @property
    def trained_samples(self) -> int:
        """Samples trained in an iteration, if none is dropped; silent groups count."""
        return self.rollout.prompts_per_iteration * self.trained_per_prompt

    @property
    def rank_samples(self) -> int:
        """Samples that a rank of the learner trains in an update."""
        return self.trained_samples // self.learner.updates_per_batch // self.fleet.learner_ranks

    @property
    def decays_until(self) -> float | None:
        """Iterations after which the learning rate is 0; None: it stays above."""
        if self.learner.decay_iterations is None:
            return None
        trained = self.trained_samples
        return self.learner.decay_iterations * (self.learner.schedule_samples or trained) / trained

    @property
    def preview_steps(self) -> tuple[int, ...]:
        """Numbers of denoising steps that previews may have; none: nothing is previewed."""
        if self.exploration is None:
            return ()
        return self.exploration.arms(self.rollout.group_size, self.rollout.steps)[1]

    @property
    def preview_steps_min(self) -> int:
        """The fewest denoising steps of a preview; 0: nothing is previewed."""
        return min(self.preview_steps, default=0)

    @property
    def trained_timesteps(self) -> int:
        """Forward/backward passes of the loss per sample, guidance aside."""
        return self.algorithm.train_timesteps or self.rollout.kept_steps
