"""Embeddings of a run: no prompt is embedded twice, and the text encoder does not stay."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight.models.condition import Condition
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.training.batching.conditions import Conditions
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import Prompt, PromptId

TEXTS = [f"prompt {number}" for number in range(5)]
NEGATIVE = TEXTS[0]
PROMPTS = [Prompt(PromptId(f"p{number}"), text, {}) for number, text in enumerate(TEXTS)]


class Family:
    """A text encoder that counts, over a cache that several of them may share."""

    def __init__(self, cache: set[str]) -> None:
        self.cache, self.read, self.embedded = cache, list[str](), list[str]()
        self.loaded = 0
        self._in_memory = False

    def not_embedded(self, prompts: Sequence[str]) -> list[str]:
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.cache]

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        self.read += prompts
        missing = self.not_embedded(prompts)
        if missing and not self._in_memory:
            self.loaded, self._in_memory = self.loaded + 1, True
        self.embedded += missing
        self.cache.update(missing)
        return [Condition({"embeds": torch.tensor([[float(prompt[-1])]])}) for prompt in prompts]

    def free_text_encoder(self) -> None:
        self._in_memory = False

    @property
    def as_family(self) -> ModelFamily:
        return cast(ModelFamily, self)


def two_ranks(rank: int, missing: list[int]) -> Ranks:
    ranks = SimpleNamespace(rank=rank, world=2, share=lambda value: [missing, value], barrier=lambda: None)
    return cast(Ranks, ranks)


def test_what_is_cached_is_neither_read_nor_embedded_again() -> None:
    family = Family(set(TEXTS))
    Conditions(family.as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=1 << 20).prefill(Ranks())
    assert family.read == []
    assert family.loaded == 0


def test_ranks_embed_a_share_each_of_what_is_missing() -> None:
    cache = {TEXTS[0]}
    ranks = [Family(cache), Family(cache)]
    missing = [TEXTS.index(text) for text in ranks[0].not_embedded(TEXTS)]
    second = Conditions(ranks[1].as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=1 << 20)
    # The second rank is ahead: it must not take what is the first's, nor the first embed it again.
    ranks[1].not_embedded = lambda prompts: list(prompts) if len(prompts) < 3 else []  # type: ignore[method-assign]
    second.prefill(two_ranks(1, missing))
    assert ranks[1].embedded == [TEXTS[2], TEXTS[4]]
    Conditions(ranks[0].as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=1 << 20).prefill(
        two_ranks(0, missing)
    )
    assert ranks[0].embedded == [TEXTS[1], TEXTS[3]]


def test_a_rank_with_a_cache_of_its_own_embeds_what_it_lacks() -> None:
    family = Family(set())
    Conditions(family.as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=1 << 20).prefill(
        two_ranks(1, list(range(5)))
    )
    assert sorted(family.embedded) == TEXTS


def test_a_cache_that_lost_prompts_costs_one_load_and_keeps_no_encoder() -> None:
    family = Family(set())
    conditions = Conditions(family.as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=1 << 20)
    wanted = [PROMPTS[3].id, PROMPTS[1].id, PROMPTS[3].id]
    assert [float(each["embeds"]) for each in conditions.of(wanted)] == [3, 1, 3]
    assert (family.loaded, family._in_memory) == (1, False)
    assert conditions[PROMPTS[1].id] is conditions.of([PROMPTS[1].id])[0]
    assert family.read == [TEXTS[3], TEXTS[1]]
    assert float(conditions[PROMPTS[0].id]["embeds"]) == 0
    assert (family.loaded, family._in_memory) == (2, False)


@given(
    used=st.lists(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4), max_size=12),
    kept=st.integers(0, 6),
)
def test_the_embeddings_used_last_are_kept_within_a_number_of_bytes(
    used: list[list[Prompt]], kept: int
) -> None:
    family = Family(set(TEXTS))
    conditions = Conditions(
        family.as_family, PROMPTS, NEGATIVE, MediaSize(32, 32), kept_bytes=kept * 4 + 3
    )  # 4 bytes each
    recent: list[Prompt] = []
    for prompts in used:
        family.read.clear()
        found = conditions.of([prompt.id for prompt in prompts])
        assert [float(each["embeds"]) for each in found] == [float(prompt.text[-1]) for prompt in prompts]
        assert set(family.read) == {prompt.text for prompt in prompts if prompt not in recent}
        held = [prompt for prompt in PROMPTS if conditions._recent.of([prompt.id])]
        assert len(held) <= kept
        asked = [prompt for prompt in PROMPTS if prompt in prompts]
        assert len(held) == min(kept, len({prompt.id for prompt in (*recent, *prompts)}))
        assert kept < len(asked) or all(prompt in held for prompt in asked)
        recent = held


@given(per_node=st.lists(st.integers(1, 8), min_size=2, max_size=4))
def test_the_ranks_of_a_node_divide_what_it_keeps(per_node: list[int]) -> None:
    world = sum(per_node)
    ranks = [Ranks(rank, world, tuple(per_node)) for rank in range(world)]
    assert [each.on_this_node for each in ranks] == [here for here in per_node for _ in range(here)]
    assert sum(Fraction(1, each.on_this_node) for each in ranks) == len(per_node)
    assert Ranks(1, 4).on_this_node == 4
