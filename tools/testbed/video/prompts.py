"""The video testbed's prompts, split into training and held-out.

``python -m tools.testbed.video.prompts DIRECTORY`` writes ``train.jsonl`` and ``test.jsonl``. Each line is
``{"tag", "prompt", "include", "motion"}``: GenEval's metadata of one object, and its direction.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from spotlight_rewards.motion import DIRECTIONS
from spotlight_rewards.shapes import PALETTE, SHAPES
from tools.testbed.prompts import Record, write_records


def record(shape: str, color: str, direction: str) -> Record:
    """The prompt that asks for one shape of one colour moving in one direction."""
    return {
        "tag": "motion",
        "prompt": f"a {color} {shape} moving {direction}",
        "include": [{"class": shape, "count": 1, "color": color}],
        "motion": direction,
    }


def split() -> tuple[list[Record], list[Record]]:
    """(train, held-out) records, 36 and 12.

    Held-out are whole combinations, never seen in pre-training or after it; each shape, colour and direction
    is among them equally often.
    """
    train: list[Record] = []
    test: list[Record] = []
    for (i, color), (j, direction), (k, shape) in product(
        enumerate(PALETTE), enumerate(DIRECTIONS), enumerate(SHAPES)
    ):
        (test if (i + j) % 4 == k + 1 else train).append(record(shape, color, direction))
    return train, test


def main() -> None:
    """Write both files to the directory given on the command line."""
    parser = argparse.ArgumentParser(description="Write the video testbed's training and held-out prompts.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in zip(("train", "test"), split(), strict=True):
        write_records(directory / f"{name}.jsonl", records)


if __name__ == "__main__":
    main()
