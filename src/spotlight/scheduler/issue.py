"""Which rollouts an iteration consists of. Pure: names, seeds and steps follow from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spotlight.scheduler.plan import Axis, Plan
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import PolicyVersion, Prompt, Purpose, Rollout, RolloutId


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
