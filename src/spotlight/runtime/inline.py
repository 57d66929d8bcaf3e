"""The inline driver: carries out the controller's effects in this process, in order.

    event ──► controller.handle ──► effects ──► engine / reward pool / learner / recorder ──► events

It decides nothing. To the controller it is a cluster of one worker that answers every command at once.
Scoring runs beside denoising, in the reward pool's processes; results are consumed in submission order, so
the same configuration gives the same ledger, bit for bit.

Of several ranks (``--ranks``, ``torchrun``) every one runs this loop with its own replica of the controller.
Replicas agree because the controller is pure and sees the same events: results local to a rank (finished
rollouts, scores) are shared before they become events.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from torch import nn

from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.reward_gradients import with_gradient
from spotlight.rollout.state import FailedRollout, FinishedRollout, Recipe
from spotlight.rollout.stored_pictures import StoredPictures
from spotlight.runtime.assembly.preview_settings import report_note, report_row
from spotlight.runtime.clock import PhaseClock
from spotlight.runtime.main_turn import MainTurn
from spotlight.runtime.observer import NotScored, Observer, stop_note, tell_stop
from spotlight.runtime.recorder import Picture, Recorder, shown, shown_in_step
from spotlight.runtime.shared_pictures import everyones, whole_groups
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import (
    PHASE_OF,
    DropReason,
    Lease,
    LeaseId,
    Node,
    NodeId,
    NodeKind,
    Phase,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
    group_of,
)
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.feed import BatchFeed
from spotlight.training.batching.redistribute import even_shares
from spotlight.training.sharding import Ranks
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.waiting import SampleGroup
from spotlight_rewards.results import RewardBatch, ScoredSample

NODE = Node(
    NodeId("local"),
    NodeKind.RESERVED,
    gpus=1,
    gpu_type="local",
    price_usd_h=0.0,
    # The worker does train, but this driver alternates rollouts and training by itself; with True the
    # controller would plan how to share the GPU between the two.
    trains=False,
    rolls_out=True,
)
WORKER = WorkerId(f"{NODE.id}/0")
_LOOK_S = 1.0
"""So often a driver that waits for scores looks for a request to stop."""


@dataclass(frozen=True, slots=True)
class Denoiser:
    """Runs leases with their purpose's slot; previews use ``train_slot`` (the behaviour policy).

    Attributes:
        around: a context for the steps of a lease, given the module that takes them.
        stored: makes the training samples of pictures; None: they are denoised.
    """

    engine: Engine
    slots: WeightSlots
    conditions: Conditions
    recipes: Mapping[Purpose, Recipe]
    train_slot: Slot
    evaluation_slot: Slot
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
    stored: StoredPictures | None = None

    def run(
        self,
        rollouts: Sequence[Rollout],
        on_step: Callable[[float], None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[FinishedRollout | FailedRollout]:
        """Denoise rollouts of one purpose; calls ``on_step(fraction_done)`` after every step.

        Args:
            around: a context for each step.
        """
        evaluating = rollouts[0].purpose is Purpose.EVAL
        recipe = self.recipes[rollouts[0].purpose]
        if self.stored is not None and not evaluating:
            return [*self.stored.samples(rollouts, recipe)]
        conditions = self.conditions.of(rollout.prompt_id for rollout in rollouts)
        states = self.engine.start(rollouts, conditions, recipe)
        steps = max(rollout.steps for rollout in rollouts)
        slot = self.evaluation_slot if evaluating else self.train_slot
        # Autocast would round merged weights to half precision; an unmerged adapter keeps its contribution.
        with self.slots.use(slot, merged=self.engine.autocast is None) as model, self.around(model):
            for step in range(steps):
                with around():
                    states = self.engine.step(model, states)
                on_step((step + 1) / steps)
        return self.engine.finish(states)


class _LeaseGivenUp(Exception):  # noqa: N818 - no error: the run was asked to stop
    """Leaves a lease between two of its steps."""


@dataclass(slots=True)
class _Scoring:
    rollouts: tuple[Rollout, ...]
    mine: tuple[RolloutId, ...]
    future: Future[RewardBatch]
    lineage: int


@dataclass(slots=True, kw_only=True)
class InlineDriver:
    """Drives one run to its end, or after ``request_stop`` to where a resume is exact.

    Attributes:
        turn: around what the recorder writes into the ledger.
        lease_size: rollouts per lease; a multiple of the number of ranks.
        grid: (prompts, images per prompt) in the image grids.
        training_pictures_every: iterations; 0: none.
        deal_size: consecutive rollouts that all ranks get equal shares of, those of an update; None: a lease.
        around: a context for each denoising step and micro-batch, by phase.
    """

    controller: Controller
    denoiser: Denoiser
    feed: BatchFeed
    rewards: RewardPool
    recorder: Recorder
    clock: PhaseClock
    observer: Observer
    ranks: Ranks
    turn: MainTurn
    lease_size: int
    grid: tuple[int, int]
    training_pictures_every: int
    deal_size: int | None = None
    around: Callable[[Phase], AbstractContextManager[object]] = nullcontext
    _events: deque[ev.Event] = field(default_factory=deque)
    _samples: dict[RolloutId, FinishedRollout] = field(default_factory=dict)
    _unsubmitted: list[ef.ScoreSamples] = field(default_factory=list)
    _group_turn: int = 0
    _group: ef.FormGroup | None = None
    _seen: LeaseId | None = None
    _scoring: deque[_Scoring] = field(default_factory=deque)
    _finish: ef.FinishRun | None = None
    _stop_requested: bool = False
    _stopping: bool = False
    _spent: Counter[Phase] = field(default_factory=Counter)
    _denoised: Counter[Phase] = field(default_factory=Counter)

    def run(self) -> str | None:
        """Run until the controller is done. Returns its error if it had to stop early."""
        self._events.extend([ev.RunStarted(), ev.NodeJoined(NODE)])
        while self._finish is None:
            event = self._next_event()
            effects = self.controller.handle(event, self.clock.elapsed_s)
            if isinstance(event, ev.StopRequested):
                controller = self.controller
                tell_stop(self.observer, stop_note(controller), at_once=controller.stops_at_once)
            if isinstance(event, ev.GroupPulled) and not any(isinstance(e, ef.GrantLease) for e in effects):
                raise RuntimeError("rollouts are outstanding, but the only worker was granted none")
            for effect in effects:
                self._carry_out(effect)
        self._account()
        return self._finish.error

    def request_stop(self) -> None:
        """Stop where a resume is exact. Only sets a flag, so a signal handler may call it."""
        self._stop_requested = True

    @property
    def stopped(self) -> bool:
        """Whether :meth:`request_stop`, on any rank, ended the run early."""
        return self._finish is not None and self._finish.stopped

    def _next_event(self) -> ev.Event:
        # Where ranks wait for each other anyway, about once per lease, micro-batch and iteration.
        if not self._events or isinstance(self._events[0], ev.MicroBatchTrained | ev.WeightsPublished):
            self._agree_to_stop()
        if self._events:
            return self._events.popleft()
        self._submit()
        if self.controller.queue.outstanding and not self._stopping_failure():
            return self._pull()
        if self._scoring:
            if self._scored(self._scoring[0]):
                self._collect(self._scoring.popleft())
            return self._next_event()
        raise RuntimeError(f"nothing left to do in {self.controller.stage}, but the run is not over")

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop, which is first said to the controller; collective."""
        if not self._stopping and any(self.ranks.share(self._stop_requested)):
            self._stopping = True
            self._events.appendleft(ev.StopRequested())
        return self._stopping

    def _scored(self, scoring: _Scoring) -> bool:
        """Wait until all ranks have their scores; False: until one was asked to stop. Collective."""
        with self.clock.phase(Phase.REWARD):
            while not self._stopping:
                wait([scoring.future], timeout=_LOOK_S)
                if all(self.ranks.share(scoring.future.done())):
                    break
                if self._agree_to_stop():
                    return False
        return True

    def _pull(self) -> ev.GroupPulled:
        assert self._group is not None, "the worker's handshake is done before anything else"
        return ev.GroupPulled(
            self._group.leader, self._group.epoch, self.lease_size, seen=self._seen or LeaseId(0)
        )

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.WriteRecord(position, record):
                self.recorder.write(position, record)
            case ef.StartWorker(worker, _, _, epoch):
                self._events.append(ev.WorkerStarted(worker, epoch))
            case ef.PullWeights(worker, epoch, version, lineage):
                # Engine and learner share one module, so the new version is already loaded.
                self._events.append(ev.WeightsPulled(worker, epoch, version, lineage))
            case ef.FormGroup(leader, epoch):
                self._group = effect
                self._events.append(ev.GroupFormed(leader, epoch))
            case ef.GrantLease(lease, rollouts):
                self.recorder.grant(effect)
                self._denoise(lease, rollouts)
            case ef.HoldSamples():
                pass
            case ef.ScoreSamples():
                self._unsubmitted.append(effect)
            case ef.KeepPreview(preview, kept, scores):
                if (sample := self._samples.pop(preview, None)) is not None:
                    self._samples[kept.id] = replace(sample, rollout=kept)
                self.feed.learner.log.scored(kept, scores)
            case ef.DiscardSamples(rollouts):
                for rollout in rollouts:
                    self._samples.pop(rollout, None)
            case ef.ReportEvaluation():
                self._report(effect)
            case ef.ReportExploration(_, report):
                self.feed.learner.log.put(report_row(report))
                if note := report_note(report):
                    self.observer.note(note)
            case ef.ReportPipeline():
                with self.turn.take():
                    self.recorder.pipeline(effect)
                self.feed.learner.log.put(effect.row())
            case ef.ReportChoice():
                self.feed.learner.log.put(effect.row())
            case ef.PrepareBatch() | ef.TrainMicroBatch() | ef.StepOptimizer() | ef.FinishBatch():
                self._train(effect)
            case ef.PublishWeights(version):
                self._iteration_done()
                self._events.append(ev.WeightsPublished(version))
            case ef.CommitCheckpoint():
                self._checkpoint(effect)
            case ef.FinishRun():
                self._finish = effect
            case ef.StopGroup() | ef.AbandonLease() | ef.RollBack():
                raise RuntimeError(f"{effect} for a cluster of one worker, which answers at once")
            case ef.RestoreLearner() | ef.PrepareLearner() | ef.EndLearner():
                raise RuntimeError(f"{effect} for a learner that ends with its worker")
            case ef.AssignRoles() | ef.PlaceLearner() | ef.NodesWanted() | ef.ReportFleet():
                raise RuntimeError(f"{effect} for one machine, which stays")
            case _:
                assert_never(effect)

    def _denoise(self, lease: Lease, rollouts: Sequence[Rollout]) -> None:
        self._submit()
        self._require_current(rollouts)
        phase = PHASE_OF[rollouts[0].purpose]
        mine, copies = even_shares(rollouts, self.ranks.rank, self.ranks.world, self.deal_size)
        work = [*mine, *copies]
        began = time.perf_counter()
        with self.clock.phase(phase):
            around = partial(self.around, phase)
            try:
                results = self.denoiser.run(work, self._progress(phase, rollouts), around)
            except _LeaseGivenUp:
                return
        self._measure(phase, time.perf_counter() - began)
        failures: dict[str, str] = {}
        own = {rollout.id for rollout in mine}
        for result in (each for each in results if each.rollout.id in own):
            if isinstance(result, FailedRollout):
                failures[result.rollout.id] = result.reason
            else:
                self._samples[result.rollout.id] = result
        for shared in self.ranks.share(failures):
            failures |= shared
        self._seen = lease.id
        holder = lease.worker, lease.id, lease.epoch
        if done := tuple(rollout.id for rollout in rollouts if rollout.id not in failures):
            self._events.append(ev.LeaseCompleted(*holder, done, rollouts[0].version))
        for rollout in rollouts:
            if rollout.id in failures:
                self._events.append(ev.RolloutFailed(*holder, rollout.id, failures[rollout.id]))

    def _measure(self, phase: Phase, seconds: float) -> None:
        engine = self.denoiser.engine
        if phase is Phase.ROLLOUT:
            self.feed.learner.log.worked("rollout", engine.take_work(), seconds, engine.peak_flop_s)
        engine.forwards.clear()

    def _require_current(self, rollouts: Sequence[Rollout]) -> None:
        """Engine and learner share one module, so only its current version can generate samples."""
        held = self.feed.learner.steps
        for rollout in rollouts:
            if rollout.version != held:
                raise RuntimeError(
                    f"{rollout.id} is to be made by version {rollout.version}, but this process holds "
                    f"{held}: rollouts of two versions need fleet.driver=ray, or pipeline.next_share=0"
                )

    def _progress(self, phase: Phase, rollouts: Sequence[Rollout]) -> Callable[[float], None]:
        left = self.controller.queue.outstanding_for(rollouts[0].purpose)
        before, total = self._denoised[phase], self._denoised[phase] + left
        self._denoised[phase] = before + len(rollouts) if left > len(rollouts) else 0

        def report(share: float) -> None:
            self.observer.work(phase, before + share * len(rollouts), total)
            # Several ranks would have to agree at every step.
            if self._stop_requested and self.ranks.world == 1 and self.controller.stops_at_once:
                raise _LeaseGivenUp

        return report

    # -- rewards ---------------------------------------------------------------------------------------

    def _submit(self) -> None:
        if not self._unsubmitted:
            return
        effects, self._unsubmitted = self._unsubmitted, []
        rollouts = tuple(rollout for effect in effects for rollout in effect.rollouts)
        images = {each.id: self._samples[each.id].image for each in rollouts if each.id in self._samples}
        groups = {
            rollout.id: SampleGroup(group_of(effect.rollouts[0]), effect.size)
            for effect in effects
            if effect.size is not None
            for rollout in effect.rollouts
        }
        if groups and self.ranks.world > 1:
            images = whole_groups(images, groups, self.ranks, self._group_turn)
            self._group_turn += len({*groups.values()})
        mine = tuple(rollout for rollout in rollouts if rollout.id in images)
        prompts = [self.controller.prompts[rollout.prompt_id] for rollout in mine]
        future = self.rewards.submit(
            [images[rollout.id] for rollout in mine],
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            [groups[rollout.id] for rollout in mine] if groups else None,
            gradients=self._differentiates(rollouts),
        )
        names = tuple(rollout.id for rollout in mine)
        self._scoring.append(_Scoring(rollouts, names, future, effects[-1].lineage))

    def _differentiates(self, rollouts: Sequence[Rollout]) -> bool:
        needed = self.feed.learner.algorithm.config.needs_gradients
        return needed and any(rollout.purpose is Purpose.TRAIN for rollout in rollouts)

    def _differentiate(self, scoring: _Scoring, batch: RewardBatch) -> None:
        """Give samples the gradient of their reward, from pixels through the VAE to the latents."""
        if not self._differentiates(scoring.rollouts):
            return
        family, size = self.feed.learner.family, self.denoiser.recipes[Purpose.TRAIN].size
        for name, result in zip(scoring.mine, batch.samples, strict=True):
            if isinstance(result, ScoredSample) and name in self._samples:
                self._samples[name] = with_gradient(family, self._samples[name], result.gradient, size)

    def _stopping_failure(self) -> bool:
        """Whether a sample already failed so as to stop the run, so that denoising may end early.

        Other scores wait for their turn, so that arrival times leave no trace.
        """
        if not self._scoring or self.controller.plan.max_drop_share is not None:
            return False
        return any(self.ranks.share(any(map(_will_stop, self._scoring))))

    def _collect(self, scoring: _Scoring) -> None:
        with self.clock.phase(Phase.REWARD):
            batch = scoring.future.result()
            self._differentiate(scoring, batch)
        results: dict[str, dict[str, float] | list[str]] = {
            rollout: result.curves()
            if isinstance(result, ScoredSample)
            else [DropReason(f"reward_{result.kind}").value, f"{result.reward}: {result.message}"]
            for rollout, result in zip(scoring.mine, batch.samples, strict=True)
        }
        for shared in self.ranks.share(results):
            results |= shared
        failed = NotScored()
        for rollout in scoring.rollouts:
            scores = results[rollout.id]
            if isinstance(scores, dict):
                self._events.append(ev.SamplesRewarded({rollout.id: scores}, scoring.lineage))
                self.feed.learner.log.scored(rollout, scores)
            else:
                reason, detail = scores
                failed.add(rollout.id, f"{reason}: {detail}")
                self._events.append(ev.RewardFailed(rollout.id, DropReason(reason), detail, scoring.lineage))

        failed.tell(self.observer.note)

    # -- evaluation and training -----------------------------------------------------------------------

    def _report(self, effect: ef.ReportEvaluation) -> None:
        self._account()
        with self.clock.phase(Phase.EVALUATION):
            trained = self.controller.ledger.trained
            grid = shown(effect.issued, *self.grid)
            there = self._shown(each.id for each in grid if each.id in effect.scores)
            pictures = {each: there.get(each.id) for each in grid}
            row = self.recorder.evaluation(effect, trained, pictures)
        self.observer.evaluated(effect.iteration, row)
        self._events.append(ev.EvaluationReported(effect.iteration, effect.lineage))

    def _shown(self, samples: Iterable[RolloutId]) -> dict[RolloutId, Picture]:
        """Pictures of samples that are on any rank; collective."""
        mine = {each: self._samples[each].image for each in samples if each in self._samples}
        return everyones(mine, self.ranks)

    def _train(
        self, effect: ef.PrepareBatch | ef.TrainMicroBatch | ef.StepOptimizer | ef.FinishBatch
    ) -> None:
        feed, learner = self.feed, self.feed.learner
        with self.clock.phase(Phase.TRAINING):
            match effect:
                case ef.PrepareBatch(iteration):
                    tensors = {name: sample.tensors for name, sample in self._samples.items()}
                    feed.prepare(effect, self.controller.rollouts, tensors)
                    self._events.append(ev.BatchPrepared(iteration))
                case ef.TrainMicroBatch(micro_batch, index):
                    with self.around(Phase.TRAINING):
                        learner.accumulate(micro_batch.rollouts, micro_batch.update_samples)
                    training = self.controller.training
                    self.observer.work(Phase.TRAINING, training.begun, training.prepared)
                    self._events.append(
                        ev.MicroBatchTrained(micro_batch.iteration, micro_batch.update, index)
                    )
                case ef.StepOptimizer(iteration, update, samples, zeros):
                    if kept := shown_in_step(self.controller, self.training_pictures_every):
                        pictures = self._shown(rollout.id for rollout in kept)
                        self.recorder.training(iteration, kept, pictures)
                    report = learner.step(samples, zeros)
                    self._events.append(
                        ev.OptimizerStepped(iteration, update, report.sums.loss, report.grad_norm)
                    )
                case ef.FinishBatch(iteration):
                    learner.finish_batch()
                    self._events.append(ev.BatchFinished(iteration))

    # -- the end of an iteration -----------------------------------------------------------------------

    def _iteration_done(self) -> None:
        controller = self.controller
        row = self.feed.learner.log.take()
        self._account()
        row |= {f"seconds/{phase.value}": spent for phase, spent in self._spent.items()}
        row["rewards/wait_s"] = self._spent[Phase.REWARD]
        self._spent.clear()
        self.recorder.iteration(controller.iteration, controller.ledger.trained, row)
        self.observer.iterated(controller.iteration, row)

    def _checkpoint(self, effect: ef.CommitCheckpoint) -> None:
        # Billed right before and right after, so that a resume from here finds exactly the lost seconds.
        self._account()
        with self.clock.phase(Phase.CHECKPOINT):
            self.recorder.checkpoint(effect, self.feed.learner)
            with self.turn.take():
                self.recorder.committed(effect)
        self._account()
        self._events.append(ev.CheckpointCommitted(effect.iteration))

    def _account(self) -> None:
        seconds = self.clock.take()
        with self.turn.take():
            self.recorder.spend(seconds)
        self._spent.update(seconds)
        self._events.extend(ev.GpuTimeSpent(WORKER, phase, spent) for phase, spent in seconds.items())


def _will_stop(scoring: _Scoring) -> bool:
    """Whether a failure is fatal; previews are expendable."""
    future = scoring.future
    if not future.done():
        return False
    if future.exception() is not None:
        return True
    expendable = bool(scoring.rollouts) and all(r.purpose is Purpose.EXPLORE for r in scoring.rollouts)
    return bool(future.result().failures) and not expendable
