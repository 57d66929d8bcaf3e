"""The reward's own process: loads one reward, then serves one request at a time until its channel closes.

Never imports torch (unless the reward does). It ends by itself

* when the other end of the channel closes, even in the middle of a call;
* when a request exceeds its deadline: faulthandler's watchdog, which needs no GIL, writes the traceback to
  stderr and exits. The pool kills whatever survives that.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from spotlight_rewards import reward_registry as registry
from spotlight_rewards.base.device_errors import end_if_lost
from spotlight_rewards.pool import channel
from spotlight_rewards.pool.channel import (
    Blame,
    CheckPrompts,
    Done,
    Failed,
    Load,
    Reply,
    Request,
    Sample,
    Score,
    Values,
)
from spotlight_rewards.pool.shared_limits import share_limits
from spotlight_rewards.reward import (
    AwayError,
    Gradient,
    Image,
    RewardInputError,
    RewardSetupError,
    SampleError,
    is_away,
)


class RewardResultError(Exception):
    """A reward returned something other than one number per sample."""


def main(file_descriptor: int) -> None:
    """Serve the channel on this file descriptor; never returns."""
    faulthandler.enable()
    connection = socket.socket(fileno=file_descriptor)
    connection.set_inheritable(False)
    threading.Thread(target=_exit_when_closed, args=(connection,), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool is gone
        _serve(connection)
    os._exit(0)  # a thread that the reward started must not keep the process alive


def _serve(connection: socket.socket) -> None:
    reward: registry.LoadedReward | None = None
    scored_by = ""

    def answer(request: Request, samples: Sequence[Sample]) -> Reply:
        nonlocal reward, scored_by
        match request:
            case Load():
                share_limits(request.replica, request.replicas)
                reward = registry.load(
                    request.name_or_path,
                    request.params,
                    request.frames,
                    request.context,
                )
                scored_by = _who_scores(request.name_or_path, reward)
                return Done(scored_by, reward.traits)
            case CheckPrompts():
                assert reward is not None
                if reward.check is not None:
                    reward.check(request.prompts, request.metadata)
                return Done()
            case Score(gradients=wanted):
                assert reward is not None
                images = [sample.image for sample in samples]
                asked = [sample.prompt for sample in samples], [sample.metadata for sample in samples]
                found = reward.function(images, *asked)
                curves, errors = as_curves(found, len(samples)), sample_errors(found)
                away = frozenset(index for index, each in errors.items() if isinstance(each, AwayError))
                failed = {index: str(each) for index, each in errors.items()}
                gradients: Sequence[Gradient] = ()
                if wanted and reward.gradient is not None and any(sample.gradient for sample in samples):
                    gradients = as_gradients(reward.gradient(images, *asked), images)
                return Values(curves, scored_by, failed, away, gradients)

    while True:
        request = channel.receive(connection)
        assert isinstance(request, Load | CheckPrompts | Score), request
        samples = []
        for _ in range(request.samples if isinstance(request, Score) else 0):
            sample = channel.receive(connection)
            assert isinstance(sample, Sample), sample
            samples.append(sample)
        reply = _within_deadline(partial(answer, request, samples), request.deadline_s)
        channel.send(connection, channel.encode(reply))


def _who_scores(name_or_path: str, reward: registry.LoadedReward) -> str:
    if reward.scored_by is None:
        return ""
    try:
        with registry.missing_packages_named(name_or_path):
            return str(reward.scored_by())
    except (RewardInputError, RewardSetupError):
        raise
    except Exception as error:
        raise RewardSetupError(
            f"reward {name_or_path!r}: its scored_by raised\n{''.join(traceback.format_exception(error))}"
        ) from error


def _within_deadline(answer: Callable[[], Reply], deadline_s: float) -> Reply:
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    try:
        return answer()
    except RewardInputError as error:
        return Failed(Blame.INPUT, str(error))
    except RewardSetupError as error:
        return Failed(Blame.SETUP, str(error))
    except RewardResultError as error:
        return Failed(Blame.RESULT, str(error))
    except Exception as error:  # noqa: BLE001  (the pool reports it with its traceback)
        end_if_lost(error)  # every later call would fail as well
        text = "".join(traceback.format_exception(error))
        return Failed(
            Blame.AWAY if is_away(error) else Blame.RAISED,
            f"raised {type(error).__name__}: {error}\nIn the reward's process:\n{text}",
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def as_curves(found: object, samples: int) -> dict[str, list[float]]:
    """Convert a reward's return value to lists of floats by curve; non-finite numbers pass.

    In place of a :class:`SampleError` stands NaN.

    Raises:
        RewardResultError: not one number per sample; names the curve, what was found and what was expected.
    """
    if not isinstance(found, Mapping):
        return {"score": _as_floats("a result", found, samples)}
    if "score" not in found:
        keys = sorted(map(str, found))
        raise RewardResultError(f"returned a dictionary with the keys {keys}; expected 'score' among them")
    if "" in found or not all(isinstance(name, str) for name in found):
        raise RewardResultError(
            f"returned a dictionary with the keys {list(found)!r}; expected non-empty strings"
        )
    return {name: _as_floats(f"a {name!r}", values, samples) for name, values in found.items()}


def as_gradients(found: Sequence[object], images: Sequence[Image]) -> list[Gradient]:
    """In float32. Raises RewardResultError unless there is one in the shape of each image."""
    gradients = [np.asarray(each, np.float32) for each in found]
    shapes, expected = [each.shape for each in gradients], [image.shape for image in images]
    if shapes != expected:
        raise RewardResultError(f"returned gradients of shapes {shapes}; expected {expected}, as its images")
    return gradients


def sample_errors(found: object) -> dict[int, SampleError]:
    """By index, why a sample has no score; of a return value that :func:`as_curves` accepts."""
    scores = found["score"] if isinstance(found, Mapping) else found
    assert isinstance(scores, Iterable)
    return {index: each for index, each in enumerate(scores) if isinstance(each, SampleError)}


def _as_floats(what: str, found: object, samples: int) -> list[float]:
    expected = f"expected a list of {samples} numbers, one a sample"
    try:
        array = np.asarray(found)
    except Exception as error:
        raise RewardResultError(
            f"returned {what} of type {type(found).__name__!r} ({error}); {expected}"
        ) from error
    if array.ndim == 0:
        raise RewardResultError(
            f"returned {what} of type {type(found).__name__!r}, {_short(found)}; {expected}"
        )
    if array.ndim > 1:
        raise RewardResultError(f"returned {what} of shape {list(array.shape)}; {expected}")
    if len(array) != samples:
        raise RewardResultError(f"returned {what} of {len(array)} values for {samples} images; {expected}")
    if array.dtype.kind not in "fiub":
        values = found if isinstance(found, Sequence) else array.tolist()
        for index, value in enumerate(values):
            if not isinstance(value, int | float | np.integer | np.floating | np.bool_ | SampleError):
                kind = type(value).__name__
                raise RewardResultError(
                    f"returned {what} with {_short(value)} of type {kind!r} for sample {index}; {expected}"
                )
    return [math.nan if isinstance(value, SampleError) else float(value) for value in array]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _exit_when_closed(connection: socket.socket) -> None:
    watch = select.poll()
    watch.register(
        connection, select.POLLRDHUP
    )  # POLLHUP is always reported; this adds the other side's shutdown
    watch.poll()
    os._exit(0)
