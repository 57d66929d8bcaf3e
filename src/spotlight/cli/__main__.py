"""``python -m spotlight.cli``, for torchrun, which starts modules."""

from __future__ import annotations

from spotlight.cli.main import app

app(prog_name="spotlight")
