"""All learner ranks as one, as the head sees them.

    restore() ─► starting ─► up ── ranks.ask(LearnerRank.train, ...) one after the other ──► lost()
                    └─ failed to start: reported once, retried with growing pauses

A *life* is one start of all ranks. Invariants:
- A life ends once. A rank that dies, misses a deadline or raises an unexpected error ends it for all ranks:
  they are killed, :meth:`LearnerGroup.lost` returns, and every call to that life raises
  :class:`~spotlight.cluster.remote_calls.AbandonedError`.
- One call is in flight at a time, in call order, so its deadline is its own.
- User-fixable errors (:data:`FINAL`) propagate unchanged and are never retried.

When a learner that keeps failing is given up, :class:`Failures` decides.
A life is *stuck* if a rank failed and no more calls were answered than in another life since the last
checkpoint: what kills at the same point every time, such as the kernel for want of memory, gets no further.
Lives whose nodes left are not stuck; that is known some time after the failure, hence :meth:`Failures.judge`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from spotlight.cluster.learner.learner_rank import LearnerRank
from spotlight.cluster.learner.life import FINAL, CallLimits, Deadlines, End, Life, described
from spotlight.cluster.learner.ray_launcher import RayLauncher
from spotlight.cluster.remote_calls import AbandonedError, Notify
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.prompts import Prompt
from spotlight_weights.bundle import WeightsManifest

START_FAILED: tuple[type[Exception], ...] = (AbandonedError, *FINAL)
"""Errors that end a life during its start."""


class LearnerError(UserError, RuntimeError):
    """The learner keeps failing in the same way; the message holds what it raised."""


class LearnerGroup:
    """The learner, as the head sees it. Its coroutines belong to one event loop.

    Args:
        prompts: all prompts of the run, which only the head reads.
        note: called once per :meth:`restore` that fails to start, with the reason.
    """

    def __init__(
        self,
        launcher: RayLauncher,
        prompts: Sequence[Prompt],
        note: Notify,
        deadlines: Deadlines,
    ) -> None:
        self._launcher, self._prompts, self._note = launcher, prompts, note
        self._limits = CallLimits(deadlines)
        self._life: Life | None = None
        self._second: tuple[Life, asyncio.Task[None]] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._lives = 0
        self._failures = Failures()

    @property
    def is_up(self) -> bool:
        """Whether all ranks are ready for calls."""
        return self._life is not None and self._life.up and not self._life.over.done()

    @property
    def ranks(self) -> Life:
        """The ranks, to be asked. AbandonedError: they are not ready."""
        if self._life is None or not self._life.up:
            raise AbandonedError("the learner is lost")
        return self._life

    @property
    def working_life(self) -> int:
        """Number of the life that was restored last; a second one may be younger."""
        assert self._life is not None, "restore() comes first"
        return self._life.number

    # -- lives -----------------------------------------------------------------------------------------

    async def restore(self, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        """Restart all ranks from ``checkpoint``, or from the start of the run, and publish the weights.

        Kills living ranks first. Failed starts are retried with growing pauses. Call :meth:`lost` as soon as
        this has returned.

        Args:
            checkpoint: the learner's folder of a checkpoint.

        Returns:
            Manifest of the restored weights.

        Raises:
            AbandonedError: :meth:`restore` or :meth:`stop` was called meanwhile.
            LearnerError: it failed several times in a row without getting further.
            Exception: one of :data:`FINAL`.
        """
        second, self._second = self._second, None
        await self.stop()
        for attempt in count():
            if attempt == 0 and second is not None:
                self._life, forming = second
                try:
                    await asyncio.shield(forming)
                    return await self._load(self._life, checkpoint, lineage)
                except START_FAILED:
                    await self._bury(second[0])
            life = self._life = self._new_life()
            # Negative, hence no pause, for the first restart.
            urgent = self._failures.lost - 2 if attempt == 0 else attempt - 1
            try:
                await self._pause(life, self._limits.deadlines.pause_before_s(urgent))
                await self._form(life)
                return await self._load(life, checkpoint, lineage)
            except START_FAILED:
                detail = await self._bury(life)
            if attempt == 0:
                self._note(
                    f"the learner does not start: {detail}\n"
                    f"(start {life.number} of the learner; it is tried again)"
                )
        raise AssertionError("unreachable")

    async def lost(self) -> str:
        """Wait until the current life and its processes end; returns the cause. Raises as :meth:`restore`."""
        life = self._life
        assert life is not None, "restore() comes first"
        await asyncio.wait({life.over})
        detail = await self._bury(life)
        self._life = None
        self._failures.lost += 1
        return detail

    def end(self, detail: str) -> None:
        """End the current life, whatever it does; :meth:`lost` returns as for any other loss."""
        if self._life is not None:
            self._life.end(End(detail))

    async def form_second(self) -> None:
        """Start all ranks once more, elsewhere, as far as they need no state; :meth:`restore` takes them.

        Raises AbandonedError: they do not start, or are not needed any more.
        """
        await self._drop_second()
        life = self._new_life()
        beside = self._life.number if self.is_up and self._life is not None else None
        forming = asyncio.ensure_future(self._form(life, beside))
        self._second = life, forming
        try:
            await asyncio.wait({forming})
            await forming
        except asyncio.CancelledError:
            if not forming.cancelled():
                raise
            raise AbandonedError("form_second") from None
        except START_FAILED as error:
            if self._second == (life, forming):
                self._note(f"a second learner does not start: {life.over.result().detail}")
                await self._drop_second()
            raise AbandonedError("form_second") from error
        watch = asyncio.ensure_future(self._watch_second(life, forming))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def leave(self, node: str) -> None:
        """A node is for something else: a second learner there would keep workers from starting, so it ends.

        Its processes hold nothing any more soon after.
        """
        if self._second is not None and node in self._launcher.nodes_of(self._second[0].number):
            self._second[0].end(End("its nodes are for something else"))

    async def _watch_second(self, life: Life, forming: asyncio.Task[None]) -> None:
        """End the other processes of one that loses any while it waits to be taken."""
        await asyncio.wait({life.over})
        if self._second == (life, forming):
            await self._drop_second()

    async def _drop_second(self) -> None:
        second, self._second = self._second, None
        if second is not None:
            second[0].end(End("another is formed"))
            if not second[0].ranks:
                second[1].cancel()  # it may wait for room
            await asyncio.wait({second[1]})
            await self._launcher.end(second[0].ranks, ())

    async def stop(self) -> None:
        """End all ranks; nothing is reported afterwards."""
        await self._drop_second()
        life, self._life = self._life, None
        if life is not None:
            life.end(End("it was stopped"))
            await self._launcher.end(life.ranks, ())

    def _new_life(self) -> Life:
        self._lives += 1
        return Life(self._lives, self._limits)

    async def _pause(self, life: Life, seconds: float) -> None:
        if seconds > 0:
            await asyncio.wait({life.over}, timeout=seconds)
        if life.over.done():
            raise AbandonedError("restore")

    async def _form(self, life: Life, beside: int | None = None) -> None:
        try:
            ranks = await self._launcher.start(life.number, beside)
        except Exception as error:
            life.end(End(f"learner ranks cannot be started: {described(error)}"))
            raise AbandonedError("start") from error
        life.begin(ranks)
        await life.ask(LearnerRank.begin)
        hosts = self._launcher.meeting_hosts(ranks)
        address = await life.ask(LearnerRank.open_rendezvous, hosts[0])
        await life.ask(LearnerRank.join, address, hosts)
        await life.ask(LearnerRank.load_model, self._prompts)
        await life.ask(LearnerRank.build)

    async def _load(self, life: Life, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        if checkpoint is not None:
            await life.ask(LearnerRank.load, checkpoint)
        manifest = await life.publish(None, lineage)
        life.up = True
        return manifest

    async def _stayed(self, lives: Sequence[int]) -> Collection[int]:
        try:
            return await self._launcher.stayed(lives)
        except Exception as error:  # noqa: BLE001 - without the list of nodes nobody is given up
            logging.getLogger(__name__).warning("Ray does not tell which nodes stayed: %s", described(error))
            return ()

    async def _bury(self, life: Life) -> str:
        end = life.over.result()
        if life is not self._life:
            await self._launcher.end(life.ranks, ())  # may have started after the life ended
            raise AbandonedError("life")
        # A rank that is late while it starts may only wait for its resources.
        failed = bool(end.ranks) and (life.up or end.died)
        self._failures.ended(life.number, answered=life.answered, raised=end.raised, failed=failed)
        try:
            log = await self._launcher.end(life.ranks, end.ranks)
        except Exception as error:  # noqa: BLE001 - logs are optional
            log = f"(no log: {described(error)})"
        suspects = self._failures.suspects
        stuck = bool(suspects) and self._failures.judge(await self._stayed(suspects))
        if life is not self._life:
            raise AbandonedError("life")
        if end.final is not None:
            raise end.final
        detail = f"{end.detail}\n{log}" if log else end.detail
        goes_on = "Once the cause is removed, the same command goes on from the last checkpoint."
        if self._failures.raised >= RAISED_MAX:
            raise LearnerError(
                f"the learner failed {self._failures.raised} times in a row: {detail}\n{goes_on}"
            )
        if stuck:
            raise LearnerError(
                f"the learner failed more than {STUCK_MAX} times in a row and got no further, though its "
                "nodes stayed. A rank that dies without an error of its own may lack host memory: look for "
                f"the kernel's OOM killer in its node's log (dmesg). The last time: {detail}\n{goes_on}"
            )
        return detail

    async def save(self, directory: Path) -> None:
        """Write the learner's state to a directory; later lives begin here."""
        ranks = self.ranks
        await ranks.ask(LearnerRank.save, directory)
        self._failures = Failures()
        ranks.answered = 0


