"""Text embeddings by prompt: encoded once up front, then read from the disk cache as needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from spotlight.core.types import Prompt, PromptId
from spotlight.models.base import Condition, ModelFamily

_KEPT_IN_MEMORY = 1024  # about 4 GB at Qwen-Image's 512 tokens x 3584 in bfloat16


class Conditions:
    """The embeddings of a run's prompts.

    Args:
        prompts: all prompts that the run can meet.
    """

    def __init__(self, family: ModelFamily, prompts: Iterable[Prompt]) -> None:
        self._family = family
        self._texts = {prompt.id: prompt.text for prompt in prompts}
        self._recent: OrderedDict[PromptId, Condition] = OrderedDict()

    def prefill(self, prompts: Sequence[Prompt], chunk: int = 64) -> None:
        """Embed ``prompts`` into the disk cache, then free the text encoder."""
        for start in range(0, len(prompts), chunk):
            self._family.encode([prompt.text for prompt in prompts[start : start + chunk]])
        self._family.free_text_encoder()

    def __getitem__(self, prompt: PromptId) -> Condition:
        if prompt in self._recent:
            self._recent.move_to_end(prompt)
        else:
            (self._recent[prompt],) = self._family.encode([self._texts[prompt]])
            if len(self._recent) > _KEPT_IN_MEMORY:
                self._recent.popitem(last=False)
        return self._recent[prompt]
