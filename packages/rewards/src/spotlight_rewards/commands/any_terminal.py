"""Commands that print on any terminal, whatever its encoding."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from typer.core import TyperGroup


class AnyTerminal(TyperGroup):
    """Print ``?`` for a character that the terminal has not: a screen must never end the work of hours."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        os.environ.setdefault("PYTHONIOENCODING", ":replace")  # for processes that the command starts
        return super().main(*args, **kwargs)
