"""``spotlight train --vote`` in a process of its own, with the address of its votes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from main_job import NFT, Job

FEW = ("evaluation.prompts=1", "evaluation.images_per_prompt=1", "evaluation.grid_images=1")
"""Pictures of an evaluation."""


@contextmanager
def voted_run(job: Job, name: str, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
    """The process, killed if it still runs at the end; and ``address`` of the dashboard and its ``token``."""
    arguments = job.arguments(name, *NFT, "evaluation.every=1", *FEW, *overrides)
    command = [sys.executable, "-m", "spotlight.cli", "train", "--vote", "--plain", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        printed = rf"(?P<address>http://127\S+)/\?token=(?P<token>\S+)#/{name}/votes"
        try:
            yield run, next(filter(None, (re.search(printed, line) for line in run.stdout)))
        finally:
            run.kill()
            run.stdout.read()
