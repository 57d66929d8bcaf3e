"""Whether the Hugging Face hub can be reached, asked before a download, which would retry for minutes."""

from __future__ import annotations

import threading
import time

_LIMIT_S = 8.0
_FAILURE_KEPT_S = 60.0
_last: list[tuple[str, float]] = []
"""The last answer, and when it was found; none before the first."""


def unreachable() -> str:
    """Why the hub cannot be reached from this process, for messages; empty if it can.

    One question without retries; asked again a minute after it failed. Downloads keep the time-outs of
    huggingface_hub.
    """
    if _last and (not _last[0][0] or time.monotonic() < _last[0][1] + _FAILURE_KEPT_S):
        return _last[0][0]
    _last[:] = [(_asked(), time.monotonic())]
    return _last[0][0]


def _asked() -> str:
    from huggingface_hub import constants, get_session

    found = [f"{constants.ENDPOINT} did not answer within {_LIMIT_S:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_LIMIT_S, follow_redirects=False)
            found[0] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, a download would end so, only later
            found[0] = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error})"

    # Looking up the host's name has no time-out of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return found[0]
