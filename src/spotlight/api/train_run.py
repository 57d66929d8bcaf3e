""":func:`train`: a run from Python, with the keys, checks and errors of ``spotlight train``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight.api.arguments import (
    ARGUMENTS,
    PromptsArgument,
    RewardArgument,
    overrides_of,
    prompt_files,
    require_kind,
    rewards_of,
    sections_of,
    stand_ins_of,
)
from spotlight.api.opened_run import Run
from spotlight.api.opened_run import open as open_run
from spotlight_rewards.base.errors import ConfigError, UserError

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class RunStoppedError(UserError, RuntimeError):
    """The run stopped by an error, which names the remedy; the same call goes on after it."""


def train(
    *,
    model: str | Path | dict[str, Any] | None = None,
    prompts: PromptsArgument | None = None,
    test_prompts: PromptsArgument | None = None,
    rewards: Sequence[RewardArgument] | None = None,
    algorithm: str | dict[str, Any] | None = None,
    config: str | Path | None = None,
    plain: bool = False,
    **keys: Any,
) -> Run:
    """Train, or go on with a run of this name; Ctrl-C, or a notebook's stop, keeps the work.

    Args:
        model: ``model.path``, or the section ``model``.
        prompts: of training (``data.train``): a file; or texts, rows with a column ``prompt``, a DataFrame or
            a ``datasets.Dataset``, of which without ``test_prompts`` every tenth is held out.
        test_prompts: held-out prompts (``data.test``), likewise.
        rewards: names, functions, or sections as in ``rewards``. A function of a module is imported by the
            reward's process; a closure, a lambda or a notebook's function is copied to it, for rewards on
            this machine: where Ray places them elsewhere (``device: spot`` or ``cuda`` on a cluster), name
            one of a module.
        algorithm: its name, or the section ``algorithm``.
        config: a configuration file; without one, keys that are not given have the reference's defaults.
        plain: one line per event, also on a terminal.
        keys: any other key of the configuration, sections as dictionaries: ``rollout={"steps": 8}``.

    Returns:
        The run. One that was interrupted has ``finished`` false; the same call goes on.

    Raises:
        ConfigError, PromptFileError, ModelError, RewardSetupError, RewardInputError, StoreError: as the
            command, before any work.
        RunStoppedError: the run stopped by an error.
    """
    require_kind("train", "config", config, str | Path | None, "a configuration file's path")
    require_kind("train", "plain", plain, bool, "True or False")
    given = [*overrides_of(sections_of(model, algorithm)), *overrides_of(keys)]
    # A key may name a reward's curve, so their places stand in for them where the run's own is sought.
    stand_ins = [] if rewards is None else [*overrides_of({"rewards": stand_ins_of(rewards)})]
    run_config = _loaded(config, [*given, *stand_ins])
    cache, directory = run_config.cache, run_config.runs_dir / run_config.name
    if rewards is not None:
        given += overrides_of({"rewards": rewards_of(rewards, directory, cache)})
    if prompts is not None or test_prompts is not None:
        given += overrides_of(prompt_files(prompts, test_prompts, cache))
    return trained(_loaded(config, given), plain=plain)


def _loaded(config: str | Path | None, given: Sequence[str]) -> RunConfig:
    from spotlight.config.load import load_config

    if config is not None:
        return load_config(Path(config), given)
    try:
        return load_config(Path(os.devnull), given)
    except ConfigError as error:
        raise ConfigError(ARGUMENTS, error.problems) from None


def trained(config: RunConfig, *, plain: bool) -> Run:
    """Train, or go on with, what is configured. Raises as :func:`train`."""
    from spotlight.cli.runs.progress import make_progress
    from spotlight.cli.runs.train import driver_of, in_a_folder
    from spotlight.runtime.preflight import finished_summary, require_startable
    from spotlight_rewards.commands.any_terminal import print_on_any_terminal

    print_on_any_terminal()
    progress = make_progress(config, plain)
    with progress, in_a_folder(config, progress.note) as local:
        if finished_summary(local) is None:
            require_startable(local)
        result = driver_of(local)(local, progress, 0.0)
    if result.error is not None:
        raise RunStoppedError(result.error)
    return open_run(config.runs_dir / config.name)
