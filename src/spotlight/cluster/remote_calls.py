"""Remote calls as awaitables with deadlines, and the tasks ("conversations") that make them.

Ray references are awaitable in the driver. Assumptions beyond that, checked by
``tests/contract/test_ray_head_calls.py``:

- an awaited reference raises ``RayActorError`` once its actor is dead, and the remote function's own error
  (as an instance of its class, with ``cause``) if that raised;
- ending the wait, by deadline or cancellation, neither cancels the remote call nor disturbs Ray when the
  answer arrives later;
- with a dead GCS nothing is raised: calls between living processes continue, starting an actor never returns.
  Hence the deadlines, and :mod:`spotlight.cluster.nodes.node_membership`, which polls the GCS; after 60 s Ray
  kills the driver without notifying Python. With a GCS that hangs it never does.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from spotlight.scheduler import events as ev
from spotlight_rewards.base.errors import UserError

T = TypeVar("T")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
Clock = Callable[[], float]
Notify = Callable[[str], None]
"""Shows the user a line."""

LATE_S, GRACE_S = 0.2, 2.0
"""A wait that ends this late means this process stood still (SIGSTOP, a long call); deadlines then move by
``GRACE_S``, since answers were held up too.
"""


class NoAnswerError(TimeoutError):
    """A remote call was not answered by its deadline."""


class RayLostError(UserError, RuntimeError):
    """Ray or the blob store died; the same command resumes the run."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the run cannot go on: {why}. Run the same command again: it resumes from the last checkpoint."
        )


class AbandonedError(Exception):
    """The addressee is lost. Ends a conversation, not the run."""


def on_node(ray_id: str) -> dict[str, Any]:
    """Ray's options for an actor of a node, which takes no cores and ends with its first failure."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    return {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": place}


def cause_of(error: BaseException) -> str:
    """Cause of an actor's death in one line, without terminal colours."""
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "raised in its creation task" in lines[0] else lines[0]


async def wait_within(futures: set[asyncio.Future[T]], seconds: float) -> set[asyncio.Future[T]]:
    """Wait until one is done, for ``seconds`` in which this process ran; returns those that are done.

    An answer that has arrived beats its deadline.
    """
    clock = asyncio.get_running_loop().time
    due_s = clock() + seconds
    while True:
        left_s = due_s - clock()
        # Wait for the last stretch separately, to notice a standstill just before the deadline.
        until_s = due_s - GRACE_S if left_s > 2 * GRACE_S else due_s
        done, _ = await asyncio.wait(
            futures, timeout=max(0.0, until_s - clock()), return_when=asyncio.FIRST_COMPLETED
        )
        now = clock()
        if now > until_s + LATE_S and not done:
            due_s = max(due_s, now + GRACE_S)
        if done or now >= due_s:
            return done


async def answer(reference: Awaitable[T], what: str, deadline_s: float) -> T:
    """The value of a remote call that was just made; ``what`` names it in errors.

    Raises:
        NoAnswerError: there was none within ``deadline_s``.
        Exception: Ray's error (``RayError``), or the remote function's own.
    """
    future = asyncio.ensure_future(reference)
    try:
        if not await wait_within({future}, deadline_s):
            raise NoAnswerError(f"{what}: no answer within {deadline_s:g} s")
        return future.result()
    finally:
        future.cancel()


class Inbox:
    """Events for the controller, in order of arrival."""

    def __init__(self) -> None:
        self._events: deque[tuple[ev.Event, str]] = deque()
        self._filled = asyncio.Event()

    def put(self, event: ev.Event, weights_digest: str = "") -> None:
        """Add an event. ``weights_digest``: of the weights behind the reported values."""
        self._events.append((event, weights_digest))
        self._filled.set()

    def wake(self) -> None:
        """Make :meth:`wait` return without an event."""
        self._filled.set()

    def take(self) -> tuple[ev.Event, str] | None:
        """The oldest event, or None."""
        return self._events.popleft() if self._events else None

    async def wait(self, seconds: float) -> None:
        """Return when there is an event, or after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._filled.wait()
        self._filled.clear()


class Conversations:
    """Tasks that wait for answers. The first error of any ends the run: see :meth:`supervise`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, conversation: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a conversation; first steps are taken in the order of these calls."""
        task = asyncio.get_running_loop().create_task(conversation)
        self._tasks.add(task)  # asyncio holds only weak references to tasks
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def supervise(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` and return its value; a conversation's error cancels it and is raised.

        Conversations still open at the end are cancelled.
        """
        task = asyncio.get_running_loop().create_task(main)
        try:
            ends: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()
        finally:
            under_way = [task, *self._tasks]
            for each in under_way:
                each.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, AbandonedError):
            self.fail(error)
