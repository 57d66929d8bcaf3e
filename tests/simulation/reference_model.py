"""The reference model (test oracle): a second, simpler account of a run, compared after every event.

It is built from effects and records alone, and sees what the simulated workers and the store really contain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import pvariance

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.answer_limits import MORE_MAX, SLOWER_MAX
from spotlight.scheduler.cluster.members import GroupState
from spotlight.scheduler.cluster.queue import WorkClass
from spotlight.scheduler.policies.exploration.exploring import Exploration
from spotlight.scheduler.policies.exploration.window import Window
from spotlight.scheduler.records import (
    RolloutIssued,
    SampleDropped,
    SampleScored,
    SampleTrained,
)
from spotlight.scheduler.types import (
    PHASE_OF,
    Group,
    GroupKind,
    Lease,
    LeaseId,
    MicroBatch,
    Phase,
    Purpose,
    Rollout,
    RolloutId,
)
from spotlight_plan.simulation.virtual_driver import Simulation
from spotlight_plan.simulation.virtual_processes import VirtualGroup, VirtualWeights
from spotlight_plan.simulation.virtual_rewards import CONTENT
from spotlight_plan.simulation.virtual_workers import Receipt
from tests.simulation.bill import Bill
from tests.simulation.head_bill import HeadBill
from tests.simulation.learner_ranks import check_ranks
from tests.simulation.ledger_model import LedgerModel


@dataclass(slots=True)
class HeldLease:
    """A lease granted at ``news_s``; believed since at ``reported_s``, with more steps at ``news_s``.

    ``limit_s``: longest silence after which it may still be believed.
    """

    lease: Lease
    kind: tuple[GroupKind, bool]
    limit_s: float
    reported_s: float
    news_s: float
    steps: int = 0


@dataclass(slots=True)
class ReferenceModel:
    """Checks a simulation after every event.

    Attributes:
        early: granted rollouts of the next iteration, which are recorded when it begins.
        made: those of them whose samples count.
        intended: the group of processes that each lease was granted to.
        holder: the lease and epoch under which each rollout was last granted.
        undone: trained samples whose training was undone, by a head that still runs.
        silences_s: the two longest times between believed messages, of each kind of groups.
    """

    simulation: Simulation
    expected: LedgerModel = field(init=False)
    early: dict[RolloutId, Rollout] = field(default_factory=dict)
    made: set[RolloutId] = field(default_factory=set)
    leases: dict[LeaseId, HeldLease] = field(default_factory=dict)
    intended: dict[LeaseId, VirtualGroup] = field(default_factory=dict)
    holder: dict[RolloutId, tuple[LeaseId, int]] = field(default_factory=dict)
    bill: Bill = field(default_factory=Bill)
    head_bill: HeadBill = field(default_factory=HeadBill)
    undone: set[Rollout] = field(default_factory=set)
    window: Window | None = None
    over: bool = False
    silences_s: dict[tuple[GroupKind, bool], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start from an empty ledger."""
        self.expected = LedgerModel(self._stale)

    @property
    def _stale(self) -> int:
        plan = self.simulation.scenario.plan
        return math.floor(round(plan.pipeline.next_share * plan.prompts_per_iteration, 6)) * plan.group_size

    def check(self, event: ev.Event, effects: Sequence[ef.Effect], receipt: Receipt | None) -> None:
        """Raise AssertionError where the controller's effects contradict the model."""
        self.simulation.controller.check()
        self._check_commit(event, effects, receipt)
        discarded: set[RolloutId] = set()
        for effect in effects:
            match effect:
                case ef.RollBack(position):
                    assert position <= len(self.expected.records), "undone is more than was recorded"
                    self.undone |= self._trained_after(position)
                    self.expected = LedgerModel.until(self.expected.records[:position], self._stale)
                    self.early.clear()
                    self.made.clear()
                case ef.WriteRecord(position, record):
                    self.expected.write(position, record)
                    if isinstance(record, RolloutIssued):
                        self._check_issue(record.rollout)
                    if isinstance(record, SampleDropped):  # left out where it was trained before
                        self.undone = {one for one in self.undone if one.id != record.rollout}
                    if isinstance(record, SampleScored):
                        made_by = self._sample(record.rollout)
                        assert made_by is not None, f"{record} is of no sample"
                        assert record.scores[CONTENT] == made_by.content, f"{record} is of another sample"
                case ef.GrantLease():
                    self._check_grant(effect, discarded)
                case ef.DiscardSamples(rollouts):
                    discarded.update(rollouts)
                case ef.PrepareBatch(_, groups, _, batches):
                    self._check_batches(groups, batches)
                    for group in groups:
                        for rollout in group.rollouts:
                            self._check_sample(self.expected.issued[rollout])
                    self._check_trainers_free()
                case ef.TrainMicroBatch():
                    self._check_trainers_free()
                case ef.FinishBatch(iteration):
                    self._check_choice(iteration)
                case ef.CommitCheckpoint(_, position):
                    assert position == len(self.expected.records), "a checkpoint stands for other records"
                case ef.FinishRun():
                    self.over = True
        self._check_spare_time()
        check_ranks(self.simulation)
        self._balance()
        self.bill.compare(self.simulation.accounts, self.simulation.now)
        self.head_bill.observe(event, effects, self.simulation.now)

    def head_restarted(self, position: int) -> None:
        """Cut the durable ledger to the checkpoint's position; forget what was in memory."""
        self.expected = LedgerModel.until(self.expected.records[:position], self._stale)
        self.head_bill.end(self.simulation.now)
        self.head_bill = HeadBill()
        self.early.clear()
        self.made.clear()
        self.undone.clear()
        self.leases.clear()
        self.silences_s.clear()
        self.intended.clear()
        self.holder.clear()

    def _balance(self) -> None:
        expected, ledger = self.expected, self.simulation.controller.ledger
        assert len(expected.issued) == ledger.issued.total(), "rollouts were issued without a record"
        in_flight = len(expected.issued) - len(expected.ended)
        assert in_flight == ledger.in_flight, f"{in_flight} are in flight, the ledger has {ledger.in_flight}"
        if self.over and self.simulation.finish is None and not in_flight:
            assert len(expected.ended) == len(expected.issued)

    def _check_commit(self, event: ev.Event, effects: Sequence[ef.Effect], receipt: Receipt | None) -> None:
        """Only the current holder's messages count, and only before the lease expires."""
        now = self.simulation.now
        if isinstance(event, ev.LeaseProgressed):
            voided = any(isinstance(e, ef.AbandonLease) and e.lease == event.lease for e in effects)
            held = self.leases.get(event.lease)
            if voided or held is None or held.lease.epoch != event.epoch:
                assert voided, f"{event} was sent under no lease, and was believed"
                return
            self._in_time(event, held, now)
            self._from_holder(event.lease, receipt)
            self._accept(held.lease.rollouts[0], receipt)
        elif isinstance(event, ev.LeaseCompleted):
            for effect in effects:
                for rollout in effect.rollouts if isinstance(effect, ef.ScoreSamples) else ():
                    assert rollout.id in event.rollouts
                    assert self.holder.get(rollout.id) == (event.lease, event.epoch), f"believed: {event}"
                    self._in_time(event, self.leases[event.lease], now)
                    self._from_holder(event.lease, receipt)
                    self._accept(rollout.id, receipt)
                    if rollout.id in self.early:
                        self.made.add(rollout.id)

    def _accept(self, rollout: RolloutId, receipt: Receipt | None) -> None:
        """Bill accepted work to its phase."""
        assert receipt is not None
        self.bill.accept(receipt.segments, PHASE_OF[self._known(rollout).purpose])

    def _known(self, rollout: RolloutId) -> Rollout:
        return self.early[rollout] if rollout in self.early else self.expected.issued[rollout]

    def _check_issue(self, rollout: Rollout) -> None:
        """A rollout begun early is issued unchanged if it was made; otherwise it may be issued again."""
        # Where previews choose another seed after a loss, the sample of the first is of no use.
        self.undone = {one for one in self.undone if one.id != rollout.id or one == rollout}
        early = self.early.pop(rollout.id, None)
        if rollout.id in self.made or rollout.version != self.expected.published:
            assert rollout == early, f"{rollout} is issued, and {early} was begun"
        self.made.discard(rollout.id)

    def _check_early(self, rollout: Rollout) -> None:
        """A rollout is granted before it was recorded."""
        self.early[rollout.id] = rollout
        assert rollout.purpose is Purpose.TRAIN, f"{rollout} is begun early"
        assert rollout.iteration == self.simulation.controller.iteration + 1, f"{rollout} is too early"
        begun = [one for one in self.early.values() if one.iteration == rollout.iteration]
        assert len(begun) <= self._stale, f"more is begun early than allowed: {rollout}"

    def _from_holder(self, lease: LeaseId, receipt: Receipt | None) -> None:
        """The sender is the group the lease was granted to, not a later one of the same name."""
        intended = self.intended.get(lease)
        assert receipt is not None
        assert intended is None or receipt.group is intended, (
            f"another group of that name finishes lease {lease}"
        )

    def _in_time(self, event: ev.LeaseProgressed | ev.LeaseCompleted, held: HeldLease, now: float) -> None:
        """A lease is believed within the limit that it had at its last news."""
        silent_s = now - held.reported_s
        assert silent_s < held.limit_s, f"believed {silent_s} s after the last news: {event}"
        held.reported_s = now
        if isinstance(event, ev.LeaseProgressed):
            if event.steps <= held.steps:
                return  # a duplicate, which measures nothing
            held.steps = event.steps
        longest = self.silences_s.setdefault(held.kind, [])
        self.silences_s[held.kind] = sorted([*longest, now - held.news_s])[-2:]
        held.news_s, held.limit_s = now, self._limit_s(held.kind)

    def _limit_s(self, kind: tuple[GroupKind, bool]) -> float:
        """Bound of limits: a median is at most the second longest interval, and here at most ``start_s``."""
        plan, longest = self.simulation.scenario.plan, self.silences_s.get(kind, ())
        given_s, times = max(plan.lease_s, plan.cluster.start_s), SLOWER_MAX * MORE_MAX
        measured_s = times * min(longest) if len(longest) == 2 else 0.0
        return max(given_s, min(measured_s, times * given_s))

    def _trained_after(self, position: int) -> set[Rollout]:
        """Samples trained or left out, which is undone; they are kept for it, unless a preview made them."""
        if not self.simulation.scenario.plan.cluster.learner_moves:
            return set()
        expected = self.expected
        ended = [
            each.rollout
            for each in expected.records[position:]
            if isinstance(each, SampleTrained) or (isinstance(each, SampleDropped) and each.reason.by_choice)
        ]
        return {expected.issued[name] for name in ended if name not in expected.kept}

    def _check_grant(self, grant: ef.GrantLease, discarded: set[RolloutId]) -> None:
        lease, simulation, plan = grant.lease, self.simulation, self.simulation.scenario.plan
        again = lease.id in self.leases
        for rollout in grant.rollouts:
            if rollout.id not in self.expected.issued and rollout.id not in self.early:
                self._check_early(rollout)
            assert rollout == self._known(rollout.id), f"granted is {rollout}"
            assert again or rollout.version == self.expected.published, f"{rollout} is begun with old weights"
            assert not plan.keeps_previews or self.expected.preview_of(rollout) is None, (
                f"{rollout.id} is made again after it was previewed"
            )
            assert rollout.id not in self.made, f"{rollout.id} is made again after it was finished"
            assert rollout not in self.undone, f"{rollout.id} is made again after its training was undone"
            assert rollout.id not in self.expected.ended
            assert rollout.id not in self.expected.finished, (
                f"{rollout.id} is made again after it was finished"
            )
            if not again:
                # What this very event discards is still in the store.
                safe = None if rollout.id in discarded else simulation.store.progress.get(rollout.id)
                step = grant.resume.get(rollout.id, 0)
                # One begun early and not done in time starts again under the next weights, with the same id.
                ours = safe is not None and safe[1] == simulation.store.versions[rollout.version]
                assert step == (safe[0] if safe and ours else 0), (
                    f"{rollout.id} resumes at {step}, not {safe}"
                )
            self.holder[rollout.id] = lease.id, lease.epoch
        if not again:
            granted = simulation.controller.cluster.groups[lease.worker]
            kind = granted.kind, granted.trains
            held = HeldLease(lease, kind, self._limit_s(kind), simulation.now, simulation.now)
            self.leases[lease.id] = held
        process = simulation.workers.processes.get(lease.worker)
        group = process.group if process is not None else None
        if group is not None and group.epoch == lease.epoch and not group.broken:
            self.intended[lease.id] = group
            for member in group.members:
                real = simulation.store.versions[grant.rollouts[0].version]
                assert member.weights == real, f"{member.worker} has {member.weights}, the lease needs {real}"
        host = simulation.controller.cluster.hosts[process.node] if process else None
        assert host is None or not (host.node.trains and simulation.learner.busy), (
            "the learner's GPU is leased"
        )

    def _check_spare_time(self) -> None:
        """Previews in idle time take nothing from an iteration; see the scheduler's ``spare_time``."""
        controller = self.simulation.controller
        queue, cluster = controller.queue, controller.cluster
        if not cluster.spare.explores:
            return
        pressing = queue.waiting - queue.waiting_of(WorkClass.EXPLORE)
        explores = controller.work.policies["exploration"]
        assert isinstance(explores, Exploration)
        window = explores.window
        opens = window is not self.window and window.opened_s is not None
        assert not (opens and pressing), "a window opens while rollouts of the iteration wait"
        self.window = window
        able = [lease for lease in queue.previews() if cluster.groups[lease.worker].state is GroupState.READY]
        assert not pressing or not able or cluster.spare.awaited(self.simulation.now), (
            f"{pressing} rollouts wait, {len(able)} groups make previews, and none is preempted"
        )
        for lease in able:
            host = cluster.hosts[cluster.groups[lease.worker].node]
            assert not host.node.trains, "a GPU that trains makes previews in idle time"
            assert not queue.count_held_by(lease.worker, previews=False), (
                "previews are made beside better work"
            )

    def _sample(self, name: RolloutId) -> VirtualWeights | None:
        """What made a stored sample, which is under its preview's name until effects are carried out."""
        samples = self.simulation.store.samples
        return samples.get(name) or samples.get(self.expected.kept.get(name, name))

    def _check_sample(self, rollout: Rollout) -> None:
        made_by = self._sample(rollout.id)
        real = self.simulation.store.versions[rollout.version]
        assert made_by == real, f"{rollout.id} was made by {made_by}, and is trained as {real}"

    def _check_batches(self, groups: Sequence[Group], batches: Sequence[MicroBatch]) -> None:
        """Ranks share a micro-batch evenly, and it cuts no group if the loss compares groups."""
        plan = self.simulation.scenario.plan
        for batch in batches:
            assert len(batch.rollouts) % plan.ranks == 0, f"{plan.ranks} ranks cannot share {batch} evenly"
            assert len(batch.rollouts) <= plan.micro_batch_size, f"more than a micro-batch: {batch}"
        if plan.whole_groups:
            for group in groups:
                parts = [batch for batch in batches if {*group.rollouts} & {*batch.rollouts}]
                assert len(parts) == 1, f"{group} is cut into {parts}"

    def _check_choice(self, iteration: int) -> None:
        """As many of each group are trained as the plan says, and those; silent groups only as it says."""
        plan, silent, filling, sounds = self.simulation.scenario.plan, 0, 0, False
        for ends in self._ends(iteration):
            chosen = [reward for end in ("train", "uneven_batch", "silent_group") for reward in ends[end]]
            left_out = ends["not_chosen"]
            if chosen:
                wanted = min(len(chosen + left_out), plan.choice.samples or plan.group_size)
                assert len(chosen) == wanted, f"{len(chosen)} of a group are trained, not {wanted}"
            if left_out and plan.choice.policy == "max_variance":
                best = max(map(pvariance, combinations(chosen + left_out, len(chosen))))
                assert pvariance(chosen) >= best - 1e-9, "others of a group have more variance"
            alike = len({*chosen}) == 1
            assert alike or not ends["silent_group"], "a group that is not silent is skipped"
            sounds |= bool(ends["train"]) and not alike
            silent += len(ends["silent_group"])
            filling += len(ends["train"]) * alike
        skips = plan.choice.silent_groups != "train"
        assert skips or not silent, "silent groups are skipped"
        assert sounds or not silent, "an iteration's last samples are skipped"
        # With several updates one may be all silent, and is then trained as it is.
        if skips and sounds and plan.pipeline.waits_for_groups and plan.updates_per_batch == 1:
            assert filling < plan.ranks, f"{filling} silent samples are trained"

    def _ends(self, iteration: int) -> Iterable[Mapping[str, list[float]]]:
        """The rewards of each group of an iteration, by what became of the samples."""
        groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for name, reward in self.expected.rewards.items():
            rollout = self.expected.issued[name]
            if rollout.purpose is Purpose.TRAIN and rollout.iteration == iteration:
                groups[name.rpartition("-")[0]][self.expected.ended[name]].append(reward)
        return groups.values()

    def _check_trainers_free(self) -> None:
        """The learner is given nothing to train while its GPUs roll out."""
        controller = self.simulation.controller
        for leader, group in controller.cluster.groups.items():
            if controller.cluster.hosts[group.node].node.trains:
                assert not controller.queue.holds(leader), f"the learner trains, and {leader} rolls out"

    def check_end(self) -> None:
        """At the end of a run every sample has ended and every second is accounted for."""
        simulation = self.simulation
        assert simulation.finish is not None
        simulation.accounts.check(simulation.now)
        self.bill.compare(simulation.accounts, simulation.now)
        self.head_bill.end(simulation.now)
        if simulation.finish.error is None:
            assert set(self.expected.issued) == set(self.expected.ended), "samples disappeared"
            assert simulation.controller.iteration == simulation.scenario.plan.iterations
        result = simulation.result()
        lost = sum(seconds for (_, phase), seconds in result.phase_s.items() if phase is Phase.LOST)
        assert lost >= -1e-6
