"""The reward ``flow-factory``: a reward server that speaks Flow-Factory's JSON scores pictures.

Protocol (https://github.com/X-GenGroup/Flow-Factory):

    POST /compute  {"prompt": [...], "image": [base64 of PNG, ...]}  ->  {"rewards": [0.21, ...]}

One picture per request: the protocol has no errors of single samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotlight_rewards.endpoints.json_client import (
    HttpCall,
    RewardServer,
    ask_all,
    parse_server,
    png_base64,
)
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reward import Image, Reward, RewardSetupError, SampleError, best_with
from spotlight_rewards.reward_facts import Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="a server",
    typical=None,
    reads=Reads.TEXT,
    weights=("the server's",),
    licence="the server's",
)


@best_with(batch_size=16)
@dataclass(frozen=True, kw_only=True)
class FlowFactory(Reward):
    """Let a server that speaks Flow-Factory's protocol score the pictures.

    Attributes:
        server: fields of :class:`RewardServer`; ``base_url`` is required.
    """

    server: Mapping[str, Any]

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float | SampleError]:
        calls = [_call(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        return ask_all(self._place(), calls)

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Let the server score a picture of a sign. Raises RewardSetupError if it does not."""
        first = _call(example_picture("sign"), prompts[0] if prompts else "a sign")
        (answer,) = ask_all(self._place(), [first])
        if isinstance(answer, SampleError):
            raise RewardSetupError(f"flow-factory reward: the server did not score a first picture: {answer}")

    def scored_by(self) -> str:
        """The server; checks its settings."""
        return self._place(self.context.deadline_s).base_url

    def _place(self, deadline_s: float | None = None) -> RewardServer:
        return parse_server(RewardServer, "flow-factory reward: params.server", self.server, deadline_s)


def parse_reward(answer: object) -> float:
    """The one reward of an answer. Raises SampleError."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != 1 or type(rewards[0]) not in (int, float):
        raise SampleError(f"the server sent {answer!r} for one picture; expected {{'rewards': [number]}}")
    if not math.isfinite(float(rewards[0])):
        raise SampleError(f"the server sent the reward {rewards[0]!r}; expected a finite number")
    return float(rewards[0])


def _call(image: Image, prompt: str) -> HttpCall[float]:
    return HttpCall("/compute", parse_reward, lambda: {"prompt": [prompt], "image": [png_base64(image)]})
