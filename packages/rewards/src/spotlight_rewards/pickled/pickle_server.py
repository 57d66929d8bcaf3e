"""The reward ``pickle-server``: a reward server of flow_grpo or verl-omni on this machine scores pictures.

Their protocols are pickles over HTTP, one picture per request here:

    verl-omni          {"images": [JPEG], "prompts": [text], "metadata": {}}
                       -> {"scores": [number]}
    flow-grpo          {"images": [JPEG], "prompts": [text]}
                       -> {"outputs": [number]}
    flow-grpo-geneval  {"images": [JPEG], "meta_datas": [record], "only_strict": bool}
                       -> {"rewards": [number], "scores": [number], "strict_rewards": [number], ...}

(https://github.com/verl-project/verl-omni, https://github.com/yifan123/flow_grpo.) Unpickling runs whatever
the other side wrote. Here only plain values are read (``plain_pickle.py``), but the server has no such guard,
and anyone who reaches its port runs code with its rights. Hence loopback only, and only if asked for.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from PIL import Image as PILImage

from spotlight_rewards.endpoints.json_client import (
    LOOPBACK,
    HttpCall,
    RewardServer,
    ask_all,
    parse_server,
)
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.pickled.plain_pickle import load_plain
from spotlight_rewards.reward import Image, RewardSetupError, SampleError, best_with
from spotlight_rewards.reward_facts import Reads, RewardFacts

logger = logging.getLogger(__name__)

Protocol = Literal["verl-omni", "flow-grpo", "flow-grpo-geneval"]
FACTS = RewardFacts(
    runs_on="a server",
    typical=None,
    reads=Reads.TEXT,
    weights=("the server's",),
    licence="the server's",
)
_DANGER = (
    "its protocol is pickle, and unpickling runs whatever code the other side wrote: everyone who reaches "
    "the server's port can run code there"
)
_CURVES: Mapping[Protocol, tuple[str, ...]] = {
    "verl-omni": ("scores",),
    "flow-grpo": ("outputs",),
    "flow-grpo-geneval": ("scores", "rewards", "strict_rewards"),
}
"""What is read of an answer; the first is trained on, as by the servers' own clients."""


@best_with(batch_size=16)
def pickle_server(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    server: Mapping[str, Any],
    protocol: Protocol,
    allow_pickle: bool = False,
    only_strict: bool = True,
) -> dict[str, list[float | SampleError]]:
    """Let a reward server of flow_grpo or verl-omni on this machine score the pictures.

    Args:
        images: uint8 [height, width, 3]; sent as JPEG, as their own clients do.
        prompts: sent as they are.
        metadata: sent with ``flow-grpo-geneval``.
        server: fields of :class:`RewardServer`; ``base_url`` must be on loopback.
        protocol: ``verl-omni``, ``flow-grpo`` (DeQA, UnifiedReward) or ``flow-grpo-geneval``.
        allow_pickle: must be true: the protocol can run code on the server's side.
        only_strict: sent with ``flow-grpo-geneval``; flow_grpo trains with true and evaluates with false.

    Returns:
        ``score``; with ``flow-grpo-geneval`` (its ``scores``) also ``rewards`` and ``strict_rewards``.

    Raises:
        RewardSetupError: invalid settings, no permission, or a refused address.
    """
    place = _settings(server, protocol, allow_pickle, only_strict)
    calls = [
        HttpCall("", partial(_body, protocol, only_strict, *each))
        for each in zip(images, prompts, metadata, strict=True)
    ]
    answers = ask_all(place, calls, partial(parse_scores, protocol), decode=load_plain)
    trained_on, *others = _CURVES[protocol]
    return {
        curve: [each if isinstance(each, SampleError) else each[name] for each in answers]
        for curve, name in {"score": trained_on, **dict(zip(others, others, strict=True))}.items()
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    server: Mapping[str, Any],
    protocol: Protocol,
    allow_pickle: bool = False,
    only_strict: bool = True,
) -> None:
    """Let the server score a picture of a sign. Raises RewardSetupError if it does not."""
    place = _settings(server, protocol, allow_pickle, only_strict)
    if protocol == "flow-grpo-geneval" and not metadata:
        return  # it scores nothing without a record
    record = metadata[0] if metadata else {}
    prompt = prompts[0] if prompts else "a sign"
    body = partial(_body, protocol, only_strict, example_picture("sign"), prompt, record)
    (answer,) = ask_all(place, [HttpCall("", body)], partial(parse_scores, protocol), decode=load_plain)
    if isinstance(answer, SampleError):
        raise RewardSetupError(f"pickle-server reward: the server did not score a first picture: {answer}")


