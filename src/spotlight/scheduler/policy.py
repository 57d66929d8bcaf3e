"""What a run may do beside the default: random seeds, synchronous iterations, every sample trained.

The core asks its policies a few questions at fixed places and merges their answers in the order of
:data:`~spotlight.registry.POLICIES`. Every hook here is the default and changes nothing; a policy overrides
the few that it needs. It has a folder of its own, is imported only by runs that use it, and is as pure as the
controller: no clock, threads or global randomness.

Another package adds one with an entry point of the group ``spotlight.policies`` and a run switches it on with
``policies.NAME: {keys of its section}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from spotlight.config.section import Section
from spotlight.scheduler.types import Maker, PolicyVersion, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt

if TYPE_CHECKING:
    from spotlight.scheduler.rollouts import Rollouts

Settings = TypeVar("Settings", bound=Section)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of an iteration before its rollouts are issued; without ``seeds`` it gets fresh ones."""

    prompt: Prompt
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A sample that is there already; ``scores``: None if it is not scored yet."""

    maker: Maker
    scores: Mapping[str, float] | None


class Policy(Generic[Settings]):
    """See the module's docstring.

    Attributes:
        section: of its keys. What they exclude is data beside them (:attr:`Section.requires`).
        work: all rollouts of the run; how a policy issues work of its own.
    """

    section: ClassVar[type[Section]]

    def __init__(self, work: Rollouts, settings: Settings) -> None:
        self.work, self.settings = work, settings

    # -- which rollouts --------------------------------------------------------------------------------

    def groups(self, iteration: int, planned: Sequence[GroupPlan]) -> Sequence[GroupPlan]:
        """Prompts and seeds of an iteration's groups; as many as ``planned``."""
        return planned

    def take(self, rollout: Rollout) -> Made | None:
        """The sample of exactly this rollout, if it need not be made."""
        return None

    def fill(self, iteration: int, now: float) -> None:
        """Issue work for workers that would idle, of a class below the iteration's."""

    # -- what came of them -----------------------------------------------------------------------------

    def arrived(self, iteration: int, scores: Mapping[int, Mapping[RolloutId, Mapping[str, float]]]) -> None:
        """Every sample of the iteration is scored or dropped; ``scores``: by group and rollout."""

    def published(self, version: PolicyVersion, now: float) -> None:
        """Workers may pull ``version``; the iteration is over."""

    # -- state -----------------------------------------------------------------------------------------

    def report(self, iteration: int) -> Mapping[str, float]:
        """Metrics of an iteration that ends, by name."""
        return {}

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state between two iterations; empty: none."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Inverse of :meth:`snapshot`; empty: the initial state. Raises ValueError if malformed."""
