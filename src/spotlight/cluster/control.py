"""One attempt on a cluster, put together: controller, workers, learner, rewards, keeper, and the nodes they
are on.

Nodes that Ray has become nodes of the controller here, and what the controller says of them finds its way
back.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight.cluster.drains import Drains
from spotlight.cluster.head import Head, Parts
from spotlight.cluster.learner.learner_actor import Placement, RayLauncher
from spotlight.cluster.learner.learner_group import Deadlines, LearnerGroup
from spotlight.cluster.learner.learner_rank import write_token
from spotlight.cluster.local.emulation import SIGTERM_GRACE_S
from spotlight.cluster.local.local_cluster import LocalCluster
from spotlight.cluster.loop import Calls
from spotlight.cluster.nodes.facts import Gpu, NodeFacts, gather
from spotlight.cluster.nodes.listing import (
    SHARE,
    SLOT,
    Part,
    RayNode,
    gpus_told,
    mixed_gpus,
    train_only,
    typed,
    unlike,
)
from spotlight.cluster.nodes.node_membership import Membership, MembershipSettings
from spotlight.cluster.nodes.node_prices import Fleet, Prices
from spotlight.cluster.nodes.notice_watch import NoticeSettings
from spotlight.cluster.sample_scoring import Scoring
from spotlight.cluster.workers.worker_actor import ActorStarter, Berth
from spotlight.cluster.workers.worker_pool import WorkerPool
from spotlight.config.errors import Problem
from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.rewards.reward_pool import RewardPool
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.runtime.attempt import Attempt
from spotlight.runtime.build import parts as build
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import CONTROLLER_FILE, LEARNER_FOLDER
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import NodeId, Prompt, PromptId
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.run_directory import RunDirectory
from spotlight.weights.node_cache import cache_directory

LOOPBACK = "127.0.0.1"
LOGS_FOLDER = "attempts"
_NAME_MAX = 24
"""Of a run's name in those of its folders on nodes: paths of sockets are limited to some hundred bytes."""


