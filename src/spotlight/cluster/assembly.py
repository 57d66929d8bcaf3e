"""Assembles one attempt on a cluster: controller, workers, learner, rewards, blob store and nodes."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.cluster_accounts import ClusterAccounts
from spotlight.cluster.cluster_nodes import ClusterNodes, Site
from spotlight.cluster.drains import Drains
from spotlight.cluster.head import Head, HeadParts
from spotlight.cluster.incidents import IncidentRecorder
from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.learner.learner_rank import write_token
from spotlight.cluster.learner.life import Deadlines
from spotlight.cluster.learner.ray_launcher import RayLauncher
from spotlight.cluster.learner.spare_workers import SpareWorkers
from spotlight.cluster.learner_driver import LearnerDriver, Places, PublishedVersions
from spotlight.cluster.model_files.model_fetch import pinned
from spotlight.cluster.nodes.on_demand_nodes import (
    CommandMachines,
    EmulatedMachines,
    OnDemandMachines,
    OnDemandNodes,
)
from spotlight.cluster.remote_calls import Conversations, Inbox
from spotlight.cluster.sample_scoring import AcceptedSamples, SampleScoring
from spotlight.cluster.scaling.node_notes import NodeNotes
from spotlight.cluster.scaling.node_provider import SpotProvider
from spotlight.cluster.scaling.run_scaling import make_scaler
from spotlight.cluster.scaling.spot_scaler import SpotScaler
from spotlight.cluster.trace_collector import TraceCollector
from spotlight.cluster.workers.worker_actor import ActorStarter
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.assembly import components as build
from spotlight.runtime.attempt import Attempt
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import CONTROLLER_FILE
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.learner.on_demand_policy import OnDemandPolicy
from spotlight.store.run_directory import RunDirectory
from spotlight.weights.node_cache import cache_directory
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.pool.reward_pool import RewardPool

LOGS_FOLDER = "attempts"
ON_DEMAND_NOTES = "on-demand-nodes.json"
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

    @property
    def by_id(self) -> dict[PromptId, Prompt]:
        """All prompts of the run."""
        return {prompt.id: prompt for prompt in (*self.prompts.train, *self.prompts.test)}


@dataclass(frozen=True, slots=True)
class AttemptRoom:
    """An attempt's surroundings.

    Attributes:
        meeting: rendezvous store of the sequence-parallel groups.
        provider: of spot nodes; None: the run neither adds nor drops any.
    """

    site: Site
    directory: RunDirectory
    attempt: Attempt
    accounts: ClusterAccounts
    store: Any
    meeting: Address
    provider: SpotProvider | None


@asynccontextmanager
async def assembled(materials: Materials, room: AttemptRoom) -> AsyncIterator[Head]:
    """A head with all its parts; leaving the block ends all processes."""
    config, note = materials.config, materials.observer.note
    controller = _controller(materials, room.attempt)
    inbox, conversations = Inbox(), Conversations()
    samples = AcceptedSamples(BlobClient(room.store))
    incidents = IncidentRecorder(room.accounts.clock, note, room.attempt.recorder.ledger, controller.cluster)
    nodes = ClusterNodes(config, room.site, inbox.put, conversations.fail, note, room.accounts.clock)
    traces = TraceCollector(samples.store, room.directory.profile, note, materials.profiled_steps)
    async with AsyncExitStack() as stack:
        workers = _workers(materials, room, nodes, conversations, inbox, incidents, traces, stack)
        if config.fleet.learner_moves:
            nodes.spares = SpareWorkers(workers.starter.kill, nodes.learner_ranks_at)
            stack.callback(nodes.spares.close)
        learner, places = await _learner(materials, room, nodes, incidents, stack)
        if config.fleet.learner_placement == "spot_then_on_demand":
            nodes.on_demand = _on_demand(config, room, nodes, incidents)
            conversations.start(nodes.on_demand.run())
        else:
            notes = NodeNotes(room.directory.path / ON_DEMAND_NOTES)
            notes.report("fleet.learner_placement=spot_then_on_demand", note)
        nodes.scaler = _scaler(config, room, nodes, controller, incidents)
        driver = LearnerDriver(
            controller,
            learner,
            PublishedVersions(samples.store),
            conversations,
            room.attempt.recorder.checkpoints,
            tuple(prompt.id for prompt in materials.used),
            inbox.put,
            note,
            places,
        )
        parts = HeadParts(
            controller=controller,
            inbox=inbox,
            conversations=conversations,
            workers=workers,
            learner=driver,
            samples=samples,
            scoring=SampleScoring(
                conversations, samples, materials.rewards, materials.by_id, inbox.put, note
            ),
            accounts=room.accounts,
            recorder=room.attempt.recorder,
            incidents=incidents,
            drains=Drains(nodes.acknowledge, nodes.parts),
            observer=materials.observer,
            attempt=room.attempt.number,
            grid=config.evaluation.grid,
            traces=traces,
            spares=nodes.spares,
            scaler=nodes.scaler,
        )
        if nodes.scaler is not None:
            conversations.start(nodes.scaler.run())
        stack.enter_context(nodes.membership)
        yield Head(parts)


def _controller(materials: Materials, attempt: Attempt) -> Controller:
    compares, prompts = bool(materials.rewards.compares_groups), materials.prompts
    plan = build.cluster_plan_of(materials.config, compares=compares)
    if attempt.newest is None:
        return Controller(plan, prompts.train, prompts.test, attempt.number)
    snapshot = json.loads((attempt.newest.directory / CONTROLLER_FILE).read_text())
    return Controller.restore(plan, prompts.train, prompts.test, snapshot, attempt.number)


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
        incidents.worker_crashed,
        fleet.heartbeat_s,
        fleet.start_s,
        nodes.worker_holds,
    )
    # On this machine only; other nodes are cleaned up by the next run.
    stack.callback(shutil.rmtree, cache_directory(shared), ignore_errors=True)
    stack.callback(pool.close)
    return pool


async def _learner(
    materials: Materials,
    room: AttemptRoom,
    nodes: ClusterNodes,
    incidents: IncidentRecorder,
    stack: AsyncExitStack,
) -> tuple[LearnerGroup, Places | None]:
    config, fleet, token = materials.config, materials.config.fleet, secrets.token_hex(16)
    token_file = write_token(config, token)
    stack.callback(token_file.unlink, missing_ok=True)
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
        room.directory.path / LOGS_FOLDER,
        room=wait_for_room if moves else None,
        spares=nodes.spares,
        yield_s=fleet.answer_s,
        profiled_steps=materials.profiled_steps,
    )
    learner = LearnerGroup(
        launcher,
        materials.used,
        materials.observer.note,
        Deadlines(start_s=fleet.start_s, answer_s=fleet.learner_s),
    )
    stack.push_async_callback(asyncio.to_thread, launcher.close)
    stack.push_async_callback(learner.stop)
    if not moves:
        return learner, None
    places = _MovingPlaces(nodes, launcher, learner, incidents)
    nodes.no_place = places.left
    return learner, places


def _scaler(
    config: RunConfig,
    room: AttemptRoom,
    nodes: ClusterNodes,
    controller: Controller,
    incidents: IncidentRecorder,
) -> SpotScaler | None:
    if room.provider is None:
        return None
    ledger = room.attempt.recorder.ledger
    return make_scaler(
        config,
        room.directory,
        room.provider,
        nodes,
        controller,
        room.accounts,
        ledger,
        incidents,
        room.site.nodes,
    )


def _on_demand(
    config: RunConfig, room: AttemptRoom, nodes: ClusterNodes, incidents: IncidentRecorder
) -> OnDemandNodes:
    fleet, settings, emulated = config.fleet, config.fleet.on_demand, room.site.emulated
    machines: OnDemandMachines
    if emulated is not None:
        machines = EmulatedMachines(emulated)
    else:
        assert settings.start is not None
        assert settings.stop is not None
        machines = CommandMachines(settings.start, settings.stop, fleet.start_s)
    return OnDemandNodes(
        OnDemandPolicy(settings.after_s, settings.back_after_s, fleet.start_s),
        machines,
        nodes,
        room.accounts.clock,
        slots=fleet.learner_ranks,
        price_usd_h=fleet.learner_ranks * fleet.price_usd_h,
        move_s=fleet.start_s + fleet.learner_s,
        record=incidents.on_demand,
        notes=None if emulated is not None else NodeNotes(room.directory.path / ON_DEMAND_NOTES),
    )


@dataclass(frozen=True, slots=True)
class _MovingPlaces:
    nodes: ClusterNodes
    launcher: RayLauncher
    learner: LearnerGroup
    incidents: IncidentRecorder

    def lost(self) -> None:
        self.nodes.learner_lost()

    def started(self) -> int:
        at = self.launcher.nodes_of(self.learner.working_life)
        ranks = sum(at.values())
        self.incidents.learner_placed(self.nodes.learner_started(at), ranks, self.nodes.places.ranks)
        return ranks

    def second_failed(self) -> None:
        self.nodes.learner_stays()

    def left(self, ray_id: str) -> None:
        """A second learner that has no place there any more would keep workers from starting."""
        life = self.learner.second_life
        if life is not None and ray_id in self.launcher.nodes_of(life):
            self.learner.end_second("its nodes are for something else")
