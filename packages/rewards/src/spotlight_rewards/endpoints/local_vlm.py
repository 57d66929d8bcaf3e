"""Settings of a vision-language model in the reward's own process. Starts without torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from spotlight_rewards.reward import SampleError

if TYPE_CHECKING:
    from spotlight_rewards.endpoints.chat import ChatAnswer, Question
    from spotlight_rewards.models.vision_language import VisionLanguageModel


class LocalVlm(BaseModel):
    """A model that transformers loads, and how it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(min_length=1)]
    """Hub id or directory of an image-text-to-text model."""
    device: str = "auto"
    """``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: PositiveInt = 8
    """Questions in a forward."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the model's chat template, such as ``{enable_thinking: false}``."""

    @property
    def title(self) -> str:
        """The model's name, for messages."""
        return self.path

    @property
    def identity(self) -> str:
        """Load the model; its source with a digest of its weights."""
        return _loaded(self.model_dump_json()).identity

    def ask(
        self, questions: Sequence[Question], *, tokens_max: int, logprobs: bool
    ) -> list[ChatAnswer | SampleError]:
        """See :meth:`VisionLanguageModel.ask`."""
        return _loaded(self.model_dump_json()).ask(questions, tokens_max=tokens_max, logprobs=logprobs)


@lru_cache(maxsize=1)
def _loaded(settings: str) -> VisionLanguageModel:
    from spotlight_rewards.models.vision_language import VisionLanguageModel

    vlm = LocalVlm.model_validate_json(settings)
    return VisionLanguageModel(
        vlm.path, key="params.model.path", device=vlm.device, dtype=vlm.dtype, batch_size=vlm.batch_size,
        template=vlm.chat_template_kwargs,
    )  # fmt: skip
