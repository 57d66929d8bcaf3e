"""Tracks which nodes exist: one head thread polls Ray's node list and long-polls every node's agent.

A node *joins* once its agent has reported compatible facts; an incompatible one is *refused*, once. Loss
shows in Ray's list or as a failure of the agent's pending call. The latter may mean a dead agent on a living
node, so the raylet's port is probed: if it refuses connections the node is lost, whatever Ray lists; if it is
silent, the list is polled at once and often. A dead agent on a living node is restarted with growing pauses.

Listener methods run in this thread and must be quick.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from spotlight.cluster.nodes.agent import NodeAgent
from spotlight.cluster.nodes.drain import drain_node, draining_nodes
from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE, RayNode, read_view
from spotlight.cluster.nodes.node_list import Pulse, refuses
from spotlight.cluster.remote_calls import Clock, cause_of, on_node
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId
from spotlight_fleet.facts import NodeFacts, incompatibility, read_facts
from spotlight_fleet.notices.notice_mail import Message, NoticeUpdate, read_messages
from spotlight_fleet.notices.notice_watch import NoticeSettings
from spotlight_rewards.base.errors import Problem

log = logging.getLogger("spotlight.cluster.nodes.node_membership")

Answer: TypeAlias = "ray.ObjectRef[object]"

_HANG_S = 15.0
_EAGER_S = 3.0
_EAGER_PERIOD_S = 0.05
_PAUSE_FIRST_S, _PAUSE_MOST_S = 2.0, 60.0
_CALLS_AT_ONCE = 4
_UNSTATED_S = 30.0
"""Until the end of a node that Ray drains without a deadline: the shortest notice of a cloud."""
_HELPERS = 64
"""Threads for what may wait for a node that does not answer."""


class Listener(Protocol):
    """Receives node changes."""

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        """A compatible node joined and may be used."""

    def happened(self, event: ev.Event) -> None:
        """Of a node that joined, or its loss, which may come before that."""

    def told(self, text: str) -> None:
        """What the user should know: a node is not used, once per node; Ray is silent, once per silence."""

    def ray_lost(self, why: str) -> None:
        """The Ray cluster itself is dead. Once, and last; this thread may take its time."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Timeouts and periods, in seconds.

    Attributes:
        answer_s: beyond the duration of a long poll, and before the listener is told that Ray is silent.
        dead_s: without a node list before the cluster is declared dead: less than the 60 s after which Ray
            ends this process, long enough for a GCS restart.
        start_s: for an agent to start and report facts.
        mortal_gcs: HOST:PORT of a GCS that nobody restarts: refusing connections, it is dead; empty: none.
    """

    notices: NoticeSettings
    period_s: float = 1.0
    answer_s: float = 10.0
    dead_s: float = 30.0
    start_s: float = 60.0
    mortal_gcs: str = ""


@dataclass(slots=True)
class _Watched:
    node: RayNode
    agent: ActorHandle | None = None
    facts: NodeFacts | None = None
    asked: Answer | None = None
    due_s: float = 0.0
    seen: int = 0
    failures: int = 0
    refused: bool = False
    told: bool = False
    ends_s: float = math.inf
    drained_s: float = math.inf


@dataclass(slots=True)
class _Pace:
    period_s: float
    next_s: float = 0.0
    eager_until_s: float = 0.0

    def looked(self, now_s: float) -> None:
        self.next_s = now_s + (_EAGER_PERIOD_S if now_s < self.eager_until_s else self.period_s)

    def hurry(self, now_s: float) -> None:
        self.eager_until_s, self.next_s = now_s + _EAGER_S, now_s


def start_agent(node: RayNode, settings: NoticeSettings) -> ActorHandle:
    """Start a node's agent; it lives as long as its handle, this driver and the node."""
    options = ray.remote(NodeAgent).options(
        **on_node(node.ray_id),
        max_concurrency=_CALLS_AT_ONCE,
        # It tells which GPUs Ray was started with, though it has none itself.
        runtime_env=ALL_GPUS_VISIBLE if node.gpus else None,
    )
    return options.remote(node.ray_id, node.session, asdict(settings))


