"""The process that runs rows: one at a time, on request; see :mod:`benchmarks.gpu.supervisor`."""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging

from benchmarks._measure import machine
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.suite import Outcome, Row, Skip
from spotlight.runtime.process import prepare_process

_PR_SET_PDEATHSIG = 1  # prctl.h
_LINES = 12


def serve(home: Path, device: str, tiny: bool, model: str, pipe: Connection) -> None:
    """Run every row that the pipe asks for, until it closes."""
    os.setpgid(0, 0)  # one group with its children, so that all can be killed at once
    die_with_parent()
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(where)
    multiprocessing.set_forkserver_preload(["benchmarks.gpu.children"])  # for the children of rows on a CPU
    prepare_process(where, deterministic=False)
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    about = machine(where)
    if where.type == "cuda":
        about |= {
            "memory_gib": round(torch.cuda.mem_get_info(where)[1] / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    pipe.send({"machine": about})
    lab = Lab(home, where, tiny=tiny, model=model)
    while True:
        try:
            row: Row = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(row, lab))


def die_with_parent() -> None:
    """End this process when its parent does, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def call(row: Row, lab: Lab) -> Outcome:
    """Run a row's function."""
    module, _, name = row.function.partition(":")
    lab.budget_s = row.budget_s
    outcome: Outcome = getattr(importlib.import_module(module), name)(lab)
    return outcome


def _answer(row: Row, lab: Lab) -> dict[str, Any]:
    try:
        outcome = call(row, lab)
    except Skip as why:
        return {"kind": "skip", "note": str(why)}
    except Exception as error:  # noqa: BLE001 - whatever a row raises is its result
        note = f"{type(error).__name__}: {str(error).strip()[:600]}"
        trace = "\n".join(traceback.format_exc().splitlines()[-_LINES:])
        print(f"{row.name}\n{trace}", flush=True)
        traceback.clear_frames(error.__traceback__)
        del error
        return {"kind": "raised", "note": note, "broken": not _tidy(lab)}
    return {"kind": "value", "outcome": outcome} | ({} if _tidy(lab) else {"broken": True})


def _tidy(lab: Lab) -> bool:
    """Free what a row left; whether the device still answers."""
    gc.collect()
    if lab.device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(lab.device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
