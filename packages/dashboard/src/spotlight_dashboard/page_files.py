"""The page's files: ours from this folder, Plotly's from the installed package."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from spotlight_rewards.base.file_errors import StoreError

PAGE_FILES = (
    *("dashboard.css", "basics.js", "charts.js", "views.js", "pictures.js", "learnt.js", "votes.js"),
    "main.js",
)
"""In the order in which the page loads them."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""Plotly sets styles at run time; nothing else is inline."""
_FOLDER = Path(__file__).parent / "page"


class PlotlyMissingError(StoreError):
    """The package that draws the charts is not installed."""


def page_file(name: str) -> Path:
    """A file of :data:`PAGE_FILES`, or ``index.html``."""
    return _FOLDER / name


def plotly_file() -> Path:
    """Plotly's JavaScript (MIT licence), as its Python package carries it. Imports nothing of it.

    Raises:
        PlotlyMissingError: the package is not installed, or carries none.
    """
    package = find_spec("plotly")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise PlotlyMissingError(
        "the dashboard's charts need the package 'plotly', which is missing. Install it: "
        "pip install 'spotlight-rl[dashboard]'"
    )


@cache
def plotly_bytes() -> tuple[bytes, bytes]:
    """Plotly's JavaScript, and packed by gzip: once, as it is large and everybody may ask for it."""
    plain = plotly_file().read_bytes()
    return plain, gzip.compress(plain, 6)
