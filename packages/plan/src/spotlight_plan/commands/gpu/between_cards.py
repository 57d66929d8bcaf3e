"""How fast cards add up tensors: an all-reduce, in a process for each card.

Invariant: when :func:`all_reduce_rate` returns, none of its processes is left, whatever they hang in.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from spotlight_kernels.measure.device_rates import repeated_s
from spotlight_plan.commands.gpu.gpu_report import Link


def all_reduce_rate(cards: int, size_bytes: int, deadline_s: float, *, backend: str = "nccl") -> Link:
    """All-reduce float32 tensors of ``size_bytes`` between ``cards`` devices.

    Args:
        deadline_s: for all of it, starting processes included.
        backend: nccl; or gloo, between CPUs.
    """
    context, ends = multiprocessing.get_context("spawn"), time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="spotlight-doctor-") as folder:
        pipes, children = [], []
        try:
            for rank in range(cards):
                here, there = context.Pipe(duplex=False)
                arguments = (rank, cards, backend, Path(folder) / "store", size_bytes, deadline_s, there)
                child = context.Process(target=_member, args=arguments, daemon=True)
                child.start()
                children.append(child)
                there.close()
                pipes.append(here)
            waiting, seconds = set(pipes), [0.0]
            while waiting:
                ready = wait(waiting, max(0.0, ends - time.monotonic()))
                if not ready:
                    return Link(cards, size_bytes, None, f"no answer within {deadline_s:g} s")
                for pipe in ready:
                    answer = _received(pipe)
                    if isinstance(answer, str):
                        return Link(cards, size_bytes, None, answer)
                    seconds.append(answer)
                    waiting.discard(pipe)
        except OSError as error:  # no process or memory to be had
            return Link(cards, size_bytes, None, str(error))
        finally:
            for child in children:
                child.kill()
                child.join()
    # Each card sends every other's share once to be added and once as the sum.
    return Link(cards, size_bytes, 2 * (cards - 1) / cards * size_bytes / max(seconds))


def _received(pipe: object) -> float | str:
    try:
        answer: float | str = pipe.recv()  # type: ignore[attr-defined]
    except EOFError:
        return "a process ended without an answer"
    return answer


def _member(
    rank: int, cards: int, backend: str, store: Path, size_bytes: int, deadline_s: float, answer: object
) -> None:
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=cards,
            timeout=timedelta(seconds=deadline_s),
        )
        tensor = torch.zeros(size_bytes // 4, device=device)
        found: float | str = repeated_s(device, lambda: dist.all_reduce(tensor))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
    answer.send(found)  # type: ignore[attr-defined]
    os._exit(0)  # at once: ending a group's threads in order may wait for members that are gone
