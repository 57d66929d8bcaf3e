"""Validation means and standard errors from an evaluation's scores. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import Rollout, RolloutId
from spotlight.store.metrics import GRADED, STDERR, STRICT, Mean
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.prompts import Prompt, PromptId


def estimate(values: Sequence[float]) -> Mean:
    """Mean of at least one value; a single value has infinite standard error."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Mean(mean, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Mean(mean, math.sqrt(variance / len(values)))


def strict_curve(configured: str | None, curves: Iterable[str]) -> str | None:
    """The configured strict curve, else the first ending in ``/strict``. Raises ConfigError if absent."""
    known = list(curves)
    if configured is None:
        return next((curve for curve in known if curve.endswith("/strict")), None)
    if configured not in known:
        problem = Problem(
            "evaluation.strict", repr(configured), f"one of {', '.join(sorted(known))}",
            "Name a curve that the rewards make.",
        )  # fmt: skip
        raise ConfigError("the configuration", [problem])
    return configured


@dataclass(frozen=True, slots=True)
class Validation:
    """Scores on held-out prompts at one point of the run.

    Attributes:
        curves: by name; ``reward`` is what training maximises.
        strict: name of the strict curve, if any.
        by_tag: the strict curve (or the reward) by prompt tag.
    """

    curves: Mapping[str, Mean]
    strict: str | None
    by_tag: Mapping[str, Mean]

    @property
    def judged(self) -> Mean:
        """The strict score if there is one, else the reward."""
        return self.curves[self.strict or REWARD]

    def row(self) -> dict[str, float]:
        """As a flat row of metrics."""
        row = {}
        for name, value in (
            *((STRICT, self.curves[curve]) for curve in (self.strict,) if curve is not None),
            (GRADED, self.curves[REWARD]),
            *((f"tag/{tag}", value) for tag, value in self.by_tag.items()),
            *((name, value) for name, value in self.curves.items() if name != REWARD),
        ):
            row[name], row[f"{name}{STDERR}"] = value.mean, value.stderr
        return row


def summarise(
    rollouts: Sequence[Rollout],
    scores: Mapping[RolloutId, Mapping[str, float]],
    prompts: Mapping[PromptId, Prompt],
    configured_strict: str | None,
) -> Validation:
    """Mean over all scored evaluation rollouts; of each curve over those that have it.

    Raises:
        ValueError: there are none.
        ConfigError: the configured strict curve does not exist.
    """
    if not rollouts:
        raise ValueError("not one evaluation sample could be scored; see the attempt's log for the reasons")
    names = list(dict.fromkeys(name for rollout in rollouts for name in scores[rollout.id]))
    shared = [name for name in names if all(name in scores[rollout.id] for rollout in rollouts)]
    strict = strict_curve(configured_strict, shared)
    tagged: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        tag = prompts[rollout.prompt_id].metadata.get("tag")
        if isinstance(tag, str):
            tagged[tag].append(scores[rollout.id][strict or REWARD])
    return Validation(
        # A reward may return some detail curves in some calls only.
        curves={
            name: estimate([scores[each.id][name] for each in rollouts if name in scores[each.id]])
            for name in names
        },
        strict=strict,
        by_tag={tag: estimate(values) for tag, values in sorted(tagged.items())},
    )
