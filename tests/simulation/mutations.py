"""Mutations: bugs planted into controller and accounts, each of which the seeds must find.

The production code knows nothing of them: a mutation replaces functions while it is active.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import getattr_static, signature
from typing import NewType
from unittest.mock import patch

from spotlight.cluster.billing import Billing
from spotlight.cluster.billing import _Slot as Slot
from spotlight.cluster.billing import _Tenant as Tenant
from spotlight.config.sections.algorithm import TrainPolicy
from spotlight.scheduler import events as ev
from spotlight.scheduler import iteration as issue_module
from spotlight.scheduler import rollouts as rollouts_module
from spotlight.scheduler import training_tasks as training_module
from spotlight.scheduler.batches import Part, micro_batches
from spotlight.scheduler.cluster.answer_limits import AnswerLimits
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.commands import CommandEffect, Commands
from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.cluster.members import Worker, WorkerGroup
from spotlight.scheduler.cluster.queue import CommitVerdict, PullQueue, _OpenLease
from spotlight.scheduler.cluster.spare_time import SpareTime
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import KeepPreview
from spotlight.scheduler.iteration import Iteration, Unsaved
from spotlight.scheduler.learner.learner_life import LearnerLife
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.exploration.exploring import Exploration, KeptPreviews
from spotlight.scheduler.policies.next_iteration.next_iteration import NextIteration
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces
from spotlight.scheduler.policies.subset import subset as subset_module
from spotlight.scheduler.policies.subset.subset import Subset, choose_seeds
from spotlight.scheduler.policy import GroupPlan
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.training_tasks import TrainingTasks
from spotlight.scheduler.types import (
    DropReason,
    Lease,
    LeaseId,
    Maker,
    MicroBatch,
    Node,
    NodeId,
    Phase,
    PolicyVersion,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.scheduler.types import Group as SampleGroup
from spotlight.store.ledger.sqlite_ledger import GpuSpend
from spotlight_plan.simulation.gpu_accounts import BilledSegment, GpuAccounts
from spotlight_rewards.base.prompts import Prompt
from tests.simulation.check import run_trial
from tests.simulation.swarm import draw_trial

Granted = tuple[Lease, tuple[Rollout, ...], dict[RolloutId, int]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A planted bug, and the functions it replaces as (owner, name, replacement)."""

    bug: str
    patches: tuple[tuple[object, str, Callable[..., object] | property], ...]

    def __post_init__(self) -> None:
        # Otherwise the call itself would fail, and a bug that no check sees would count as found.
        for owner, name, replacement in self.patches:
            original = getattr_static(owner, name)
            if not isinstance(replacement, property) and not isinstance(original, NewType):
                found, expected = (list(signature(f).parameters) for f in (replacement, original))
                assert found == expected, f"{self.bug}: {name} takes {expected}, its replacement {found}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug within the block."""
        with ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(patch.object(owner, name, replacement))
            yield


_complete, _pull, _check, _revoke = PullQueue.complete, PullQueue.pull, PullQueue._check, PullQueue._revoke
_choose_seeds, _micro_batches = choose_seeds, micro_batches
_load, _train_rollouts = Rollouts.load, issue_module.train_rollouts
_add, _confirm, _take_bill = GpuAccounts.add, GpuAccounts.confirm, Billing.take
_take = KeptPreviews.take
_place_learner, _limit_s = Controller._place_learner, AnswerLimits.limit_s


def _completes_twice(self: PullQueue, lease: LeaseId, epoch: int, rollout: RolloutId) -> CommitVerdict:
    verdict = _complete(self, lease, epoch, rollout)
    return CommitVerdict.ACCEPTED if verdict is CommitVerdict.DUPLICATE else verdict


def _forgets_requeued(self: PullQueue, leases: list[_OpenLease]) -> None:
    for held in leases:
        self._forget(held.lease)
        for rollout in held.open:
            del self._entries[rollout]


def _believes_anyone(self: PullQueue, lease: LeaseId, epoch: int, rollout: RolloutId) -> CommitVerdict:
    entry = self._entries.get(rollout)
    if entry is None or entry.lease is None:
        return _check(self, lease, epoch, rollout)
    return _check(self, entry.lease, self._held[entry.lease].lease.epoch, rollout)


def _closes_any(self: PullQueue, lease: LeaseId, rollout: RolloutId) -> None:
    for held in list(self._held.values()):
        held.open.pop(rollout, None)
        if not held.open:
            self._forget(held.lease)


def _lags_a_version(
    plan: Plan, groups: Sequence[GroupPlan], iteration: int, version: PolicyVersion
) -> Iterator[tuple[int, Prompt, Rollout]]:
    return _train_rollouts(plan, groups, iteration, PolicyVersion(max(0, version - 1)))


