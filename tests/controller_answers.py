"""How workers and the learner answer a controller when nothing goes wrong."""

from __future__ import annotations

from typing import TypeAlias

from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import (
    AbandonLease,
    CommitCheckpoint,
    Effect,
    FinishBatch,
    FormGroup,
    PrepareBatch,
    PublishWeights,
    PullWeights,
    ReportEvaluation,
    StartWorker,
    StepOptimizer,
    StopGroup,
    TrainMicroBatch,
)

ClusterCommand: TypeAlias = StartWorker | PullWeights | FormGroup | StopGroup | AbandonLease


def cluster_answer(command: ClusterCommand) -> ev.Event | None:
    match command:
        case StartWorker(worker, _, _, epoch):
            return ev.WorkerStarted(worker, epoch)
        case PullWeights(worker, epoch, version, lineage):
            return ev.WeightsPulled(worker, epoch, version, lineage)
        case FormGroup(leader, epoch):
            return ev.GroupFormed(leader, epoch)
        case StopGroup(leader, epoch):
            return ev.GroupStopped(leader, epoch)
        case AbandonLease():
            return None


def learner_answer(effect: Effect) -> ev.Event | None:
    """None: the effect asks nothing of the learner."""
    match effect:
        case PrepareBatch(iteration):
            return ev.BatchPrepared(iteration)
        case TrainMicroBatch(batch, index):
            return ev.MicroBatchTrained(batch.iteration, batch.update, index)
        case StepOptimizer(iteration, update):
            return ev.OptimizerStepped(iteration, update, 0.1, 1.0)
        case FinishBatch(iteration):
            return ev.BatchFinished(iteration)
        case PublishWeights(version):
            return ev.WeightsPublished(version)
        case ReportEvaluation(iteration, lineage=lineage):
            return ev.EvaluationReported(iteration, lineage)
        case CommitCheckpoint(iteration):
            return ev.CheckpointCommitted(iteration)
    return None
