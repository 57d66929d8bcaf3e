"""Whether the Hugging Face hub can be reached, asked before a download, which would retry for minutes."""

from __future__ import annotations

import threading
from functools import lru_cache

_LIMIT_S = 8.0


@lru_cache(maxsize=1)
def unreachable() -> str:
    """Why the hub cannot be reached from this process, for messages; empty if it can.

    One question without retries. Downloads keep the time-outs of huggingface_hub.
    """
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
