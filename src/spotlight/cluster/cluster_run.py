"""Run a configuration on a Ray cluster, from validation to summary.

    check ─► run directory ─► join or start Ray ─► blob store, learner, rewards ─► head ─► export

Nodes may join and leave at any time. Re-running the same command resumes at the newest complete checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import ray

from spotlight.cluster.assembly import AttemptRoom, Materials, assembled
from spotlight.cluster.billing import ClusterAccounts
from spotlight.cluster.blobs.blob_server import start_blob_store
from spotlight.cluster.cluster_nodes import Site
from spotlight.cluster.learner.learner_rank import LOOPBACK
from spotlight.cluster.local.emulation import (
    require_learner_room,
    reserved_slots,
    spot_slots,
    spot_trace,
)
from spotlight.cluster.nodes.listing import LearnerSlots, read_view, require_usable
from spotlight.cluster.nodes.node_list import list_nodes
from spotlight.cluster.remote_calls import RayLostError
from spotlight.cluster.scaling.open_providers import open_providers
from spotlight.cluster.scorers.remote_scorer import RemoteScorer, ScorerNodes
from spotlight.cluster.scorers.scorer_places import placed_by_ray, require_places, scorer_nodes
from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.rollout.sequence_parallel.rendezvous import serve
from spotlight.runtime.assembly import components as build
from spotlight.runtime.attempt import RunResult, open_attempt
from spotlight.runtime.conclusion import conclude_run
from spotlight.runtime.observer import Observer
from spotlight.runtime.preflight import finished_note, finished_summary, require_disk, require_startable
from spotlight.runtime.recorder import LEARNER_FOLDER
from spotlight.runtime.resuming.course import Resuming
from spotlight.runtime.signals import stopping_gracefully
from spotlight.scheduler.types import NodeKind
from spotlight.store.run_directory import RunDirectory
from spotlight.training.sharding import Ranks
from spotlight_fleet.connection import connected
from spotlight_fleet.emulated.local_cluster import local_cluster
from spotlight_fleet.emulated.market import LocalMachines, Market
from spotlight_fleet.providers.emulated_provider import EmulatedProvider
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.pool.reward_lane import ScorerStarter
from spotlight_rewards.pool.reward_process import RewardProcess, Scorer
from spotlight_rewards.reward_config import RewardConfig


def train_on_cluster(
    config: RunConfig, observer: Observer, spent_s: float = 0.0, *, profiled_steps: int = 0
) -> RunResult:
    """Start or resume a run on a Ray cluster; see :func:`spotlight.runtime.run.train`.

    Args:
        profiled_steps: to be traced, of one worker's rollouts and of rank 0's training.

    Raises:
        ConfigError, PromptFileError, RewardSetupError, RewardInputError: before any work; ConfigError also
            for an unusable cluster.
        ModelError, TrainingError, LearnerError: raised by the learner.
        StoreError: the run directory or the disk failed.
    """
    began_s, began_here_s = time.time() - spent_s, time.monotonic() - spent_s
    if (summary := finished_summary(config)) is not None:
        observer.note(finished_note(config, summary))
        return RunResult(config.runs_dir / config.name)
    with ExitStack() as stack:
        prompts = _read_prompts(config)
        # Rewards first, because their errors are the user's; before Ray is started or joined, if possible.
        site = stack.enter_context(_joined(config, observer)) if placed_by_ray(config) else None
        starter = None if site is None else _starter(config, site, observer)
        rewards = stack.enter_context(build.make_reward_pool(config, merges=True, starter=starter))
        used = prompts.used(config)
        rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
        directory = stack.enter_context(
            RunDirectory.open(config.runs_dir, config.name, dump_config(config), Resuming(config))
        )
        if site is None:
            site = stack.enter_context(_joined(config, observer))
        materials = Materials(config, observer, prompts, used, rewards, profiled_steps)
        accounts = ClusterAccounts(time.monotonic, observer)
        accounts.written_s = began_here_s  # setup so far belongs to the attempt
        with open_attempt(
            config,
            directory,
            prompts,
            Ranks(),
            workers={},
            began_s=began_s,
            scored_by=materials.rewards.scored_by,
            observer=observer,
            account=accounts.finish,
        ) as attempt:
            materials.rewards.log_to(directory.attempts, prefix="reward")
            materials.rewards.tell(observer.note)
            with _blob_store(config, directory, site.here) as store:
                served, meeting = serve(site.host)  # served while referenced
                providers = open_providers(config, directory, site.emulated, observer.note)
                room = AttemptRoom(site, directory, attempt, accounts, store, meeting, providers)
                attempt.result = asyncio.run(_drive(materials, room))
                del served
        return attempt.result


def _read_prompts(config: RunConfig) -> build.Prompts:
    if config.fleet.address is None:
        spot_trace(config.fleet)  # raises ConfigError early if the trace is unreadable
        require_learner_room(config)
    prompts = require_startable(config)
    require_disk(config, prompts)
    return prompts


def _starter(config: RunConfig, site: Site, observer: Observer) -> ScorerStarter:
    rows = list_nodes()
    require_places(
        config.rewards, config.reward_policy.workers or 1, scorer_nodes(rows, read_view(rows), site.here)
    )
    nodes = ScorerNodes(site.here, site.learner_slots, observer.note)
    placed = {reward.curve for reward in placed_by_ray(config)}
    directory = str(build.run_directory_of(config))

    def start(reward: RewardConfig, start_deadline_s: float, replica: int, replicas: int) -> Scorer:
        if reward.curve in placed:
            return RemoteScorer(nodes, reward, start_deadline_s, replica, replicas, directory)
        return RewardProcess(reward, start_deadline_s, replica, replicas, run_directory=directory)

    return start


# -- the cluster ---------------------------------------------------------------------------------------


@contextmanager
def _joined(config: RunConfig, observer: Observer) -> Iterator[Site]:
    fleet = config.fleet
    with ExitStack() as stack:
        address, emulated, stop = fleet.address, None, _nothing
        if address is None:
            observer.note("starting Ray on this machine, bound to 127.0.0.1")
            emulated = stack.enter_context(local_cluster(reserved_slots(fleet)))
            address, stop = emulated.address, emulated.stop
        connection = stack.enter_context(connected(address, stop))
        here = ray.get_runtime_context().get_node_id()
        view = read_view(list_nodes())
        require_usable(view, fleet.reserved_ranks, f"the cluster at {address}", spot_head=fleet.head == "any")
        nodes = list(view.nodes.values())
        head_node = next((node for node in nodes if node.ray_id == here), None)
        if head_node is None or (head_node.kind is not NodeKind.RESERVED and fleet.head == "reserved"):
            problem = Problem(
                "the node of this process",
                "a spot node" if head_node else "a node that is neither reserved nor spot",
                "a reserved node, for the head" if fleet.head == "reserved" else "a node of the run",
                "Run this command on a reserved node (ray start --resources='{\"spotlight_reserved\": 1}'), "
                "or on any if the run outlives it (fleet.head=any).",
            )
            raise ConfigError(f"the cluster at {address}", [problem])
        host = head_node.address if emulated is None else LOOPBACK
        threads = None if emulated is None else _threads(config)
        slots = LearnerSlots.plan(fleet.reserved_ranks, nodes)
        yield Site(here, host, nodes, emulated, threads, slots, connection.give_up)


def _nothing() -> None:
    """A cluster that others started goes on."""


def _threads(config: RunConfig) -> int:
    local = config.fleet.local
    if local.threads is not None:
        return local.threads
    beside = config.fleet.learner_ranks if config.pipeline.trainers_generate else 0
    return max(1, (os.cpu_count() or 1) // max(1, local.rollout_slots + spot_slots(config.fleet) + beside))


# -- the run -------------------------------------------------------------------------------------------


async def _drive(materials: Materials, room: AttemptRoom) -> RunResult:
    config, site, attempt = materials.config, room.site, room.attempt
    checkpoint = None if attempt.newest is None else attempt.newest.directory / LEARNER_FOLDER
    async with assembled(materials, room) as head:
        with ExitStack() as stack:
            if site.emulated is not None:
                spot = room.providers.get(NodeKind.SPOT)
                taken = spot if isinstance(spot, EmulatedProvider) else None
                stack.enter_context(Market(spot_trace(config.fleet), taken or LocalMachines(site.emulated)))
            # From a signal handler, only this wakes a loop that waits.
            stop = partial(asyncio.get_running_loop().call_soon_threadsafe, head.request_stop)
            stack.enter_context(stopping_gracefully(stop, materials.observer))
            weights = await head.conversations.supervise(head.run(checkpoint))
            if weights is not None:
                conclude_run(config, attempt.recorder, weights, lambda: room.accounts.write(attempt.recorder))
            return RunResult(room.directory.path, head.error, head.stopped)


@contextmanager
def _blob_store(config: RunConfig, directory: RunDirectory, node: str) -> Iterator[Any]:
    actor = start_blob_store(directory.in_flight, int(config.fleet.store_gb * 2**30), node=node)
    patience_s = 10.0
    try:
        yield actor
    except RayLostError:
        patience_s = 0.0
        raise
    finally:
        with suppress(ray.exceptions.RayError):
            ray.get(actor.close.remote(), timeout=patience_s)
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)