# -- when a learner that keeps failing is given up. Pure ---------------------------------------------------


RAISED_MAX = 3
"""After this many lives in a row that unexpected errors ended, stop retrying."""
STUCK_MAX = 10
"""After this many stuck lives in a row whose nodes stayed, and another failure, stop retrying."""


@dataclass(slots=True)
class Failures:
    """Lives since the last checkpoint, in a row.

    Attributes:
        lost: lives that were up.
        raised: lives ended by unexpected errors, up to now.
    """

    lost: int = 0
    raised: int = 0
    _stuck: list[int] = field(default_factory=list)
    _furthest: int = 0

    def ended(self, life: int, *, answered: int, raised: bool, failed: bool) -> None:
        """Count an ended life.

        Args:
            answered: calls, once it was up.
            raised: an unexpected error ended it.
            failed: a rank ended it, by an error, its death or its silence.
        """
        self.raised = self.raised + 1 if raised else 0
        if answered > self._furthest:
            self._furthest, self._stuck = answered, []
        elif failed:
            self._stuck.append(life)

    @property
    def suspects(self) -> Sequence[int]:
        """The lives to :meth:`judge`; empty: too few. Not the newest of all: its node may be leaving."""
        return self._stuck[:-1] if len(self._stuck) > STUCK_MAX else ()

    def judge(self, stayed: Collection[int]) -> bool:
        """Whether to give up: of the suspects, those whose nodes all ``stayed`` are too many."""
        self._stuck = [*(life for life in self._stuck[:-1] if life in stayed), self._stuck[-1]]
        return bool(self.suspects)
