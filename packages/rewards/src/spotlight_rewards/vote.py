"""The reward ``vote``: a person picks or ranks the pictures of a group, on the dashboard's page.

A group's pictures become a ballot in the run directory (``ballots.py``). The score is the share of the
group's other pictures that one was placed before; equal places count half. Each picture's name is its digest,
so a group that was voted on is scored without asking, after whatever restart.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from spotlight_rewards.ballots import (
    TOUCHED_EVERY_S,
    VOTES_FOLDER,
    Ballot,
    BallotBox,
    DamagedVoteError,
    NoSuchBallotError,
    Vote,
    picture_name,
)
from spotlight_rewards.base.picture_page import frames_of, picture_of
from spotlight_rewards.reward import (
    Curves,
    Image,
    Reward,
    RewardSetupError,
    takes_groups,
    takes_videos,
)
from spotlight_rewards.reward_facts import Reads, RewardFacts

FACTS = RewardFacts(runs_on="the dashboard", typical=(0, 1), reads=Reads.NOTHING)
_LOOKS_EVERY_S = 0.2
_SEEN_WITHIN_S = 1.0
"""Of the call's limit, or a quarter if that is less: kept to see a vote that came at the last moment."""
_UNLIMITED_S = 60.0
"""Of a call that nobody limits."""
_SHOWN_FPS = 8


@takes_groups
@takes_videos
@dataclass(frozen=True, kw_only=True)
class PeoplesVote(Reward):
    """Let a person pick or rank the pictures of a group, on the dashboard.

    ``score``: share of the others that it was placed before, equal places counting half, in [0, 1];
    ``vote_s``: seconds from the question to the vote. Pictures that are all the same, and a picture alone in
    its group, score 1/2 without a vote.

    Attributes:
        ask_name: ask who votes, and keep the name with the vote; nothing of a voter is kept otherwise.
        stand_in: nobody is asked; the brighter pictures win (``spotlight train --smoke``).
    """

    ask_name: bool = False
    stand_in: bool = False

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """Raises RewardSetupError: the run directory is not here, cannot be written, or a vote is damaged."""
        limit_s = self.context.deadline_s or _UNLIMITED_S
        ends_s = time.monotonic() + limit_s - min(_SEEN_WITHIN_S, limit_s / 4)
        files = [_png(image) for image in images]
        names = [picture_name(file) for file in files]
        found = Vote((), 0.0)
        if len(set(names)) > 1:
            about = [_png(picture) for picture in _references(prompts[0], metadata[0])]
            shown = tuple(map(picture_name, about))
            ballot = Ballot(prompts[0], tuple(sorted(set(names))), self.ask_name, references=shown)
            pictures = dict(zip((*names, *shown), (*files, *about), strict=True))
            box = _box(self.context.run_directory)
            if self.stand_in:
                levels = {name: float(image.mean()) for name, image in zip(names, images, strict=True)}
                box.open(ballot, pictures, ends_s - time.monotonic())
                with suppress(NoSuchBallotError):  # it is voted on
                    box.vote(ballot.id, sorted(levels, key=lambda name: -levels[name]), "nobody")
            found = _awaited(box, ballot, pictures, ends_s)
        return {"score": shares_beaten(names, found.ranking), "vote_s": [found.took_s] * len(images)}

    def scored_by(self) -> str:
        """People, none of them named. Raises RewardSetupError outside of a run."""
        if not self.context.run_directory:
            raise RewardSetupError(
                "reward 'vote' asks the people who watch a run; expected one. Use it in a configuration for "
                "`spotlight train`, and open `spotlight dashboard`."
            )
        return "brightness, in place of people" if self.stand_in else "people"

    def tiny(self, folder: Path) -> dict[str, Any]:
        """No model: the parameter that asks nobody."""
        return {"stand_in": True}


def shares_beaten(names: Sequence[str], ranking: Sequence[str]) -> list[float]:
    """Per picture: the share of the others that come after it, half of those beside it too; alone 1/2."""
    place = {name: at for at, name in enumerate(ranking)}
    places = [place.get(name, len(ranking)) for name in names]
    others = len(places) - 1
    return (
        [0.5] * len(places)
        if others < 1
        else [
            (sum(each > mine for each in places) + (sum(each == mine for each in places) - 1) / 2) / others
            for mine in places
        ]
    )


def _references(prompt: str, record: Mapping[str, Any]) -> list[Image]:
    """The pictures that a prompt is about, small. Raises RewardSetupError: one is not on this machine."""
    paths = record.get("references")
    found = []
    for path in paths if isinstance(paths, list | tuple) else ():
        try:
            found.append(picture_of(Path(str(path))))
        except (OSError, ValueError) as error:
            raise RewardSetupError(
                f"reward 'vote': the picture {path} that {prompt!r} is about cannot be shown ({error}); "
                "expected it here, beside the command that trains"
            ) from error
    return found


def _box(run_directory: str) -> BallotBox:
    path = Path(run_directory)
    if not path.is_dir():
        raise RewardSetupError(
            f"reward 'vote': the run directory {run_directory!r} is not on this machine; expected it here, "
            "beside the command that trains. Put runs_dir on storage that all ranks' machines share."
        )
    return BallotBox(path / VOTES_FOLDER)


def _awaited(box: BallotBox, ballot: Ballot, pictures: Mapping[str, bytes], ends_s: float) -> Vote:
    """The vote, once there is one; the caller ends this process soon after ``ends_s`` (monotonic)."""
    asked, touch_s = False, 0.0
    try:
        while (found := box.vote_on(ballot.id)) is None:
            now_s = time.monotonic()
            if now_s >= touch_s:
                if not (asked and box.touch(ballot.id)):
                    box.open(ballot, pictures, ends_s - now_s)
                asked, touch_s = True, now_s + TOUCHED_EVERY_S
            time.sleep(_LOOKS_EVERY_S)
    except (DamagedVoteError, OSError) as error:
        raise RewardSetupError(f"reward 'vote': {error}") from error
    box.close(ballot.id)
    return found


def _png(media: Image) -> bytes:
    """As PNG; of a video an animated one."""
    first, *others = [PILImage.fromarray(frame) for frame in frames_of(media)]
    buffer = io.BytesIO()
    if others:
        first.save(buffer, "PNG", save_all=True, append_images=others, duration=1000 / _SHOWN_FPS)
    else:
        first.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()
