"""Reward processes on the nodes of a cluster, each kept by an actor beside it.

    lane's thread ── ask ──► actor ──► reward process      (the actor keeps the deadlines, on its node)

An actor that dies takes nothing with it: its thread still holds the samples, places another actor and asks
again. That does not count as a failure of the reward (``ProcessLost.preempted``), and no more does a node
on which a reward that has scored elsewhere cannot be loaded: it is left out. Pictures travel as the bytes
that all rewards share.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from spotlight.cluster.nodes.listing import ALL_GPUS_VISIBLE, LearnerSlots, read_view
from spotlight.cluster.nodes.node_list import NodeList
from spotlight.cluster.remote_calls import Notify, cause_of, on_node
from spotlight.cluster.scorers.scorer_places import (
    ScorerNode,
    ScorerPlace,
    beside_learner,
    choose_node,
    has_spot,
    preferred_cores,
    scorer_nodes,
)
from spotlight.scheduler.types import NodeKind
from spotlight_rewards.base.files import open_to_append
from spotlight_rewards.pool.channel import Done, Failed, Request, Values
from spotlight_rewards.pool.gpu_placement import VISIBLE, cpu_environment, visible_names
from spotlight_rewards.pool.reward_process import (
    PoolClosedError,
    ProcessLost,
    RewardProcess,
    setup_error,
)
from spotlight_rewards.reward import RewardSetupError, RewardTraits, same_scorer
from spotlight_rewards.reward_config import RewardConfig, RewardDevice

_NODES_S = 5.0
_GRACE_S = 15.0
"""On top of a call's deadline, which the actor keeps: for sending the pictures."""
_ACTOR_START_S = 120.0
_LOOK_AGAIN_S = 0.5
_LOOK_FOR_SPOT_S = 30.0
_STARTS_MAX = 20
_OUTPUT_MAX_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ScorerOrder:
    """All that a reward's process on another node needs to start.

    Attributes:
        on_gpu: on the GPU that Ray assigns.
        gpu: instead, on the learner's of this index among the node's.
    """

    reward: str
    start_deadline_s: float
    replica: int
    replicas: int
    on_gpu: bool
    gpu: int | None
    directory: str
    paths: tuple[str, ...]
    run_directory: str


@dataclass(frozen=True, slots=True)
class LostThere:
    """A reward process ended while its actor lives; see :class:`ProcessLost`."""

    message: str
    timed_out: bool


class ScorerActor:
    """Keeps one reward process on its node."""

    def __init__(self, order: ScorerOrder) -> None:
        if os.path.isdir(order.directory):  # noqa: PTH112 - where the user's own modules are
            os.chdir(order.directory)
        sys.path.extend(path for path in order.paths if path not in sys.path)
        reward = RewardConfig.model_validate_json(order.reward)
        self._process = RewardProcess(
            reward,
            order.start_deadline_s,
            order.replica,
            order.replicas,
            _environment(order),
            order.run_directory,
        )

    def start(self) -> tuple[str, RewardTraits]:
        """Start and load the reward; what scores, and what it declares. Raises RewardSetupError."""
        self._process.start()
        return self._process.scored_by or "", self._process.traits

    def ask(
        self, request: Request, samples: Sequence[bytes]
    ) -> tuple[Done | Values | Failed | LostThere, bytes]:
        """The reply to a request, and what the reward has printed since the last."""
        try:
            reply: Done | Values | Failed | LostThere = self._process.ask(request, samples)
        except ProcessLost as lost:
            reply = LostThere(str(lost), lost.timed_out)
        return reply, self._process.take_output(_OUTPUT_MAX_BYTES)


def _environment(order: ScorerOrder) -> Mapping[str, str]:
    if order.on_gpu:
        return {}
    if order.gpu is None:
        return cpu_environment(order.replicas)
    names = visible_names(os.environ, order.gpu + 1)
    if len(names) <= order.gpu or not names[order.gpu]:
        raise RewardSetupError(
            f"the learner's GPU {order.gpu} is not among those that Ray was started with here: found "
            f"{VISIBLE}={os.environ.get(VISIBLE)!r}; expected {order.gpu + 1} or more. Start Ray with it."
        )
    return {VISIBLE: names[order.gpu]}


