"""Processes of test_two_gpus.py: two ranks, each on a device of its own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
from benchmarks.gpu import lab as model
from benchmarks.gpu.children import Place
from torch.distributed.tensor import DTensor

from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.rollout.sequence_parallel.communicators import communicator
from spotlight.rollout.sequence_parallel.membership import GroupLostError, SpGroup, SpMembership
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.scheduler.types import WorkerId
from spotlight.training.sharding import Meeting, RolloutGathering, process_group

WORKERS = (WorkerId("w0"), WorkerId("w1"))


def denoise_together(
    where: Place, pipe: Connection, address: rendezvous.Address, rank: int, limit_s: float
) -> None:
    """A forward alone, then one in a group of two; then an order and one more, with the other missing."""
    lab = where.lab()
    family, shape = lab.fresh(lab.scale.few_layers, torch.float32), lab.scale.exact
    parallel = SequenceParallel([family.transformer])
    member = SpMembership(
        WORKERS[rank],
        rendezvous.connect(address),
        communicator(lab.device, limit_s),
        parallel,
        form_s=60.0,
    )
    alone = lab.velocity(family, family.transformer, shape)
    member.form(SpGroup(1, WORKERS))
    with member.exchange():
        together = lab.velocity(family, family.transformer, shape)
    pipe.send(float((together - alone).norm() / alone.norm()))
    pipe.recv()
    began = time.monotonic()
    try:
        member.broadcast(b"an order" if member.leads else None)
        with member.exchange():
            lab.velocity(family, family.transformer, shape)
    except GroupLostError:
        lost_s = time.monotonic() - began
        again = lab.velocity(family, family.transformer, shape)
        pipe.send((lost_s, bool(torch.equal(again, alone))))
    else:
        pipe.send("the group is whole")


def train_together(
    where: Place, pipe: Connection, address: rendezvous.Address, rank: int, world: int
) -> None:
    """Gradients of one update, this rank training its share of the samples.

    With them: whether velocities of a lease before are those of the next, which keeps the model gathered.
    """
    lab = where.lab()
    family, shape = lab.fresh(lab.scale.few_layers), lab.scale.train_small
    slots = model.adapters(family, lab.scale.rank)
    samples = lab.samples(family, slots, shape, 3)
    meeting = Meeting(rendezvous.connect(address), rank, world)
    with process_group(lab.device, 60.0, meeting) as ranks:
        learner = lab.learner(family, slots, shape, ranks=ranks)
        model.accumulate(learner, model.dealt(samples, rank, world))
        parameters = learner.slots.trainable_parameters()
        gradients = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).cpu()
            for name, p in parameters.items()
            if p.grad is not None
        }
        on_gpu = lab.device.type == "cuda"
        gathering = RolloutGathering("auto" if on_gpu else True, ranks, lab.device, family.dtype)
        velocities, kept = [], False
        for _lease in range(2):
            with learner.slots.use("policy") as module, gathering.around(module):
                velocities.append(lab.velocity(family, module, shape))
                block = next(iter(module.transformer_blocks))  # type: ignore[arg-type]
                kept = not isinstance(next(block.parameters()), DTensor)
        same = kept and torch.equal(*velocities)
    pipe.send(({name: gradient.numpy() for name, gradient in gradients.items()}, same))
    pipe.recv()
