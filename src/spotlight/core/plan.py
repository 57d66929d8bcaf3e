"""What the controller needs of the configuration, and what it demands of a run's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotlight.core.types import Prompt, PromptId


@dataclass(frozen=True, slots=True)
class Plan:
    """What the controller needs of the configuration.

    Attributes:
        ranks: learner ranks; every rank must train equally many samples.
        micro_batch_size: samples of one forward/backward over all ranks: a multiple of ``ranks``.
        evaluate_every: iterations between evaluations; the start and the end are always evaluated.
        max_drop_share: the run stops when a larger share of an iteration's samples cannot be scored;
            None stops at the first.
    """

    run_seed: int
    iterations: int
    prompts_per_iteration: int
    group_size: int
    rollout_steps: int
    evaluation_steps: int
    evaluation_images: int
    evaluate_every: int
    updates_per_batch: int
    micro_batch_size: int
    checkpoint_every: int
    lease_s: float
    max_drop_share: float | None
    ranks: int = 1


def require_usable(plan: Plan, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise ValueError for a plan or prompts that no schedule can carry out."""
    if not train:
        raise ValueError("no training prompts; data.train must name at least one")
    if plan.micro_batch_size % plan.ranks:
        raise ValueError(
            f"micro-batches of {plan.micro_batch_size} samples do not divide by {plan.ranks} ranks; "
            f"give every rank equally many"
        )
    known: dict[PromptId, Prompt] = {}
    for prompt in (*train, *test):
        if known.setdefault(prompt.id, prompt) != prompt:
            raise ValueError(f"two prompts share the id {prompt.id}; ids must tell prompts apart")
