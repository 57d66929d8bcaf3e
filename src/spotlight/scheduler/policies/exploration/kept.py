"""Previews that are rollouts already, and are not made again.

A preview by its iteration's weights, with a rollout's steps, guidance and precision, is what the rollout of
its prompt and seed would be, bit for bit. Where the plan says ``keeps_previews``, the samples of
such previews stay stored until their window has closed. Those of chosen seeds then become their rollouts'
samples, with their scores; the others are discarded.

Invariant: a preview becomes at most one rollout, of its prompt, seed, steps and version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.exploration.window import Window
from spotlight.scheduler.types import Maker, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A preview's sample and scores; ``maker`` names the preview."""

    preview: RolloutId
    maker: Maker
    scores: Mapping[str, float]


@dataclass(slots=True)
class KeptPreviews:
    """See the module's docstring. Between two events it holds nothing.

    Attributes:
        kept: number of rollouts since the last window.
    """

    plan: Plan
    kept: int = 0
    _offered: dict[tuple[PromptId, int], Rollout] = field(default_factory=dict)
    _window: Window = field(default_factory=lambda: Window(0))

    def wants(self, preview: Rollout) -> bool:
        """Whether a preview's sample has to stay until its window closes."""
        return self.plan.keeps_previews and preview.steps == self.plan.rollout_steps

    def offer(self, closed: Window) -> None:
        """Take the scored previews of a window whose rollouts are issued next."""
        scored = (closed.work.rollouts[name] for name in closed.work.scores)
        self._offered = {(one.prompt_id, one.seed): one for one in scored if self.wants(one)}
        self._window, self.kept = closed, 0

    def take(self, rollout: Rollout) -> KeptSample | None:
        """The sample of this rollout, if it was made as a preview."""
        preview = self._offered.get((rollout.prompt_id, rollout.seed))
        if preview is None or rollout.purpose is not Purpose.TRAIN or preview.version != rollout.version:
            return None
        del self._offered[rollout.prompt_id, rollout.seed]
        self.kept += 1
        maker = self._window.work.makers[preview.id]._replace(preview=preview.id)
        return KeptSample(preview.id, maker, self._window.work.scores[preview.id])

    def report(self) -> dict[str, object]:
        """JSON-able: how many rollouts were not made again; empty where none can be kept."""
        return {"kept": self.kept} if self.plan.keeps_previews else {}

    def rest(self) -> list[RolloutId]:
        """Previews that no rollout took, to be discarded."""
        left, self._offered = [one.id for one in self._offered.values()], {}
        self._window = Window(0)
        return left