@dataclass(frozen=True, slots=True)
class Materials:
    """What was checked before the run directory is touched."""

    config: RunConfig
    observer: Observer
    prompts: build.Prompts
    rewards: RewardPool

    @property
    def by_id(self) -> dict[PromptId, Prompt]:
        """All prompts of the run."""
        return {prompt.id: prompt for prompt in (*self.prompts.train, *self.prompts.test)}


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster that this process has joined.

    Attributes:
        here: Ray's id of this process's node.
        host: its address, as others reach it.
        nodes: those that were there.
        emulated: the cluster, if it is one of this machine.
        threads: of a worker on a CPU slot, where all slots share this machine.
    """

    here: str
    host: str
    nodes: Sequence[RayNode]
    emulated: LocalCluster | None
    threads: int | None


class Control:
    """Puts the parts of the head together, and tells it of nodes. The head's thread but for the listener."""

    def __init__(
        self,
        materials: Materials,
        site: Site,
        head: Head,
        keeper: Any,
        meeting: Address,
        attempt: Attempt,
        directory: RunDirectory,
    ) -> None:
        config, fleet = materials.config, materials.config.fleet
        self._config, self._site, self._head, self._attempt = config, site, head, attempt
        self._observer, self._prompts = materials.observer, materials.by_id
        prices = Prices(fleet.price_usd_h, fleet.spot.price_usd_h)
        ranks_roll_out = config.pipeline.trainers_generate
        self._fleet = Fleet.plan(fleet.learner_ranks, prices, site.nodes, ranks_roll_out=ranks_roll_out)
        # Read in the launcher's thread, hence replaced as a whole and never changed.
        self._learner_slots = self._fleet.learner_slots
        self._berths: dict[NodeId, Berth] = {}
        self._rolling: set[NodeId] = set()
        self._gpu: Gpu | None = None
        run = secrets.token_hex(4)
        token = secrets.token_hex(16)
        self._token_file = write_token(config, token)
        text = dump_config(config)
        calls = Calls(head.loop)
        settings = NoticeSettings(*_notice_settings(config))
        self.membership = Membership(self, gather(), MembershipSettings(settings))
        shared = f"{config.name[:_NAME_MAX]}-{run}"
        self._left = cache_directory(shared)
        self.workers = self._pool(
            calls, ActorStarter(text, keeper, meeting, shared, self._berths, self._tail)
        )
        self._launcher = RayLauncher(
            text, fleet.learner_ranks, self._placements, keeper, token, directory.path / LOGS_FOLDER
        )
        learner = LearnerGroup(
            self._launcher, head.loop, head, Deadlines(start_s=fleet.start_s, answer_s=fleet.learner_s)
        )
        self.learner = learner
        controller = self._controller(materials.prompts)
        scoring = Scoring(
            keeper,
            calls,
            materials.rewards,
            self._prompts,
            head.tell,
            head.holds,
            head.scored,
            materials.observer.note,
            head.fail,
        )
        self.parts = Parts(
            controller=controller,
            calls=calls,
            workers=self.workers,
            learner=learner,
            scoring=scoring,
            keeper=keeper,
            book=attempt.book,
            drains=Drains(self._emptied),
            attempt=attempt.number,
            prompts=tuple(prompt.id for prompt in materials.prompts.used(config)),
            grid=config.evaluation.grid,
        )

    def _pool(self, calls: Calls, starter: ActorStarter) -> WorkerPool:
        head, fleet = self._head, self._config.fleet
        return WorkerPool(
            calls,
            starter,
            head.tell,
            self._observer.note,
            lambda worker, why: head.befall(Incident.WORKER_CRASHED, worker, why),
            fleet.heartbeat_s,
            fleet.start_s,
        )

    def _controller(self, prompts: build.Prompts) -> Controller:
        config, newest = self._config, self._attempt.newest
        plan = build.cluster_plan_of(config)
        term = self._attempt.number
        if newest is None:
            return Controller(plan, prompts.train, prompts.test, term)
        snapshot = json.loads((newest.directory / CONTROLLER_FILE).read_text())
        return Controller.restore(plan, prompts.train, prompts.test, snapshot, term)

    @property
    def begin(self) -> Path | None:
        """The learner's state to begin from."""
        newest = self._attempt.newest
        return None if newest is None else newest.directory / LEARNER_FOLDER

    def close(self) -> None:
        """End all processes."""
        self.learner.stop()
        self._launcher.close()
        self.workers.close()
        # On this machine; on a cluster's other nodes the next run does it.
        shutil.rmtree(self._left, ignore_errors=True)
        self._token_file.unlink(missing_ok=True)

    # -- nodes: called in the membership's thread -----------------------------------------------------

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._join, node, facts)

    def lost(self, node: RayNode) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._lose, node)

    def noticed(self, node: RayNode, remaining_s: float, detail: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        deadline_s = self._head.clock() + remaining_s
        self._soon(self._tell_all, node, lambda name: ev.NodeNoticed(name, deadline_s))

    def notice_cancelled(self, node: RayNode, detail: str) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._tell_all, node, ev.NoticeCancelled)

    def refused(self, problem: Problem) -> None:
        """See :class:`spotlight.cluster.nodes.node_membership.Listener`."""
        self._soon(self._observer.note, f"a node is not used: {problem}")

    def _soon(self, then: Callable[..., object], *args: Any) -> None:
        self._head.loop.call_soon_threadsafe(then, *args)

    # -- nodes: the head's thread ----------------------------------------------------------------------

    def _join(self, node: RayNode, facts: NodeFacts) -> None:
        node = typed(node, facts)
        parts = self._fleet.join(node)
        self._learner_slots = self._fleet.learner_slots
        if self._config.fleet.sequence_parallel.degrees[-1] > 1 and (problem := mixed_gpus(node, facts)):
            self._observer.note(f"the slots of a node do not roll out: {problem}")
            parts = tuple(train_only(part) for part in parts if part.node.trains)
        self._note_type(node, facts)
        for part in parts:
            self._berths[part.node.id] = self._berth(node, part)
            if part.node.rolls_out:
                self._rolling.add(part.node.id)
            self._head.tell(ev.NodeJoined(part.node))
        if not self._rolling:
            self._observer.note("waiting for nodes that roll out")

    def _berth(self, node: RayNode, part: Part) -> Berth:
        shared = part.node.trains and part.node.rolls_out
        # Ray gives a process whichever GPU has room; a rank and the worker beside it must have the same.
        first_gpu = part.first_slot if node.gpus and self._fleet.ranks_roll_out else None
        return Berth(node.ray_id, node.gpus, self._site.threads, SHARE if shared else 1.0, first_gpu)

    def _note_type(self, node: RayNode, facts: NodeFacts) -> None:
        """Results on another type of GPU differ by rounding, and it may hold less: people should know."""
        if not (node.gpus and facts.gpus):
            return
        self._gpu = self._gpu or facts.gpus[0]
        if any(unlike(gpu, self._gpu) for gpu in facts.gpus):
            self._observer.note(f"{node.name} brings {gpus_told(facts)}: it takes what its memory holds")

    def _lose(self, node: RayNode) -> None:
        for name in self._fleet.lose(node.ray_id):
            self._rolling.discard(name)
            self._berths.pop(name, None)
            self._head.tell(ev.NodeLost(name))
        self._learner_slots = self._fleet.learner_slots

    def _tell_all(self, node: RayNode, event: Callable[[NodeId], ev.Event]) -> None:
        for name in self._fleet.known(node.ray_id):
            self._head.tell(event(name))

    def _emptied(self, node: NodeId, seconds: float) -> None:
        self._head.drained(node, seconds)
        if (host := self._fleet.host_of(node)) is not None:
            self.membership.acknowledge(host)

    def _placements(self) -> list[Placement]:
        """Where the learner's ranks go now; called in the launcher's thread."""
        beside = self._fleet.ranks_roll_out
        share = SHARE if beside else 1.0
        placements = [
            Placement(
                ray_id,
                LOOPBACK if self._site.emulated else node.address,
                share if node.gpus else 0.0,
                {} if node.gpus else {SLOT: share},
                None if self._site.threads is None else max(1, self._learner_threads()),
                slot if node.gpus and beside else None,
            )
            for ray_id, (node, count) in self._learner_slots.items()
            for slot in range(count)
        ]
        if len(placements) < self._fleet.ranks:
            raise LookupError(f"room for {len(placements)} of {self._fleet.ranks} learner ranks")
        return placements

    def _learner_threads(self) -> int:
        return (os.cpu_count() or 1) // self._fleet.ranks

    def _tail(self, node: NodeId, actor: str, then: Callable[[str], None]) -> None:
        host = self._fleet.host_of(node)
        if host is None:
            self._soon(then, "")
            return

        def ask() -> None:
            self._soon(then, self.membership.log_tail(host, None, actor))

        threading.Thread(target=ask, name="log tail", daemon=True).start()


def _notice_settings(config: RunConfig) -> tuple[Any, str | None, float | None]:
    fleet = config.fleet
    if fleet.address is None:  # emulated nodes are told by SIGTERM, and nobody else's service is asked
        return "none", None, SIGTERM_GRACE_S if fleet.spot.notice_s is None else fleet.spot.notice_s
    return fleet.notices.cloud, fleet.notices.endpoint, fleet.notices.sigterm_grace_s
