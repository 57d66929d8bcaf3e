"""Random but lawful histories of a run, as the controller would record them, for property tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spotlight.scheduler.records import (
    REWARD,
    CommitRejected,
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleExplored,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import DropReason, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight_rewards.base.prompts import Prompt, PromptId

SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where property tests put their many small files: memory, where syncing costs nothing."""

GROUP_SIZE = 3
WORKER = WorkerId("worker-0")
Transaction = list[Record]


def history(seed: int, iterations: int) -> list[Transaction]:
    """What each append of a whole run writes, the same for the same arguments."""
    return list(_transactions(random.Random(seed), random.Random(f"{seed}/stale"), iterations))


def _transactions(rng: random.Random, stale: random.Random, iterations: int) -> Iterator[Transaction]:
    version = PolicyVersion(0)
    yield [VersionPublished(version)]
    prompts = [Prompt(PromptId(f"prompt-{i}"), f"déjà {i}", {"count": i, "of": ["red"]}) for i in range(4)]
    yield [PromptSeen(prompt) for prompt in prompts]
    for iteration in range(iterations):
        issued = _issue(rng, iteration, version, prompts)
        yield [RolloutIssued(rollout) for rollout in issued]
        for index, rollout in enumerate(issued):
            if rollout.purpose is Purpose.TRAIN and stale.random() < 0.1:
                issued[index] = replace(rollout, id=RolloutId(f"{rollout.id}r"))
                dropped = SampleDropped(rollout.id, DropReason.STALE, "its holder is gone")
                yield [dropped, RolloutIssued(issued[index])]
        trainable: list[Rollout] = []
        rng.shuffle(issued)
        for rollout in issued:
            yield list(_sample(rng, rollout, trainable))
        updates = [chunk for chunk in (trainable[::2], trainable[1::2]) if chunk]
        for update, samples in enumerate(updates):
            version = PolicyVersion(version + 1)
            trained: Transaction = [SampleTrained(rollout.id, version) for rollout in samples]
            step = StepApplied(version, iteration, update, len(samples), rng.random(), None)
            yield [*trained, step] if rng.random() < 0.5 else [step, *trained]
        if updates:
            yield [VersionPublished(version)]


def _issue(
    rng: random.Random, iteration: int, version: PolicyVersion, prompts: Sequence[Prompt]
) -> list[Rollout]:
    return [
        Rollout(
            id=RolloutId(f"{purpose.value}-{iteration}-{prompt.id}-{member}"),
            purpose=purpose,
            iteration=iteration,
            prompt_id=prompt.id,
            member=member,
            seed=rng.getrandbits(63),
            steps=8,
            version=version,
        )
        for purpose in Purpose
        for prompt in rng.sample(list(prompts), 2)
        for member in range(GROUP_SIZE)
    ]


def _sample(rng: random.Random, rollout: Rollout, trainable: list[Rollout]) -> Iterator[Record]:
    if rng.random() < 0.1:
        yield SampleDropped(rollout.id, DropReason.ROLLOUT_FAILED, "out of memory")
        return
    yield SampleFinished(rollout.id, rollout.version, WORKER, epoch=rollout.iteration)
    if rng.random() < 0.1:
        yield CommitRejected(rollout.id, "duplicate")
    finite = rng.random() > 0.1
    score = rng.random() if finite else float("nan")
    yield SampleScored(rollout.id, {REWARD: score, "strict": float(rng.random() < 0.5)})
    if not finite:
        yield SampleDropped(rollout.id, DropReason.REWARD_NOT_FINITE, "nan")
    elif rollout.purpose is Purpose.EVAL:
        yield SampleEvaluated(rollout.id)
    elif rollout.purpose is Purpose.EXPLORE:
        yield SampleExplored(rollout.id)
    else:
        trainable.append(rollout)


def write(ledger: SqliteLedger, transactions: Sequence[Transaction]) -> None:
    """Append whole transactions, numbered from where the ledger stands."""
    for transaction in transactions:
        ledger.append(list(enumerate(transaction, ledger.position() + 1)))


def whole_ledger(directory: Path, seed: int, iterations: int) -> SqliteLedger:
    """A ledger holding a whole history; the caller closes it."""
    directory.mkdir(parents=True, exist_ok=True)
    ledger = SqliteLedger(directory / "ledger.sqlite")
    write(ledger, history(seed, iterations))
    return ledger
