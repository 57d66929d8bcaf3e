"""Keys, and values of keys, that older versions had.

A run of an older version writes every key into its ``config.yaml``, used or not: one that did nothing there
is left out, so that the run can be resumed and read. Otherwise the error names the way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spotlight_rewards.base.errors import Problem


@dataclass(frozen=True, slots=True)
class Removed:
    """A key that is no more.

    Attributes:
        off: values with which it did nothing.
        remedy: what to do instead, in sentences.
    """

    key: str
    off: tuple[object, ...]
    remedy: str


REMOVED = (
    Removed(
        "exploration.rungs",
        (None,),
        "Previews no longer stop early: leave it out, and preview with fewer exploration.steps, or fewer "
        "exploration.seeds_per_prompt, to spend less.",
    ),
    Removed("exploration.finishers", (None,), "Previews no longer stop early: leave it out."),
    Removed(
        "exploration.undo_selection",
        (False,),
        "Samples of chosen seeds are no longer weighted: leave it out, or set exploration.policy=random for "
        "seeds that nothing chose.",
    ),
    Removed(
        "exploration.fidelity_min",
        (None,),
        "Previews choose seeds however they rank: leave it out, watch the metric "
        "exploration/fidelity/reward/tau_by_slope, and preview with more exploration.steps where it is low.",
    ),
)
"""All of them, in the order of the configuration."""


def without_removed(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree without removed keys, and what is wrong where they did something."""
    found = dict(tree)
    return found, [problem for each in REMOVED for problem in _taken_out(found, each)]


def _taken_out(tree: dict[str, Any], removed: Removed) -> Iterator[Problem]:
    *parents, leaf = removed.key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            return
        node[parent] = child = dict(child)
        node = child
    if leaf in node and (value := node.pop(leaf)) not in removed.off:
        yield Problem(removed.key, repr(value), "nothing: this version has no such key", removed.remedy)
