"""A reward that is no function of a module: a closure, a lambda, or one of a notebook's cell.

It travels to the reward's process by value, in a file of the cache directory: what it refers to is copied as
it is when :func:`spotlight.train` is called.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spotlight.api.arguments import ARGUMENTS, label_of
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.files import write_atomically
from spotlight_rewards.reward import Image, Reward, RewardSetupError


@dataclass(frozen=True)
class PickledReward(Reward):
    """The function in a file that :func:`pickled` wrote. Raises RewardSetupError if it cannot be read."""

    path: str = ""

    def __post_init__(self) -> None:
        try:
            _ = self._function
        except Exception as error:
            raise RewardSetupError(
                f"the function in {self.path} cannot be read here: {type(error).__name__}: {error}. it is on "
                "the machine that called spotlight.train: where Ray places a reward elsewhere, name a "
                "function of a module that every node has."
            ) from error

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = pickle.loads(Path(self.path).read_bytes())
        return function

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Any:
        """Score as the function does."""
        return self._function(images, prompts, metadata)


def pickled(function: Callable[..., Any], run: Path, cache: Path) -> dict[str, Any]:
    """A section of ``rewards`` that calls the function. Raises ConfigError if it cannot be copied.

    Args:
        run: its directory. A run has one file for each function's name, so that the same call goes on.
    """
    from ray import cloudpickle

    label = label_of(function)
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:
        problem = Problem(
            "rewards", f"the function {label}, which cannot be copied to another process ({error})",
            "a function that refers to plain values, or one of a module",
            "Make within it what it refers to, or write it into a module.",
        )  # fmt: skip
        raise ConfigError(ARGUMENTS, [problem]) from error
    folder = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    path = cache / "rewards" / folder / f"{label}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, 0o600)
    params = {"path": str(path.resolve())}
    return {"name": f"{__name__}:{PickledReward.__name__}", "params": params, "label": label}
