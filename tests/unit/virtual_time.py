"""An asyncio event loop in which time passes only when there is nothing left to do: tests need not wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_INSTANT_S = 1e-6


class _SkippingSelector(selectors.SelectSelector):
    """Instead of waiting for a timer it moves the clock to it, unless a thread is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.in_threads = 0

    def select(self, timeout: float | None = None) -> Any:
        if self.in_threads:
            return super().select(None if timeout is None or timeout > 0 else 0)
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Seconds of :meth:`time` begin with 0."""

    def __init__(self) -> None:
        self._virtual = _SkippingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        self._virtual.in_threads += 1

        def over(_: object) -> None:
            self._virtual.in_threads -= 1

        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(over)
        return future

    def pass_s(self, seconds: float) -> None:
        """From outside: let so much time pass."""
        self.run_until_complete(asyncio.sleep(seconds))

    def stand_still(self, seconds: float) -> None:
        """From within: so much time passes while nothing of this loop runs."""
        self._virtual.now_s += seconds

    def settle(self) -> None:
        """From outside: do all that can be done now."""
        self.pass_s(_INSTANT_S)


async def settle() -> None:
    """Return when everything is done that can be done now."""
    await asyncio.sleep(_INSTANT_S)


def played(scene: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scene)
