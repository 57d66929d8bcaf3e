"""Spotlight: reinforcement-learning post-training of Diffusion Transformers on preemptible GPUs.

:func:`train` trains, :func:`open` opens a run; importing them imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotlight.api.opened_run import Run as Run
    from spotlight.api.opened_run import open as open
    from spotlight.api.train_run import RunStoppedError as RunStoppedError
    from spotlight.api.train_run import train as train

__version__ = "0.1.0"
_API = {
    **dict.fromkeys(("train", "RunStoppedError"), "spotlight.api.train_run"),
    **dict.fromkeys(("Run", "open"), "spotlight.api.opened_run"),
}
__all__ = ["Run", "RunStoppedError", "open", "train"]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_API[name]), name)
