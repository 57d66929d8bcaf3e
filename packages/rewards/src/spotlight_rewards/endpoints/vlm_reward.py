"""What rewards that ask a VLM have in common: they ask about a sample, and read the answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np

from spotlight_rewards.endpoints.chat import (
    ChatAnswer,
    Question,
    Vlm,
    ask_about,
    merged,
    parse_vlm,
    token_curves,
)
from spotlight_rewards.reward import Curves, Image, Reward, RewardSetupError, SampleError

Value = TypeVar("Value")
GRAY: Image = np.full((64, 64, 3), 128, np.uint8)


@dataclass(frozen=True, kw_only=True)
class VlmReward(Reward, Generic[Value]):
    """A reward that asks a VLM.

    Attributes:
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        name: the reward's, for messages.
    """

    endpoint: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None

    name: ClassVar[str]

    @property
    @abstractmethod
    def tokens_max(self) -> int:
        """Length limit of an answer."""

    @property
    def logprobs(self) -> bool:
        """Whether answers are read from the probabilities of the first token."""
        return False

    @property
    def hint(self) -> str:
        """What may help if the first question is not answered."""
        return ""

    @property
    @abstractmethod
    def tiny_answers(self) -> Sequence[str]:
        """What a random model answers in a smoke run."""

    @abstractmethod
    def read(self, answer: ChatAnswer, question: Question) -> Value:
        """What an answer says; SampleError if nothing, RewardSetupError if no answer ever will."""

    @abstractmethod
    def first_question(self, prompts: Sequence[str]) -> Question:
        """Asked before any work, to see whether the model is there and answers as it should."""

    def read_first(self, answer: ChatAnswer, question: Question) -> object:
        """What the answer to :meth:`first_question` says; raises as :meth:`read` does."""
        return self.read(answer, question)

    def vlm(self) -> Vlm:
        """Whom to ask; loads nothing. Raises RewardSetupError."""
        return parse_vlm(self.name, self.endpoint, self.model)

    def answers(
        self, vlm: Vlm, questions: Sequence[Question]
    ) -> list[tuple[ChatAnswer, Value] | SampleError]:
        """Ask all questions in one batch."""
        return ask_about(vlm, questions, self.read, tokens_max=self.tokens_max, logprobs=self.logprobs)

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Ask a first question."""
        vlm, first = self.vlm(), self.first_question(prompts)
        (answer,) = ask_about(
            vlm, [first], self.read_first, tokens_max=self.tokens_max, logprobs=self.logprobs
        )
        if isinstance(answer, SampleError):
            raise RewardSetupError(f"{vlm.title!r} did not answer a first question: {answer}{self.hint}")

    def scored_by(self) -> str:
        """What answers; checks an endpoint's settings, and loads a model."""
        return parse_vlm(self.name, self.endpoint, self.model, self.context.deadline_s).identity

    def tiny(self, folder: Path) -> dict[str, Any]:
        """A small random model that gives one of :attr:`tiny_answers`."""
        from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

        return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, self.tiny_answers))}}

    def require(self, param: str, sound: bool, expected: str) -> None:
        """Raise RewardSetupError unless a parameter is ``sound``."""
        if not sound:
            found = getattr(self, param)
            raise RewardSetupError(f"{self.name} reward: params.{param} is {found!r}; expected {expected}.")

    def require_one_of(self, param: str, choices: object) -> None:
        """Raise RewardSetupError unless a parameter is one of a Literal's values."""
        known = get_args(choices)
        expected = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
        self.require(param, getattr(self, param) in known, expected)


@dataclass(frozen=True, kw_only=True)
class VlmSampleReward(VlmReward[Value]):
    """A reward that asks about each sample by itself."""

    @abstractmethod
    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        """The questions about a sample. Raises RewardInputError for a prompt that cannot be scored."""

    @abstractmethod
    def curves(self, answers: Sequence[tuple[ChatAnswer, list[Value]] | SampleError]) -> Curves:
        """By curve, what the answers of each sample say together."""

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """The curves of :meth:`curves`, tokens and cost."""
        vlm = self.vlm()
        asked = [self.ask(*each) for each in zip(images, prompts, metadata, strict=True)]
        answers = iter(self.answers(vlm, [question for own in asked for question in own]))
        found = [merged([next(answers) for _ in own]) for own in asked]
        return {**self.curves(found), **token_curves(vlm, found)}

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Build every prompt's questions, and ask a first one."""
        self.vlm()
        for prompt, record in zip(prompts, metadata, strict=True):
            self.ask(GRAY, prompt, record)
        super().check(prompts, metadata)
