"""Assembles one attempt on a cluster: controller, workers, learner, rewards, blob store and nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotlight.cluster.billing import ClusterAccounts
from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.cluster_nodes import ClusterNodes, Site
from spotlight.cluster.head import Head
from spotlight.cluster.incidents import Drains, IncidentRecorder
from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.learner.life import Deadlines
from spotlight.cluster.learner.rank_folder import write_token
from spotlight.cluster.learner.ray_launcher import RayLauncher
from spotlight.cluster.learner_driver import LearnerDriver, PublishedVersions
from spotlight.cluster.model_fetch import pinned
from spotlight.cluster.remote_calls import Conversations, Inbox
from spotlight.cluster.sample_scoring import AcceptedSamples, SampleScoring
from spotlight.cluster.scaling.node_supply import NodeSupply
from spotlight.cluster.trace_collector import TraceCollector
from spotlight.cluster.workers.worker_actor import ActorStarter
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.assembly import components as build
from spotlight.runtime.attempt import Attempt
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import restored_controller
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import NodeId, NodeKind
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.run_directory import RunDirectory
from spotlight_fleet.providers.node_provider import NodeProvider
from spotlight_rewards.base.files import discard
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_weights.node_cache import cache_directory

_NAME_MAX = 24
"""Longest part of a run's name used in folder names on nodes: socket paths are limited to about 100 bytes."""


@dataclass(frozen=True, slots=True)
class Materials:
    """Inputs validated before the run directory is touched.

    Attributes:
        used: the prompts that the run uses.
        profiled_steps: denoising steps of one worker, and micro-batches of rank 0, to be traced.
    """

    config: RunConfig
    observer: Observer
    prompts: build.Prompts
    used: Sequence[Prompt]
    rewards: RewardPool
    profiled_steps: int = 0


@dataclass(frozen=True, slots=True)
class AttemptRoom:
    """An attempt's surroundings.

    Attributes:
        meeting: rendezvous store of the sequence-parallel groups.
        providers: of the kinds of nodes that come and go as the run wants.
    """

    site: Site
    directory: RunDirectory
    attempt: Attempt
    accounts: ClusterAccounts
    store: Any
    meeting: Address
    providers: Mapping[NodeKind, NodeProvider]


@asynccontextmanager
async def assembled(materials: Materials, room: AttemptRoom) -> AsyncIterator[Head]:
    """A head with all its parts; leaving the block ends all processes."""
    config, note = materials.config, materials.observer.note
    controller = _controller(materials, room)
    inbox, conversations = Inbox(), Conversations()
    samples = AcceptedSamples(BlobClient(room.store))
    incidents = IncidentRecorder(room.accounts.clock, note, room.attempt.recorder.ledger, controller.fleet)
    nodes = ClusterNodes(config, room.site, inbox.put, conversations.fail, note, room.accounts.clock)
    traces = TraceCollector(samples.store, room.directory.profile, note, materials.profiled_steps)
    async with AsyncExitStack() as stack:
        workers = _workers(materials, room, nodes, conversations, inbox, incidents, traces, stack)
        if nodes.spares is not None:
            stack.callback(nodes.spares.close)
        learner, placed = _learner(materials, room, nodes, incidents, stack)
        supplies = {
            kind: NodeSupply(
                kind,
                provider,
                partial(nodes.of_kind, kind),
                inbox.put,
                partial(incidents.nodes_wanted, kind),
                room.accounts.clock,
                config.fleet.target.retry_s,
                partial(nodes.awaits, kind),
            )
            for kind, provider in room.providers.items()
        }
        driver = LearnerDriver(
            controller,
            learner,
            PublishedVersions(samples.store),
            conversations,
            room.attempt.recorder.checkpoints,
            tuple(prompt.id for prompt in materials.used),
            inbox.put,
            note,
            placed,
        )
        head = Head(
            controller=controller,
            inbox=inbox,
            conversations=conversations,
            workers=workers,
            learner=driver,
            samples=samples,
            scoring=SampleScoring(
                conversations, samples, materials.rewards, materials.prompts.by_id, inbox.put, note
            ),
            accounts=room.accounts,
            recorder=room.attempt.recorder,
            incidents=incidents,
            drains=Drains(nodes.acknowledge),
            observer=materials.observer,
            attempt=room.attempt.number,
            grid=config.evaluation.grid,
            training_pictures_every=config.metrics.training_pictures_every,
            traces=traces,
            nodes=nodes,
            supplies=supplies,
        )
        for supply in supplies.values():
            conversations.start(supply.run())
        stack.enter_context(nodes.membership)
        yield head


