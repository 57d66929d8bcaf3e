"""Which of the files' prompts a run meets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import load_config
from spotlight.core.types import Prompt, PromptId
from spotlight.runtime.prompts import evenly_spaced, load_prompts, sharing_note
from spotlight.testbed import TRAIN_PROMPTS

TAGS = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


@given(st.integers(1, 60), st.none() | st.integers(1, 80))
def test_held_out_prompts_are_spread_over_the_file(total: int, count: int | None) -> None:
    prompts = [Prompt(PromptId(str(index)), str(index), {}) for index in range(total)]
    chosen = [int(prompt.id) for prompt in evenly_spaced(prompts, count)]
    assert len(chosen) == min(total, total if count is None else count)
    assert chosen[0] == 0
    gaps = [after - before for before, after in zip(chosen, [*chosen[1:], total], strict=True)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_few_held_out_prompts_are_of_many_kinds() -> None:
    prompts = load_prompts(load_config(None, ["evaluation.prompts=12", "data.tags=[]"]))
    assert len(prompts.test) == 12
    assert len({prompt.metadata["tag"] for prompt in prompts.test} & TAGS) >= 5


def test_the_used_prompts_are_those_of_every_iteration_and_all_held_out_ones() -> None:
    config = load_config(None, ["iterations=2"])
    prompts = load_prompts(config)
    used = prompts.used(config)
    assert len({prompt.id for prompt in used}) == len(used)
    assert len(used) == len(prompts.test) + 2 * config.rollout.prompts_per_iteration


def test_held_out_prompts_that_are_trained_on_are_counted() -> None:
    assert load_prompts(load_config(None, [])).shared == 0
    prompts = load_prompts(load_config(None, [f"data.test={TRAIN_PROMPTS}", "evaluation.prompts=12"]))
    assert prompts.shared == 12
    assert sharing_note(12, 12).startswith("12 of 12 held-out prompts are in data.train too")
