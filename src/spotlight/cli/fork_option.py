"""``spotlight train --fork RUN --name NAME``: another run from a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from spotlight.cli.run_argument import find_run
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import failure


def forked(
    overrides: list[str], parent: str | None, name: str | None, iteration: int | None, *, dry_run: bool
) -> list[str]:
    """Make the fork if it is not there; the arguments that go on with it, none after a dry run.

    Raises:
        ConfigError, StoreError: see :func:`spotlight.runtime.resuming.course.fork`.
    """
    from spotlight.cli.runs.train import in_a_folder
    from spotlight.config.load import load_run
    from spotlight.runtime.resuming.course import fork, fork_plan
    from spotlight.store.ledger.course_changes import CourseChange, course_words
    from spotlight.store.run_store import stored_runs

    if parent is None:
        raise failure(
            "--name or --iteration without --fork; expected a run. Add --fork RUN, or use name=NAME."
        )
    if name is None:
        raise failure("--fork without --name; expected the new run's name. Add --name NAME.")
    run = find_run(parent, "all")
    beside = [] if stored_runs(Path(parent).parent) is None else [f"runs_dir={Path(parent).parent}"]
    config = load_run(run, [*beside, *overrides, f"name={name}"], forks=True)
    say = partial(TextConsole().print, soft_wrap=True)
    if dry_run:
        checkpoint, changes = fork_plan(run, config, iteration)
        at = checkpoint.header.iteration
        said = course_words([CourseChange(at, 0, key, *values) for key, values in changes.items()])
        say(f"The run {name} would begin {', '.join(said)}")
        return []
    with in_a_folder(config, say) as local:
        fork(run, local, iteration)
    kept = stored_runs(config.runs_dir)
    place = f"{config.runs_dir if kept is None else kept.address}/{name}"
    say(f"{place}: a fork of {run.name}; `spotlight train {place}` continues it")
    return [place, *overrides]
