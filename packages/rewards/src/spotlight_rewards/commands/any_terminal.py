"""Printing on any terminal, whatever its encoding."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from typer.core import TyperGroup


def print_on_any_terminal() -> None:
    """Print ``?`` for a character that the terminal has not: a screen must never end the work of hours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.setdefault("PYTHONIOENCODING", ":replace")  # for processes that are started from here


class AnyTerminal(TyperGroup):
    """Commands whose screens end no work."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command."""
        print_on_any_terminal()
        return super().main(*args, **kwargs)