def _never_expires(self: PullQueue, now: float) -> list[Lease]:
    return []


def _waits_longer(self: AnswerLimits, leader: WorkerId | None, least_s: float = 0.0) -> float:
    return 50 * _limit_s(self, leader, least_s)


def _skips_a_step(self: PullQueue, worker: WorkerId, capacity: int, now: float) -> Granted | None:
    granted = _pull(self, worker, capacity, now)
    return granted and (granted[0], granted[1], {name: step + 1 for name, step in granted[2].items()})


def _discards_progress(self: PullQueue, leases: list[_OpenLease]) -> None:
    for held in leases:
        for rollout in held.open:
            self._entries[rollout].step = 0
    _revoke(self, leases)


def _grants_again_from_now(self: PullQueue, lease: LeaseId) -> Granted:
    held = self._held[lease]
    entries = [self._entries[rollout] for rollout in held.open]
    held.start, held.steps = {entry.rollout.id: entry.step for entry in entries}, 0
    return held.lease, tuple(entry.rollout for entry in entries), dict(held.start)


def _keeps_the_ledger(
    self: Rollouts, ledger: Mapping[str, object], states: Mapping[str, Mapping[str, object]]
) -> None:
    before = self.ledger
    _load(self, ledger, states)
    if before.position:
        self.ledger = before


def _grants_before_weights(self: Cluster, group: WorkerGroup) -> None:
    if group.capacity:
        self.serving.idle.add(group)


def _never_repeats(self: Commands, now: float) -> Iterator[tuple[CommandEffect, bool]]:
    return iter(())


def _overlooks_a_lost_member(self: Cluster, worker: Worker) -> None:
    worker.leader = None


def _leases_busy_learners(self: Dispatcher, rollouts: float, *, explore: bool) -> None:
    self.serving.trainer_budget, self.serving.trainers_explore = math.inf, True


def _never_preempts(
    self: SpareTime, groups: int, able: Callable[[WorkerId], bool], now: float
) -> list[Lease]:
    return []


def _looks_ahead_at_once(self: Exploration, iteration: int, now: float) -> None:
    if self.beside and iteration + 1 < self.work.plan.iterations and self.window.opened_s is None:
        self._open(iteration + 1, self.work.cluster.target, now)


def _leaves_windows_open(self: Exploration, now: float) -> None:
    pass


def _keeps_newer_weights(self: Cluster, version: PolicyVersion) -> None:
    self.target = version
    self.lineage += 1


def _trains_every_group_every_time(groups: Sequence[SampleGroup], updates: int) -> list[list[SampleGroup]]:
    return [list(groups) for _ in range(updates)]


def _forgets_the_learner(self: LearnerLife) -> None:
    self.up = False


def _rolls_back_a_learner_that_works(self: Controller) -> None:
    learner, working = self.learner, bool(self.training.task)
    if working and learner.prepared and any(host.draining for host in learner._leaving):
        self._roll_back()
    _place_learner(self)


def _moves_a_learner_that_starts(self: Controller) -> None:
    self.work.effects += self.learner.placed(self.iteration, idle=not self.training.task)


def _never(self: LearnerLife) -> bool:
    return False


def _never_unsaved(self: LearnerLife) -> bool:
    return self.up


def _forgets_what_was_trained(self: Unsaved, ended: Iteration) -> None:
    self.trained.clear()
    self.left_out.clear()


_observe = LearnerLife.observe


def _counts_no_ranks(self: LearnerLife, event: ev.Event) -> None:
    match event:
        case ev.RunStarted():
            pass
        case ev.LearnerRestored(lineage):
            _observe(self, ev.LearnerRestored(lineage))
        case _:
            _observe(self, event)


def _allows_any_divisor(self: LearnerPlaces) -> list[int]:
    return [size for size in range(self.ranks, 0, -1) if self.ranks % size == 0]


def _allows_any_number(self: LearnerPlaces) -> list[int]:
    return list(range(self.ranks, self.ranks_min - 1, -1))


def _triples_prices(self: GpuAccounts, node: Node, now: float) -> None:
    _add(self, node, now)
    for gpu in self.gpus[node.id]:
        gpu.usd_s *= 3


def _overlooks_prices(self: GpuAccounts, node: NodeId, price_usd_h: float, now: float) -> None:
    pass


def _books_work_as_idle(self: GpuAccounts, segments: Iterable[BilledSegment], phase: Phase) -> None:
    _confirm(self, segments, Phase.LOST if phase is Phase.LOST else Phase.IDLE)


