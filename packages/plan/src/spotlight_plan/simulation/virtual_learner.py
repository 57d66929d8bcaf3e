"""The learner, its checkpoints and the tensors beside the controller, in virtual time.

It answers each effect once and in order, or is lost: then nothing in progress is answered, and it restarts
from the last durable checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Phase, PolicyVersion, RolloutId
from spotlight_plan.simulation.gpu_accounts import BilledSegment, GpuSwitches
from spotlight_plan.simulation.virtual_processes import INITIAL_WEIGHTS, VirtualWeights

if TYPE_CHECKING:
    from spotlight_plan.simulation.virtual_driver import Simulation


@dataclass(frozen=True, slots=True)
class VirtualCheckpoint:
    """Durable state of learner, controller and ledger, saved together."""

    effect: ef.CommitCheckpoint
    weights: VirtualWeights


@dataclass(slots=True)
class VirtualStore:
    """Tensors that outlive workers: finished samples, committed progress, published versions."""

    samples: dict[RolloutId, VirtualWeights] = field(default_factory=dict)
    progress: dict[RolloutId, tuple[int, VirtualWeights]] = field(default_factory=dict)
    versions: dict[int, VirtualWeights] = field(default_factory=dict)

    def finished(self, rollouts: Iterable[RolloutId], weights: VirtualWeights) -> None:
        """Keep the samples of rollouts that were made by these weights."""
        for rollout in rollouts:
            self.samples[rollout] = weights
            self.progress.pop(rollout, None)

    def progressed(self, steps: Iterable[tuple[RolloutId, int]], weights: VirtualWeights) -> None:
        """Keep the furthest step of each rollout."""
        for rollout, step in steps:
            known = self.progress.get(rollout)
            if known is None or known[0] < step or known[1] != weights:
                self.progress[rollout] = step, weights

    def carry_out(self, effect: ef.KeepPreview | ef.DiscardSamples) -> None:
        """Give a sample another name, or free tensors that are no longer needed."""
        match effect:
            case ef.KeepPreview(preview, rollout):
                self.samples[rollout.id] = self.samples.pop(preview)
            case ef.DiscardSamples(rollouts):
                for name in rollouts:
                    self.samples.pop(name, None)
                    self.progress.pop(name, None)


LearnerEffect = (
    ef.PrepareBatch
    | ef.TrainMicroBatch
    | ef.StepOptimizer
    | ef.FinishBatch
    | ef.PublishWeights
    | ef.CommitCheckpoint
)


@dataclass(slots=True)
class VirtualLearner:
    """All learner ranks as one.

    Attributes:
        turns: switches of GPUs between training and rollout.
        life: counts restarts; effects of an earlier life are never answered.
        prepared: samples of the batch that no micro-batch has taken yet.
        trained: samples accumulated since the last optimizer step.
        task: what it does, one thing at a time.
        ranks: that it has.
        ready_s: when the second learner is formed; None: there is none.
    """

    host: Simulation
    gpu_type: str
    turns: GpuSwitches
    ranks: int = 1
    prepared: set[RolloutId] = field(default_factory=set)
    trained: int = 0
    weights: VirtualWeights = INITIAL_WEIGHTS
    checkpoint: VirtualCheckpoint | None = None
    life: int = 0
    alive: bool = False
    busy: bool = True
    task: LearnerEffect | None = None
    ready_s: float | None = None
    preparation: int = 0
    _contents: int = 0
    _uncommitted: list[BilledSegment] = field(default_factory=list)

    def start(self, ranks: int) -> None:
        """First start, or restart with the head; answers :class:`RunStarted`."""
        self.forget_second()
        self.ranks = ranks
        self._begin_life()
        self.host.after_ranks(self._restore_s, self._up, self.life, ev.RunStarted(ranks))

    @property
    def _restore_s(self) -> float:
        scenario, places = self.host.scenario, self.host.places
        return scenario.costs.restore_s(cold=scenario.plan.cluster.learner_moves and places.is_cold)

    def restore(self, effect: ef.RestoreLearner, ranks: int) -> None:
        """Restart from the checkpoint that the controller names."""
        durable = self.checkpoint.effect.iteration if self.checkpoint else 0
        assert effect.iteration == durable, (
            f"checkpoint {effect.iteration} is asked for, {durable} is durable"
        )
        if self.alive:  # it leaves its node
            self.lose()
        formed_s = self._restore_s
        if self.ready_s is not None:
            formed_s = min(formed_s, max(0.0, self.ready_s - self.host.now))
            self.forget_second()
        self.ranks = ranks
        self._begin_life()
        self.host.after_ranks(formed_s, self._up, self.life, ev.LearnerRestored(effect.lineage, ranks))

    def prepare(self, number: int) -> None:
        """Form a second learner, up to loading the state."""
        self.preparation = number
        restore_s = self._restore_s
        self.ready_s = self.host.now + restore_s
        self.host.after_ranks(restore_s, self._prepared, self.preparation)

    def _prepared(self, preparation: int) -> None:
        if preparation == self.preparation and self.ready_s is not None:
            self.host.feed(ev.LearnerPrepared(preparation))

    def forget_second(self) -> None:
        """The second learner is gone."""
        self.ready_s = None

    def lose(self) -> None:
        """A rank dies: training since the checkpoint is lost."""
        self.life, self.alive = self.life + 1, False
        self._phase(Phase.SETUP)
        self.host.accounts.confirm(self._uncommitted, Phase.LOST)
        self._uncommitted = []

    def carry_out(self, effect: LearnerEffect) -> None:
        """Execute an effect and answer when done."""
        assert self.alive, f"the learner is gone, and is asked to {effect}"
        assert self.task is None, f"the learner is to {self.task}, and is asked to {effect}"
        self.task = effect
        if isinstance(effect, ef.PrepareBatch | ef.TrainMicroBatch) and (turn_s := self.turns.to_training()):
            self._phase(Phase.RECONFIGURATION)
            self.host.after_ranks(turn_s, self._turned, self.life, effect)
        else:
            self._begin(effect)

    def _turned(self, life: int, effect: LearnerEffect) -> None:
        if life == self.life:
            self._begin(effect)

    def _begin(self, effect: LearnerEffect) -> None:
        costs, plan = self.host.scenario.costs, self.host.scenario.plan
        phase, seconds = Phase.TRAINING, 0.0
        match effect:
            case ef.PrepareBatch(_, groups):
                members = [rollout for group in groups for rollout in group.rollouts]
                missing = [rollout for rollout in members if rollout not in self.host.store.samples]
                assert not missing, f"samples to train on are gone: {missing}"
                assert not self.prepared or effect.partial, "a batch comes before the one before is trained"
                again = self.prepared.intersection(members)
                assert not again, f"samples are prepared twice: {again}"
                self.prepared.update(members)
                seconds = costs.prepare_s(len(members), self.ranks)
            case ef.TrainMicroBatch(batch):
                size = len(batch.rollouts)
                strange = set(batch.rollouts) - self.prepared
                assert not strange, f"a micro-batch has samples that were not prepared: {strange}"
                self.prepared -= set(batch.rollouts)
                self.trained += size
                seconds = costs.train_s(self.gpu_type, plan.cluster.pixels, size, self.ranks)
            case ef.StepOptimizer(samples=samples):
                assert samples == self.trained, f"a step of {samples} samples has {self.trained}"
                self.trained = 0
                seconds = costs.optimizer_s()
            case ef.FinishBatch():
                assert not self.prepared, f"samples were prepared and never trained: {self.prepared}"
            case ef.PublishWeights():
                phase, seconds = Phase.WEIGHT_SYNC, costs.publish_s(plan.cluster.publishes)
            case ef.CommitCheckpoint():
                phase, seconds = Phase.CHECKPOINT, costs.checkpoint_s()
        self._phase(phase)
        self.host.after_ranks(seconds, self._done, self.life, effect)

    def _done(self, life: int, effect: LearnerEffect) -> None:
        if life != self.life:
            return
        self.task = None
        self._phase(Phase.IDLE)
        match effect:
            case ef.PrepareBatch(iteration):
                self.host.feed(ev.BatchPrepared(iteration))
            case ef.TrainMicroBatch(batch, index):
                self.host.feed(ev.MicroBatchTrained(batch.iteration, batch.update, index))
            case ef.StepOptimizer(iteration, update):
                self._contents += 1
                self.weights = VirtualWeights(PolicyVersion(self.weights.version + 1), self._contents)
                self.host.feed(ev.OptimizerStepped(iteration, update, 0.0, 1.0))
            case ef.FinishBatch(iteration):
                self.host.feed(ev.BatchFinished(iteration))
            case ef.PublishWeights(version):
                assert version == self.weights.version, f"{version} is published, {self.weights} is there"
                self.host.store.versions[version] = self.weights
                self.host.feed(ev.WeightsPublished(version))
            case ef.CommitCheckpoint(iteration):
                self.checkpoint = VirtualCheckpoint(effect, self.weights)
                self._uncommitted = []
                self.host.feed(ev.CheckpointCommitted(iteration))

    def _begin_life(self) -> None:
        self.life, self.alive = self.life + 1, False
        self.turns.to_training()  # covered by the restart time
        self.prepared, self.trained, self.task = set(), 0, None
        self.weights = self.checkpoint.weights if self.checkpoint else INITIAL_WEIGHTS
        self.host.store.versions[self.weights.version] = self.weights
        self._phase(Phase.SETUP)

    def _up(self, life: int, event: ev.Event) -> None:
        if life == self.life:
            self.alive = True
            self._phase(Phase.IDLE)
            self.host.feed(event)

    def _phase(self, phase: Phase) -> None:
        self.busy = phase is not Phase.IDLE
        self.host.accounts.learner(phase, self._uncommitted, self.host.now)
