"""How much of a prompt's quoted text was read: the formula of every reward for legible text.

The target is the text between the first pair of double quotes; case, white space and what Unicode writes in
several ways (accents, widths, ligatures, curly apostrophes, dashes) are ignored on both sides. Score =
1 - distance / len(target), in [0, 1], with distance 0 if the reading contains the target, else Levenshtein's,
at most len(target).

Formula: Flow-GRPO (``flow_grpo/ocr.py`` of https://github.com/yifan123/flow_grpo, arXiv 2505.05470). It
differs for targets of one to three letters, which long readings contain by chance: those must stand alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from spotlight_rewards.reward import RewardInputError

SHORT_MAX = 3
"""Letters of a short target. What Tesseract reads in white noise contains 53 % of all single letters, 5 % of
pairs, 0.05 % of triples, and none of 60 targets of four letters (``benchmarks/ocr_readings.py``).
"""

_LENGTH_MAX = 1 << 13
"""Characters of a reading that count: of a server's megabyte of accents, Unicode's order takes hours."""


def target_of(prompt: str, reward: str = "ocr") -> str:
    """The text to draw, :func:`normalized`. Raises :class:`RewardInputError`."""
    pieces = prompt.split('"', 2)
    target = normalized(pieces[1]) if len(pieces) == 3 else ""
    if not target:
        found = (
            "has nothing between its double quotes" if len(pieces) == 3 else "has no text in double quotes"
        )
        raise RewardInputError(
            f"{reward} reward: the prompt {prompt!r} {found}; expected the text to draw in straight double "
            'quotes, as in: a shop sign that says "OPEN". Correct the prompt\'s line in the prompts file.'
        )
    return target


def legibility(target: str, reading: str) -> float:
    """1 - distance / len(target).

    Args:
        target: normalized, not empty.
        reading: as read, with its white space.
    """
    text = normalized(reading)
    if stands_alone(target, reading) if is_short(target) else target in text:
        return 1.0
    if len(text) >= 2 * len(target):
        return 0.0  # so many must go, which of a long reading takes minutes to count
    return 1.0 - min(levenshtein(target, text), len(target)) / len(target)


def reading_curves(targets: Sequence[str], found: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """``score``; ``exact``: 1 if the target was read in full, else 0; ``lines``, the number read.

    Args:
        found: of every picture, the lines as read, in reading order.
    """
    scores = [legibility(target, "\n".join(lines)) for target, lines in zip(targets, found, strict=True)]
    return {
        "score": scores,
        "exact": [float(score == 1.0) for score in scores],
        "lines": [float(len(lines)) for lines in found],
    }


def is_short(target: str) -> bool:
    """Whether chance may contain it: up to three letters, of which none is as rare as a wide character."""
    return len(target) <= SHORT_MAX and not any(unicodedata.east_asian_width(each) in "WF" for each in target)


def stands_alone(target: str, reading: str) -> bool:
    """Whether the target is in the reading with no letter or digit beside it."""
    letters = r"\s*".join(map(re.escape, target))
    before = r"(?<!\w)" if target[0].isalnum() else ""
    after = r"(?!\w)" if target[-1].isalnum() else ""
    return re.search(before + letters + after, _folded(reading)) is not None


def levenshtein(a: str, b: str) -> int:
    """Minimum number of insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]


_ONE_OF_MANY = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u02bb\u02bc\u2032\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    }
)


def normalized(text: str) -> str:
    """What is compared of a target, a reading and an alphabet: one spelling, no case, no white space."""
    return "".join(_folded(text).split())


def _folded(text: str) -> str:
    # Translated before, because NFKC makes a space and a combining accent of an acute; and after, because it
    # makes a dash of a vertical one.
    few = text[:_LENGTH_MAX].translate(_ONE_OF_MANY)
    plain = unicodedata.normalize("NFKC", few).translate(_ONE_OF_MANY).casefold()
    seen = (each for each in plain if unicodedata.category(each) != "Cf")  # such as a zero-width space
    return unicodedata.normalize("NFKC", "".join(seen))


@dataclass(frozen=True, slots=True)
class KnownCharacters:
    """What a reader can read, :func:`normalized`, and the scripts of it."""

    characters: frozenset[str]
    scripts: frozenset[str]

    @classmethod
    def of(cls, characters: Iterable[str]) -> Self:
        """Of a reader's alphabet, which may have tens of thousands."""
        known = frozenset(characters)
        return cls(frozenset("".join(map(normalized, known))), frozenset(map(_script, known)))


def missing_scripts(target: str, known: KnownCharacters) -> list[str]:
    """Scripts of the target of which a reader knows no character; ``Symbol`` if it has no letters, and
    nothing that is known.

    A single missing letter (an accent) costs its place in the score; a missing script would cost all of it.
    """
    letters = {script for each in target if (script := _script(each))}
    if not letters:
        return [] if any(each in known.characters for each in target) else ["Symbol"]
    return sorted(letters - known.scripts)


def _script(character: str) -> str:
    """Empty for what is no letter, or only changes or repeats one, which many scripts do."""
    plain = unicodedata.normalize("NFKC", character)[:1]
    if not plain.isalpha() or unicodedata.category(plain) == "Lm":
        return ""
    return unicodedata.name(plain, "UNKNOWN").partition(" ")[0].partition("-")[0].capitalize()
