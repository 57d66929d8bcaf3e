"""User-fixable errors, printed without a traceback, and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

EXIT_STOPPED_BY_ERROR = 1
EXIT_NOT_STARTED = 2
EXIT_INTERRUPTED = 130

_OURS = (
    ("spotlight.cluster.learner.learner_group", "LearnerError"),
    ("spotlight.cluster.remote_calls", "RayLostError"),
    ("spotlight.config.errors", "ConfigError"),
    ("spotlight.data.prompt_files", "PromptFileError"),
    ("spotlight.fleet.gpus", "UnknownGpuError"),
    ("spotlight.fleet.notices.notice", "NoticeError"),
    ("spotlight.planning.prices.quotes", "PriceError"),
    ("spotlight.fleet.traces.trace", "TraceError"),
    ("spotlight.models.model_errors", "ModelError"),
    ("spotlight.registry", "RegistryError"),
    ("spotlight.rewards.prompt_sets.splitting", "PromptSetError"),
    ("spotlight.rewards.reward", "RewardSetupError"),
    ("spotlight.rewards.reward", "RewardInputError"),
    ("spotlight.runtime.process", "DeviceMemoryError"),
    ("spotlight.store.store_errors", "StoreError"),
    ("spotlight.training.learner_state", "StateError"),
    ("spotlight.training.settings", "TrainingError"),
    ("spotlight.weights.weight_errors", "WeightsError"),
    ("torch", "OutOfMemoryError"),
)


def ours() -> tuple[type[Exception], ...]:
    """Spotlight's error classes in modules imported so far; no other can have been raised."""
    return tuple(getattr(sys.modules[module], name) for module, name in _OURS if module in sys.modules)


@contextmanager
def errors_without_traceback(exit_code: int = EXIT_NOT_STARTED) -> Iterator[None]:
    """Print Spotlight's own errors to stderr and exit; propagate all other exceptions."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ours()):
            raise failure(str(error), exit_code) from error
        raise


def failure(message: str, exit_code: int = EXIT_NOT_STARTED) -> typer.Exit:
    """Print an error to stderr, and return the exception to raise."""
    complain(message)
    return typer.Exit(exit_code)


def complain(message: str) -> None:
    """Print an error to stderr."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
