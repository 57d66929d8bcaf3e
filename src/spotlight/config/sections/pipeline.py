"""Configuration of the overlap between generation and training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.section import Section
from spotlight.config.sections.algorithm import AlgorithmSection, FlowGRPOConfig
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

_SLICE_MIN = 3
"""A sample of the first slice needs mean and standard deviation of at least two others."""


class PipelineConfig(Section):
    """What of generation and training may overlap; nothing by default. Each switch works alone."""

    axis: Literal["none", "prompt", "generation"] = "none"
    """Accumulate gradients while the rest is generated: of whole groups as they complete (``prompt``), or of
    slices of groups (``generation``). ``none``: once all samples are complete.
    """
    slice_size: PositiveInt = 4
    """Samples of a group per slice. Unused without ``axis: generation``."""
    baseline: Literal["group", "slice", "exploration"] = "group"
    """What rewards are compared with. ``group``: the whole group, so slices wait for it. ``slice``: the
    group's samples so far, leave-one-out. ``exploration``: previews of the group's other seeds.
    """
    trainers_generate: bool = False
    """The learner's GPUs generate rollouts while they have nothing to train, as far as that lets training
    finish earlier. They hold both models (``fleet.driver: ray``).
    """
    switch_s: Annotated[float, Field(ge=0)] = 0.0
    """Profiled seconds for switching them from training to rollouts, or back."""
    next_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the next iteration's groups that may be generated before this one is trained, one policy
    version stale; their seeds are not explored (``fleet.driver: ray``).
    """

    @property
    def trains_parts(self) -> bool:
        """Whether samples are trained before the batch is complete."""
        return self.axis != "none"

    @property
    def waits_for_groups(self) -> bool:
        """Whether samples are trained only once their whole group is scored."""
        return self.axis != "generation" or self.baseline == "group"

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Overlap that conflicts with algorithm, batch, fleet or exploration."""
        yield from self._part_problems(run)
        yield from self._baseline_problems(run)
        yield from self._trainer_problems(run)
        yield from self._early_problems(run)

    def _part_problems(self, run: RunConfig) -> Iterator[Problem]:
        group = run.rollout.group_size
        if self.axis == "none":
            return
        if run.algorithm.advantage.std == "global":
            yield Problem(
                "algorithm.advantage.std", "'global'",
                f"'group' with pipeline.axis={self.axis} and baseline={self.baseline}",
                "The spread of the whole batch is known only when all of it is there: set "
                "algorithm.advantage.std=group, or pipeline.axis=none.",
            )  # fmt: skip
        ranks, learner, rollout = run.fleet.learner_ranks, run.learner, run.rollout
        trained = run.algorithm.train_samples or group
        share = rollout.prompts_per_iteration * trained // learner.updates_per_batch // ranks
        if learner.micro_batch_size >= share:
            yield Problem(
                "learner.micro_batch_size", str(learner.micro_batch_size),
                f"less than the {share} samples that a rank trains in an update, with pipeline.axis="
                f"{self.axis}",
                "What is trained at once must be there at once, and this is all: lower it, or set "
                "pipeline.axis=none.",
            )  # fmt: skip
        if self.axis == "generation" and self.slice_size >= group:
            yield Problem(
                "pipeline.slice_size", str(self.slice_size), f"less than rollout.group_size = {group}",
                "A slice is a part of a group: lower it, or set pipeline.axis=prompt for whole groups.",
            )  # fmt: skip

    def _baseline_problems(self, run: RunConfig) -> Iterator[Problem]:
        exploration = run.exploration
        if self.baseline == "group":
            return
        if self.axis != "generation":
            yield Problem(
                "pipeline.baseline", repr(self.baseline), f"'group' with pipeline.axis={self.axis}",
                "Only slices of groups need another baseline: set pipeline.axis=generation, or leave it out.",
            )  # fmt: skip
            return
        if run.algorithm.silent_groups != "train":
            yield Problem(
                "algorithm.silent_groups", repr(run.algorithm.silent_groups),
                f"'train' with pipeline.baseline={self.baseline}",
                "Whether a group is silent is known only when all of it is scored, and its slices are "
                "trained before: set pipeline.baseline=group, or leave it out.",
            )  # fmt: skip
        yield from self.slice_problems(
            explores=exploration is not None, chooses=run.algorithm.train_samples is not None
        )

    def slice_problems(self, *, explores: bool, chooses: bool) -> Iterator[Problem]:
        """Baselines that slices of this size, without exploration, or of which some are chosen cannot have.

        Args:
            chooses: only some of a group's samples are trained.
        """
        if self.axis != "generation":
            return
        if chooses and self.baseline != "group":
            yield Problem(
                "pipeline.baseline", repr(self.baseline),
                "'group' where only some samples of a group are trained",
                "Which ones is known only when the whole group is scored: set pipeline.axis=prompt and leave "
                "the baseline out, or train all samples.",
            )  # fmt: skip
        if self.baseline == "slice" and self.slice_size < _SLICE_MIN:
            yield Problem(
                "pipeline.slice_size", str(self.slice_size),
                f"at least {_SLICE_MIN} with pipeline.baseline=slice",
                "A sample of the first slice is compared with the mean and spread of the others in it: raise "
                "it.",
            )  # fmt: skip
        if self.baseline == "exploration" and not explores:
            yield Problem(
                "pipeline.baseline", "'exploration'", "'group' or 'slice' without exploration",
                "No seeds are explored to compare with: set exploration={}, or pipeline.baseline=slice.",
            )  # fmt: skip

    def _trainer_problems(self, run: RunConfig) -> Iterator[Problem]:
        if self.trainers_generate and run.fleet.driver == "inline":
            yield Problem(
                "pipeline.trainers_generate", "true", "false with fleet.driver=inline",
                "One process trains and denoises in turn already: set fleet.driver=ray, or leave it out.",
            )  # fmt: skip
        learner = run.learner
        measures = learner.timesteps_per_pass == "auto" and learner.pass_memory_gib is None
        if self.trainers_generate and measures:
            yield Problem(
                "learner.pass_memory_gib", "null",
                "a number with pipeline.trainers_generate and learner.timesteps_per_pass=auto",
                "A worker has memory of the same GPU, and later more than when a pass is measured: set what "
                "passes may take, or learner.timesteps_per_pass to a number.",
            )  # fmt: skip
        if self.switch_s and not self.trainers_generate:
            yield Problem(
                "pipeline.switch_s", f"{self.switch_s:g}", "0 with pipeline.trainers_generate=false",
                "Nobody switches: set pipeline.trainers_generate=true, or leave it out.",
            )  # fmt: skip

    def _early_problems(self, run: RunConfig) -> Iterator[Problem]:
        if not self.next_share:
            return
        share = f"{self.next_share:g}"
        if run.fleet.driver == "inline":
            yield Problem(
                "pipeline.next_share", share, "0 with fleet.driver=inline",
                "One process trains and denoises in turn, so nothing idles meanwhile: set fleet.driver=ray, "
                "or "
                "leave it out.",
            )  # fmt: skip
        elif run.fleet.only_learner_slots:
            yield Problem(
                "pipeline.next_share", share, "0 where all slots train",
                "The learner's slots make nothing for the next iteration: set fleet.local.rollout_slots or "
                "fleet.spot.nodes to at least 1, name a fleet.spot.trace, or leave it out.",
            )  # fmt: skip
        if self.next_share * run.rollout.prompts_per_iteration < 1 - 1e-9:
            yield Problem(
                "pipeline.next_share", share,
                f"at least {math.ceil(1e4 / run.rollout.prompts_per_iteration) / 1e4:g}, one of "
                f"{run.rollout.prompts_per_iteration} groups",
                "This is no whole group: raise it, or set 0.",
            )  # fmt: skip
        if run.exploration is not None and run.exploration.where == "critical_path":
            yield Problem(
                "pipeline.next_share", share, "0 with exploration.where=critical_path",
                "Seeds that are explored first cannot be rolled out early: set exploration.where=idle, or "
                "leave one of the two out.",
            )  # fmt: skip
        elif run.exploration is not None and self.next_share == 1:
            yield Problem(
                "pipeline.next_share", share, "less than 1 with exploration",
                "Groups that start early keep seeds that nobody explored, and these would be all: lower it, "
                "or "
                "leave exploration out.",
            )  # fmt: skip
        yield from self._stale_problems(run.algorithm, share)

    def _stale_problems(self, algorithm: AlgorithmSection, share: str) -> Iterator[Problem]:
        if algorithm.learns_from_clean_samples and not algorithm.recomputes_log_probs:
            return
        if not isinstance(algorithm, FlowGRPOConfig):
            clean = algorithm.learns_from_clean_samples and hasattr(algorithm, "old_log_probs")
            own = "set algorithm.old_log_probs=stop_gradient, " if clean else ""
            yield Problem(
                "pipeline.next_share", share, f"0 with algorithm.name={algorithm.name}",
                f"Its ratio is to the policy that starts the batch, not to the one that made a sample: {own}"
                "take flow-grpo with algorithm.old_log_probs=rollout, or leave it out.",
            )  # fmt: skip
        elif algorithm.old_log_probs != "rollout":
            yield Problem(
                "algorithm.old_log_probs", repr(algorithm.old_log_probs),
                f"'rollout' with pipeline.next_share={share}",
                "Stale samples are weighted by the policy that made them, whose log-probs only the rollout "
                "has: "
                "set it, or pipeline.next_share=0.",
            )  # fmt: skip


NO_OVERLAP = PipelineConfig()
