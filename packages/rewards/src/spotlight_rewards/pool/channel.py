"""Messages between the reward pool and a reward process: pickled values over a local socket pair.

Each message is its length (8 bytes, little-endian) and its pickle. The socket pair has no address, so only
the two processes can write to it. Transfers take a time limit, because the other side may hang in the middle
of a message.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from spotlight_rewards.frames import FrameRule
from spotlight_rewards.reward import Gradient, Image, RewardContext, RewardTraits

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Load:
    """Import the reward. Must be the first request. Reply: :class:`Done`.

    Attributes:
        replica, replicas: which of the reward's processes this is; they share limits such as a server's
            ``concurrency``.
    """

    name_or_path: str
    params: Mapping[str, Any]
    frames: FrameRule
    deadline_s: float
    context: RewardContext
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class CheckPrompts:
    """Run the reward's ``check``, if it has one. Reply: :class:`Done`."""

    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Score:
    """Score the ``samples`` that follow, each a message of its own. Reply: :class:`Values`.

    Attributes:
        gradients: also of those that ask for theirs.
    """

    deadline_s: float
    samples: int
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """An image with its prompt and metadata; encoded once for all rewards.

    Attributes:
        gradient: it is to be differentiated, too, by rewards that can.
    """

    image: Image
    prompt: str
    metadata: Mapping[str, Any]
    gradient: bool = False


Request: TypeAlias = Load | CheckPrompts | Score


class Blame(StrEnum):
    """What went wrong in a reward process that is still alive."""

    INPUT = "input"
    SETUP = "setup"
    RESULT = "result"
    RAISED = "raised"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Done:
    """The request succeeded; for a ``Load`` with what the reward's ``scored_by`` returned, and its traits."""

    scored_by: str = ""
    traits: RewardTraits = field(default_factory=RewardTraits)


@dataclass(frozen=True, slots=True)
class Values:
    """A batch's scores by curve, including ``score``; lists as long as the batch, possibly not finite.

    ``failed``: by index, why a sample has no score; ``away``: of which what scores does not answer.
    ``scored_by`` as in :class:`Done`. ``gradients``: one a sample, or none.
    """

    curves: Mapping[str, Sequence[float]]
    scored_by: str = ""
    failed: Mapping[int, str] = field(default_factory=dict)
    away: frozenset[int] = frozenset()
    gradients: Sequence[Gradient] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; ``message`` includes the remote traceback if there is one."""

    blame: Blame
    message: str


Reply: TypeAlias = Done | Values | Failed


def encode(message: Request | Sample | Reply) -> bytes:
    """Pickle a message. Raises ValueError if it cannot be pickled."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise ValueError(
            f"prompts and metadata must be plain values, for they are sent to the rewards' processes: {error}"
        ) from error


def send(channel: socket.socket, message: bytes, limit_s: float | None = None) -> None:
    """Send an encoded message.

    Raises:
        TimeoutError: not sent within ``limit_s``; the channel is unusable from then on.
        OSError: the other side is gone.
    """
    channel.settimeout(limit_s)
    channel.sendall(_LENGTH.pack(len(message)))
    channel.sendall(message)


def receive(channel: socket.socket, limit_s: float | None = None) -> object:
    """Wait for a complete message.

    Raises:
        TimeoutError: not received within ``limit_s``; the channel is unusable from then on.
        EOFError: the other side is gone.
    """
    end_s = None if limit_s is None else time.monotonic() + limit_s
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, end_s))
    return pickle.loads(_receive_exactly(channel, length, end_s))


def _receive_exactly(channel: socket.socket, size: int, end_s: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        if end_s is not None:
            # A timeout of 0 would mean "do not block", another error.
            channel.settimeout(max(end_s - time.monotonic(), 1e-3))
        try:
            count = channel.recv_into(view[filled:])
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error
        if count == 0:
            raise EOFError("the other side is gone")
        filled += count
    return data
