"""Votes of people, all that the dashboard writes: ``votes/`` of a run (``spotlight_rewards.ballots``).

    GET  /api/runs/RUN/ballots/ID/NAME   a picture of a ballot
    POST /api/runs/RUN/ballots/ID        {"ranking": [NAME, ...], "voter": TEXT}

A vote is taken from this page and from programs, not from other sites (``gate.py``). Whom it came from is not
recorded.
Imports FastAPI.
"""

from __future__ import annotations

import json

from fastapi import FastAPI, Request, Response

from spotlight_dashboard.gate import body_of, not_from_here, png, text
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.shown_runs import ShownRuns
from spotlight_dashboard.views.votes import ballot_box, ballot_picture
from spotlight_rewards.ballots import NoSuchBallotError

BODY_MAX = 1 << 16


class NoVoteError(ValueError):
    """A request that is no vote; says why."""


def add_votes(app: FastAPI, shown: ShownRuns) -> None:
    """Add the routes."""

    @app.get("/api/runs/{name}/ballots/{ballot}/{picture}")
    async def picture(name: str, ballot: str, picture: str) -> Response:
        found = shown.find(name, "ballot picture", lambda run: ballot_picture(run, ballot, picture))
        return await png(found, cache="no-store")

    @app.post("/api/runs/{name}/ballots/{ballot}")
    async def cast(name: str, ballot: str, request: Request) -> Response:
        if refusal := not_from_here(request):
            return text(403, refusal)
        body = await body_of(request, BODY_MAX)
        if body is None:
            return text(413, f"a vote of more than {BODY_MAX} bytes")
        answer = await shown.find(name, "vote", lambda run: recorded(run, ballot, body))
        return answer or text(404, "no such ballot")


def recorded(run: RunFolder, ballot: str, body: bytes) -> Response:
    """The answer to a vote, which is written if it is one."""
    box = ballot_box(run)
    if box is None:
        return text(404, "no such ballot")
    try:
        ranking, voter = read_vote(body)
        box.vote(ballot, ranking, voter)
    except NoSuchBallotError as error:
        return text(409, str(error))
    except ValueError as error:
        return text(400, str(error))
    except OSError as error:
        return text(507, f"the vote cannot be written: {error.strerror or error}")
    return Response("{}", media_type="application/json")


def read_vote(body: bytes) -> tuple[list[str], str]:
    """Ranking and voter. Raises NoVoteError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoVoteError("the vote is not JSON") from error
    ranking, voter = (found.get("ranking"), found.get("voter", "")) if isinstance(found, dict) else (None, "")
    if not isinstance(ranking, list) or not all(isinstance(each, str) for each in ranking):
        raise NoVoteError("ranking is not a list of pictures' names, the best first; expected that.")
    if not isinstance(voter, str):
        raise NoVoteError("voter is not a text; expected a name.")
    return ranking, voter.encode("utf-8", "backslashreplace").decode()
