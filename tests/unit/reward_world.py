"""Modules of rewards that behave and misbehave, and what tests of the pool ask of them."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from spotlight_rewards.pool.channel import CheckPrompts, Done, Failed, Score, Values
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.reward_process import RewardProcess
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import Image
from spotlight_rewards.reward_config import RewardConfig

REWARDS = '''
import ctypes, os, subprocess, sys, threading, time

from spotlight_rewards.reward import RewardInputError

calls = 0
gpu_is_lost = False

def gray(images, prompts, metadata):
    """The picture's first byte."""
    return [int(image[0, 0, 0]) for image in images]

def batch_size(images, prompts, metadata):
    return [float(len(images)) for _ in images]

def detailed(images, prompts, metadata, *, factor=2.0):
    values = gray(images, prompts, metadata)
    return {"score": [factor * v for v in values], "strict": [v > 3 for v in values]}

def faces(images, prompts, metadata):
    """Does to each sample what its prompt says; the metadata's number is the score."""
    global gpu_is_lost
    gpu_is_lost |= "lose the GPU" in prompts
    if gpu_is_lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    for prompt in prompts:
        if prompt == "raise":
            raise ValueError("no face in the picture")
        if prompt == "sleep":
            open("asleep", "w").close()
            time.sleep(60)
        if prompt == "hold the GIL":
            ctypes.PyDLL(None).sleep(60)
        if prompt == "exit":
            print("last words", flush=True)
            os._exit(7)
        if prompt == "segfault":
            ctypes.string_at(0)
        if prompt == "stop":
            os.kill(os.getpid(), 19)
        if prompt == "linger":
            child = subprocess.Popen(["sleep", "60"])
            with open("lingering", "w") as file:
                file.write(str(child.pid))
            os._exit(7)
        if prompt == "no input":
            raise RewardInputError("the prompt has no face to look for")
    return [float("nan") if p == "nan" else m["value"] for p, m in zip(prompts, metadata)]

def fails_once(images, prompts, metadata):
    global calls
    calls += 1
    if calls == 1:
        raise ConnectionError("the service is busy")
    return [float(calls)] * len(images)

def modules(images, prompts, metadata):
    torch = float("torch" in sys.modules)
    return {"score": [torch], "modules": [len(sys.modules)], "pid": [os.getpid()]}

def one_short(images, prompts, metadata):
    return [1.0] * (len(images) - 1)

def as_array(images, prompts, metadata):
    import numpy as np
    return np.array(gray(images, prompts, metadata), dtype=np.float32)

def huge(images, prompts, metadata):
    return [1e308] * len(images)

def slow(images, prompts, metadata):
    time.sleep(metadata[0]["sleep_s"])
    return gray(images, prompts, metadata)
'''


def give_up_soon(patch: pytest.MonkeyPatch, about: bytes, deadline_s: float) -> None:
    """Requests that hold these bytes hang, and have this deadline; others keep the patient one of their
    reward, however busy the machine is.
    """
    ask = RewardProcess.ask

    def ask_in_time(
        self: RewardProcess, request: Score | CheckPrompts, samples: Sequence[bytes] = ()
    ) -> Done | Values | Failed:
        if about in pickle.dumps(request) + b"".join(samples):
            request = dataclasses.replace(request, deadline_s=deadline_s)
        return ask(self, request, samples)

    patch.setattr(RewardProcess, "ask", ask_in_time)


CHECKED = """
import time
from spotlight_rewards.reward import RewardInputError

def reward_of_quotes(images, prompts, metadata, *, word="OPEN"):
    return [1.0] * len(images)

def check(prompts, metadata, *, word="OPEN"):
    for prompt in prompts:
        if prompt == "bug":
            raise KeyError("oops")
        if prompt == "hang":
            time.sleep(60)
        if word not in prompt:
            raise RewardInputError(f"prompt {prompt!r} lacks {word!r}")

def scored_by(*, word):
    return f"a reader of {word.upper()}"
"""


@contextmanager
def reward_modules(directory: Path) -> Iterator[None]:
    """Write ``faulty.py`` and ``checked.py``; at the end no process that started meanwhile may be left."""
    (directory / "faulty.py").write_text(REWARDS)
    (directory / "checked.py").write_text(CHECKED)
    before = _children()
    yield
    if _children() - before:
        gc.collect()  # not always: it looks at all that the test runner has
    assert not _children() - before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pictures(*values: int) -> list[Image]:
    return [np.full((4, 4, 3), value, np.uint8) for value in values]


def ask(pool: RewardPool, *prompts: str) -> tuple[ScoredSample | RewardFailure, ...]:
    metadata = [{"value": float(index)} for index in range(len(prompts))]
    return pool.score(pictures(*range(len(prompts))), prompts, metadata).samples


def totals(samples: tuple[ScoredSample | RewardFailure, ...]) -> list[float | str]:
    return [each.total if isinstance(each, ScoredSample) else each.kind.value for each in samples]


def spec(function: str, **changes: object) -> RewardConfig:
    return RewardConfig(name=f"faulty:{function}", **{"deadline_s": 5.0, "retries": 0, **changes})  # type: ignore[arg-type]


def message(sample: ScoredSample | RewardFailure) -> str:
    assert isinstance(sample, RewardFailure), sample
    return sample.message


def has_ended(pid: int) -> bool:
    """Whether a killed process is gone soon: signals are not waited for, except the pool's own."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:  # of whom init takes care
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
