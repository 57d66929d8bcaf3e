"""One iteration: its rollouts, what became of them, and what survives it.

Ids, seeds and steps of rollouts depend on the plan and the run seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policy import GroupPlan, Policy
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Maker, PolicyVersion, Purpose, Rollout, RolloutId, Scores
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.base.typed_json import typed


def train_rollouts(
    plan: Plan, groups: Sequence[GroupPlan], iteration: int, version: PolicyVersion
) -> Iterator[tuple[int, Prompt, Rollout]]:
    """An iteration's train rollouts with slot and prompt, in pull order.

    The order is group by group, or where slices are trained as they arrive, slice by slice over all groups.

    Args:
        groups: by slot.
    """
    size, step = plan.group_size, plan.issued_at_once
    members = range(size)
    seeds = [
        group.seeds or [derive_seed(plan.run_seed, "train", iteration, slot, one) for one in members]
        for slot, group in enumerate(groups)
    ]
    for start in range(0, size, step):
        for slot, group in enumerate(groups):
            for member in members[start : start + step]:
                name = RolloutId(f"t{iteration:06d}-{slot:03d}-{member:03d}")
                seed, steps, prompt = seeds[slot][member], plan.rollout_steps, group.prompt
                rollout = Rollout(name, Purpose.TRAIN, iteration, prompt.id, member, seed, steps, version)
                yield slot, prompt, rollout


def evaluation_rollouts(
    plan: Plan, prompts: Sequence[Prompt], iteration: int, version: PolicyVersion
) -> Iterator[tuple[Prompt, Rollout]]:
    """An iteration's evaluation rollouts."""
    steps = plan.evaluation.steps
    for slot, prompt in enumerate(prompts):
        for member in range(plan.evaluation.images_per_prompt):
            # Same seeds at every evaluation and in every run: curves differ only by the weights.
            seed = derive_seed(0, "eval", prompt.id, member)
            name = RolloutId(f"e{iteration:06d}-{slot:03d}-{member:03d}")
            yield prompt, Rollout(name, Purpose.EVAL, iteration, prompt.id, member, seed, steps, version)


@dataclass(slots=True, eq=False)
class Work:
    """Rollouts and what became of them.

    Attributes:
        owner: the policy that issued them; None: the iteration under way.
        recorded: in the ledger.
        unscored: neither scored nor dropped.
        makers: of the samples made; of the current iteration's without those freed since.
    """

    owner: Policy | None = None
    recorded: bool = True
    rollouts: dict[RolloutId, Rollout] = field(default_factory=dict)
    scores: dict[RolloutId, Scores] = field(default_factory=dict)
    unscored: set[RolloutId] = field(default_factory=set)
    makers: dict[RolloutId, Maker] = field(default_factory=dict)

    @property
    def unmade(self) -> set[RolloutId]:
        """Neither made nor dropped."""
        return {name for name in self.unscored if name not in self.makers}

    def issue(self, rollout: Rollout) -> None:
        """Add a rollout that is to be made."""
        self.rollouts[rollout.id] = rollout
        self.unscored.add(rollout.id)

    def score(self, rollout: RolloutId, scores: Scores) -> None:
        """Add a sample's rewards."""
        self.scores[rollout] = scores
        self.unscored.discard(rollout)


@dataclass(slots=True, eq=False)
class Iteration(Work):
    """The rollouts of an iteration, in groups by slot, in order."""

    groups: dict[int, list[RolloutId]] = field(default_factory=dict)
    evaluation: list[RolloutId] = field(default_factory=list)
    drops: int = 0

    def drop(self, rollout: RolloutId, why: str, share: float | None) -> str | None:
        """Count a drop. Returns the reason to stop the run, if this was one too many.

        Args:
            why: of this drop.
            share: of the rollouts that may be dropped; None: none may.
        """
        self.unscored.discard(rollout)
        self.drops += 1
        if share is None:
            return (
                f"{rollout}: {why}\nRepair that, and the same command goes on; so does one with "
                "reward_policy.on_failure=drop, which leaves such samples out."
            )
        if self.drops <= share * len(self.rollouts):
            return None
        return (
            f"iteration {self.rollouts[rollout].iteration + 1}: {self.drops} of {len(self.rollouts)} samples "
            f"were dropped, more than reward_policy.max_drop_share = {share}; the last: {why}"
        )


