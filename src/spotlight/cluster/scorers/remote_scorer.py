"""Reward processes on the nodes of a cluster, each kept by an actor beside it.

    lane's thread ── ask ──► actor ──► reward process      (the actor keeps the deadlines, on its node)

An actor that dies takes nothing with it: its thread still holds the samples, places another actor and asks
again. That does not count as a failure of the reward (``ProcessLost.preempted``). Pictures travel as the
bytes that all rewards share.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotlight.cluster.nodes.listing import read_view
from spotlight.cluster.remote_calls import Notify, cause_of
from spotlight.cluster.scorers.scorer_places import ScorerNode, choose_node, scorer_nodes
from spotlight.config.sections.rewards import RewardConfig
from spotlight.rewards.pool.channel import Done, Failed, Request, Values
from spotlight.rewards.pool.gpu_placement import cpu_environment
from spotlight.rewards.pool.reward_process import PoolClosedError, ProcessLost, RewardProcess
from spotlight.rewards.reward import RewardSetupError, RewardTraits
from spotlight.scheduler.types import NodeKind

_GRACE_S = 15.0
"""On top of a call's deadline, which the actor keeps: for sending the pictures."""
_ACTOR_START_S = 120.0
_LOOK_AGAIN_S = 0.5
_LOOK_FOR_SPOT_S = 30.0
_STARTS_MAX = 20
_OUTPUT_MAX_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ScorerOrder:
    """All that a reward's process on another node needs to start."""

    reward: str
    start_deadline_s: float
    replica: int
    replicas: int
    on_gpu: bool
    directory: str
    paths: tuple[str, ...]


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
        environment = {} if order.on_gpu else cpu_environment(order.replicas)
        self._process = RewardProcess(
            reward, order.start_deadline_s, order.replica, order.replicas, environment
        )
        self._output = Path(tempfile.mkstemp(prefix="spotlight-reward-")[1])
        self._told = 0
        self._process.log_to(self._output)

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
        with self._output.open("rb") as file:
            file.seek(self._told)
            printed = file.read(_OUTPUT_MAX_BYTES)
        self._told += len(printed)
        return reply, printed


class ScorerNodes:
    """The nodes that reward processes can go to, and how many each holds. Any thread."""

    def __init__(self, here: str, note: Notify) -> None:
        self._here, self.note = here, note
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, reward: RewardConfig, limit_s: float, avoided: str | None) -> ScorerNode:
        """Reserve a place, waiting for a node for ``limit_s``. Raises RewardSetupError if none comes."""
        end_s = time.monotonic() + limit_s
        while True:
            with self._lock:
                rows = ray.nodes()
                nodes = scorer_nodes(rows, read_view(rows), self._here)
                chosen = choose_node(nodes, reward.device, self._held, () if avoided is None else (avoided,))
                if chosen is not None:
                    self._held[chosen.ray_id] += 1
                    return chosen
            if time.monotonic() > end_s:
                raise RewardSetupError(
                    f"reward {reward.curve!r}: no node for rewards[].device={reward.device!r} came within "
                    f"{limit_s:g} s (reward_policy.start_deadline_s); expected one. Start a node, or set "
                    "device: cpu."
                )
            time.sleep(_LOOK_AGAIN_S)

    def has_spot(self) -> bool:
        """Whether a spot node lives."""
        rows = ray.nodes()
        return any(node.kind is NodeKind.SPOT for node in scorer_nodes(rows, read_view(rows), self._here))

    def leave(self, node: ScorerNode) -> None:
        """Give a place back."""
        with self._lock:
            self._held[node.ray_id] -= 1


