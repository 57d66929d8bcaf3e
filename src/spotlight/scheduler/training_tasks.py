"""The learner's next task: parts of the batch, micro-batches, optimizer steps.

    part ──► PrepareBatch ──► TrainMicroBatch* ──► ... the next part ... ──► StepOptimizer* ──► FinishBatch

The whole batch is one part, unless a policy has parts trained while the rest is generated.

Invariants
    1. At most one task is under way.
    2. Every part is prepared before the first optimizer step, so old log-probs are those of the weights the
       batch started with.
    3. A sample is in one part, one micro-batch and one optimizer step, or dropped with a reason.
    4. A micro-batch is divisible by the learner's ranks, and cuts no group if the loss compares groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse
from typing import TypeAlias

from spotlight.scheduler import events as ev
from spotlight.scheduler.batches import (
    Part,
    even_out,
    even_out_each,
    even_shares,
    micro_batches,
    split_samples,
    split_updates,
    whole_group,
)
from spotlight.scheduler.effects import FinishBatch, PrepareBatch, StepOptimizer, TrainEffect, TrainMicroBatch
from spotlight.scheduler.iteration import Iteration
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import (
    Comparison,
    DropReason,
    Group,
    MicroBatch,
    Purpose,
    RolloutId,
)

Answer: TypeAlias = ev.BatchPrepared | ev.MicroBatchTrained | ev.OptimizerStepped | ev.BatchFinished

_WHY_LEFT_OUT = {
    DropReason.NOT_CHOSEN: "others of its group are trained",
    DropReason.SILENT_GROUP: "all chosen rewards of its group are equal",
}


class TrainingTasks:
    """See the module's docstring.

    Attributes:
        task: the one under way.
        update: index of the current optimizer step within the iteration.
        overlapped: samples given to the learner before the batch was complete.
        prepared: micro-batches so far.
        begun: of these, those given to the learner to train.
    """

    def __init__(self, plan: Plan, work: Rollouts, iteration: int) -> None:
        self._plan, self._work, self.iteration = plan, work, iteration
        self._policies = tuple(work.policies.values())
        self.trains_parts = any(policy.trains_parts for policy in self._policies)
        self.task: TrainEffect | None = None
        self.update = 0
        self.overlapped = self.prepared = self.begun = 0
        self._pending: deque[MicroBatch] = deque()
        self._index = 0
        self._sliced: dict[int, int] = {}
        self.trained_in: dict[int, list[RolloutId]] = {}
        self._announced: dict[int, int] = {}
        self.zeros: Counter[int] = Counter()
        self.left_out: Counter[DropReason] = Counter()
        self._updates = 1
        self._seen: tuple[int, ...] = ()
        self._found: list[Part] = []
        self._whole = False

    @property
    def _current(self) -> Iteration:
        return self._work.current

    # -- tasks -----------------------------------------------------------------------------------------

    def ready(self) -> int:
        """Samples trainable now, before the batch is complete, with those left out for them."""
        pending = sum(len(micro_batch.rollouts) for micro_batch in self._pending)
        found = self._ready_parts()
        return self._generated(pending) + sum(len(part.group.rollouts + part.left_out) for part in found)

    @property
    def untrained(self) -> int:
        """Samples generated, scored or not, and neither trained yet nor left out for others."""
        current, queue = self._current, self._work.queue
        made = len(current.rollouts) - len(current.evaluation) - queue.outstanding_for(Purpose.TRAIN)
        return max(0, made - self._generated(sum(map(len, self.trained_in.values()))))

    def _generated(self, trained: int) -> int:
        """Samples of which so many were chosen to be trained."""
        return round(trained / self._plan.trained_share)

    def next(self, all_there: bool) -> TrainEffect | None:
        """Start the next task. None: none is ready or, with ``all_there``, nothing is trainable."""
        self.task = self._next(all_there)
        return self.task

    def _next(self, all_there: bool) -> TrainEffect | None:
        if self._pending and self._pending[0].update == self.update:
            micro_batch = self._pending.popleft()
            self.begun += 1
            self.trained_in.setdefault(self.update, []).extend(micro_batch.rollouts)
            return TrainMicroBatch(micro_batch, self._index)
        if not self._whole:
            part = self._rest() if all_there else self._part()
            if part is not None or not all_there:
                return part
        if not self.trained_in and not self._pending:
            return None
        while self.update < self._updates and self.update not in self.trained_in:
            self.update += 1  # all its samples were dropped
            if self._pending and self._pending[0].update == self.update:
                return self._next(all_there)
        if self.update < self._updates:
            samples, zeros = len(self.trained_in[self.update]), self.zeros[self.update]
            return StepOptimizer(self.iteration, self.update, samples, zeros)
        return FinishBatch(self.iteration)

    def answered(self, event: Answer) -> None:
        """Close the task under way.

        Raises:
            RuntimeError: ``event`` does not answer it.
        """
        match self.task, event:
            case PrepareBatch(), ev.BatchPrepared():
                pass
            case TrainMicroBatch(batch, index), ev.MicroBatchTrained(_, update, answered) if (
                batch.update == update and index == answered
            ):
                self._index += 1
            case StepOptimizer(_, update), ev.OptimizerStepped(_, answered) if update == answered:
                pass
            case FinishBatch(), ev.BatchFinished():
                pass
            case task, _:
                raise RuntimeError(
                    f"{event} came while the learner was to do {task}; drivers answer effects in order"
                )
        self.task = None

    def stepped(self) -> list[RolloutId]:
        """Advance to the next update. Returns the samples of the one applied."""
        trained = self.trained_in[self.update]
        self.update, self._index = self.update + 1, 0
        return trained

    # -- parts -----------------------------------------------------------------------------------------

    def _part(self) -> PrepareBatch | None:
        chosen = self._ready_parts()
        if not chosen:
            return None
        self.overlapped += sum(len(part.group.rollouts) for part in chosen)
        choice = self._plan.choice
        planned = sum(choice.of_group(len(self._current.groups[slot])) for slot in self._planned_slots()[0])
        self._announced.setdefault(0, planned)
        return self._prepare([(0, part) for part in chosen], partial=True)

    def _ready_parts(self) -> list[Part]:
        """The most ready slices divisible by the ranks; none below a micro-batch."""
        if not self.trains_parts or self._whole:
            return []
        # Called at every event; only scores and drops change the result, so it is cached.
        seen = (len(self._current.scores), len(self._current.unscored), sum(self._sliced.values()))
        if seen != self._seen:
            self._seen, self._found = seen, self._find_parts()
        return self._found

    def _find_parts(self) -> list[Part]:
        found = self._ready(self._planned_slots()[0])
        for policy in self._policies:
            found = filterfalse(policy.defers, found)
        ready = sorted(found, key=lambda part: (part.members, part.slot))
        total = longest = samples = 0
        for count, part in enumerate(ready, start=1):
            total += len(part.group.rollouts)
            if total % self._plan.ranks == 0:
                longest, samples = count, total
        return ready[:longest] if samples >= self._plan.micro_batch_size else []

    def _rest(self) -> PrepareBatch | None:
        """Everything not in a part yet; drops what cannot be trained."""
        self._whole = True
        parts: list[tuple[int, Part]] = []
        updates = self._updates_of_rest()
        for policy in self._policies:
            updates = policy.left_out(updates, self)
        for update, found in enumerate(updates):
            even = even_out_each if self._plan.whole_groups else even_out
            surplus = even([part.group for part in found], self._plan.ranks)
            for rollout in surplus:
                why = f"{self._plan.ranks} ranks share an update"
                self._work.leave_out(rollout, DropReason.UNEVEN_BATCH, why)
            parts += [(update, part) for part in self.trained([part.without({*surplus}) for part in found])]
            self._updates = update + 1
        if not parts:
            return None
        return self._prepare(parts, partial=self.trains_parts)

    def _updates_of_rest(self) -> list[list[Part]]:
        if self.trains_parts:
            return [self._survivors(slots) for slots in self._planned_slots()]
        found = self._survivors(range(len(self._current.groups)))
        if self._plan.update_split != "groups":
            return [found]  # divided when it is known what is trained
        return split_updates(found, self._plan.updates_per_batch)

    def _survivors(self, slots: Iterable[int]) -> list[Part]:
        slots = list(slots)
        found = list(self._ready(slots))
        taken = {rollout for part in found for rollout in part.group.rollouts + part.left_out}
        for slot in slots:
            for rollout in self._current.groups[slot][self._sliced.get(slot, 0) :]:
                if rollout in self._current.scores and rollout not in taken:
                    why = "the rest of its group was dropped"
                    self._work.leave_out(rollout, DropReason.GROUP_TOO_SMALL, why)
        return found

    def _prepare(self, parts: Sequence[tuple[int, Part]], *, partial: bool) -> PrepareBatch:
        current, plan = self._current, self._plan
        batches: list[MicroBatch] = []
        for update, groups in self._by_update(parts):
            total = sum(len(group.rollouts) for group in groups)
            announced = self._announced.setdefault(update, total + self.zeros[update])
            batches += micro_batches(
                groups,
                self.iteration,
                update,
                plan.micro_batch_size,
                announced,
                whole_groups=plan.whole_groups,
            )
        for _, part in parts:
            self._sliced[part.slot] = part.members
        self.leave_out((part.left_out for _, part in parts), DropReason.NOT_CHOSEN)
        self._pending.extend(batches)
        self.prepared += len(batches)
        kept = [rollout for _, part in parts for rollout in part.group.rollouts]
        self._work.require_fresh(kept)
        comparisons = tuple(part.comparison for _, part in parts)
        plain = all(comparison == Comparison() for comparison in comparisons)
        return PrepareBatch(
            self.iteration,
            tuple(part.group for _, part in parts),
            {rollout: current.scores[rollout] for rollout in kept},
            tuple(batches),
            partial,
            () if plain else comparisons,
        )

    def _by_update(self, parts: Sequence[tuple[int, Part]]) -> list[tuple[int, list[Group]]]:
        """The groups, or parts of groups, of each update."""
        plan = self._plan
        if plan.update_split == "groups":
            updates = sorted({update for update, _ in parts})
            return [(update, [part.group for of, part in parts if of == update]) for update in updates]
        key = partial(derive_seed, plan.run_seed, "update", self.iteration)
        split = split_samples(
            [part.group for _, part in parts],
            plan.updates_per_batch,
            plan.ranks,
            key if plan.update_split == "shuffled" else None,
        )
        self._updates, zeros = len(split), self.zeros[0]
        for update in range(self._updates):
            low, high = (zeros * edge // self._updates for edge in (update, update + 1))
            self.zeros[update] = high - low
        return [*enumerate(split)]

    # -- what is left out ------------------------------------------------------------------------------

    def trained(self, parts: Iterable[Part]) -> list[Part]:
        """Those with samples to train; what was left out for the others is dropped."""
        parts = list(parts)
        self.leave_out((part.left_out for part in parts if not part.group.rollouts), DropReason.NOT_CHOSEN)
        return [part for part in parts if part.group.rollouts]

    def leave_out(self, rollouts: Iterable[Iterable[RolloutId]], reason: DropReason) -> None:
        """Drop scored samples that the run chose not to train."""
        for rollout in chain.from_iterable(rollouts):
            self.left_out[reason] += 1
            self._work.leave_out(rollout, reason, _WHY_LEFT_OUT[reason])

    def has_begun(self, update: int) -> bool:
        """Whether some samples of an update are with the learner."""
        return update in self._announced

    # -- groups ----------------------------------------------------------------------------------------

    def _ready(self, slots: Iterable[int]) -> Iterator[Part]:
        current = self._current
        for slot in slots:
            members, sliced = current.groups[slot], self._sliced.get(slot, 0)
            if sliced == len(members):
                continue
            cut = (policy.parts(slot, members) for policy in self._policies)
            found = next((parts for parts in cut if parts is not None), None)
            if found is None:
                prompt = current.rollouts[members[0]].prompt_id
                found = whole_group(slot, prompt, members, current.scores, current.unscored)
            for part in found:
                if part.members > sliced:
                    for policy in self._policies:
                        part = policy.select(part, self.iteration)
                    yield part

    def _planned_slots(self) -> list[range]:
        """Of every update, regardless of drops."""
        return even_shares(len(self._current.groups), self._plan.updates_per_batch)
