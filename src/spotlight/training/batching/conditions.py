"""Text embeddings by prompt: encoded once up front, then read from the disk cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from spotlight.models.condition import Condition, ModelInput, model_input
from spotlight.models.family import ModelFamily
from spotlight.scheduler.types import Prompt, PromptId
from spotlight.training.sharding import Ranks

_CHUNK = 64  # embeddings in memory at a time while the cache is filled
_KEPT_IN_MEMORY = 1024  # about 4 GB at Qwen-Image's 512 tokens x 3584 in bfloat16


class Conditions:
    """The embeddings of a run's prompts.

    Args:
        prompts: all prompts of the run.
        negative: the negative prompt.
    """

    def __init__(self, family: ModelFamily, prompts: Iterable[Prompt], negative: str) -> None:
        self._family, self._negative = family, negative
        self._inputs = {
            prompt.id: model_input(prompt.text, prompt.references, negative) for prompt in prompts
        }
        self._recent: OrderedDict[PromptId, Condition] = OrderedDict()

    def prefill(self, ranks: Ranks) -> None:
        """Embed into the disk cache what it lacks, divided over the ranks, then free the text encoder.

        Every rank must call this.
        """
        wanted = [self._negative, *self._inputs.values()]
        (missing, *_) = ranks.share(self._family.not_embedded(wanted))
        self._embed(missing[ranks.rank :: ranks.world])
        ranks.barrier()
        self._embed(self._family.not_embedded(wanted))  # for ranks that do not share a cache
        self._family.free_text_encoder()

    def of(self, prompts: Iterable[PromptId]) -> list[Condition]:
        """Embeddings in the order of ``prompts``."""
        wanted = list(prompts)
        found = {prompt: self._recent[prompt] for prompt in wanted if prompt in self._recent}
        absent = [prompt for prompt in dict.fromkeys(wanted) if prompt not in found]
        if absent:
            embedded = self._family.encode([self._inputs[prompt] for prompt in absent])
            self._family.free_text_encoder()  # loaded again only if the cache lost entries since the prefill
            found |= dict(zip(absent, embedded, strict=True))
        for prompt, condition in found.items():
            self._recent[prompt] = condition
            self._recent.move_to_end(prompt)
        while len(self._recent) > _KEPT_IN_MEMORY:
            self._recent.popitem(last=False)
        return [found[prompt] for prompt in wanted]

    def __getitem__(self, prompt: PromptId) -> Condition:
        (condition,) = self.of([prompt])
        return condition

    def _embed(self, inputs: Sequence[ModelInput]) -> None:
        for start in range(0, len(inputs), _CHUNK):
            self._family.encode(inputs[start : start + _CHUNK])