class RemoteScorer:
    """One process of one reward on some node; a :class:`~spotlight.rewards.pool.reward_process.Scorer`."""

    def __init__(
        self, nodes: ScorerNodes, reward: RewardConfig, start_deadline_s: float, replica: int, replicas: int
    ) -> None:
        self._nodes, self._reward, self._start_deadline_s = nodes, reward, start_deadline_s
        self._order = ScorerOrder(
            reward.model_dump_json(), start_deadline_s, replica, replicas, reward.device == "cuda",
            str(Path.cwd()), tuple(str(path) for path in sys.path),
        )  # fmt: skip
        self._lock = threading.Lock()  # guards _actor and _closed
        self._actor: Any = None
        self._node: ScorerNode | None = None
        self._last: str | None = None
        self._looks_s = 0.0
        self._closed = False
        self._kept: Path | None = None
        self._printed = b""
        self.scored_by: str | None = None
        self.traits = RewardTraits()

    @property
    def pid(self) -> int | None:
        """None: it runs elsewhere."""
        return None

    def log_to(self, path: Path) -> None:
        """Append its output, which arrives with each reply, to ``path``."""
        self._kept = path
        self._keep(b"")

    def start(self) -> None:
        """See :class:`Scorer`. A node that vanishes meanwhile is replaced by another."""
        if self._may_move():
            self._drop()
        for _ in range(_STARTS_MAX):
            if self._actor is not None:
                return
            try:
                self._start()
            except ProcessLost as lost:
                self._nodes.note(f"{lost}; it is started again")
        if self._actor is None:
            raise RewardSetupError(
                f"reward {self._reward.curve!r} did not start: {_STARTS_MAX} nodes were lost meanwhile. "
                "Set rewards[].device to cpu, the reserved nodes'."
            )

    def ask(self, request: Request, samples: Sequence[bytes] = ()) -> Done | Values | Failed:
        """See :class:`Scorer`; ProcessLost is ``preempted`` if the actor was lost, too."""
        self.start()
        reply, printed = self._call("ask", request.deadline_s + _GRACE_S, request, list(samples))
        self._keep(printed)
        if isinstance(reply, LostThere):
            raise ProcessLost(reply.message, timed_out=reply.timed_out)
        assert isinstance(reply, Done | Values | Failed), reply
        return reply

    def interrupt(self) -> None:
        """See :class:`Scorer`."""
        with self._lock:
            self._closed = True
            self._kill()

    def close(self) -> None:
        """See :class:`Scorer`."""
        self.interrupt()

    def _may_move(self) -> bool:
        """Whether this process stands in for one on a spot node, and there is one now."""
        node, now = self._node, time.monotonic()
        stands_in = self._reward.device == "spot" and node is not None and node.kind is not NodeKind.SPOT
        if not stands_in or now < self._looks_s:
            return False
        self._looks_s = now + _LOOK_FOR_SPOT_S
        return self._nodes.has_spot()

    def _start(self) -> None:
        node = self._nodes.take(self._reward, self._start_deadline_s, self._last)
        with self._lock:
            if self._closed:
                self._nodes.leave(node)
                raise PoolClosedError("the reward pool is closed")
            self._node, self._last = node, node.ray_id
            self._actor = (
                ray.remote(ScorerActor)
                .options(
                    num_cpus=1 if node.cpus >= 1 and not self._order.on_gpu else 0,
                    num_gpus=1 if self._order.on_gpu else 0,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
                )
                .remote(self._order)
            )
        scored_by, traits = self._call("start", self._start_deadline_s + _ACTOR_START_S)
        if self.scored_by not in (None, scored_by):
            self._drop()
            raise RewardSetupError(
                f"reward {self._reward.curve!r} was scored by {self.scored_by!r}, and on node {node.name!r} "
                f"would be by {scored_by!r}; expected the same. Give every node the weights that the run "
                "began with."
            )
        self.scored_by, self.traits = scored_by, traits
        self._nodes.note(f"reward {self._reward.curve!r}: process {self._order.replica} runs on {node.name}")

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
            if self._closed:
                raise PoolClosedError("the reward pool was closed before this was scored") from None
            why = f"no answer in {limit_s:g} s" if isinstance(error, GetTimeoutError) else cause_of(error)
            raise ProcessLost(
                f"the process of reward {self._reward.curve!r} on node {node.name!r} is gone ({why})",
                timed_out=False,
                preempted=True,
            ) from None

    def _drop(self) -> None:
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        actor, node = self._actor, self._node
        self._actor = self._node = None
        if actor is not None and node is not None:
            self._nodes.leave(node)
            with suppress(RayError, RuntimeError):  # dead already, or Ray is shutting down
                ray.kill(actor)

    def _keep(self, printed: bytes) -> None:
        self._printed += printed
        if self._kept is not None and self._printed:
            with suppress(OSError), self._kept.open("ab") as file:  # a full disk must not stop the run here
                file.write(self._printed)
            self._printed = b""
