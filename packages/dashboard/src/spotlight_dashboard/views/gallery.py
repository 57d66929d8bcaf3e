"""Pictures with scores: of evaluations, the same prompts and seeds at every one, and of training groups."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from spotlight.store.images import TileNote, drawn_iterations, read_tile_note, reference_path
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.picture_names import TILES, TRAINING, tile_path, tiles_of
from spotlight.store.store_errors import LedgerError
from spotlight_dashboard.figures import Json, finite
from spotlight_dashboard.run_folders import RunFolder

PICTURE_BYTES_MAX = 256 << 20
"""Of a file; videos are pictures, too."""
_CAPTION_MAX = 20_000
_REFERENCES_MAX = 16
FOLDERS = {"picture": TILES, "training": TRAINING}
"""By kind, as the page names it in a picture's address."""


@dataclass(frozen=True, slots=True)
class _ScoredPicture:
    rollout: str
    seed: str
    tag: str | None
    scores: dict[str, float]


def gallery(run: RunFolder) -> Json:
    """The evaluations, and the iterations of training, that have pictures, ascending."""
    return {
        "iterations": drawn_iterations(run.paths),
        "training": drawn_iterations(run.paths, TRAINING),
    }


def training_pictures(run: RunFolder, iteration: int) -> Json:
    """Best and worst of a few of an iteration's groups, in turn, with all scores; an index may be missing."""
    return {
        "iteration": iteration,
        "pictures": [
            _described(index, note, note.rollout or None, note.scores)
            for index, note in _notes(run, iteration, TRAINING)
        ],
    }


def pictures(run: RunFolder, iteration: int) -> Json:
    """One evaluation's pictures in the grid's order, with scores, seed and tag of the sample where known."""
    notes = _notes(run, iteration)
    rollouts = _evaluated(run, iteration)
    found: list[Json] = []
    met: dict[str, int] = defaultdict(int)
    for index, note in notes:
        of_prompt = rollouts.get(note.caption, [])
        place = met[note.caption]
        met[note.caption] += 1
        known = of_prompt[place] if place < len(of_prompt) else None
        # A sample that was dropped has no picture, so places alone could name the wrong one.
        if known is not None and note.score not in known.scores.values():
            known = None
        found.append(
            {
                **_described(index, note, known.rollout if known else None, known.scores if known else {}),
                "seed": known.seed if known else None,
                "tag": of_prompt[0].tag if of_prompt else None,
            }
        )
    return {"iteration": iteration, "pictures": found}


def _described(index: int, note: TileNote, rollout: str | None, scores: Mapping[str, float | None]) -> Json:
    return {
        "index": index,
        "caption": note.caption[:_CAPTION_MAX],
        "references": list(note.references[:_REFERENCES_MAX]),
        "score": finite(note.score),
        "rollout": rollout,
        "scores": {name: finite(value) for name, value in scores.items()},
    }


def picture(run: RunFolder, iteration: int, index: int, folder: str = TILES) -> bytes | None:
    """The file of one picture, of those within the run's directory; None if there is none."""
    return run.file(tile_path(run.paths, iteration, index, folder), PICTURE_BYTES_MAX)


def reference(run: RunFolder, name: str) -> bytes | None:
    """The file of a picture that prompts are about, as :func:`picture`."""
    try:
        path = reference_path(run.paths, name)
    except ValueError:
        return None
    return run.file(path, PICTURE_BYTES_MAX)


def _notes(run: RunFolder, iteration: int, folder: str = TILES) -> list[tuple[int, TileNote]]:
    """An iteration's pictures by index."""
    return [
        (int(path.stem.rpartition("-")[2]), note)
        for path in tiles_of(run.paths, iteration, folder)
        if run.readable(path) and (note := read_tile_note(path)) is not None
    ]


def _evaluated(run: RunFolder, iteration: int) -> dict[str, list[_ScoredPicture]]:
    """Scored evaluation rollouts of an iteration by prompt, in the order of issue; empty without a ledger."""
    try:
        connection = run.open_ledger()
    except LedgerError:
        return {}
    with closing(connection), queries.consistent_reading(connection):
        rows = connection.execute(
            "SELECT rollouts.id, seed, text, metadata, name, value FROM rollouts"
            " JOIN prompts ON prompts.id = prompt JOIN rewards ON rewards.rollout = rollouts.id"
            " WHERE purpose = 'eval' AND iteration = ? ORDER BY rollouts.seq",
            (iteration,),
        ).fetchall()
    return _by_prompt(rows)


def _by_prompt(rows: list[tuple[str, int, str, str, str, float | None]]) -> dict[str, list[_ScoredPicture]]:
    samples: dict[str, _ScoredPicture] = {}
    found: dict[str, list[_ScoredPicture]] = defaultdict(list)
    for rollout, seed, text, metadata, name, value in rows:
        if rollout not in samples:
            tag = json.loads(metadata).get("tag")
            # As text: a seed has more digits than a number of JavaScript.
            samples[rollout] = _ScoredPicture(rollout, str(seed), tag if isinstance(tag, str) else None, {})
            found[text].append(samples[rollout])
        if value is not None:
            samples[rollout].scores[name] = value
    return found
