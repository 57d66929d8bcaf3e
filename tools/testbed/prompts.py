"""The testbed's prompts in GenEval's metadata format, split into training and held-out.

``python -m tools.testbed.prompts DIRECTORY`` writes ``train_metadata.jsonl`` and ``test_metadata.jsonl``.
Each line is ``{"tag", "prompt", "include", "exclude"?}``; filter by ``tag`` for one task, such as
``counting``. The split is deterministic and depends on this file only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from spotlight_rewards.geneval.vocabulary import RELATIONS
from spotlight_rewards.shapes import PALETTE, SHAPES

Record = Mapping[str, Any]

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
HELD_OUT = {
    "single_object": 6,
    "two_object": 6,
    "counting": 12,
    "colors": 12,
    "position": 24,
    "color_attr": 16,
}
"""Number of held-out prompts per tag."""

_SPLIT_SEED = 20
_NUMBERS = {2: "two", 3: "three", 4: "four"}
# Few shapes give few bare prompts, so openings add enough wordings to hold some out.
_OPENINGS = ("", "a picture of ", "a drawing of ", "an image of ")


def _single_object() -> Iterator[Record]:
    for opening, article, shape in product(_OPENINGS, ("a", "one"), SHAPES):
        yield _record("single_object", f"{opening}{article} {shape}", _need(shape))


def _two_object() -> Iterator[Record]:
    for opening, (a, b) in product(_OPENINGS, permutations(SHAPES, 2)):
        yield _record("two_object", f"{opening}a {a} and a {b}", _need(a), _need(b))


def _counting() -> Iterator[Record]:
    for (count, word), color, shape in product(_NUMBERS.items(), (None, *PALETTE), SHAPES):
        text = " ".join(filter(None, (word, color, f"{shape}s")))
        exclude = [{"class": shape, "count": count + 1}]
        yield {**_record("counting", text, _need(shape, color, count)), "exclude": exclude}


def _colors() -> Iterator[Record]:
    for opening, color, shape in product(_OPENINGS, PALETTE, SHAPES):
        yield _record("colors", f"{opening}a {color} {shape}", _need(shape, color))


def _position() -> Iterator[Record]:
    colorings = [(None, None), *permutations(PALETTE, 2)]
    for relation, (a, b), (color_a, color_b) in product(RELATIONS, permutations(SHAPES, 2), colorings):
        text = f"a {_noun(a, color_a)} {relation} a {_noun(b, color_b)}"
        # GenEval lists the reference object first: the relation points back to index 0.
        yield _record("position", text, _need(b, color_b), {**_need(a, color_a), "position": [relation, 0]})


def _color_attr() -> Iterator[Record]:
    for (a, b), (color_a, color_b) in product(permutations(SHAPES, 2), permutations(PALETTE, 2)):
        text = f"a {_noun(a, color_a)} and a {_noun(b, color_b)}"
        yield _record("color_attr", text, _need(a, color_a), _need(b, color_b))


def _noun(shape: str, color: str | None) -> str:
    return shape if color is None else f"{color} {shape}"


def _need(shape: str, color: str | None = None, count: int = 1) -> dict[str, Any]:
    return {"class": shape, "count": count} | ({} if color is None else {"color": color})


def _record(tag: str, prompt: str, *include: Mapping[str, Any]) -> dict[str, Any]:
    return {"tag": tag, "prompt": prompt, "include": list(include)}


def all_records() -> dict[str, list[Record]]:
    """Every prompt by tag, in a fixed order."""
    makers = (_single_object, _two_object, _counting, _colors, _position, _color_attr)
    return {tag: list(maker()) for tag, maker in zip(TAGS, makers, strict=True)}


def split() -> tuple[list[Record], list[Record]]:
    """(train, held-out) records; held-out ones are evenly spaced in each tag's list."""
    rng = np.random.default_rng(_SPLIT_SEED)
    train: list[Record] = []
    test: list[Record] = []
    for tag, records in all_records().items():
        strata = np.array_split(rng.permutation(len(records)), HELD_OUT[tag])
        held_out = {int(rng.choice(stratum)) for stratum in strata}
        for index, record in enumerate(records):
            (test if index in held_out else train).append(record)
    return train, test


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    """Write both metadata files to the directory given on the command line."""
    parser = argparse.ArgumentParser(description="Write the testbed's training and held-out prompts.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    train, test = split()
    write_records(directory / "train_metadata.jsonl", train)
    write_records(directory / "test_metadata.jsonl", test)
    print(f"{len(train)} training and {len(test)} held-out prompts in {directory}")


if __name__ == "__main__":
    main()
