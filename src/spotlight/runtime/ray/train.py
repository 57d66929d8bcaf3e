"""A run on a cluster, from its configuration to its summary.

    check ─► run directory ─► Ray: join, or start one here ─► keeper, learner, rewards ─► head's loop ─► export

Nodes come and go meanwhile. Re-running the same command resumes at the newest whole checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from spotlight.config.contradictions import batch_problems
from spotlight.config.errors import ConfigError, Problem
from spotlight.config.load import dump_config
from spotlight.config.schema import RESUMABLE_KEYS, RunConfig
from spotlight.core import events as ev
from spotlight.core.controller import Controller
from spotlight.core.types import NodeId, NodeKind, Prompt, PromptId
from spotlight.rewards.pool import RewardPool
from spotlight.rollout.rendezvous import Address, serve
from spotlight.runtime import build
from spotlight.runtime.attempt import Attempt, RunResult, open_attempt, stopping_gracefully
from spotlight.runtime.book import CONTROLLER_FILE, LEARNER_FOLDER
from spotlight.runtime.disk import require_disk
from spotlight.runtime.finished import finished_summary
from spotlight.runtime.observer import Observer
from spotlight.runtime.outcome import conclude_run
from spotlight.runtime.ray.connection import connected
from spotlight.runtime.ray.drains import Drains
from spotlight.runtime.ray.emulation import SIGTERM_GRACE_S, reserved_slots, spot_slots, spot_trace
from spotlight.runtime.ray.facts import NodeFacts, gather
from spotlight.runtime.ray.fleet import Fleet, Prices
from spotlight.runtime.ray.head import Head, Parts
from spotlight.runtime.ray.keeper import start_keeper
from spotlight.runtime.ray.learner_actor import Placement, RayLauncher
from spotlight.runtime.ray.learner_group import Deadlines, LearnerGroup
from spotlight.runtime.ray.learner_rank import write_token
from spotlight.runtime.ray.local import LocalCluster, local_cluster
from spotlight.runtime.ray.loop import Calls, Loop
from spotlight.runtime.ray.market import LocalMachines, Market
from spotlight.runtime.ray.membership import Membership, MembershipSettings
from spotlight.runtime.ray.nodes import SLOT, RayNode, read_view, require_usable
from spotlight.runtime.ray.notice_watch import NoticeSettings
from spotlight.runtime.ray.scoring import Scoring
from spotlight.runtime.ray.worker_actor import ActorStarter, Berth
from spotlight.runtime.ray.workers import WorkerPool
from spotlight.store.run_directory import RunDirectory
from spotlight.store.schema import Incident
from spotlight.store.sinks import require_wandb
from spotlight.training.sharding import Ranks

KEEPER_FOLDER, LOGS_FOLDER = "in-flight", "attempts"
LOOPBACK = "127.0.0.1"
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class _Materials:
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
class _Site:
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


def train_on_cluster(config: RunConfig, observer: Observer) -> RunResult:
    """Run, or resume, a configuration on a Ray cluster; see :func:`spotlight.runtime.train.train`.

    Raises:
        ConfigError, PromptFileError, RewardSetupError, RewardInputError: before any work; ConfigError also for
            a cluster that cannot be used.
        ModelError, TrainingError, LearnerError: what the learner met with.
        StoreError: the run directory or the disk.
    """
    began_s = time.time()
    if (summary := finished_summary(config)) is not None:
        observer.note(f"finished before: {summary.validation[-1].iteration} iterations are trained")
        return RunResult(config.runs_dir / config.name, summary, None, stopped=False)
    with ExitStack() as stack:
        materials = _gather(config, observer, stack)
        for note in materials.prompts.notes(config):
            observer.note(note)
        require_disk(config)
        directory = stack.enter_context(
            RunDirectory.open(config.runs_dir, config.name, dump_config(config), RESUMABLE_KEYS)
        )
        site = stack.enter_context(_joined(config, observer))
        head = Head(Loop(), observer)
        with open_attempt(
            config,
            directory,
            materials.by_id,
            Ranks(),
            workers={},
            began_s=began_s,
            observer=observer,
            account=head.close_account,
        ) as attempt:
            attempt.result = _drive(materials, site, head, attempt, directory)
        return attempt.result


def _gather(config: RunConfig, observer: Observer, stack: ExitStack) -> _Materials:
    ranks = config.fleet.learner_ranks
    if problems := list(batch_problems(config, ranks)):
        raise ConfigError(f"this configuration on {ranks} learner ranks", problems)
    if config.metrics.wandb is not None:
        require_wandb()
    prompts = build.load_prompts(config)
    rewards = stack.enter_context(build.make_reward_pool(config))
    used = prompts.used(config)
    rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
    return _Materials(config, observer, prompts, rewards)


# -- the cluster ---------------------------------------------------------------------------------------


@contextmanager
def _joined(config: RunConfig, observer: Observer) -> Iterator[_Site]:
    """This process is the driver of a cluster that can be used, within the block."""
    fleet = config.fleet
    with ExitStack() as stack:
        address, emulated = fleet.address, None
        if address is None:
            observer.note("starting Ray on this machine, bound to 127.0.0.1")
            emulated = stack.enter_context(local_cluster(reserved_slots(fleet)))
            address = emulated.address
        stack.enter_context(connected(address))
        here = ray.get_runtime_context().get_node_id()
        view = read_view(ray.nodes())
        require_usable(view, fleet.learner_ranks, f"the cluster at {address}")
        nodes = list(view.nodes.values())
        head_node = next((node for node in nodes if node.ray_id == here), None)
        if head_node is None or head_node.kind is not NodeKind.RESERVED:
            problem = Problem(
                "the node of this process",
                "a spot node" if head_node else "a node that is neither reserved nor spot",
                "a reserved node: the controller and all progress live there",
                "Run this command on a reserved node (ray start --resources='{\"spotlight_reserved\": 1}').",
            )
            raise ConfigError(f"the cluster at {address}", [problem])
        host = head_node.address if emulated is None else LOOPBACK
        yield _Site(here, host, nodes, emulated, None if emulated is None else _threads(config))


def _threads(config: RunConfig) -> int:
    """Of each process on a CPU slot, where all share this machine's cores."""
    local = config.fleet.local
    if local.threads is not None:
        return local.threads
    return max(1, (os.cpu_count() or 1) // max(1, local.rollout_slots + spot_slots(config.fleet)))


# -- the run -------------------------------------------------------------------------------------------


def _drive(
    materials: _Materials, site: _Site, head: Head, attempt: Attempt, directory: RunDirectory
) -> RunResult:
    config = materials.config
    with ExitStack() as stack:
        keeper = start_keeper(directory.path / KEEPER_FOLDER, int(config.fleet.store_gb * 2**30), site.here)
        stack.callback(_end, keeper)
        store, meeting = serve(site.host)
        stack.callback(lambda: store)  # served for as long as this block lasts
        control = _Control(materials, site, head, keeper, meeting, attempt, directory)
        stack.callback(control.close)
        stack.enter_context(control.membership)
        if site.emulated is not None:
            stack.enter_context(Market(spot_trace(config.fleet), LocalMachines(site.emulated)))
        materials.rewards.log_to(directory.attempts, prefix="reward")
        with stopping_gracefully(head.request_stop, materials.observer):
            head.run(control.parts, control.begin)
        if head.error is not None or head.stopped:
            return RunResult(directory.path, None, head.error, head.stopped)
        weights = head.export()
        summary = conclude_run(config, attempt.book, weights, lambda: head.account(attempt.book))
        return RunResult(directory.path, summary, None, stopped=False)


class _Control:
    """Puts the parts of the head together, and tells it of nodes. The head's thread but for the listener."""

    def __init__(
        self,
        materials: _Materials,
        site: _Site,
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
        self._fleet = Fleet.plan(fleet.learner_ranks, prices, site.nodes)
        self._berths: dict[NodeId, Berth] = {}
        run = secrets.token_hex(4)
        token = secrets.token_hex(16)
        self._token_file = write_token(config, token)
        text = dump_config(config)
        calls = Calls(head.loop)
        settings = NoticeSettings(*_notice_settings(config))
        self.membership = Membership(self, gather(), MembershipSettings(settings))
        starter = ActorStarter(
            text, keeper, meeting, f"{config.name}-{run}", _node_directory(run), self._berths, self._tail
        )
        self.workers = WorkerPool(
            calls,
            starter,
            head.tell,
            materials.observer.note,
            lambda worker, why: head.befall(Incident.WORKER_CRASHED, worker, why),
            fleet.heartbeat_s,
            fleet.start_s,
        )
        self._launcher = RayLauncher(
            text, fleet.learner_ranks, self._placements, keeper, token, directory.path / LOGS_FOLDER
        )
        learner = LearnerGroup(
            self._launcher, head.loop, head, Deadlines(start_s=fleet.start_s, answer_s=fleet.learner_s)
        )
        self.learner = learner
        controller = self._controller()
        scoring = Scoring(
            keeper,
            calls,
            materials.rewards,
            self._prompts,
            head.tell,
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
            grid=(config.evaluation.grid_prompts, config.evaluation.grid_images),
        )

    def _controller(self) -> Controller:
        config, newest, prompts = self._config, self._attempt.newest, self._prompts
        loaded = build.load_prompts(config)
        plan = build.cluster_plan_of(config)
        assert {prompt.id for prompt in (*loaded.train, *loaded.test)} == set(prompts)
        term = self._attempt.number
        if newest is None:
            return Controller(plan, loaded.train, loaded.test, term)
        snapshot = json.loads((newest.directory / CONTROLLER_FILE).read_text())
        return Controller.restore(plan, loaded.train, loaded.test, snapshot, term)

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
        self._token_file.unlink(missing_ok=True)

    # -- nodes: called in the membership's thread -----------------------------------------------------

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        """See :class:`spotlight.runtime.ray.membership.Listener`."""
        self._soon(self._join, node)

    def lost(self, node: RayNode) -> None:
        """See :class:`spotlight.runtime.ray.membership.Listener`."""
        self._soon(self._lose, node)

    def noticed(self, node: RayNode, remaining_s: float, detail: str) -> None:
        """See :class:`spotlight.runtime.ray.membership.Listener`."""
        deadline_s = self._head.clock() + remaining_s
        self._soon(self._tell_all, node, lambda name: ev.NodeNoticed(name, deadline_s))

    def notice_cancelled(self, node: RayNode, detail: str) -> None:
        """See :class:`spotlight.runtime.ray.membership.Listener`."""
        self._soon(self._tell_all, node, ev.NoticeCancelled)

    def refused(self, problem: Problem) -> None:
        """See :class:`spotlight.runtime.ray.membership.Listener`."""
        self._soon(self._observer.note, f"a node is not used: {problem}")

    def _soon(self, then: Callable[..., object], *args: Any) -> None:
        self._head.loop.call_soon_threadsafe(then, *args)

    # -- nodes: the head's thread ----------------------------------------------------------------------

    def _join(self, node: RayNode) -> None:
        for part in self._fleet.join(node):
            self._berths[part.id] = Berth(node.ray_id, node.gpus, self._site.threads)
            self._head.tell(ev.NodeJoined(part))

    def _lose(self, node: RayNode) -> None:
        for name in self._fleet.lose(node.ray_id):
            self._berths.pop(name, None)
            self._head.tell(ev.NodeLost(name))

    def _tell_all(self, node: RayNode, event: Callable[[NodeId], ev.Event]) -> None:
        for name in self._fleet.known(node.ray_id):
            self._head.tell(event(name))

    def _emptied(self, node: NodeId, seconds: float) -> None:
        self._head.drained(node, seconds)
        host = self._fleet.host_of(node)
        agent = None if host is None else self.membership.agent(host)
        if agent is not None:
            agent.acknowledge.remote()

    def _placements(self) -> list[Placement]:
        """Where the learner's ranks go now; called in the launcher's thread."""
        placements = [
            Placement(
                ray_id,
                LOOPBACK if self._site.emulated else node.address,
                1.0 if node.gpus else 0.0,
                {} if node.gpus else {SLOT: 1.0},
                None if self._site.threads is None else max(1, self._learner_threads()),
            )
            for ray_id, (node, count) in self._fleet.learner_slots.items()
            for _ in range(count)
        ]
        if len(placements) < self._fleet.ranks:
            raise LookupError(f"room for {len(placements)} of {self._fleet.ranks} learner ranks")
        return placements

    def _learner_threads(self) -> int:
        return (os.cpu_count() or 1) // self._fleet.ranks

    def _tail(self, node: NodeId, actor: str) -> str:
        host = self._fleet.host_of(node)
        agent = None if host is None else self.membership.agent(host)
        if agent is None:
            return ""
        with suppress(ray.exceptions.RayError):
            tail: str = ray.get(agent.log_tail.remote(None, actor, _TAIL_LINES), timeout=2.0)
            return tail
        return ""


def _notice_settings(config: RunConfig) -> tuple[Any, str | None, float | None]:
    fleet = config.fleet
    if fleet.address is None:  # emulated nodes are told by SIGTERM, and nobody else's service is asked
        return "none", None, SIGTERM_GRACE_S if fleet.spot.notice_s is None else fleet.spot.notice_s
    return fleet.notices.cloud, fleet.notices.endpoint, fleet.notices.sigterm_grace_s


def _node_directory(run: str) -> Path:
    return Path("/tmp") / f"spotlight-{os.getuid()}-{run}"


def _end(keeper: Any) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(keeper.close.remote(), timeout=10.0)
    with suppress(ray.exceptions.RayError):
        ray.kill(keeper)
