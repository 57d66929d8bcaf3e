"""Questions about pictures to a VLM at an OpenAI-compatible endpoint (vLLM, SGLang), or in this process.

Protocol of endpoints: ``POST /chat/completions`` of
https://platform.openai.com/docs/api-reference/chat, as vLLM and SGLang serve it, with pictures
as PNG data URLs and temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from spotlight_rewards.endpoints.json_client import (
    HttpCall,
    Read,
    RewardServer,
    ask_all,
    parse_server,
    parse_settings,
    png_base64,
)
from spotlight_rewards.endpoints.local_vlm import LocalVlm
from spotlight_rewards.reward import Image, RewardSetupError, SampleError

TOP_LOGPROBS = 20
"""The most that OpenAI, and vLLM by default, return."""
_LOGPROB_SLACK = 1e-3
_TOKENS_MAX = 1 << 40

PriceUsd = Annotated[float, Field(ge=0)]


class ChatEndpoint(RewardServer):
    """An OpenAI-compatible endpoint and one of its models."""

    model: Annotated[str, Field(min_length=1)]
    """As the endpoint names it."""
    usd_per_million_prompt_tokens: PriceUsd | None = None
    """Price; with this or the next set, the curve ``cost_usd`` is recorded."""
    usd_per_million_completion_tokens: PriceUsd | None = None
    """Price of what the model writes."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, such as ``chat_template_kwargs: {enable_thinking: false}``."""

    @property
    def identity(self) -> str:
        """What answers."""
        return f"{self.model} at {self.base_url}"

    @property
    def title(self) -> str:
        """The model's name, for messages."""
        return self.model

    @property
    def priced(self) -> bool:
        """Whether a price is given."""
        return (self.usd_per_million_prompt_tokens, self.usd_per_million_completion_tokens) != (None, None)

    def cost_usd(self, tokens: TokenCount) -> float:
        """Price of one answer."""
        return (
            tokens.prompt * (self.usd_per_million_prompt_tokens or 0.0)
            + tokens.completion * (self.usd_per_million_completion_tokens or 0.0)
        ) / 1e6


Vlm: TypeAlias = ChatEndpoint | LocalVlm


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of one exchange."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about pictures [height, width, 3], in order; ``answer``: one to look for, if there is."""

    text: str
    pictures: tuple[Image, ...]
    answer: str = ""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What the model wrote.

    Attributes:
        text: the whole answer; empty only if the model ended it there.
        cut_off: it reached ``tokens_max``.
        first_token: probability of each candidate for the first token; None if not offered.
        tokens: None if not reported.
    """

    text: str
    cut_off: bool
    first_token: Mapping[str, float] | None
    tokens: TokenCount | None


def parse_vlm(
    reward: str,
    endpoint: Mapping[str, Any] | None,
    model: Mapping[str, Any] | None,
    deadline_s: float | None = None,
) -> Vlm:
    """Which VLM a reward's params name; loads nothing. Raises RewardSetupError."""
    if (endpoint is None) == (model is None):
        found = "neither endpoint nor model" if endpoint is None else "both endpoint and model"
        raise RewardSetupError(
            f"{reward} reward: params has {found}; expected one of them. Give endpoint: {{base_url: ..., "
            "model: ...} for a server, or model: {path: HUB_ID_OR_DIRECTORY} for one in its own process."
        )
    if model is None:
        return parse_server(ChatEndpoint, f"{reward} reward: params.endpoint", endpoint, deadline_s)
    return parse_settings(LocalVlm, f"{reward} reward: params.model", model)


def ask_about(
    place: Vlm,
    questions: Sequence[Question],
    read: Callable[[ChatAnswer, Question], Read],
    *,
    tokens_max: int,
    logprobs: bool = False,
) -> list[tuple[ChatAnswer, Read] | SampleError]:
    """Ask all questions.

    Args:
        read: what an answer says; raises as :attr:`HttpCall.read` does.

    Raises:
        RewardSetupError: nothing can be asked: key, address or model are refused, or costs cannot be counted.
    """
    if isinstance(place, LocalVlm):
        answers = place.ask(questions, tokens_max=tokens_max, logprobs=logprobs)
        return [_understood(*each, read) for each in zip(answers, questions, strict=True)]

    def parsed(question: Question, body: object) -> tuple[ChatAnswer, Read]:
        answer = parse_completion(place, body)
        return answer, read(answer, question)

    def call(question: Question) -> HttpCall[tuple[ChatAnswer, Read]]:
        body = partial(_body, place, question, tokens_max, logprobs)
        return HttpCall("/chat/completions", partial(parsed, question), body)

    return ask_all(place, [call(each) for each in questions])


