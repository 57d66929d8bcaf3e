"""What a run will take: by its own rows once there are three, before by what an installed package says."""

from __future__ import annotations

from spotlight.config.load import load_dump
from spotlight.config.schema import RunConfig
from spotlight.registry import PACES
from spotlight.store.run_directory import RunPaths, changes_of, flatten
from spotlight.store.run_estimate import (
    RunEstimate,
    SpentSoFar,
    changes_pace,
    estimated,
    read_so_far,
)

NO_ESTIMATE = (
    "three iterations of the run itself, or the package spotlight-plan, which is not installed: "
    "pip install 'spotlight-rl[plan]'"
)


def estimate_run(config: RunConfig, ranks: int) -> RunEstimate | str:
    """What the run of this name takes from its beginning to its end, if it goes on as configured.

    Returns:
        In place of an estimate, what it would need.

    Raises:
        StoreError, ConfigError: what there is of the run cannot be read.
        RegistryError: the package that estimates is broken.
    """
    paths = RunPaths(config.runs_dir / config.name)
    spent, pace = SpentSoFar(), None
    if paths.config.is_file() and paths.ledger.is_file():
        spent, pace = read_so_far(paths.path)
        if changes_pace(changes_of(_leaves(load_dump(paths.config, installed=False)), _leaves(config))):
            pace = None
    said = pace or (PACES.load("plan")(config, ranks) if "plan" in PACES else NO_ESTIMATE)
    if isinstance(said, str):
        return said
    evaluations = config.evaluation.count(config.iterations)
    return estimated(said, spent, config.iterations, evaluations, starts=True)


def _leaves(config: RunConfig) -> dict[str, object]:
    return flatten(config.model_dump(mode="json"))