class ScorerNodes:
    """The nodes that reward processes can go to, and how many each holds. Any thread."""

    def __init__(self, here: str, learner_slots: LearnerSlots, note: Notify) -> None:
        self._here, self._learner_slots, self.note = here, learner_slots, note
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._list, self._list_lock = NodeList(), threading.Lock()

    def take(
        self,
        reward: RewardConfig,
        replica: int,
        limit_s: float,
        closed: threading.Event,
        avoided: Collection[str] = (),
        refused: Collection[str] = (),
    ) -> ScorerPlace:
        """Reserve a place, waiting for a node for ``limit_s``.

        Args:
            replica: which of the reward's processes it is for.
            closed: ends the wait.
            avoided: see :func:`choose_node`.
            refused: taken only if no other node is left.

        Raises:
            RewardSetupError: no node came.
            PoolClosedError: ``closed`` is set.
        """
        end_s = time.monotonic() + limit_s
        while not closed.is_set():
            nodes = self._living()  # asks Ray: not under the lock, which closing needs
            with self._lock:
                chosen = self._chosen(nodes, reward.device, replica, avoided, refused)
                if chosen is not None:
                    self._held[chosen.node.ray_id] += 1
                    return chosen
            if time.monotonic() > end_s:
                remedy = ", or set device: cpu" if reward.device == "cuda" else ""
                raise RewardSetupError(
                    f"reward {reward.curve!r}: no node for rewards[].device={reward.device!r} came within "
                    f"{limit_s:g} s (reward_policy.start_deadline_s); expected one. Start a node{remedy}."
                )
            closed.wait(_LOOK_AGAIN_S)
        raise PoolClosedError("the reward pool is closed")

    def _chosen(
        self,
        nodes: Sequence[ScorerNode],
        device: RewardDevice,
        replica: int,
        avoided: Collection[str],
        refused: Collection[str],
    ) -> ScorerPlace | None:
        if device == "learner":
            ranks = {ray_id: count for ray_id, (_, count) in self._learner_slots.by_node.items()}
            return beside_learner(nodes, ranks, replica)
        willing = [node for node in nodes if node.ray_id not in refused]
        node = choose_node(willing, device, self._held, avoided)
        node = node or choose_node(nodes, device, self._held, avoided)
        return None if node is None else ScorerPlace(node)

    def has_spot(self, refused: Collection[str]) -> bool:
        """See :func:`~spotlight.cluster.scorers.scorer_places.has_spot`."""
        nodes = self._living()
        with self._lock:
            return has_spot(nodes, self._held, refused)

    def cores(self, device: RewardDevice) -> int:
        """Cores that a reward's processes on these nodes share."""
        return preferred_cores(self._living(), device) or os.cpu_count() or 1

    def leave(self, node: ScorerNode) -> None:
        """Give a place back."""
        with self._lock:
            self._held[node.ray_id] -= 1

    def _living(self) -> list[ScorerNode]:
        with self._list_lock:
            rows = self._list.ask(_NODES_S) or ()  # without an answer in time: no nodes, this time
        return scorer_nodes(rows, read_view(rows), self._here)


