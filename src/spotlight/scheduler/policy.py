"""What a run may do beside the default: random seeds, synchronous iterations, every sample trained.

The core asks its policies a few questions at fixed places, in the order of
:data:`~spotlight.registry.POLICIES`. Every hook here is the default and changes nothing: a policy overrides
those that it needs, in a folder of its own that only runs with it import. It is as pure as the controller: no
clock, threads or global randomness. Times are the controller's, in seconds.

Another package adds one with an entry point of the group ``spotlight.policies``; a run switches it on with
``policies: {NAME: {keys of its section}}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from spotlight.config.section import Section
from spotlight.scheduler.batches import Part
from spotlight.scheduler.effects import Effect
from spotlight.scheduler.types import DropReason, Maker, PolicyVersion, Rollout, RolloutId, Scores
from spotlight_rewards.base.prompts import Prompt


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group before its rollouts are issued: its prompt, and the seeds of its members; none: fresh ones."""

    prompt: Prompt
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """Work that stands for a rollout to be issued.

    Attributes:
        rollout: of the same id, prompt and seed; its version may be older.
        maker: None: it is still being made, and in the queue.
        scores: None: not scored yet.
    """

    rollout: Rollout
    maker: Maker | None
    scores: Scores | None


class Training(Protocol):
    """What a policy may know and do of an iteration's training.

    Attributes:
        trains_parts: some policy has parts trained before the batch is complete.
        overlapped: samples given to the learner before that.
        zeros: by update, samples that its mean counts as 0.
        left_out: samples that are not trained, by reason.
        trained_in: samples by update.
    """

    iteration: int
    trains_parts: bool
    overlapped: int
    zeros: Counter[int]
    left_out: Counter[DropReason]
    trained_in: dict[int, list[RolloutId]]

    def ready(self) -> int:
        """Samples trainable now, before the batch is complete."""
        ...

    @property
    def untrained(self) -> int:
        """Samples generated, and neither trained yet nor left out."""
        ...

    def has_begun(self, update: int) -> bool:
        """Whether some samples of an update are with the learner."""
        ...

    def leave_out(self, rollouts: Iterable[Iterable[RolloutId]], reason: DropReason) -> None:
        """Drop scored samples that the run chose not to train."""
        ...

    def trained(self, parts: Iterable[Part]) -> list[Part]:
        """Those with samples to train; what was left out for the others is dropped."""
        ...


class Policy:
    """See the module's docstring. Made from all rollouts of the run, and its settings.

    Attributes:
        section: of the keys of a policy that another package adds. What they exclude is data beside them
            (:attr:`~spotlight.config.section.Section.requires`).
    """

    section: ClassVar[type[Section]] = Section

    # -- which rollouts --------------------------------------------------------------------------------

    def begin(self, iteration: int, version: PolicyVersion, now: float) -> None:
        """An iteration begins; its rollouts are issued, unless a policy holds them back."""

    @property
    def holds_back(self) -> bool:
        """Whether the rollouts of every iteration wait for work of this policy (:attr:`decided`)."""
        return False

    @property
    def decided(self) -> bool:
        """Whether what was held back can be issued."""
        return True

    def close(self, now: float) -> None:
        """Last call before the groups that come next are asked for: choose from what was made for them."""

    def groups(self, iteration: int, planned: Sequence[GroupPlan]) -> Sequence[GroupPlan]:
        """Prompts and seeds of an iteration's groups; as many as ``planned``."""
        return planned

    def take(self, rollout: Rollout) -> Begun | None:
        """Work that was done for exactly this rollout, which is then not made again."""
        return None

    def issued(self) -> None:
        """All rollouts of the iteration are issued; what none of them took is not needed any more."""

    def fill(self, iteration: int, now: float) -> None:
        """Issue work for workers that would idle, of a class below the iteration's; after any event."""

    # -- what became of them ---------------------------------------------------------------------------

    def scored(self, rollout: RolloutId, scores: Scores, now: float) -> None:
        """A sample of this policy's own work is scored."""

    def dropped(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """A rollout of this policy's own work will not be scored."""

    def waits_to_score(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether these samples are scored later, when this policy says so."""
        return False

    def after_event(self) -> None:
        """Rollouts were perhaps made, dropped or requeued."""

    def arrived(self, iteration: int, version: PolicyVersion) -> None:
        """Every sample of the iteration is scored or dropped."""

    def published(self) -> None:
        """Workers pull a new version; an iteration is over."""

    def rolled_back(self) -> list[RolloutId]:
        """The learner is lost: forget own work, and return its rollouts."""
        return []

    # -- training --------------------------------------------------------------------------------------

    def parts(self, slot: int, members: Sequence[RolloutId]) -> Iterator[Part] | None:
        """The trainable parts of a group, those that are complete, in order; None: the group as a whole."""
        return None

    @property
    def trains_parts(self) -> bool:
        """Whether parts are trained before the batch is complete."""
        return False

    def select(self, part: Part, iteration: int) -> Part:
        """What of a part is trained."""
        return part

    def defers(self, part: Part) -> bool:
        """Whether a part is not trained before the batch is complete."""
        return False

    def left_out(self, updates: list[list[Part]], training: Training) -> list[list[Part]]:
        """What is trained of a complete batch, by update."""
        return updates

    def others(self, slot: int, members: Sequence[RolloutId]) -> Sequence[Scores]:
        """Scores of a slot's prompt at other seeds than those of ``members``, to compare with."""
        return ()

    # -- the learner's GPUs ----------------------------------------------------------------------------

    def rolls_out(self, training: Training, now: float) -> bool:
        """Whether an idle learner's GPUs make rollouts first, although some samples may be trainable."""
        return False

    def trainer_budget(self) -> float | None:
        """Rollouts that they may make while they wait for samples; None: this policy does not say."""
        return None

    def trainer_budget_left(self, rollouts: float) -> None:
        """What is left of the budget after work was granted; 0 if training begins."""

    def wake_s(self, now: float) -> float | None:
        """When :class:`~spotlight.scheduler.events.TimePassed` is due at the latest."""
        return None

    # -- reports and state -----------------------------------------------------------------------------

    def figures(self, training: Training) -> Mapping[str, int]:
        """Counts for the iteration's :class:`~spotlight.scheduler.effects.ReportPipeline`."""
        return {}

    def reports(self, training: Training) -> Iterable[Effect]:
        """Own reports on an iteration that was trained."""
        return ()

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state between two iterations; empty: none."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Inverse of :meth:`snapshot`; empty: the initial state. Raises ValueError if malformed."""

    def check(self) -> None:
        """Assert own invariants."""


def overriding(policies: Iterable[Policy], hook: Callable[..., object]) -> tuple[Policy, ...]:
    """Those that have a hook of their own in place of the default ``hook``."""
    return tuple(each for each in policies if getattr(type(each), hook.__name__) is not hook)