def scored_by(
    *,
    server: Mapping[str, Any],
    protocol: Protocol,
    allow_pickle: bool = False,
    only_strict: bool = True,
    deadline_s: float | None = None,
) -> str:
    """The server; checks its settings, and warns."""
    place = _settings(server, protocol, allow_pickle, only_strict, deadline_s)
    logger.warning("pickle-server reward: %s is used although %s.", place.base_url, _DANGER)
    return f"{place.base_url} ({protocol})"


def parse_scores(protocol: Protocol, answer: object) -> dict[str, float]:
    """The scores of the one picture, by their names in the answer. Raises SampleError."""
    if isinstance(answer, dict) and "error" in answer:
        raise SampleError(f"the server could not score it: {answer['error']}")
    found: dict[str, float] = {}
    for name in _CURVES[protocol]:
        values = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != 1 or type(values[0]) not in (bool, int, float):
            raise SampleError(
                f"the server sent {answer!r} for one picture; expected {{{name!r}: [number]}}, as "
                f"{protocol} has it. Is params.protocol the server's?"
            )
        found[name] = float(values[0])
        if not math.isfinite(found[name]):
            raise SampleError(f"the server sent {values[0]!r} as {name!r}; expected a finite number")
    return found


def _body(
    protocol: Protocol, only_strict: bool, image: Image, prompt: str, record: Mapping[str, Any]
) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(image).save(buffer, format="JPEG")
    sent: dict[str, Any] = {"images": [buffer.getvalue()]}
    if protocol == "flow-grpo-geneval":
        sent |= {"meta_datas": [dict(record)], "only_strict": only_strict}
    else:
        sent |= {"prompts": [prompt]} | ({"metadata": {}} if protocol == "verl-omni" else {})
    return pickle.dumps(sent)


def _settings(
    server: Mapping[str, Any],
    protocol: Protocol,
    allow_pickle: bool,
    only_strict: bool,
    deadline_s: float | None = None,
) -> RewardServer:
    if protocol not in get_args(Protocol):
        raise RewardSetupError(
            f"pickle-server reward: params.protocol is {protocol!r}; expected one of "
            f"{', '.join(get_args(Protocol))}."
        )
    if only_strict is not True and (only_strict is not False or protocol != "flow-grpo-geneval"):
        raise RewardSetupError(
            f"pickle-server reward: params.only_strict is {only_strict!r} with the protocol {protocol}; "
            "expected true or false with flow-grpo-geneval, and no such parameter with others. Remove it."
        )
    place = parse_server(RewardServer, "pickle-server reward: params.server", server, deadline_s)
    if urlsplit(place.base_url).hostname not in LOOPBACK:
        raise RewardSetupError(
            f"pickle-server reward: params.server.base_url is {place.base_url!r}; expected an address of "
            f"this machine (127.0.0.1), because {_DANGER}. Run the server here, or serve its model by "
            "'spotlight rewards serve' and use the reward http."
        )
    if allow_pickle is not True:
        raise RewardSetupError(
            f"pickle-server reward: params.allow_pickle is {allow_pickle!r}; expected true, because "
            f"{_DANGER}. Set it if you trust all users of this machine, or serve the model by 'spotlight "
            "rewards serve' and use the reward http."
        )
    return place
