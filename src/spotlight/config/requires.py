"""What configuration keys require of each other, as data: the checks, their messages and a page of the
reference (``docs/reference/configuration.md``) are made from the same rows.

A section, an algorithm or a policy declares its rows beside its keys, as the class attribute ``requires``::

    requires = (
        Requires("fleet.learner_ranks", {"fleet.driver": "inline"}, 1, "Set fleet.driver=ray."),
        Requires("pipeline.slice_size", {"pipeline.axis": "generation"},
                 less_than("rollout.group_size"), "A slice is a part of a group: lower it."),
    )

and gets ``fleet.learner_ranks: found 4; expected 1 with fleet.driver=inline. Set fleet.driver=ray.``
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel

from spotlight_rewards.base.errors import Problem

Run = TypeVar("Run")
"""What is checked: a run's configuration, or another tree of sections with these keys."""

_HOLE = re.compile(r"\{([\w.]+)\}")
_FIGURE = re.compile(r"(?:,| ?=) ?\{[\w.]+\}|(?<=\bthe )\{[\w.]+\} ")
"""A hole that a sentence does without."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of the value of one key.

    Attributes:
        text: completes "expected ...".
        holds: whether a value is as wanted; given it and what the key ``other`` has.
        other: key, or constant, to compare with.
    """

    text: str
    holds: Callable[[Any, Any], bool]
    other: object = None


@dataclass(frozen=True)
class That(Generic[Run]):
    """A fact that is computed. ``{key}`` in ``text`` becomes the key's value (any attribute's)."""

    text: str
    holds: Callable[[Run], bool]


Value: TypeAlias = Need | BaseModel | str | int | float | bool | tuple[object, ...] | None
"""A test; or the value wanted; or a tuple of those that will do; a section stands for its defaults."""

SET = Need("a value", lambda value, _: bool(value))
UNSET = Need("nothing", lambda value, _: not value)
"""None, 0, false or empty."""


def at_most(other: str | float) -> Need:
    """A bound: a number, or the key that has it. What is left out fits; of a list, every item must."""
    return _bound("at most", operator.le, other)


def at_least(other: str | float) -> Need:
    """As :func:`at_most`."""
    return _bound("at least", operator.ge, other)


def less_than(other: str | float) -> Need:
    """As :func:`at_most`, without the bound itself."""
    return _bound("less than", operator.lt, other)


def more_than(other: str | float) -> Need:
    """As :func:`at_least`, without the bound itself."""
    return _bound("more than", operator.gt, other)


def _bound(text: str, compare: Callable[[Any, Any], bool], other: str | float) -> Need:
    def holds(value: Any, bound: Any) -> bool:
        items = value if isinstance(value, tuple) else (value,)
        return value is None or all(compare(item, bound) for item in items)

    return Need(text, holds, other)


def other_than(*values: object) -> Need:
    """Any value but these."""
    return Need(f"other than {' or '.join(map(shown, values))}", lambda value, _: value not in values)


