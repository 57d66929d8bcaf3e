"""Groups of pictures on which a person is asked to vote (the reward ``vote``)."""

from __future__ import annotations

from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.gallery import PICTURE_BYTES_MAX
from spotlight_dashboard.views.vote_rounds import rounds, vote_curve
from spotlight_rewards.ballots import OPEN_FOLDER, VOTES_FOLDER, BallotBox

_SHOWN = 20
_PROMPT_MAX = 20_000


def ballot_box(run: RunFolder) -> BallotBox | None:
    """The run's ballots; None if it has none, or only a link to others."""
    folder = run.paths.path / VOTES_FOLDER
    is_ours = not folder.is_symlink() and not (folder / OPEN_FOLDER).is_symlink()
    return BallotBox(folder) if is_ours and folder.is_dir() else None


def votes(run: RunFolder) -> Json:
    """The ballots that wait, the oldest first, and what the last rounds of votes came to."""
    box = ballot_box(run)
    waiting = [] if box is None else box.awaited()
    now_s = 0.0 if box is None or not waiting else box.now_s()
    shown = [
        {
            "id": each.id,
            "prompt": each.prompt[:_PROMPT_MAX],
            "pictures": list(each.pictures),
            "references": list(each.references),
            "left_s": max(0.0, each.ends_at - now_s),
            "asks_name": each.asks_name,
        }
        for each in waiting[:_SHOWN]
    ]
    return {
        "ballots": shown,
        "more": len(waiting) - len(shown),
        "curve": vote_curve(run) or "vote",
        "rounds": rounds(run),
    }


def ballot_picture(run: RunFolder, ballot: str, name: str) -> bytes | None:
    """The file of a ballot's picture, within the run's directory."""
    box = ballot_box(run)
    path = None if box is None else box.picture(ballot, name)
    return None if path is None else run.file(path, PICTURE_BYTES_MAX)
