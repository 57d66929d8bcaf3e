"""Whether a request may come from a page of another site, in the browser of somebody who may ask.

For all servers of the packages; a request is known by its headers, whose names are in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_LOOPBACK_HOSTS = {"localhost", "127.0.0.1", "[::1]"}


def under_another_name(headers: Mapping[str, str]) -> str:
    """Why a request does not ask for this machine by a name of the loopback; empty if it does.

    Of servers without a secret of the user's: a page of the web whose name leads to this machine could
    otherwise read them through its visitor's browser.
    """
    host = re.sub(r":[0-9]+$", "", headers.get("host", ""))
    return "" if host in _LOOPBACK_HOSTS else f"the host is {host[:100]!r}; expected localhost"


def from_another_site(headers: Mapping[str, str]) -> str:
    """Why a request is of another site's page, as browsers say it; empty if none says so."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "the request is from another site's page; expected the server's own, or a program"
    if origin is not None and not _is_host(origin, host):
        return (
            f"the page's origin is {origin[:100]!r}, the host asked for {host[:100]!r}; "
            "expected the same. A proxy in between must pass the host on."
        )
    return ""


def _is_host(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # "http://[x"
        return False
