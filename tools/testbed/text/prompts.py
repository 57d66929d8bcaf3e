"""The writing testbed's prompts, split into training and held-out.

``python -m tools.testbed.text.prompts DIRECTORY`` writes ``train.jsonl`` and ``test.jsonl``. Each line is
``{"tag", "prompt"}``; rewards for legible text take the word from the prompt's quotes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tools.testbed.prompts import Record, write_records

LETTERS = "ACEHKLNOPRST"
"""Capitals of which readers tell one from the other at this size."""
INKS: Mapping[str, tuple[int, int, int]] = {
    "black": (20, 20, 20),
    "red": (200, 30, 30),
    "blue": (30, 60, 200),
    "green": (20, 130, 40),
}
LENGTHS = (2, 3, 4, 5)

_WORDS = """
    AN AS AT HA HE LO NO OH ON OR PA SO TO ACE ACT APE ARC ARE ART ASH ASK ATE CAN CAP CAR CAT COP COT
    EAR EAT EEL ELK HAS HAT HEN HER HOP HOT LAP LET LOT NAP NET NOR NOT OAK OAR OAT OLE PAN PAT PEA PEN
    PET RAN RAT ROE ROT SEA SET SON TAN TAP TAR TEA TEN TOE TON TOP ACHE ALSO CAKE CANE CAPE CARE CART
    CASE CASH CENT COAL COAT CONE COOK CORE CORK CORN COST EARN EAST ECHO HALO HARE HEAL HEAP HEAR HEAT
    HERO HOLE HOPE HORN HOST KALE LACE LAKE LANE LAST LATE LEAK LEAN LENS LOAN LOCK LOOK LOST NEAR NECK
    NEST NOON NOSE NOTE ONCE OPEN PACE PACK PALE PARK PART PAST PATH PEAK PEAR PEEL PLAN POET POLE POOL
    PORT POST RACE RACK RATE REAL REST ROCK ROLE ROOT ROPE ROSE SACK SALE SALT SEAL SEAT SHOE SHOP SHOT
    SLOT SOAK SOAP STAR STEP STOP TALE TALK TALL TANK TAPE TEAR TELL TENT TOLL TORN TREE TREK CATCH
    CHALK CHEAP CHECK CHEST CLEAN CLOCK COAST COLOR CRANE EARTH HEART HORSE LATER LEARN NORTH OCEAN
    ONSET OTHER PANEL PAPER PATCH PEACH PEARL PLACE PLANE PLANT PLATE REACH ROAST SCALE SHAPE SHARK
    SHARP SHEEP SHORE SHORT SLEEP SPACE STAKE STEEL STOCK STONE STORE TASTE TEACH THERE THREE TOAST
    TORCH TRACK TRAPS
"""
WORDS = tuple(_WORDS.split())
_EVERY, _FIRST = 7, 3
"""Which of the words are held out."""


def record(word: str, ink: str) -> Record:
    """The prompt that asks for one word in one ink."""
    return {"tag": "text", "prompt": f'the word "{word}" in {ink}'}


def is_held_out(word: str) -> bool:
    """Whether a word is kept from pre-training, too."""
    return word in WORDS[_FIRST::_EVERY]


def split() -> tuple[list[Record], list[Record]]:
    """(train, held-out) records, 194 and 32: every word in one ink."""
    train: list[Record] = []
    test: list[Record] = []
    for index, word in enumerate(WORDS):
        (test if is_held_out(word) else train).append(record(word, list(INKS)[index % len(INKS)]))
    return train, test


def main() -> None:
    """Write both files to the directory given on the command line."""
    parser = argparse.ArgumentParser(description="Write the writing testbed's training and held-out prompts.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in zip(("train", "test"), split(), strict=True):
        write_records(directory / f"{name}.jsonl", records)


if __name__ == "__main__":
    main()