class RemoteScorer:
    """One process of one reward on some node; a :class:`~spotlight_rewards.pool.reward_process.Scorer`."""

    def __init__(
        self,
        nodes: ScorerNodes,
        reward: RewardConfig,
        start_deadline_s: float,
        replica: int,
        replicas: int,
        run_directory: str = "",
    ) -> None:
        self._nodes, self._reward, self._start_deadline_s = nodes, reward, start_deadline_s
        self._order = ScorerOrder(
            reward.model_dump_json(), start_deadline_s, replica, replicas, reward.device == "cuda", None,
            str(Path.cwd()), tuple(str(path) for path in sys.path), run_directory,
        )  # fmt: skip
        self._lock = threading.Lock()  # guards _actor
        self._actor: Any = None
        self._node: ScorerNode | None = None
        self._last: tuple[str, ...] = ()
        self._refused: set[str] = set()
        self._looks_s = 0.0
        self._closed = threading.Event()
        self._kept: Path | None = None
        self._printed = b""
        self.scored_by: str | None = None
        self.traits = RewardTraits()

    @property
    def pid(self) -> int | None:
        """None: it runs elsewhere."""
        return None

    @property
    def cores(self) -> int:
        """Those of the nodes that its kind of process goes to."""
        return self._nodes.cores(self._reward.device)

    def log_to(self, path: Path) -> None:
        """Append its output, which arrives with each reply, to ``path``."""
        self._kept = path
        self._keep(b"")

    def start(self) -> None:
        """See :class:`Scorer`. A node that vanishes meanwhile, or refuses, is replaced by another."""
        if self._may_move():
            self._drop()
        for _ in range(_STARTS_MAX):
            if self._actor is not None:
                return
            place = self._nodes.take(
                self._reward, self._order.replica, self._wait_s, self._closed, self._last, self._refused
            )
            node = place.node
            try:
                self._start_on(place)
            except ProcessLost as lost:
                if not lost.preempted:
                    what = f"reward {self._reward.curve!r} did not start on node {node.name!r}"
                    self._refuse(node, setup_error(what, lost))
                else:
                    self._nodes.note(f"{lost}; it is started again")
            except RewardSetupError as error:
                self._refuse(node, error)
        if self._actor is None:
            raise RewardSetupError(
                f"reward {self._reward.curve!r} did not start: {_STARTS_MAX} nodes were lost or refused it "
                "meanwhile. Set rewards[].device to cpu, the reserved nodes'."
            )

    def ask(self, request: Request, samples: Sequence[bytes] = ()) -> Done | Values | Failed:
        """See :class:`Scorer`; ProcessLost is ``preempted`` if the actor was lost, too."""
        self.start()
        node = self._node
        # The actor may have to restart the process first.
        limit_s = self._start_deadline_s + request.deadline_s + _GRACE_S
        try:
            reply, printed = self._call("ask", limit_s, request, list(samples))
        except RewardSetupError as error:
            assert node is not None, "a process that was asked has a node"
            self._refuse(node, error)
            raise ProcessLost(str(error), timed_out=False, preempted=True) from None
        self._keep(printed)
        if isinstance(reply, LostThere):
            raise ProcessLost(reply.message, timed_out=reply.timed_out)
        assert isinstance(reply, Done | Values | Failed), reply
        return reply

    def interrupt(self) -> None:
        """See :class:`Scorer`."""
        self._closed.set()
        self._drop()

    def close(self) -> None:
        """See :class:`Scorer`."""
        self.interrupt()

    @property
    def _wait_s(self) -> float:
        """For a node. A run whose learner is lost waits until another node takes it, however long."""
        endless = self._reward.device == "learner" and self.scored_by is not None
        return math.inf if endless else self._start_deadline_s

    def _may_move(self) -> bool:
        """Whether this process stands in for one on a spot node, and there is one now."""
        node, now = self._node, time.monotonic()
        stands_in = self._reward.device == "spot" and node is not None and node.kind is not NodeKind.SPOT
        if not stands_in or now < self._looks_s:
            return False
        self._looks_s = now + _LOOK_FOR_SPOT_S
        return self._nodes.has_spot(self._refused)

    def _refuse(self, node: ScorerNode, error: RewardSetupError) -> None:
        """Leave a node out. Raises the error where the reward never loaded, or no other node was left."""
        if self.scored_by is None or node.ray_id in self._refused:
            raise error
        self._refused.add(node.ray_id)
        self._nodes.note(f"node {node.name!r} is left out for reward {self._reward.curve!r}: {error}")

    def _start_on(self, place: ScorerPlace) -> None:
        node = place.node
        with self._lock:
            if self._closed.is_set():
                self._nodes.leave(node)
                raise PoolClosedError("the reward pool is closed")
            self._node, self._last = node, (node.ray_id,)
            self._actor = (
                ray.remote(ScorerActor)
                .options(
                    **on_node(node.ray_id),  # ScorerNodes counts cores: Ray would wait where others share
                    num_gpus=1 if self._order.on_gpu else 0,
                    runtime_env=None if place.gpu is None else ALL_GPUS_VISIBLE,
                )
                .remote(replace(self._order, gpu=place.gpu))
            )
        scored_by, traits = self._call("start", self._start_deadline_s + _ACTOR_START_S)
        if self.scored_by is not None and not same_scorer(self.scored_by, scored_by):
            self._drop()
            raise RewardSetupError(
                f"reward {self._reward.curve!r} was scored by {self.scored_by!r}, and on node {node.name!r} "
                f"would be by {scored_by!r}; expected the same. Give every node the weights that the run "
                "began with."
            )
        self.scored_by, self.traits = scored_by, traits
        self._refused.discard(node.ray_id)
        on = node.name if place.gpu is None else f"{node.name}, on the learner's GPU {place.gpu}"
        self._nodes.note(f"reward {self._reward.curve!r}: process {self._order.replica} runs on {on}")

    def _call(self, method: str, limit_s: float, *arguments: object) -> Any:
        actor, node = self._actor, self._node
        if actor is None or node is None:
            raise PoolClosedError("the reward pool is closed")
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=limit_s)
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                if isinstance(error.cause, RewardSetupError):
                    self._drop()
                raise error.cause from None
            raise
        except RayError as error:
            self._drop()
            if self._closed.is_set():
                raise PoolClosedError("the reward pool was closed before this was scored") from None
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise RewardSetupError(
                    f"reward {self._reward.curve!r} did not start on node {node.name!r}: {cause_of(error)}"
                ) from None
            why = f"no answer in {limit_s:g} s" if isinstance(error, GetTimeoutError) else cause_of(error)
            raise ProcessLost(
                f"the process of reward {self._reward.curve!r} on node {node.name!r} is gone ({why})",
                timed_out=False,
                preempted=not isinstance(error, OutOfMemoryError),
            ) from None

    def _drop(self) -> None:
        with self._lock:
            actor, node = self._actor, self._node
            self._actor = self._node = None
            if actor is not None and node is not None:
                self._nodes.leave(node)
                with suppress(RayError, RuntimeError):  # dead already, or Ray is shutting down
                    ray.kill(actor)

    def _keep(self, printed: bytes) -> None:
        self._printed += printed
        if self._kept is not None and self._printed:
            with suppress(OSError), open_to_append(self._kept) as file:  # a full disk must not stop the run
                file.write(self._printed)
            self._printed = b""