def merged(
    answers: Sequence[tuple[ChatAnswer, Read] | SampleError],
) -> tuple[ChatAnswer, list[Read]] | SampleError:
    """All answers about one sample as one: tokens add, and the first failure fails the sample."""
    found = []
    for each in answers:
        if isinstance(each, SampleError):
            return each
        found.append(each)
    counts = [answer.tokens for answer, _ in found if answer.tokens is not None]
    tokens = TokenCount(sum(each.prompt for each in counts), sum(each.completion for each in counts))
    whole = ChatAnswer(
        "\n".join(answer.text for answer, _ in found),
        any(answer.cut_off for answer, _ in found),
        None,
        tokens if len(counts) == len(found) else None,
    )
    return whole, [read for _, read in found]


def curve_of(
    answers: Sequence[tuple[ChatAnswer, Read] | SampleError], value: Callable[[Read], float]
) -> list[float | SampleError]:
    """A curve of what the answers say; errors stay where they are."""
    return [each if isinstance(each, SampleError) else value(each[1]) for each in answers]


def token_curves(
    place: Vlm, answers: Sequence[tuple[ChatAnswer, object] | SampleError]
) -> dict[str, list[float]]:
    """``prompt_tokens``, ``completion_tokens`` and, with prices, ``cost_usd``; none if not reported."""
    # Curves of failed samples are not read; in a group's sum they count nothing.
    tokens = [TokenCount(0, 0) if isinstance(each, SampleError) else each[0].tokens for each in answers]
    counted = [each for each in tokens if each is not None]
    if len(counted) < len(tokens):
        return {}
    curves = {
        "prompt_tokens": [float(each.prompt) for each in counted],
        "completion_tokens": [float(each.completion) for each in counted],
    }
    if isinstance(place, ChatEndpoint) and place.priced:
        curves["cost_usd"] = [place.cost_usd(each) for each in counted]
    return curves


def parse_completion(endpoint: ChatEndpoint, body: object) -> ChatAnswer:
    """Read the JSON of a completion.

    Raises:
        SampleError: no answer in it, or something that cannot be true.
        RewardSetupError: prices are given but tokens are not reported.
    """
    source = f"{endpoint.base_url} ({endpoint.model})"
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(choice, dict) or not isinstance(text, str) or not (text.strip() or _ended(choice)):
        raise SampleError(
            f"{source} sent {body!r}; expected choices[0].message.content with text. A model that reasons "
            "first needs that switched off (extra_body), or is not suited."
        )
    tokens = _tokens(source, body)
    if endpoint.priced and tokens is None:
        raise RewardSetupError(
            f"{source} does not report its tokens (usage); expected them, because prices are given. "
            "Remove the prices from the endpoint's settings, or use a server that counts."
        )
    return ChatAnswer(text, choice.get("finish_reason") == "length", _first_token(source, choice), tokens)


def _understood(
    answer: ChatAnswer | SampleError, question: Question, read: Callable[[ChatAnswer, Question], Read]
) -> tuple[ChatAnswer, Read] | SampleError:
    if isinstance(answer, SampleError):
        return answer
    try:
        return answer, read(answer, question)
    except SampleError as error:
        return error


def _body(endpoint: ChatEndpoint, question: Question, tokens_max: int, logprobs: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_base64(image)}"}}
        for image in question.pictures
    ]
    content.append({"type": "text", "text": question.text})
    offer = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if logprobs else {}
    return {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens_max,
        "temperature": 0,
        **offer,
        **endpoint.extra_body,
    }


def _ended(choice: Mapping[str, Any]) -> bool:
    """Whether the model itself ended its answer, without having reasoned instead."""
    message = choice["message"]
    return choice.get("finish_reason") == "stop" and not (
        message.get("reasoning") or message.get("reasoning_content")
    )


def _tokens(source: str, body: object) -> TokenCount | None:
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens", 0)]
    if any(type(count) is not int or not 0 <= count <= _TOKENS_MAX for count in counts):
        raise SampleError(f"{source} sent the usage {usage!r}; expected whole numbers of tokens.")
    return TokenCount(counts[0], counts[1])


def _first_token(source: str, choice: Mapping[str, Any]) -> dict[str, float] | None:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return None
    found: dict[str, float] = {}
    for candidate in [content[0], *(content[0].get("top_logprobs") or [])]:
        token = candidate.get("token") if isinstance(candidate, dict) else None
        logprob = candidate.get("logprob") if isinstance(candidate, dict) else None
        if (
            not isinstance(token, str)
            or isinstance(logprob, bool)
            or not isinstance(logprob, int | float)
            or not logprob <= _LOGPROB_SLACK
        ):
            raise SampleError(f"{source} sent {candidate!r}; expected a token and its logprob <= 0.")
        found[token] = min(math.exp(logprob), 1.0)
    if sum(found.values()) > 1 + _LOGPROB_SLACK * len(found):
        raise SampleError(
            f"{source} sent first tokens of probability {sum(found.values()):.3f}; expected <= 1."
        )
    return found
