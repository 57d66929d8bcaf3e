"""Prompts for rewards that read text, from templates and words of our own: one a line, the text in quotes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from spotlight_rewards.prompt_sets.splitting import drawn, split
from spotlight_rewards.reading.legibility import normalized

_PLACES = (
    'a shop window with a sign that says "{}"',
    'a wooden board at a trailhead that reads "{}"',
    'a chalkboard in front of a café with the words "{}"',
    'a neon sign at night that glows "{}"',
    'a book on a table with "{}" on its cover',
    'a poster on a brick wall that says "{}"',
    'a cardboard box with "{}" printed on its side',
    'a T-shirt on a hanger with the words "{}"',
    'a road sign in the desert that reads "{}"',
    'a birthday cake with "{}" written in icing',
    'a train station display that shows "{}"',
    'a paper cup with the name "{}" on it',
    'a banner between two trees that reads "{}"',
    'a stamp with "{}" along its edge',
    'a hot air balloon with "{}" across it',
    'a museum label beside a vase that says "{}"',
    'a phone screen with the message "{}"',
    'graffiti on a bridge that spells "{}"',
    'a jar in a kitchen with the label "{}"',
    'the words "{}" written in wet sand',
)
_QUALITIES = (
    "quiet", "early", "golden", "frozen", "hidden", "gentle", "broken", "silver", "clever", "distant",
    "electric", "famous", "fresh", "honest", "humble", "lively", "modern", "narrow", "northern",
    "patient", "polished", "royal", "rusty", "secret", "simple", "spicy", "stormy", "summer", "sweet",
    "tiny", "velvet", "winter", "wooden", "yellow",
)  # fmt: skip
_NOUNS = (
    "anchor", "bakery", "bicycle", "blanket", "bridge", "button", "candle", "canyon", "castle",
    "circus", "coffee", "comet", "compass", "cottage", "dragon", "engine", "feather", "festival",
    "forest", "fountain", "garden", "guitar", "harbor", "hammer", "harvest", "island", "jungle",
    "kitchen", "ladder", "lantern", "library", "lighthouse", "magnet", "market", "meadow", "mirror",
    "mountain", "museum", "notebook", "ocean", "orchard", "palace", "pencil", "picnic", "planet",
    "pocket", "puzzle", "rabbit", "rocket", "sailor", "sculpture", "shadow", "station", "sunrise",
    "teapot", "theater", "thunder", "tunnel", "village", "violin", "voyage", "whistle", "window",
    "workshop",
)  # fmt: skip
_VERBS = (
    "build", "climb", "follow", "forget", "guard", "share", "visit", "watch", "welcome", "keep",
    "trust", "paint",
)  # fmt: skip
_CASES = (str.upper, str.title, str.lower)


def ocr_prompts(
    train: int, held_out: int, seed: int, without: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Prompts of a training and a held-out set that share no text to draw.

    Args:
        without: texts to draw that neither set may have, however they are written.

    Raises:
        PromptSetError: there are fewer prompts than asked for.
    """
    known = {normalized(text) for text in without}
    groups = {words: list(_texts(words)) for words in ("one", "two", "three")}
    found = split(
        groups,
        train=train,
        held_out=held_out,
        seed=seed,
        wordings=lambda _: len(_PLACES),
        without=frozenset(text for texts in groups.values() for text in texts if normalized(text) in known),
    )

    def prompt(text: str, place: int) -> str:
        case = _CASES[drawn(seed, "case", text, place) % len(_CASES)]
        return _PLACES[place].format(case(text))

    return [prompt(*each) for each in found.train], [prompt(*each) for each in found.held_out]


def _texts(words: str) -> Iterator[str]:
    match words:
        case "one":
            yield from _NOUNS
        case "two":
            yield from map(" ".join, product(_QUALITIES, _NOUNS))
        case "three":
            yield from (f"{verb} the {noun}" for verb, noun in product(_VERBS, _NOUNS))
            yield from (f"{a} and {b}" for a, b in permutations(_NOUNS, 2))
