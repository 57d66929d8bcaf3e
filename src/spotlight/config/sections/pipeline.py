"""Configuration of the overlap between generation and training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from spotlight.config.requires import SET, UNSET, Requires, That, Value, at_least, less_than, other_than
from spotlight.config.section import Section
from spotlight.config.sections.algorithm import FlowGRPOConfig
from spotlight_rewards.base.strict_section import WORK

_SLICE_MIN = 3
"""A sample of the first slice needs mean and standard deviation of at least two others."""


_INLINE = {"fleet.driver": "inline"}
_PARTS = {"pipeline.axis": other_than("none")}
_SLICES: dict[str, Value] = {"pipeline.axis": "generation"}
_EARLY_SLICES: dict[str, Value] = {**_SLICES, "pipeline.baseline": other_than("group")}


def slices_require(train_samples: str) -> tuple[Requires[Any], ...]:
    """What slices of groups require of a run or of a simulated one, which has the key ``train_samples``."""
    return (
        Requires("pipeline.baseline", {**_SLICES, train_samples: SET}, "group",
                 "Which samples are trained is known only once the whole group is scored: set "
                 "pipeline.axis=prompt and leave the baseline out, or train all samples."),
        Requires("pipeline.slice_size", {**_SLICES, "pipeline.baseline": "slice"}, at_least(_SLICE_MIN),
                 "A sample of the first slice is compared with the mean and spread of the others in it: "
                 "raise it."),
        Requires("pipeline.baseline", {**_SLICES, "exploration": UNSET}, ("group", "slice"),
                 "No seeds are explored to compare with: set exploration={}, or pipeline.baseline=slice."),
    )  # fmt: skip


class PipelineConfig(Section):
    """Which parts of generation and training may overlap; none by default. Each switch works alone."""

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
    trainers_generate: Annotated[bool, WORK] = False
    """The learner's GPUs generate rollouts while they have nothing to train, as far as that lets training
    finish earlier. They hold both models (``fleet.driver: ray``).
    """
    switch_s: Annotated[float, Field(ge=0), WORK] = 0.0
    """Profiled seconds for switching the learner's GPUs from training to rollouts, or back."""
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

    requires = (
        Requires("algorithm.advantage.std", _PARTS, "group",
                 "The spread of the whole batch is known only once it is complete: set "
                 "algorithm.advantage.std=group, or pipeline.axis=none."),
        Requires("learner.micro_batch_size", _PARTS,
                 That("less than the {rank_samples} samples that a rank trains in an update",
                      lambda run: run.learner.micro_batch_size < run.rank_samples),
                 "A micro-batch of all samples has to wait for all of them: lower it, or set "
                 "pipeline.axis=none."),
        Requires("pipeline.slice_size", _SLICES, less_than("rollout.group_size"),
                 "A slice is a part of a group: lower it, or set pipeline.axis=prompt for whole groups."),
        Requires("pipeline.baseline", {"pipeline.axis": ("none", "prompt")}, "group",
                 "Only slices of groups need another baseline: set pipeline.axis=generation, or leave it "
                 "out."),
        Requires("algorithm.silent_groups", _EARLY_SLICES, "train",
                 "Whether a group is silent is known only once all of it is scored, but its slices are "
                 "trained before: set pipeline.baseline=group, or leave it out."),
        *slices_require("algorithm.train_samples"),
        Requires("pipeline.trainers_generate", _INLINE, False,
                 "One process trains and denoises in turn already: set fleet.driver=ray, or leave it out."),
        *(Requires("learner.pass_memory_gib", {"pipeline.trainers_generate": True, key: "auto"}, SET,
                   "A worker uses memory of the same GPU, later more than when a pass is measured: set what "
                   f"a pass may use, or {key} to another value.")
          for key in ("learner.timesteps_per_pass", "learner.recompute")),
        Requires("pipeline.switch_s", {"pipeline.trainers_generate": False}, 0,
                 "Nothing switches: set pipeline.trainers_generate=true, or leave it out."),
        Requires("pipeline.next_share", _INLINE, 0,
                 "One process trains and denoises in turn, so nothing idles meanwhile: set fleet.driver=ray, "
                 "or leave it out."),
        Requires("pipeline.next_share",
                 That("where all slots train", lambda run: run.fleet.only_learner_slots), 0,
                 "The learner's slots make nothing for the next iteration: set fleet.local.rollout_slots or "
                 "fleet.spot.nodes to at least 1, name a fleet.spot.trace, or leave it out."),
        Requires("pipeline.next_share", {},
                 That("at least one group of {rollout.prompts_per_iteration}", lambda run:
                      not 0 < run.pipeline.next_share * run.rollout.prompts_per_iteration < 1 - 1e-9),
                 "This is less than one group: raise it, or set 0."),
        Requires("pipeline.next_share", {"exploration.where": "critical_path"}, 0,
                 "Seeds that are explored first cannot be rolled out early: set exploration.where=idle, or "
                 "leave one of the two out."),
        Requires("pipeline.next_share", {"exploration.where": "idle"}, less_than(1),
                 "Groups that start early are not explored, and these would be all: lower it, or leave "
                 "exploration out."),
        Requires("pipeline.next_share",
                 That("with algorithm.name={algorithm.name}, whose ratio is to the policy that starts a "
                      "batch", lambda run: not isinstance(run.algorithm, FlowGRPOConfig)
                      and (run.algorithm.recomputes_log_probs
                           or not run.algorithm.learns_from_clean_samples)),
                 0, "Another policy makes the stale samples: take flow-grpo with "
                 "algorithm.old_log_probs=rollout, set algorithm.old_log_probs=stop_gradient (awm), or leave "
                 "it out."),
        Requires("algorithm.old_log_probs",
                 That("with pipeline.next_share={pipeline.next_share}",
                      lambda run: run.pipeline.next_share > 0 and isinstance(run.algorithm, FlowGRPOConfig)),
                 "rollout",
                 "Stale samples are weighted by the policy that made them, whose log-probs only the rollout "
                 "has: set it, or pipeline.next_share=0."),
    )  # fmt: skip


NO_OVERLAP = PipelineConfig()