def _controller(materials: Materials, room: AttemptRoom) -> Controller:
    compares, prompts = bool(materials.rewards.compares_groups), materials.prompts
    plan, attempt = build.cluster_plan_of(materials.config, compares=compares), room.attempt
    if not plan.cluster.learner_moves:
        planned = {NodeId(node.name): ranks for node, ranks in room.site.learner_slots.by_node.values()}
        plan = dataclasses.replace(plan, fleet=dataclasses.replace(plan.fleet, reserved=planned))
    if attempt.newest is None:
        return Controller(plan, prompts.train, prompts.test, attempt.number)
    return restored_controller(attempt.newest.directory, plan, prompts, attempt.number)


def _workers(
    materials: Materials,
    room: AttemptRoom,
    nodes: ClusterNodes,
    conversations: Conversations,
    inbox: Inbox,
    incidents: IncidentRecorder,
    traces: TraceCollector,
    stack: AsyncExitStack,
) -> WorkerPool:
    config, note = materials.config, materials.observer.note
    shared = f"{config.name[:_NAME_MAX]}-{secrets.token_hex(4)}"
    starter = ActorStarter(
        dump_config(pinned(config)),
        room.store,
        room.meeting,
        shared,
        nodes.placements,
        nodes.log_tail,
        traces.steps_of,
    )
    fleet = config.fleet
    pool = WorkerPool(
        conversations,
        starter,
        inbox.put,
        note,
        partial(incidents.record, Incident.WORKER_CRASHED),
        fleet.heartbeat_s,
        fleet.start_s,
    )
    # On this machine only; other nodes are cleaned up by the next run.
    stack.callback(shutil.rmtree, cache_directory(shared), ignore_errors=True)
    stack.callback(pool.close)
    return pool


def _learner(
    materials: Materials,
    room: AttemptRoom,
    nodes: ClusterNodes,
    incidents: IncidentRecorder,
    stack: AsyncExitStack,
) -> tuple[LearnerGroup, Callable[[], Mapping[NodeId, int]] | None]:
    config, fleet, token = materials.config, materials.config.fleet, secrets.token_hex(16)
    token_file = write_token(config, token)
    stack.callback(discard, token_file)
    moves = fleet.learner_moves

    async def wait_for_room() -> None:
        if nodes.learner_waits:
            incidents.learner_waits(fleet.fewest_ranks, even=config.learner.shard == "node")
        await nodes.learner_room()

    launcher = RayLauncher(
        dump_config(pinned(config)),
        nodes.learner_placements,
        room.store,
        token,
        room.directory.attempts,
        room=wait_for_room if moves else None,
        spares=nodes.spares,
        yield_s=fleet.answer_s,
        profiled_steps=materials.profiled_steps,
    )
    learner = LearnerGroup(
        launcher,
        materials.used,
        materials.observer.note,
        Deadlines(start_s=fleet.start_s, answer_s=fleet.learner_s, step_s=fleet.lease_s),
    )
    stack.push_async_callback(asyncio.to_thread, launcher.close)
    stack.push_async_callback(learner.stop)

    def placed() -> Mapping[NodeId, int]:
        ranks = nodes.ranks_by_machine(launcher.nodes_of(learner.working_life))
        incidents.learner_placed(nodes.prices_of(ranks), sum(ranks.values()), fleet.learner_ranks)
        return ranks

    return learner, placed if moves else None
