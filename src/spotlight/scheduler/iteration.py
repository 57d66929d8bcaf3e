"""One iteration: which rollouts it consists of, what became of them, and what outlives it.

Names, seeds and steps of rollouts follow from the plan and the run seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.plan import Axis, Plan
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import (
    DropReason,
    PolicyVersion,
    Prompt,
    PromptId,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)


def train_rollouts(
    plan: Plan,
    prompts: Sequence[Prompt],
    iteration: int,
    version: PolicyVersion,
    chosen: Mapping[int, Sequence[int]],
) -> Iterator[tuple[int, Prompt, Rollout]]:
    """The groups of an iteration, each rollout with its slot and prompt, in the order they are to be made.

    That is group after group, or slice after slice of all groups where slices are trained as they come.

    Args:
        prompts: one a slot.
        chosen: seeds by slot, where exploration chose them; other slots get seeds of their own.
    """
    pipeline, size = plan.pipeline, plan.group_size
    members = range(size)
    step = pipeline.slice_size if pipeline.axis is Axis.GENERATION else size
    seeds = [
        _mixed(plan, iteration, chosen[slot])
        if slot in chosen
        else [derive_seed(plan.run_seed, "train", iteration, slot, one) for one in members]
        for slot in range(len(prompts))
    ]
    for start in range(0, size, step):
        for slot, prompt in enumerate(prompts):
            for member in members[start : start + step]:
                name = RolloutId(f"t{iteration:06d}-{slot:03d}-{member:03d}")
                seed, steps = seeds[slot][member], plan.rollout_steps
                rollout = Rollout(name, Purpose.TRAIN, iteration, prompt.id, member, seed, steps, version)
                yield slot, prompt, rollout


def _mixed(plan: Plan, iteration: int, seeds: Sequence[int]) -> list[int]:
    """Chosen seeds in an order that says nothing of their previews, which they come sorted by.

    Else the first slice of a group would be its best samples, compared with each other alone.
    """
    return sorted(seeds, key=lambda seed: derive_seed(plan.run_seed, "order", iteration, seed))


def evaluation_rollouts(
    plan: Plan, prompts: Sequence[Prompt], iteration: int, version: PolicyVersion
) -> Iterator[tuple[int, Prompt, Rollout]]:
    """The validation images of an iteration."""
    for slot, prompt in enumerate(prompts):
        for member in range(plan.evaluation.images_per_prompt):
            # The same seeds at every evaluation AND in every run: curves differ only by the weights.
            seed = derive_seed(0, "eval", prompt.id, member)
            name = RolloutId(f"e{iteration:06d}-{slot:03d}-{member:03d}")
            yield (
                slot,
                prompt,
                Rollout(
                    name, Purpose.EVAL, iteration, prompt.id, member, seed, plan.evaluation.steps, version
                ),
            )


def preview_rollouts(
    plan: Plan,
    members: Mapping[int, range],
    prompts: Mapping[int, Prompt],
    steps: int,
    iteration: int,
    version: PolicyVersion,
) -> Iterator[tuple[int, Prompt, Rollout]]:
    """Previews that choose an iteration's seeds, one prompt after the other.

    Not a round of all prompts after the other: when time is up before the end, some prompts are explored
    whole and some not at all, instead of all too little.

    Args:
        members: that are wanted, by slot.
        prompts: by slot.
    """
    for slot, wanted in members.items():
        prompt = prompts[slot]
        for member in wanted:
            seed = derive_seed(plan.run_seed, "explore", iteration, slot, member)
            name = RolloutId(f"x{iteration:06d}-{slot:03d}-{member:03d}")
            yield (
                slot,
                prompt,
                Rollout(name, Purpose.EXPLORE, iteration, prompt.id, member, seed, steps, version),
            )


@dataclass(slots=True)
class Iteration:
    """What was issued and what became of it.

    Attributes:
        unscored: rollouts neither scored nor dropped.
        finished: rollouts whose samples are held somewhere.
        makers: who made them, under which epoch.
        lost: rollouts of an iteration that has not begun, to be dropped then, and why.
    """

    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    groups: dict[tuple[int, PromptId], list[RolloutId]] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    finished: set[RolloutId] = field(default_factory=set)
    makers: dict[RolloutId, tuple[WorkerId, int]] = field(default_factory=dict)
    lost: dict[RolloutId, tuple[DropReason, str]] = field(default_factory=dict)
    evaluation: list[RolloutId] = field(default_factory=list)
    drops: int = 0


@dataclass(slots=True)
class Safe:
    """What outlived a lost learner: samples, their scores and makers, and steps of unfinished rollouts."""

    samples: dict[RolloutId, Rollout] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    makers: dict[RolloutId, tuple[WorkerId, int]] = field(default_factory=dict)
    progress: dict[RolloutId, tuple[Rollout, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, at: Iteration, unfinished: Mapping[RolloutId, tuple[Rollout, int]]) -> Safe:
        """What is safe of an iteration."""
        return cls(
            {name: at.rollouts[name] for name in at.rollouts if name in at.finished},
            dict(at.scores),
            dict(at.makers),
            {name: (rollout, step) for name, (rollout, step) in unfinished.items() if step},
        )

    def merge(self, older: Safe) -> None:
        """Add what an older loss left, and nothing was asked for since."""
        self.samples = older.samples | self.samples
        self.scores = {**older.scores, **self.scores}
        self.makers = older.makers | self.makers
        self.progress = older.progress | self.progress

    def take(self, rollout: Rollout) -> bool:
        """Whether the sample of exactly this rollout is safe; it is then no longer among ``samples``."""
        if self.samples.get(rollout.id) != rollout:
            return False
        del self.samples[rollout.id]
        return True

    def step_of(self, rollout: Rollout) -> int:
        """The step at which exactly this rollout is safe (then no longer in ``progress``), or 0."""
        known, step = self.progress.get(rollout.id, (None, 0))
        if known != rollout:
            return 0
        del self.progress[rollout.id]
        return step


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a resumed run starts from.

    Attributes:
        iteration: the one to start with.
        leases_granted: by the queue, so far.
        ledger: see :meth:`~spotlight.scheduler.ledger.Ledger.snapshot`.
        exploration: see :meth:`~spotlight.scheduler.exploration.explorer.Explorer.snapshot`; empty without
        exploration.
    """

    iteration: int
    version: PolicyVersion
    leases_granted: int
    ledger: Mapping[str, object]
    exploration: Mapping[str, object]

    def to_dict(self) -> dict[str, object]:
        """What :meth:`from_dict` takes."""
        tree: dict[str, object] = {
            "iteration": self.iteration,
            "version": self.version,
            "leases_granted": self.leases_granted,
            "ledger": dict(self.ledger),
        }
        if self.exploration:
            tree["exploration"] = dict(self.exploration)
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> Snapshot:
        """Raises ValueError for anything else than what :meth:`to_dict` made."""
        iteration, version = tree.get("iteration"), tree.get("version")
        leases, ledger = tree.get("leases_granted"), tree.get("ledger")
        exploration = tree.get("exploration", {})
        if not (
            isinstance(iteration, int)
            and isinstance(version, int)
            and isinstance(leases, int)
            and isinstance(ledger, Mapping)
            and isinstance(exploration, Mapping)
        ):
            raise ValueError(f"not a controller snapshot: {sorted(tree)}")
        return cls(iteration, PolicyVersion(version), leases, ledger, exploration)
