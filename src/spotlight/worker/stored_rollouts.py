"""What a worker stores of its rollouts, with the events that refer to it, and begins a lease's rollouts from.

- Values go before events, which refer to stored values only. They are packed as they are delivered: behind
  the next step, where the head's client does that.
- A rollout begins from a commit or from pure noise. Only commits made with the current weights count: one
  policy version makes all of a rollout.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from spotlight.models.condition import Condition, RecentConditions
from spotlight.rollout.commits import Committer, latents_of, restore
from spotlight.rollout.engine import Engine
from spotlight.rollout.serialization import SerializationError, pack_image, pack_sample, unpack_condition
from spotlight.rollout.state import FailedRollout, FinishedRollout, Recipe, RolloutState
from spotlight.scheduler.events import Event
from spotlight.scheduler.types import Purpose, Rollout, RolloutId, WorkerId
from spotlight.worker.interfaces import HeadClient
from spotlight.worker.reports import Report, ReportedValue, RolloutSpeed, address
from spotlight_rewards.base.prompts import PromptId

REPORT_BYTES = 64 * 2**20
"""Most bytes of values in a report that has several: Ray's smallest object store holds 75 MiB, and a batch of
states of 129 frames at 720p takes hundreds (``benchmarks/state_bytes.py``)."""


class ReportOutbox:
    """Not thread-safe.

    Args:
        report_bytes: values beyond it are delivered before, in reports of their own without events.
    """

    def __init__(self, worker: WorkerId, head: HeadClient, report_bytes: int = REPORT_BYTES) -> None:
        self._worker, self._head, self._report_bytes = worker, head, report_bytes
        self._committer = Committer()
        self._values: list[Iterable[ReportedValue]] = []
        self._events: list[Event | RolloutSpeed] = []
        self._later: list[tuple[float, int, Event]] = []
        self._count = 0

    def send(self, event: Event | RolloutSpeed) -> None:
        """Send an event with the next delivery."""
        self._events.append(event)

    def send_later(self, event: Event, seconds: float) -> None:
        """Send an event after a delay."""
        self._count += 1
        heapq.heappush(self._later, (time.monotonic() + seconds, self._count, event))

    def keep_progress(self, states: Sequence[RolloutState]) -> None:
        """Add states to resume from."""
        if states:
            packed = self._committer.begin(states)
            self._values.append(
                ReportedValue(
                    "latent" if one.latent else "progress", one.rollout, one.data, one.step, one.latent
                )
                for one in packed
            )

    def keep_finished(self, finished: FinishedRollout) -> None:
        """Add the image for rewards and the sample for the learner."""
        name, step = finished.rollout.id, finished.rollout.steps
        packers = ("image", pack_image), ("sample", pack_sample)
        self._values.append(ReportedValue(kind, name, pack(finished), step) for kind, pack in packers)

    @property
    def due_s(self) -> float | None:
        """``time.monotonic()`` of the next delayed event."""
        return self._later[0][0] if self._later else None

    def deliver(self, weights_digest: str) -> None:
        """Send everything that is due. Raises HeadLostError.

        Args:
            weights_digest: of the weights that made the values.
        """
        while self._later and self._later[0][0] <= time.monotonic():
            self._events.append(heapq.heappop(self._later)[2])
        if self._values or self._events:
            values, events = chain(*self._values), tuple(self._events)
            self._values, self._events = [], []
            self._head.deliver(self._reports(values, events, weights_digest))

    def _reports(
        self, values: Iterable[ReportedValue], events: tuple[Event | RolloutSpeed, ...], weights_digest: str
    ) -> Iterator[Report]:
        """Values in order, each report with at most ``report_bytes`` or one; the last has the events."""
        together: list[ReportedValue] = []
        size = 0
        for value in values:
            if together and size + len(value.data) > self._report_bytes:
                yield Report(self._worker, weights_digest, tuple(together), ())
                together, size = [], 0
            together.append(value)
            size += len(value.data)
        yield Report(self._worker, weights_digest, tuple(together), events)


# -- turns a lease's rollouts into states: resumed from a commit, or pure noise ----------------------------


_KEPT_BYTES = 1 << 30
"""Of prompts' embeddings, and of latents of their pictures: a video's first frame has up to 10 MB."""


class RolloutStarter:
    """Creates rollout states. Keeps the conditions used last, which no commit holds."""

    def __init__(self, head: HeadClient, engine: Engine, recipes: Mapping[Purpose, Recipe]) -> None:
        self._head, self._engine, self._recipes = head, engine, recipes
        self._recent = RecentConditions(_KEPT_BYTES)

    def start(
        self, rollouts: Sequence[Rollout], resume: Collection[RolloutId], weights_digest: str
    ) -> tuple[list[RolloutState], list[FailedRollout]]:
        """States in the order of ``rollouts``, and those that could not be started.

        Args:
            resume: rollouts with committed progress.
            weights_digest: of the weights held.

        Raises:
            HeadLostError: the blob store does not answer.
        """
        states = self._resumed([rollout for rollout in rollouts if rollout.id in resume], weights_digest)
        fresh = [rollout for rollout in rollouts if rollout.id not in states]
        conditions = self._conditions_of({rollout.prompt_id: None for rollout in fresh})
        failed = [
            FailedRollout(rollout, f"no sound embeddings of prompt {rollout.prompt_id} are kept")
            for rollout in fresh
            if rollout.prompt_id not in conditions
        ]
        for purpose in dict.fromkeys(rollout.purpose for rollout in fresh):
            part = [r for r in fresh if r.purpose is purpose and r.prompt_id in conditions]
            begun, refused = self._begun(part, conditions)
            states |= {state.rollout.id: state for state in begun}
            failed += refused
        return [states[rollout.id] for rollout in rollouts if rollout.id in states], failed

    def _resumed(self, rollouts: Sequence[Rollout], weights_digest: str) -> dict[RolloutId, RolloutState]:
        if not rollouts:
            return {}
        kept = self._head.fetch("progress", [rollout.id for rollout in rollouts], weights_digest)
        conditions = self._conditions_of({rollout.prompt_id: None for rollout in rollouts})
        states: dict[RolloutId, RolloutState] = {}
        for rollout, value in zip(rollouts, kept, strict=True):
            if value is None:
                continue
            try:
                latents = self._latents_of(rollout, value.data, weights_digest)
                condition, recipe = conditions.get(rollout.prompt_id), self._recipes[rollout.purpose]
                state = restore(value.data, latents, condition, recipe, self._engine.device)
            except ValueError:
                continue  # damaged, or of another configuration: start over
            # A restored learner reuses version numbers; the digest identifies weights.
            if dataclasses.replace(state.rollout, version=rollout.version) == rollout:
                states[rollout.id] = dataclasses.replace(state, rollout=rollout)
        return states

    def _latents_of(self, rollout: Rollout, state: bytes, weights_digest: str) -> list[bytes]:
        """Those that are found; of one that is not, the checksum is missed."""
        values = [
            self._head.fetch("latent", [rollout.id], address(weights_digest, name))[0]
            for name in latents_of(state)
        ]
        return [value.data for value in values if value is not None]

    def _begun(
        self, rollouts: Sequence[Rollout], conditions: Mapping[PromptId, Condition]
    ) -> tuple[list[RolloutState], list[FailedRollout]]:
        """After an error start one by one, so that a bad rollout does not block the others."""
        if not rollouts:
            return [], []
        recipe = self._recipes[rollouts[0].purpose]
        embeddings = [conditions[rollout.prompt_id] for rollout in rollouts]
        try:
            return self._engine.start(rollouts, embeddings, recipe), []
        except ValueError as error:
            if len(rollouts) == 1:
                return [], [FailedRollout(rollouts[0], str(error))]
        parts = [self._begun([rollout], conditions) for rollout in rollouts]
        return [s for begun, _ in parts for s in begun], [f for _, refused in parts for f in refused]

    def _conditions_of(self, prompts: Iterable[PromptId]) -> dict[PromptId, Condition]:
        wanted = list(prompts)
        found = self._recent.of(wanted)
        absent = [prompt for prompt in wanted if prompt not in found]
        if absent:
            kept = self._head.fetch("condition", absent)
            for prompt, value in zip(absent, kept, strict=True):
                if value is not None:
                    with suppress(SerializationError):  # treat damaged as absent
                        found[prompt] = unpack_condition(value.data)
        self._recent.use(found)
        return found
