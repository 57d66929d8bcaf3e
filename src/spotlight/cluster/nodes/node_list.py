"""Ray's list of nodes, a call without a timeout, and how long it has gone unanswered."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping, Sequence

import ray

from spotlight.cluster.remote_calls import Clock, RayLostError

_LIST_S = 30.0
_PROBE_S = 0.5


class NodeList:
    """``ray.nodes()``, which has no timeout, called in a thread that nobody waits for."""

    def __init__(self) -> None:
        self._asked = False
        self._answers: queue.SimpleQueue[Sequence[Mapping[str, object]] | Exception] = queue.SimpleQueue()

    def ask(self, timeout_s: float) -> Sequence[Mapping[str, object]] | None:
        """Ray's list; None on timeout, in which case the next call awaits the same answer."""
        if not self._asked:
            self._asked = True
            threading.Thread(target=self._run, name="ray-nodes", daemon=True).start()
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._asked = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            self._answers.put(ray.nodes())
        except Exception as error:  # noqa: BLE001 - ask() raises it
            self._answers.put(error)


def list_nodes() -> Sequence[Mapping[str, object]]:
    """Ray's list of nodes. Raises RayLostError if it does not come in time."""
    if (rows := NodeList().ask(_LIST_S)) is None:
        raise RayLostError(f"Ray did not list its nodes within {_LIST_S:g} s")
    return rows


class Pulse:
    """Asks for the list again and again, and counts the seconds without an answer.

    Only those count in which this process waited for one: it may stand still itself (SIGSTOP, a long call).

    Args:
        ask_s: longest wait of a call of :meth:`rows`.
    """

    def __init__(self, ask_s: float, clock: Clock) -> None:
        self.silent_s = 0.0
        self._ask_s, self._clock, self._list = ask_s, clock, NodeList()

    def rows(self) -> Sequence[Mapping[str, object]] | None:
        """The list; None: not yet, see ``silent_s``."""
        asked_s = self._clock()
        rows = self._list.ask(self._ask_s)
        if rows is None:
            self.silent_s += min(self._clock() - asked_s, 2 * self._ask_s)
        else:
            self.silent_s = 0.0
        return rows


def refuses(host: str, port: int) -> bool:
    """Whether a port refuses connections; False where it is silent, which proves nothing."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