@dataclass(frozen=True)
class Requires(Generic[Run]):
    """One requirement.

    Attributes:
        key: the key to change; one ``*`` stands for every index of a list (``rewards.*.device``), and for the
            same index in ``when``.
        when: keys and values under which this applies, all together; ``{}``: always.
        needs: what the key's value has to be; nothing where its section is off.
        remedy: what to do, in sentences, with ``{key}`` as in :class:`That`; or what computes them.
        found: what the message quotes, likewise, where the key's value alone would not show the fault.
    """

    key: str
    when: Mapping[str, Value] | That[Run]
    needs: Value | That[Run]
    remedy: str | Callable[[Run], str]
    found: str = ""

    def problems(self, run: Run) -> Iterator[Problem]:
        """What contradicts this row: of a list, one for each item."""
        listed, star, _ = self.key.partition(".*")
        for index in range(len(value_at(run, listed))) if star else [None]:
            here = str(index)
            if _is_off(run, key := self.key.replace("*", here)):
                continue
            if not self._applies(run, here) or self._fits(run, key):
                continue
            found = filled(self.found, run) or shown(value_at(run, key))
            expected = f"{self._wanted(run)} {self.condition(run, here)}".strip()
            remedy = filled(self.remedy, run) if isinstance(self.remedy, str) else self.remedy(run)
            yield Problem(_indexed(key), found, expected, remedy)

    def _applies(self, run: Run, here: str) -> bool:
        if isinstance(self.when, That):
            return self.when.holds(run)
        pairs = self.when.items()
        return all(_holds(test, value_at(run, key.replace("*", here)), run) for key, test in pairs)

    def _fits(self, run: Run, key: str) -> bool:
        if isinstance(self.needs, That):
            return self.needs.holds(run)
        return _holds(self.needs, value_at(run, key), run)

    def _wanted(self, run: Run | None) -> str:
        return filled(self.needs.text, run) if isinstance(self.needs, That) else _text(self.needs, run)

    def condition(self, run: Run | None, here: str = "*") -> str:
        """``when`` in words, with the values of a run if one is given: "with fleet.driver=inline"."""
        if isinstance(self.when, That):
            return filled(self.when.text, run)
        words = {"with": list[str](), "without": list[str]()}
        for key, test in self.when.items():
            found, key = key.replace("*", here), _indexed(key.replace("*", here))
            if self._quotes(found) and (run is not None or test is SET):
                continue
            if test is UNSET:
                words["without"].append(key)
            elif test is SET:
                words["with"].append(key)
            else:
                value = _text(test, None).replace("'", "") if run is None else plain(value_at(run, found))
                words["with"].append(
                    f"{key} {value}" if run is None and isinstance(test, Need) else f"{key}={value}"
                )
        return ", ".join(f"{word} {' and '.join(keys)}" for word, keys in words.items() if keys)

    def _quotes(self, key: str) -> bool:
        """Whether what is needed already says the value of ``key``."""
        if isinstance(self.needs, That):
            return re.search(rf"(?<![\w.]){re.escape(key)} ?= ?{{", self.needs.text) is not None
        return isinstance(self.needs, Need) and self.needs.other == key

    def row(self) -> tuple[str, str, str, str]:
        """(key, what it needs, under which condition, remedy), of any run."""
        remedy = (
            filled(self.remedy, None) if isinstance(self.remedy, str) else "The message has values that fit."
        )
        return self.key, self._wanted(None), self.condition(None), remedy


@dataclass(frozen=True)
class Computed(Generic[Run]):
    """A requirement whose key, or whose remedy, has to be computed: a function in the same list."""

    key: str
    needs: str
    problems: Callable[[Run], Iterator[Problem]]

    def row(self) -> tuple[str, str, str, str]:
        """As :meth:`Requires.row`."""
        return self.key, self.needs, "", ""


Requirement: TypeAlias = Requires[Run] | Computed[Run]


def problems_of(rows: Iterable[Requirement[Run]], run: Run) -> Iterator[Problem]:
    """What contradicts the rows, in their order, each problem once; of one key there may be several."""
    yield from dict.fromkeys(problem for row in rows for problem in row.problems(run))


def value_at(tree: object, key: str) -> Any:
    """Value of a dotted key; None where a section on the way is off, or another algorithm's."""
    for part in key.split("."):
        if tree is None:
            return None
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        else:
            tree = tree[int(part)] if isinstance(tree, Sequence) else getattr(tree, part, None)
    return tree


def shown(value: object) -> str:
    """A value as messages quote it."""
    return repr(value) if isinstance(value, str) else plain(value)


def plain(value: object) -> str:
    """A value as on the command line; of a section its name, or that it is set."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    return str(getattr(value, "name", "set")) if isinstance(value, BaseModel) else str(value)


def filled(text: str, run: object | None) -> str:
    """``text`` with the values of the keys in braces; without a run, with the keys' names, if need be."""
    if run is None:
        return _HOLE.sub(lambda hole: hole[1].rpartition(".")[2], _FIGURE.sub("", text))
    return _HOLE.sub(lambda hole: plain(value_at(run, hole[1])), text)


def _indexed(key: str) -> str:
    return re.sub(r"\.(\d+)", r"[\1]", key)


def _is_off(run: object, key: str) -> bool:
    section, _, _ = key.rpartition(".")
    return bool(section) and value_at(run, section) is None


def _holds(test: Value, value: object, run: object) -> bool:
    if isinstance(test, Need):
        other = value_at(run, test.other) if isinstance(test.other, str) else test.other
        return test.holds(value, other)
    return value in test if isinstance(test, tuple) else value == test


def _text(test: Value, run: object | None) -> str:
    if isinstance(test, tuple):
        return " or ".join(map(shown, test))
    if not isinstance(test, Need):
        return "nothing" if isinstance(test, BaseModel) else shown(test)
    if isinstance(test.other, str):
        return filled(f"{test.text} {test.other} = {{{test.other}}}", run)
    return test.text if test.other is None else f"{test.text} {shown(test.other)}"
