"""Text embeddings by prompt: encoded once up front, then read from the disk cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotlight.models.condition import Condition, ModelInput, RecentConditions, model_input
from spotlight.models.family import MediaSize, ModelFamily
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import Prompt, PromptId

_CHUNK = 64  # embeddings in memory at a time while the cache is filled


class Conditions:
    """The embeddings of a run's prompts.

    Args:
        prompts: all prompts of the run.
        negative: the negative prompt.
        size: of what is made.
        kept_bytes: of the embeddings used last, kept in memory.
    """

    def __init__(
        self,
        family: ModelFamily,
        prompts: Iterable[Prompt],
        negative: str,
        size: MediaSize,
        *,
        kept_bytes: int,
    ) -> None:
        self._family, self._negative = family, negative
        self._inputs = {
            prompt.id: model_input(prompt.text, prompt.references, negative, size) for prompt in prompts
        }
        self._recent = RecentConditions(kept_bytes)

    def prefill(self, ranks: Ranks) -> None:
        """Embed into the disk cache what it lacks, divided over the ranks, then free the text encoder.

        Every rank must call this.
        """
        wanted = list(dict.fromkeys([self._negative, *self._inputs.values()]))
        lacking = set(self._family.not_embedded(wanted))
        (missing, *_) = ranks.share([at for at, each in enumerate(wanted) if each in lacking])
        self._embed([wanted[at] for at in missing[ranks.rank :: ranks.world]])
        ranks.barrier()
        self._embed(self._family.not_embedded(wanted))  # for ranks that do not share a cache
        self._family.free_text_encoder()

    def of(self, prompts: Iterable[PromptId]) -> list[Condition]:
        """Embeddings in the order of ``prompts``."""
        wanted = list(prompts)
        found = self._recent.of(wanted)
        absent = [prompt for prompt in dict.fromkeys(wanted) if prompt not in found]
        if absent:
            embedded = self._family.encode([self._inputs[prompt] for prompt in absent])
            self._family.free_text_encoder()  # loaded again only if the cache lost entries since the prefill
            found |= dict(zip(absent, embedded, strict=True))
        self._recent.use(found)
        return [found[prompt] for prompt in wanted]

    def __getitem__(self, prompt: PromptId) -> Condition:
        (condition,) = self.of([prompt])
        return condition

    def _embed(self, inputs: Sequence[ModelInput]) -> None:
        for start in range(0, len(inputs), _CHUNK):
            self._family.encode(inputs[start : start + _CHUNK])
