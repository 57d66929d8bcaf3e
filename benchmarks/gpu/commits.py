"""Part B: what the commit of a step costs the thread that denoises."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from benchmarks.gpu.lab import Lab
from benchmarks.gpu.suite import Outcome
from benchmarks.gpu.timing import (
    interleaved,
    medians,
    spread,
)
from spotlight.rollout.state import RolloutState
from spotlight.scheduler.types import WorkerId
from spotlight.worker.reports import Report
from spotlight.worker.steps import all_finite
from spotlight.worker.stored_rollouts import ReportOutbox
from spotlight_kernels.measure.device_rates import wait

PICTURE_STEPS = 20
"""Denoising steps of a picture, for shares."""
COMMITTED_STEP = 10


class _Behind:
    """A head's client that takes reports in the background of the next step, as a worker's does."""

    def __init__(self) -> None:
        self._carrier = ThreadPoolExecutor(1, "reports")
        self._under_way: Future[int] | None = None
        self.bytes = 0

    def deliver(self, reports: Iterable[Report]) -> None:
        """Begin once the last ones are taken."""
        self.wait()
        self._under_way = self._carrier.submit(self._take, reports)

    def wait(self) -> None:
        """Until all is taken."""
        if self._under_way is not None:
            self.bytes = self._under_way.result()

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[None]:
        """Nothing is kept."""
        return [None for _ in names]

    @staticmethod
    def _take(reports: Iterable[Report]) -> int:
        return sum(len(value.data) for report in reports for value in report.values)


def _at_step(states: Sequence[RolloutState], step: int) -> list[RolloutState]:
    """As if the steps before had been taken, with all their latents kept."""
    return [
        dataclasses.replace(
            state,
            step=step,
            kept=(*(torch.randn_like(state.latents) for _ in range(step)), state.latents),
            log_probs=tuple(torch.zeros((), device=state.latents.device) for _ in range(step)),
        )
        for state in states
    ]


def _again(states: Sequence[RolloutState]) -> list[RolloutState]:
    """As the last step made them, but not committed yet."""
    made = []
    for state in states:
        latents = state.latents.clone()
        log_probs = (*state.log_probs[:-1], state.log_probs[-1].clone())
        kept = (*state.kept[:-1], latents)
        made.append(dataclasses.replace(state, latents=latents, kept=kept, log_probs=log_probs))
    return made


def commit_share(lab: Lab) -> Outcome:
    """What a step's thread pays to commit all rollouts at step 10, as a share of the step."""
    family, shape = lab.family(), lab.scale.small
    engine, client, taken = lab.engine(family, shape), _Behind(), list[float]()
    outbox = ReportOutbox(WorkerId("worker"), client)

    def commit(states: Sequence[RolloutState]) -> None:
        wait(lab.device)
        began = time.perf_counter()
        outbox.keep_progress(
            [state for state, finite in zip(states, all_finite(states), strict=True) if finite]
        )
        outbox.deliver("digest")
        taken.append(time.perf_counter() - began)

    with lab.slots().use("policy", merged=True) as module:
        started = lab.start(family, engine, shape, PICTURE_STEPS, stochastic=True)
        states = engine.step(module, _at_step(started, COMMITTED_STEP - 1))
        commit(states)  # all latents so far
        client.wait()
        taken.clear()

        def committed() -> None:
            commit(_again(states))
            engine.step(module, states)
            client.wait()

        seconds = interleaved(lab, {"step": lambda: engine.step(module, states), "committed": committed})
        began_s = time.process_time()
        commit(_again(states))
        client.wait()
        cpu_s = time.process_time() - began_s
    typical = medians(seconds)
    waited = statistics.median(taken)
    details = {
        **spread(seconds),
        "commit_ms": 1e3 * waited,
        "slower_step": typical["committed"] / typical["step"] - 1,
        "cpu_ms": 1e3 * cpu_s,
        "bytes": client.bytes,
    }
    return Outcome(waited / typical["step"], details)
