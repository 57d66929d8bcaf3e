"""Who may ask the dashboard: programs with its token, browsers with a session that a token was given for.

A one-time token stands in the printed address, and so in the browser's history; it opens one session. Only
digests are kept of what is given out. Of one event loop.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

SESSION_S = 30 * 86_400
GUESSES, GUESS_EVERY_S = 10, 6.0
"""Wrong tokens that one address may send at once, and after how long it may send one more."""
_SESSIONS_MAX = _ADDRESSES_MAX = 1000


@dataclass(slots=True)
class Guesses:
    """Wrong tokens of late by address; of IPv6 by network, since a machine has all addresses of one."""

    clock: Callable[[], float] = time.monotonic
    _level: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def may_try(self, address: str) -> bool:
        """Whether a token of this address is looked at."""
        return self._now(_network(address)) <= GUESSES - 1

    def was_wrong(self, address: str) -> None:
        """Count one."""
        network = _network(address)
        self._level[network] = (self._now(network) + 1, self.clock())
        self._level.move_to_end(network)
        while len(self._level) > _ADDRESSES_MAX:
            self._level.popitem(last=False)

    def _now(self, network: str) -> float:
        level, at = self._level.get(network, (0.0, 0.0))
        return max(0.0, level - (self.clock() - at) / GUESS_EVERY_S)


@dataclass(slots=True)
class DashboardKeys:
    """The secrets of one dashboard.

    Attributes:
        own: the user's token, for programs and for any number of browsers; empty: there is none.
        used: called when a one-time token has been used.
    """

    own: str = ""
    used: Callable[[], object] = lambda: None
    guesses: Guesses = field(default_factory=Guesses)
    _once: set[bytes] = field(default_factory=set)
    _sessions: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    def one_time(self, token: str = "") -> str:
        """A token that opens one session: a new one, or this."""
        token = token or secrets.token_urlsafe(24)
        self._once.add(_digest(token))
        return token

    def is_own(self, given: str) -> bool:
        """Whether it is the user's token."""
        return bool(self.own) and hmac.compare_digest(_digest(given), _digest(self.own))

    def open_session(self, given: str, *, own_too: bool = True) -> str | None:
        """A new session's secret for a token, which is used up if it is a one-time token; None for others.

        Args:
            own_too: the user's token is looked at. One-time tokens always are: they cannot be guessed.
        """
        once = _digest(given) in self._once  # digests: their order tells nothing of a token
        if not once and not (own_too and self.is_own(given)):
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = time.monotonic() + SESSION_S
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        if once:
            self._once.remove(_digest(given))
            self.used()
        return session

    def is_session(self, given: str) -> bool:
        """Whether it is a session's secret."""
        return self._sessions.get(_digest(given), 0.0) > time.monotonic()


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a socket without addresses
        return ""
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