@dataclass(slots=True)
class Survived:
    """Work that survived a lost learner: samples, scores, makers, and steps of unfinished rollouts."""

    samples: dict[RolloutId, Rollout] = field(default_factory=dict)
    scores: dict[RolloutId, Mapping[str, float]] = field(default_factory=dict)
    makers: dict[RolloutId, Maker] = field(default_factory=dict)
    progress: dict[RolloutId, tuple[Rollout, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, lost: Iteration, unfinished: Mapping[RolloutId, tuple[Rollout, int]]) -> Survived:
        """The surviving work of an iteration."""
        return cls(
            {name: lost.rollouts[name] for name in lost.rollouts if name in lost.makers},
            dict(lost.scores),
            dict(lost.makers),
            {name: (rollout, step) for name, (rollout, step) in unfinished.items() if step},
        )

    @property
    def names(self) -> tuple[RolloutId, ...]:
        """Of all that is left."""
        return (*self.samples, *self.progress)

    def merge(self, older: Survived) -> None:
        """Add what was there before, unless it is here."""
        self.samples = older.samples | self.samples
        self.scores = {**older.scores, **self.scores}
        self.makers = older.makers | self.makers
        self.progress = older.progress | self.progress

    def take(self, rollout: Rollout) -> bool:
        """Remove the sample of exactly this rollout, if there is one."""
        if self.samples.get(rollout.id) != rollout:
            return False
        del self.samples[rollout.id]
        return True

    def step_of(self, rollout: Rollout) -> int:
        """Remove the committed step of exactly this rollout; 0 if none."""
        known, step = self.progress.get(rollout.id, (None, 0))
        if known != rollout:
            return 0
        del self.progress[rollout.id]
        return step


@dataclass(slots=True)
class Unsaved:
    """Samples that are kept until their optimizer step is durable: trained ones, and those left out for them.

    ``before``: their iteration.
    """

    trained: list[RolloutId] = field(default_factory=list)
    left_out: list[RolloutId] = field(default_factory=list)
    before: Iteration = field(default_factory=Iteration)

    def begin(self, ended: Iteration) -> None:
        """The next iteration begins after ``ended``."""
        if self.trained or self.left_out:
            self.before = ended

    def take(self) -> list[RolloutId]:
        """Remove all, since they are durable or are trained again."""
        taken = self.trained + self.left_out
        self.trained, self.left_out, self.before = [], [], Iteration()
        return taken


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a resumed run starts from.

    Attributes:
        iteration: the one to start with.
        ledger: see :meth:`~spotlight.scheduler.ledger.Ledger.snapshot`.
        policies: by name, see :meth:`~spotlight.scheduler.policy.Policy.snapshot`; without empty ones.
    """

    iteration: int
    version: PolicyVersion
    leases_granted: int
    ledger: Mapping[str, object]
    policies: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """JSON-able, for :meth:`from_dict`."""
        tree: dict[str, object] = {
            "iteration": self.iteration,
            "version": self.version,
            "leases_granted": self.leases_granted,
            "ledger": dict(self.ledger),
        }
        if self.policies:
            tree["policies"] = {name: dict(state) for name, state in self.policies.items()}
        return tree

    @classmethod
    def from_dict(cls, tree: object) -> Snapshot:
        """Inverse of :meth:`to_dict`. Raises ValueError for anything else."""
        if isinstance(tree, Mapping) and "exploration" in tree:  # as older versions wrote it
            tree = {**tree, "policies": {"exploration": tree["exploration"]}}
        return typed(_SNAPSHOT, tree, "controller")


_SNAPSHOT = TypeAdapter(Snapshot)
