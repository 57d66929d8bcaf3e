"""Keys, and values of keys, that older versions had.

A run of an older version writes every key into its ``config.yaml``, used or not: one that did nothing there
is left out, so that the run can be resumed. Otherwise the error names the way out. Reading a run needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotlight_rewards.base.errors import Problem


@dataclass(frozen=True, slots=True)
class Removed:
    """A key that is no more, or one of its values.

    Attributes:
        off: values with which the key did nothing.
        remedy: what to do instead, in sentences.
        value: the value that is no more; None: the key itself.
        read_as: the value that stands for ``value`` when an old run is read.
        now: the key that has taken its place, whose value is that of this one, or what ``values`` say.
    """

    key: str
    off: tuple[object, ...]
    remedy: str
    value: str | None = None
    read_as: str | None = None
    now: str | None = None
    values: tuple[tuple[object, object], ...] = ()

    def renamed(self, value: object) -> object:
        """For the key ``now``."""
        return next((new for old, new in self.values if old is value), value)


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
        "Previews choose seeds however well they rank: leave it out, watch the metric "
        "exploration/fidelity/reward/tau_by_slope, and preview with more exploration.steps where it is low.",
    ),
    Removed(
        "exploration.policy",
        (),
        "It brought no measured gain: set exploration.policy=max_variance.",
        value="proportional",
        read_as="random",  # both choose by chance
    ),
    Removed(
        "learner.gradient_checkpointing",
        (False,),
        "Set learner.recompute to blocks for true, to the same number for a number; elementwise keeps "
        "matrix products, and is faster than blocks.",
        now="learner.recompute",
        values=((True, "blocks"), (False, "none")),
    ),
)
"""Those of runs, and of scenarios, which have the section ``exploration`` too."""


def without_removed(
    tree: Mapping[str, Any], rows: Sequence[Removed] = REMOVED, *, renamed: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """The tree as this version reads it, and what is wrong where removed keys did something.

    Args:
        renamed: a key that has another name now is not wrong.
    """
    found = dict(tree)
    problems = [(each, problem) for each in rows for problem in _taken_out(found, each)]
    return found, [problem for each, problem in problems if not (renamed and each.now)]


def _taken_out(tree: dict[str, Any], removed: Removed) -> Iterator[Problem]:
    *parents, leaf = removed.key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            return
        node[parent] = child = dict(child)
        node = child
    if leaf not in node:
        return
    value = node[leaf]
    if removed.value is None:
        del node[leaf]
        now = (removed.now or "").rpartition(".")[2]
        if now in node:
            yield Problem(
                removed.key, repr(value), f"only {removed.now}, its new name", "Leave the old name out."
            )
            return
        if now:
            node[now] = removed.renamed(value)
        if value not in removed.off:
            yield Problem(removed.key, repr(value), "nothing: this version has no such key", removed.remedy)
    elif value == removed.value:
        node[leaf] = removed.read_as
        yield Problem(removed.key, repr(value), "a value that this version has", removed.remedy)