def _forgets_lost_nodes(self: Billing) -> list[GpuSpend]:
    self._gone = []
    return []


def _forgets_what_was_at_risk(self: Slot, tenant: Tenant, phase: Phase) -> None:
    tenant.at_risk_s = 0.0


def _bills_again(self: Billing, now: float) -> list[GpuSpend]:
    return _take_bill(self, now) * 2


def _keeps_older_work(self: NextIteration) -> None:
    pass


def _reissues_early(self: NextIteration, rollout: Rollout) -> None:
    return None


def _chooses_the_best(
    rewards: Mapping[int, float], count: int, policy: TrainPolicy, draw_seed: int
) -> frozenset[int]:
    return frozenset(sorted(rewards, key=lambda seed: (-rewards[seed], seed))[:count])


def _chooses_one_too_many(
    rewards: Mapping[int, float], count: int, policy: TrainPolicy, draw_seed: int
) -> frozenset[int]:
    return _choose_seeds(rewards, count + 1, policy, draw_seed)


def _cuts_groups(
    groups: Sequence[SampleGroup],
    iteration: int,
    update: int,
    size: int,
    update_samples: int,
    *,
    whole_groups: bool,
) -> list[MicroBatch]:
    return _micro_batches(groups, iteration, update, size, update_samples, whole_groups=False)


def _counts_none_left_out(
    self: TrainingTasks, rollouts: Iterable[Iterable[RolloutId]], reason: DropReason
) -> None:
    pass


def _calls_everything_silent(self: Subset, part: Part) -> bool:
    return part.slot > 0


def _keeps_short_previews(self: KeptPreviews, preview: Rollout) -> bool:
    return self.plan.exploration is not None and self.plan.exploration.where == "critical_path"


def _keeps_nothing(self: KeptPreviews, rollout: Rollout) -> tuple[KeepPreview, Maker] | None:
    return None


def _keeps_twice(self: KeptPreviews, rollout: Rollout) -> tuple[KeepPreview, Maker] | None:
    offered = self._offered.get((rollout.prompt_id, rollout.seed))
    sample = _take(self, rollout)
    if sample is not None and offered is not None:
        self._offered = dict.fromkeys(self._offered, offered) | {(rollout.prompt_id, rollout.seed): offered}
    return sample


_ALL_GROUPS = property(lambda self: self.prompts_per_iteration if self.pipeline.next_share else 0)
_NEVER = property(lambda self: False)


