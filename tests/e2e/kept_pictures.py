"""Pictures of training groups as a run left them, each checked against its ledger."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spotlight.store.images import drawn_iterations, read_tile_note
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.picture_names import TRAINING, tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.jpeg import jpeg_size

_REWARDS = (
    "SELECT text, rewards.name, value FROM rewards JOIN rollouts ON rollouts.id = rewards.rollout"
    " JOIN prompts ON prompts.id = prompt JOIN outcomes ON outcomes.rollout = rollouts.id"
    " WHERE rollouts.id = ? AND outcomes.kind = 'trained' AND iteration = ?"
)


def training_pictures(run: Path) -> dict[int, dict[str, bytes]]:
    """Files by iteration and name.

    Asserts of each that its rollout was trained in that iteration with the rewards told, that the picture is
    worth them where ``jpeg_size`` can tell, and that no worst is better than its best.
    """
    paths, found = RunPaths(run), dict[int, dict[str, bytes]]()
    with closing(queries.open_readonly(paths.ledger)) as ledger:
        for iteration in drawn_iterations(paths, TRAINING):
            files = tiles_of(paths, iteration, TRAINING)
            scores = []
            for path in files:
                note = read_tile_note(path)
                assert note is not None
                rows = ledger.execute(_REWARDS, (note.rollout, iteration)).fetchall()
                assert {name: value for _, name, value in rows} == note.scores, note
                assert {text for text, _, _ in rows} == {note.caption}
                if "jpeg_size" in note.scores:
                    (worth,) = jpeg_size([np.asarray(Image.open(path).convert("RGB"))], [""], [{}])
                    assert worth == pytest.approx(note.scores["jpeg_size"])
                scores.append(note.score)
            assert len(files) % 2 == 0
            assert all(best >= worst for best, worst in zip(scores[::2], scores[1::2], strict=True))
            found[iteration] = {path.name: path.read_bytes() for path in files}
    return found
