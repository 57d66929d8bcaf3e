"""The reward's own process: loads one reward, then serves one request at a time until its channel closes.

Never imports torch (unless the reward does). It ends by itself

* when the other end of the channel closes, even in the middle of a call;
* when a request exceeds its deadline: faulthandler's watchdog, which needs no GIL, writes the traceback to
  stderr and exits. The pool kills whatever survives that.
"""

from __future__ import annotations

import faulthandler
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

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
from spotlight_rewards.returned_scores import RewardResultError, as_curves, as_gradients, sample_errors
from spotlight_rewards.reward import (
    AwayError,
    Gradient,
    RewardInputError,
    RewardSetupError,
    is_away,
)


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


def _exit_when_closed(connection: socket.socket) -> None:
    watch = select.poll()
    watch.register(
        connection, select.POLLRDHUP
    )  # POLLHUP is always reported; this adds the other side's shutdown
    watch.poll()
    os._exit(0)
