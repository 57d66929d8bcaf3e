"""Slots of a benchmark's cluster that take their time, however many cores they share.

Python imports this file at its start where its folder is in ``PYTHONPATH``, so it reaches workers and learner
ranks alike. Each denoising step of a sample, and each sample trained, then lasts so many seconds more than it
computes: asleep, which costs the other slots nothing. That is what a GPU of one's own is like; without it,
slots on one core would slow each other down, and nothing could be gained by overlapping.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

STEP_S = float(os.environ.get("SPOTLIGHT_PACED_STEP_S", "0"))
TRAIN_S = float(os.environ.get("SPOTLIGHT_PACED_TRAIN_S", "0"))


def _pace_engine(module: ModuleType) -> None:
    step: Callable[..., Any] = module.Engine.step

    @wraps(step)
    def paced(self: Any, model: Any, states: Sequence[Any]) -> Any:
        advanced = step(self, model, states)
        time.sleep(STEP_S * sum(not state.done for state in states))
        return advanced

    module.Engine.step = paced


def _pace_learner(module: ModuleType) -> None:
    accumulate: Callable[..., Any] = module.Learner.accumulate

    @wraps(accumulate)
    def paced(self: Any, keys: Sequence[str], update_samples: int) -> Any:
        accumulate(self, keys, update_samples)
        seconds = TRAIN_S * len(keys) / self.ranks.world
        time.sleep(seconds)
        self._update.seconds += seconds  # as train/step_s tells it

    module.Learner.accumulate = paced


PACED = {"spotlight.rollout.engine": _pace_engine, "spotlight.training.learner": _pace_learner}


class _Pacer(importlib.abc.MetaPathFinder):
    """Finds the two modules as everybody does, and paces them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        pace = PACED.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if pace is not None else None
        if spec is None or spec.loader is None or pace is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            pace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if STEP_S or TRAIN_S:
    sys.meta_path.insert(0, _Pacer())