def raylet_listens(node: RayNode) -> bool:
    """False if the raylet's port refuses connections; True otherwise, since silence proves nothing."""
    return not refuses(node.address, node.port)


class NodeMembership:
    """A context manager, within which this process must stay connected to Ray.

    Args:
        here: facts of the head.
        clock: the controller's.
        known: nodes that have their names already.
    """

    def __init__(
        self,
        listener: Listener,
        here: NodeFacts,
        settings: MembershipSettings,
        clock: Clock = time.monotonic,
        known: Iterable[RayNode] = (),
    ) -> None:
        self._listener, self._here, self._settings, self._clock = listener, here, settings, clock
        self._names = {node.ray_id: node.name for node in known}
        self._watched: dict[str, _Watched] = {}
        self._reported: set[str] = set()
        self._dead: set[str] = set()
        self._pace = _Pace(settings.period_s)
        self._pulse = Pulse(settings.period_s, clock)
        self._silence_told = False
        self._drains: Future[dict[str, int]] | None = None
        self._helpers = ThreadPoolExecutor(_HELPERS, "membership-helper")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __enter__(self) -> NodeMembership:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._settings.answer_s)
        self._helpers.shutdown(wait=False, cancel_futures=True)
        if ray.is_initialized():
            for watched in list(self._watched.values()):  # a thread that hangs may go on changing it
                self._dismiss(watched)

    def acknowledge(self, node: RayNode) -> None:
        """Tell the cloud that a noticed node is drained. Any thread; does not wait."""
        if (agent := self.agent(node)) is not None:
            agent.acknowledge.remote()

    def log_tail(self, node: RayNode, actor: str) -> str:
        """Last log lines of an actor (see ``agent.log_tail``), or why they are unavailable. Any thread."""
        agent = self.agent(node)
        if agent is None:
            return f"node {node.name} has no agent to ask for the log"
        try:
            return str(ray.get(agent.log_tail.remote(actor), timeout=self._settings.answer_s))
        except RayError as error:
            return f"node {node.name} does not send its log: {cause_of(error)}"

    def agent(self, node: RayNode) -> ActorHandle | None:
        """The node's agent, if it has one now. Any thread."""
        watched = self._watched.get(node.ray_id)
        return None if watched is None else watched.agent

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                # Never give up: without this thread no node change would be noticed again.
                log.exception("looking after Ray's nodes failed; trying again")
                self._stop.wait(self._settings.period_s)

    def _turn(self) -> None:
        if self._clock() >= self._pace.next_s and (rows := self._rows()) is not None:
            self._look(rows)
            self._look_at_drains()
            self._pace.looked(self._clock())
        self._start_agents()
        self._listen(max(0.0, min(self._pace.next_s - self._clock(), self._settings.period_s)))

    # -- Ray's list -----------------------------------------------------------------------------------------

    def _rows(self) -> Sequence[Mapping[str, object]] | None:
        rows, silent_s = self._pulse.rows(), self._pulse.silent_s
        if rows is not None:
            self._silence_told = False
            return rows
        if self._settings.mortal_gcs and refuses(*_parts(self._settings.mortal_gcs)):
            self._lose_ray("its GCS refuses connections")
        elif silent_s >= self._settings.dead_s:
            self._lose_ray(f"it has not listed its nodes for {silent_s:.0f} s")
        elif silent_s >= self._settings.answer_s and not self._silence_told:
            self._silence_told = True
            log.warning("Ray has not listed its nodes for %.0f s", silent_s)
            self._listener.told(
                f"Ray does not answer: it has not listed its nodes for {silent_s:.0f} s; after "
                f"{self._settings.dead_s:.0f} s the run ends, and can be resumed"
            )
        return None

    def _lose_ray(self, why: str) -> None:
        self._stop.set()  # the run ends, which takes a while: nothing is looked after, and this told once
        self._listener.ray_lost(f"Ray is dead: {why}")

    def _look(self, rows: Sequence[Mapping[str, object]]) -> None:
        names = self._names | {ray_id: watched.node.name for ray_id, watched in self._watched.items()}
        view = read_view([row for row in rows if row["NodeID"] not in self._dead], names)
        for ray_id, problem in view.problems.items():
            self._refuse(ray_id, problem)
        for watched in list(self._watched.values()):
            if watched.node.ray_id not in view.nodes:
                self._lose(watched)
        for ray_id, node in view.nodes.items():
            self._watched.setdefault(ray_id, _Watched(node))

    def _look_at_drains(self) -> None:
        """Nodes that Ray drains, but not because of our notice: its autoscaler does, KubeRay, an operator."""
        if self._drains is not None and self._drains.done():
            try:
                found = self._drains.result()
            except Exception as error:  # noqa: BLE001 - a private call may fail in any way but must not end the run
                log.debug("Ray does not tell which nodes it drains: %r", error)
                found = {}
            self._drains = None
            for watched in self._watched.values():
                ends_ms = found.get(watched.node.ray_id)
                if ends_ms is not None and watched.facts is not None and not watched.told:
                    watched.told = True
                    # 0 is an end at no stated time, as of idle nodes.
                    left_s = max(0.0, ends_ms / 1000 - time.time()) if ends_ms > 0 else _UNSTATED_S
                    watched.drained_s = self._clock() + left_s
                    self._notice(watched, watched.drained_s)
        if self._drains is None:
            self._drains = self._helpers.submit(draining_nodes)

    def _notice(self, watched: _Watched, ends_s: float) -> None:
        """Of several notices the earliest deadline counts."""
        if ends_s < watched.ends_s:
            watched.ends_s = ends_s
            self._listener.happened(ev.NodeNoticed(NodeId(watched.node.name), ends_s))

    def _lose(self, watched: _Watched) -> None:
        del self._watched[watched.node.ray_id]
        self._dead.add(watched.node.ray_id)
        self._listener.happened(ev.NodeLost(NodeId(watched.node.name)))

    def _refuse(self, ray_id: str, problem: Problem) -> None:
        if ray_id not in self._reported:
            self._reported.add(ray_id)
            self._listener.told(f"a node is not used: {problem}")

    # -- agents ---------------------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        now_s = self._clock()
        due = [
            watched
            for watched in self._watched.values()
            if watched.agent is None and not watched.refused and now_s >= watched.due_s
        ]
        for watched in due:
            watched.due_s = now_s + self._settings.start_s
        # With a hung Ray it never returns; this thread is needed to notice that.
        started = [self._helpers.submit(start_agent, each.node, self._settings.notices) for each in due]
        wait(started, self._settings.answer_s)
        for watched, agent in zip(due, started, strict=True):
            if agent.done():
                watched.agent = agent.result()
                watched.asked = watched.agent.facts.remote()

    def _listen(self, timeout_s: float) -> None:
        asked = {item.asked: item for item in self._watched.values() if item.asked is not None}
        if not asked:
            self._stop.wait(timeout_s)
            return
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        failed = {}
        for answer in ready:
            try:
                content = ray.get(answer)
            except RayError as error:
                failed[asked[answer].node.ray_id] = error
            else:
                self._receive(asked[answer], content)
        self._examine(failed)
        now_s = self._clock()
        for watched in self._watched.values():
            if watched.asked is not None and now_s > watched.due_s:
                patience_s = self._settings.start_s if watched.facts is None else self._settings.answer_s
                self._agent_failed(watched, f"no answer within {patience_s:g} s")

    def _examine(self, failed: Mapping[str, RayError]) -> None:
        """Tell nodes that are gone from nodes without an agent."""
        failing = [self._watched[ray_id] for ray_id in failed]
        listening = self._helpers.map(raylet_listens, [watched.node for watched in failing])
        for watched, listens in zip(failing, listening, strict=True):
            if listens:
                self._pace.hurry(self._clock())
                self._agent_failed(watched, cause_of(failed[watched.node.ray_id]))
            else:
                self._lose(watched)

    def _receive(self, watched: _Watched, content: object) -> None:
        watched.failures = 0
        if watched.facts is None:
            assert isinstance(content, dict)
            facts = read_facts(content)
            if (problem := incompatibility(watched.node.name, self._here, facts)) is not None:
                watched.refused, watched.asked = True, None
                self._dismiss(watched)
                self._refuse(watched.node.ray_id, problem)
                return
            watched.facts = facts
            self._listener.joined(watched.node, facts)
        elif isinstance(content, list):
            for message in read_messages(content):
                watched.seen = message.number
                self._pass_on(watched, message)
        self._ask(watched)

    def _ask(self, watched: _Watched) -> None:
        if watched.agent is None:
            return
        if watched.facts is None:
            watched.asked = watched.agent.facts.remote()
            watched.due_s = self._clock() + self._settings.start_s
        else:
            watched.asked = watched.agent.notices.remote(watched.seen, _HANG_S)
            watched.due_s = self._clock() + _HANG_S + self._settings.answer_s

    def _pass_on(self, watched: _Watched, message: Message) -> None:
        node = watched.node
        match message.update:
            case NoticeUpdate.NOTICED if self._ray_ends():
                log.info("node %s: no notice, Ray ends: %s", node.name, message.detail)
            case NoticeUpdate.NOTICED:
                # For good: Ray goes on draining it after a cancelled notice.
                watched.told = True
                self._helpers.submit(drain_node, node.ray_id, message.remaining_s, message.detail)
                self._notice(watched, self._clock() + message.remaining_s)
            case NoticeUpdate.CANCELLED if watched.ends_s == watched.drained_s < math.inf:
                log.info("node %s: Ray drains it nevertheless: %s", node.name, message.detail)
            case NoticeUpdate.CANCELLED:
                watched.ends_s = math.inf
                self._listener.happened(ev.NoticeCancelled(NodeId(node.name)))
                if watched.drained_s < math.inf:
                    self._notice(watched, watched.drained_s)  # Ray drains it nevertheless
            case NoticeUpdate.REBALANCE:
                log.info("node %s: %s", node.name, message.detail)
                self._listener.happened(ev.NodeAdvised(NodeId(node.name)))
            case NoticeUpdate.UNWATCHED:
                log.warning("node %s: preemptions may come unannounced: %s", node.name, message.detail)

    def _ray_ends(self) -> bool:
        """Whether the node of this process is dead: Ray then ends its actors everywhere, by SIGTERM."""
        here = ray.get_runtime_context().get_node_id()
        own = self._watched.get(here)
        return here in self._dead or (own is not None and not raylet_listens(own.node))

    def _agent_failed(self, watched: _Watched, why: str) -> None:
        self._dismiss(watched)
        watched.asked, watched.seen = None, 0
        pause_s = min(_PAUSE_MOST_S, _PAUSE_FIRST_S * 2.0 ** min(watched.failures, 30))
        watched.failures += 1
        watched.due_s = self._clock() + pause_s
        if watched.facts is None:
            self._refuse(watched.node.ray_id, _no_agent(watched.node.name, why, pause_s))
        else:
            log.info("node %s: its agent is gone (%s)", watched.node.name, why)

    def _dismiss(self, watched: _Watched) -> None:
        if watched.agent is not None:
            with suppress(RayError):
                ray.kill(watched.agent)
            watched.agent = None


def _no_agent(node: str, why: str, pause_s: float) -> Problem:
    return Problem(
        f"node {node!r}", f"no agent, which it needs to be used: {why}",
        "a process that imports this package (spotlight-rl) and answers",
        f"Install there what the head has; tried again in {pause_s:g} s and then more rarely.",
    )  # fmt: skip


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
