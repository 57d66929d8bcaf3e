"""``spotlight train --fork RUN --name NAME``: another run from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from spotlight.cli.run_argument import find_run
from spotlight_rewards.commands.exit_codes import failure


def forked(
    overrides: list[str], parent: str | None, name: str | None, iteration: int | None, *, dry_run: bool
) -> list[str]:
    """Make the fork if it is not there; the arguments that go on with it, none after a dry run.

    Raises:
        ConfigError, StoreError: see :func:`spotlight.runtime.resuming.course.fork`.
    """
    from spotlight.config.load import load_run
    from spotlight.runtime.resuming.course import fork, fork_plan
    from spotlight.store.ledger.course_changes import CourseChange, course_words
    from spotlight.store.run_store import stored_runs

    if parent is None:
        raise failure("--name and --iteration are of --fork; expected it. Add --fork RUN, or say name=NAME.")
    if name is None:
        raise failure("--fork without --name; expected the new run's. Add --name NAME.")
    if stored_runs(Path(parent).parent) is not None:
        raise failure(
            f"--fork is {parent}; expected a run in a folder, beside which the fork is made. Name one."
        )
    run = find_run(parent)
    config = load_run(run, [*overrides, f"name={name}"])
    console = Console(highlight=False)
    if dry_run:
        checkpoint, changes = fork_plan(run, config, iteration)
        at = checkpoint.header.iteration
        said = course_words([CourseChange(at, 0, key, *values) for key, values in changes.items()])
        console.print(Text(f"The run {name} would begin {', '.join(said)}"), soft_wrap=True)
        return []
    place = fork(run, config, iteration)
    console.print(
        Text(f"{place}: a fork of {run.name}, of which `spotlight train {place}` goes on"), soft_wrap=True
    )
    return [str(place), *overrides]