MUTATIONS = (
    Mutation("a second completion counts", ((PullQueue, "complete", _completes_twice),)),
    Mutation("the leases of a lost group are not requeued", ((PullQueue, "_revoke", _forgets_requeued),)),
    Mutation(
        "old epochs and leases are believed",
        ((PullQueue, "_check", _believes_anyone), (PullQueue, "_close", _closes_any)),
    ),
    Mutation("samples are one version too old", ((rollouts_module, "train_rollouts", _lags_a_version),)),
    Mutation("leases never expire", ((PullQueue, "expire", _never_expires),)),
    Mutation("leases expire late", ((AnswerLimits, "limit_s", _waits_longer),)),
    Mutation("a resumed rollout skips a step", ((PullQueue, "pull", _skips_a_step),)),
    Mutation("committed progress is thrown away", ((PullQueue, "_revoke", _discards_progress),)),
    Mutation("a repeated grant counts steps from now", ((PullQueue, "granted", _grants_again_from_now),)),
    Mutation("the ledger is not rolled back", ((Rollouts, "load", _keeps_the_ledger),)),
    Mutation(
        "work is granted before the weights are there", ((Cluster, "consider", _grants_before_weights),)
    ),
    Mutation("unanswered commands are not repeated", ((Commands, "overdue", _never_repeats),)),
    Mutation("a lost member of a group is overlooked", ((Cluster, "_leave", _overlooks_a_lost_member),)),
    Mutation(
        "GPUs that train are leased meanwhile", ((Dispatcher, "set_trainer_budget", _leases_busy_learners),)
    ),
    Mutation("previews are not preempted", ((SpareTime, "preempt", _never_preempts),)),
    Mutation("previews begin while rollouts wait", ((Exploration, "fill", _looks_ahead_at_once),)),
    Mutation("exploration windows are never closed", ((Exploration, "close", _leaves_windows_open),)),
    Mutation("workers keep weights that were undone", ((Cluster, "roll_back", _keeps_newer_weights),)),
    Mutation(
        "rollouts of the version before last are begun", ((NextIteration, "after_event", _keeps_older_work),)
    ),
    Mutation("more groups than allowed begin early", ((Plan, "early_groups", _ALL_GROUPS),)),
    Mutation("rollouts begun early are issued a second time", ((NextIteration, "take", _reissues_early),)),
    Mutation("the learner trains while its GPUs roll out", ((Dispatcher, "trainers_work", _NEVER),)),
    Mutation(
        "several updates train the same samples",
        ((training_module, "split_updates", _trains_every_group_every_time),),
    ),
    Mutation("the best are trained, not the extremes", ((subset_module, "choose_seeds", _chooses_the_best),)),
    Mutation(
        "one more than configured is trained", ((subset_module, "choose_seeds", _chooses_one_too_many),)
    ),
    Mutation("micro-batches cut groups", ((training_module, "micro_batches", _cuts_groups),)),
    Mutation("samples left out have no end", ((TrainingTasks, "leave_out", _counts_none_left_out),)),
    Mutation("groups that differ are skipped", ((Subset, "_is_silent", _calls_everything_silent),)),
    Mutation("previews of fewer steps are kept", ((KeptPreviews, "wants", _keeps_short_previews),)),
    Mutation("rollouts are made that were previewed", ((KeptPreviews, "take", _keeps_nothing),)),
    Mutation("a preview is kept as several rollouts", ((KeptPreviews, "take", _keeps_twice),)),
    Mutation("a lost learner is not restored", ((LearnerLife, "lost", _forgets_the_learner),)),
    Mutation(
        "the learner is restored before its loss is reported",
        ((Controller, "_place_learner", _rolls_back_a_learner_that_works),),
    ),
    Mutation(
        "the learner moves before it has started",
        ((Controller, "_place_learner", _moves_a_learner_that_starts),),
    ),
    Mutation(
        "the learner trains before its last step is durable",
        ((LearnerLife, "works", property(_never_unsaved)),),
    ),
    Mutation("it is forgotten how many ranks there are", ((LearnerLife, "observe", _counts_no_ranks),)),
    Mutation("nobody forms the larger learner", ((LearnerLife, "_has_second", property(_never)),)),
    Mutation("fewer ranks than allowed", ((LearnerPlaces, "_sizes", property(_allows_any_divisor)),)),
    Mutation("ranks that share no batch", ((LearnerPlaces, "_sizes", property(_allows_any_number)),)),
    Mutation("samples of a lost step are made again", ((Unsaved, "begin", _forgets_what_was_trained),)),
    Mutation("every price is tripled", ((GpuAccounts, "add", _triples_prices),)),
    Mutation("prices that change are overlooked", ((GpuAccounts, "price", _overlooks_prices),)),
    Mutation("work that counts is booked as idle", ((GpuAccounts, "confirm", _books_work_as_idle),)),
    Mutation("the head bills no lost node", ((Billing, "take_gone", _forgets_lost_nodes),)),
    Mutation("the head bills no work at risk", ((Slot, "settle", _forgets_what_was_at_risk),)),
    Mutation("the head bills everything twice", ((Billing, "take", _bills_again),)),
)


FOUND_BY = {
    "leases expire late": 37,
    "a repeated grant counts steps from now": 131,
    "previews are not preempted": 37,
    "workers keep weights that were undone": 44,
    "rollouts of the version before last are begun": 5,
    "more groups than allowed begin early": 7,
    "several updates train the same samples": 41,
    "the best are trained, not the extremes": 27,
    "micro-batches cut groups": 6,
    "groups that differ are skipped": 5,
    "rollouts are made that were previewed": 10,
    "a preview is kept as several rollouts": 10,
    "the learner is restored before its loss is reported": 117,
    "the learner trains before its last step is durable": 30,
    "it is forgotten how many ranks there are": 4,
    "nobody forms the larger learner": 4,
    "ranks that share no batch": 80,
    "samples of a lost step are made again": 61,
}
"""Seeds that found a bug when last tried, of bugs that the first seeds do not find."""


def find(mutation: Mutation, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of the seeds that finds a planted bug, and the failure."""
    with mutation.planted():
        for seed in seeds:
            outcome = run_trial(draw_trial(seed))
            if outcome.failure is not None:
                return seed, outcome.failure
    return None


def report_mutations(seeds: int) -> int:
    """Plant every bug, print which seed finds it. Returns the number of bugs not found."""
    missed = 0
    print(f"{'planted bug':48} {'found by seed':13}  as")
    for mutation in MUTATIONS:
        found = find(mutation, range(seeds))
        missed += found is None
        seed, how = found or ("NOT FOUND", f"in {seeds} seeds")
        print(f"{mutation.bug:48} {seed!s:13}  {how[:90]}", flush=True)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} found")
    return missed
