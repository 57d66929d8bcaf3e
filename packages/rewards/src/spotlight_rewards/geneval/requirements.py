"""Parse GenEval's metadata: which objects a prompt asks for, how many, in which colour and where."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotlight_rewards.geneval.vocabulary import RELATIONS
from spotlight_rewards.reward import RewardInputError


@dataclass(frozen=True, slots=True)
class Requirement:
    """One ``include`` entry of GenEval's metadata.

    Attributes:
        name: GenEval's class.
        count: minimum number.
        color: None for any.
        relation: one of :data:`~spotlight_rewards.geneval.vocabulary.RELATIONS` to requirement ``target``,
            or None.
        target: index of an earlier requirement; -1 without a relation.
    """

    name: str
    count: int
    color: str | None
    relation: str | None
    target: int


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a prompt asks for; ``exclude`` holds (class, smallest count that is too many)."""

    include: tuple[Requirement, ...]
    exclude: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class MetadataFormat:
    """GenEval's metadata with one reward's classes and colours.

    Attributes:
        reward: the reward's name, for messages.
        count_max: largest count that can be met, or None.
    """

    reward: str
    names: Collection[str]
    colors: Collection[str]
    count_max: int | None = None

    def parse(self, prompt: str, metadata: Mapping[str, Any]) -> Requirements:
        """Parse one record. Raises :class:`RewardInputError` naming the prompt and the field."""
        entries = metadata.get("include")
        if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
            raise self.error(prompt, "include", entries, "a non-empty list of objects")
        include = tuple(self._include(prompt, index, entry) for index, entry in enumerate(entries))
        excluded = metadata.get("exclude", ())
        if not isinstance(excluded, Sequence) or isinstance(excluded, str):
            raise self.error(prompt, "exclude", excluded, "a list of objects")
        exclude = tuple(
            self._name_and_count(prompt, f"exclude[{index}]", entry) for index, entry in enumerate(excluded)
        )
        return Requirements(include, exclude)

    def _include(self, prompt: str, index: int, entry: object) -> Requirement:
        field = f"include[{index}]"
        name, count = self._name_and_count(prompt, field, entry)
        assert isinstance(entry, Mapping)
        if self.count_max is not None and count > self.count_max:
            expected = f"at most {self.count_max}: no more of a class are counted"
            raise self.error(prompt, f"{field}.count", count, expected)
        color = entry.get("color")
        if color is not None and (not isinstance(color, str) or color not in self.colors):
            raise self.error(prompt, f"{field}.color", color, f"one of {', '.join(self.colors)}")
        relation, target = None, -1
        if "position" in entry:
            position = entry["position"]
            if not isinstance(position, Sequence) or len(position) != 2 or position[0] not in RELATIONS:
                expected = f"[relation, index] with relation one of {', '.join(RELATIONS)}"
                raise self.error(prompt, f"{field}.position", position, expected)
            relation, target = position
            if not isinstance(target, int) or not 0 <= target < index:
                expected = "the index of an earlier include entry"
                raise self.error(prompt, f"{field}.position[1]", target, expected)
        return Requirement(name, count, color, relation, target)

    def _name_and_count(self, prompt: str, field: str, entry: object) -> tuple[str, int]:
        if not isinstance(entry, Mapping):
            example = next(iter(self.names))
            raise self.error(prompt, field, entry, f'an object like {{"class": "{example}", "count": 1}}')
        name, count = entry.get("class"), entry.get("count")
        if not isinstance(name, str) or name not in self.names:
            raise self.error(prompt, f"{field}.class", name, f"one of {', '.join(self.names)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise self.error(prompt, f"{field}.count", count, "a whole number of at least 1")
        return name, count

    def error(self, prompt: str, field: str, found: object, expected: str) -> RewardInputError:
        """The error of one field, to be raised."""
        state = "is missing" if found is None else f"is {found!r}"
        return RewardInputError(
            f"{self.reward} reward: metadata field {field!r} of prompt {prompt!r} {state}; expected "
            f"{expected}. Correct the prompt's line in the metadata file (GenEval's format)."
        )
