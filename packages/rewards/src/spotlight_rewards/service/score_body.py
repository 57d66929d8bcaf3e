"""The body of ``POST /score``, read so that only its pictures may be large, and outside the event loop.

JSON of a few megabytes can hold millions of lists, for seconds and gigabytes: all but the pictures is small.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

REQUESTS_MAX = 1024
PLAIN_BYTES_MAX = 4 << 20
"""Of a body without its pictures: 4 kB for each of as many requests as there may be."""
_TURNS_MAX, _REWARDS_MAX = 64, 256
_KEY = b'"image_b64"'
_OPENS = re.compile(rb'[ \t\r\n]{0,99}:[ \t\r\n]{0,99}"')


class Turn(BaseModel):
    """One exchange: a prompt and the picture made for it, as a file in base64."""

    text: str
    image_b64: str


class ScoreRequest(BaseModel):
    """One sample; the last turn is scored."""

    history: list[Turn] = Field(min_length=1, max_length=_TURNS_MAX)
    required_rewards: list[str] = Field(min_length=1, max_length=_REWARDS_MAX)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ScoreBody(BaseModel):
    """The body of ``POST /score``."""

    requests: list[ScoreRequest] = Field(min_length=1, max_length=REQUESTS_MAX)


class BodyError(ValueError):
    """A body that is none of ``POST /score``; ``status`` says why."""

    def __init__(self, status: int, found: str) -> None:
        super().__init__(found)
        self.status = status


def read_body(parts: Sequence[bytes]) -> list[ScoreRequest]:
    """The requests; of each only the picture that is scored. Raises BodyError."""
    body, mark = b"".join(parts), secrets.token_hex(8)
    pictures = list(_pictures(body))
    plain, at = bytearray(), 0
    for number, (start, end) in enumerate(pictures):
        plain += body[at:start] + f"{mark}{number}".encode()
        at = end
    plain += body[at:]

    def whole(found: Any) -> Any:
        """What was sent, of a value that may be, or hold, a mark."""
        match found:
            case dict():
                return {name: whole(each) for name, each in found.items()}
            case list():
                return [whole(each) for each in found]
            case str() if found.startswith(mark):
                start, end = pictures[int(found.removeprefix(mark))]
                return body[start:end].decode("utf-8", "replace")
        return found

    try:
        requests = ScoreBody.model_validate(json.loads(plain)).requests
        for request in requests:
            request.history[-1].image_b64 = whole(request.history[-1].image_b64)
            request.metadata = whole(request.metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise BodyError(422, f"{where}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise BodyError(422, "the body is no JSON, or nested too deeply; expected that of /score") from None
    return requests


def _pictures(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the values of :data:`_KEY` are. None with escapes: what they hold is read as all else is.

    Between two quotation marks that no backslash precedes, these letters are a key, or a value that only a
    body which is no JSON goes on after with a colon.
    """
    at = cut_bytes = 0
    while (found := body.find(_KEY, at)) >= 0:
        at = found + len(_KEY)
        _check_plain(at - cut_bytes)
        opens = _OPENS.match(body, at)
        if opens is None or body[found - 1 : found] == b"\\":
            continue
        end = body.find(b'"', opens.end())
        if end >= 0 and body.find(b"\\", opens.end(), end) < 0:
            yield opens.end(), end
            cut_bytes += end - opens.end()
            at = end
    _check_plain(len(body) - cut_bytes)


def _check_plain(found_bytes: int) -> None:
    if found_bytes > PLAIN_BYTES_MAX:
        raise BodyError(
            413, f"more than {PLAIN_BYTES_MAX} bytes besides the pictures; expected that at most. Send less"
        )
