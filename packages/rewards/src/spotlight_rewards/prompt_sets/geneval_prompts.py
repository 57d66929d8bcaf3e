"""Prompts in GenEval's metadata format, from templates of our own, over all six tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from spotlight_rewards.geneval.requirements import MetadataFormat
from spotlight_rewards.geneval.vocabulary import COLORS, OBJECTS, RELATIONS, TAGS
from spotlight_rewards.prompt_sets.splitting import split

_OPENINGS = ("a photo of", "a picture of", "a snapshot of", "an image showing")
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_NUMBERS = {2: "two", 3: "three", 4: "four"}
_MEASURED = {"skis": "pair", "scissors": "pair", "broccoli": "head"}
_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}
_COLORLESS = "person"


@dataclass(frozen=True, slots=True)
class Thing:
    """``count`` objects of a class, of one colour or any."""

    name: str
    color: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt asks for, however it is worded.

    Attributes:
        things: in GenEval's order of classes.
        relation: of the first thing to the second.
    """

    tag: str
    things: tuple[Thing, ...]
    relation: str | None = None


def geneval_prompts(
    train: int, held_out: int, seed: int, without: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of a training and a held-out set that share no scene.

    Args:
        without: records, such as the official ones, whose scenes neither set may have.

    Raises:
        PromptSetError: there are fewer prompts than asked for.
        RewardInputError: a record of ``without`` is invalid.
    """
    excluded = frozenset(scene_of(record) for record in without)  # errors before the work
    drawn = split(
        {tag: list(scenes(tag)) for tag in TAGS},
        train=train,
        held_out=held_out,
        seed=seed,
        wordings=lambda scene: len(_OPENINGS) * len(scene.things),
        without=excluded,
    )
    return [record(*each) for each in drawn.train], [record(*each) for each in drawn.held_out]


def scenes(tag: str) -> Iterator[Scene]:
    """All scenes of a tag."""
    colored = [
        Thing(name, color)
        for name in OBJECTS
        for color in COLORS
        if name not in (_COLORLESS, color)  # neither a red person nor an orange orange
    ]
    pairs = combinations(map(Thing, OBJECTS), 2)
    match tag:
        case "single_object":
            yield from (Scene(tag, (Thing(name),)) for name in OBJECTS)
        case "two_object":
            yield from (Scene(tag, pair) for pair in pairs)
        case "counting":
            yield from (Scene(tag, (Thing(name, None, count),)) for name in OBJECTS for count in _NUMBERS)
        case "colors":
            yield from (Scene(tag, (thing,)) for thing in colored)
        case "position":
            yield from (Scene(tag, pair, relation) for pair in pairs for relation in RELATIONS)
        case "color_attr":
            for a, b in combinations(colored, 2):
                if a.name != b.name and a.color != b.color:
                    yield Scene(tag, (a, b))


def record(scene: Scene, wording: int) -> dict[str, Any]:
    """A scene in GenEval's format; ``wording``: the opening, and which of two things is named first."""
    opening, turned = _OPENINGS[wording % len(_OPENINGS)], wording // len(_OPENINGS)
    things, relation = scene.things, scene.relation
    if turned:
        things, relation = things[::-1], None if relation is None else _OPPOSITE[relation]
    between = f" {relation or 'and'} "
    text = f"{opening} {between.join(map(_phrase, things))}"
    if relation is not None:  # the thing that the relation leads to comes first
        things = things[::-1]
    include = [_entry(thing) for thing in things]
    if relation is not None:
        include[1]["position"] = [relation, 0]
    found: dict[str, Any] = {"tag": scene.tag, "include": include}
    if scene.tag == "counting":
        found["exclude"] = [{"class": each.name, "count": each.count + 1} for each in things]
    return found | {"prompt": text}


def scene_of(record: Mapping[str, Any]) -> Scene:
    """The scene of a record. Raises RewardInputError for an invalid one."""
    form = MetadataFormat("geneval", OBJECTS, COLORS)
    prompt, tag = str(record.get("prompt")), record.get("tag")
    if tag not in TAGS:
        raise form.error(prompt, "tag", tag, f"one of {', '.join(TAGS)}")
    wanted = form.parse(prompt, record)
    things = [Thing(need.name, need.color, need.count) for need in wanted.include]
    relation = next((need.relation for need in wanted.include if need.relation is not None), None)
    if relation is not None:
        things.reverse()
    order = sorted(range(len(things)), key=lambda index: OBJECTS.index(things[index].name))
    if relation is not None and order != list(range(len(things))):
        relation = _OPPOSITE[relation]
    return Scene(str(tag), tuple(things[index] for index in order), relation)


def _entry(thing: Thing) -> dict[str, Any]:
    color = {} if thing.color is None else {"color": thing.color}
    return {"class": thing.name, "count": thing.count, **color}


def _phrase(thing: Thing) -> str:
    name = thing.name if thing.color is None else f"{thing.color} {thing.name}"
    measure = _MEASURED.get(thing.name)
    if thing.count > 1:
        number = _NUMBERS[thing.count]
        return f"{number} {measure}s of {name}" if measure else f"{number} {_plural(name)}"
    if measure:
        return f"a {measure} of {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _plural(name: str) -> str:
    if name in _PLURALS:
        return _PLURALS[name]
    return f"{name}es" if name.endswith(("s", "ch", "sh")) else f"{name}s"
