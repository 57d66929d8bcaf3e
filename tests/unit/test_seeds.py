"""Random decisions are pure functions of what they are for."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler import seeds as module
from spotlight.scheduler.seeds import derive_seed, prompts_of_iteration
from spotlight_rewards.base.prompts import Prompt, PromptId

FIELDS = st.lists(st.one_of(st.integers(), st.text(alphabet="abc-0123")), min_size=1, max_size=4)


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(PromptId(f"p{number}"), f"prompt {number}", {}) for number in range(count)]


@given(st.integers(0, 2**31 - 1), FIELDS)
def test_a_seed_is_a_63_bit_function_of_its_fields(run_seed: int, fields: list[str | int]) -> None:
    seed = derive_seed(run_seed, *fields)
    assert seed == derive_seed(run_seed, *fields)
    assert 0 <= seed < 2**63
    assert seed != derive_seed(run_seed + 1, *fields)
    assert seed != derive_seed(run_seed, *fields, 0)


def test_seeds_do_not_collide_and_stay_what_they_were() -> None:
    seeds = {
        derive_seed(0, "train", i, slot, member)
        for i in range(20)
        for slot in range(20)
        for member in range(20)
    }
    assert len(seeds) == 8000
    # A changed value would change every run made so far.
    assert derive_seed(0, "train", 0, 0, 0) == 3159527795571703026


def test_fields_are_not_glued_together() -> None:
    assert derive_seed(0, "a", 1, 23) != derive_seed(0, "a", 12, 3)
    assert derive_seed(1, 2) != derive_seed(12)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**31 - 1))
def test_every_prompt_comes_once_a_pass(prompts: int, count: int, run_seed: int) -> None:
    pool = make_prompts(prompts)
    iterations = prompts  # whole passes: prompts * count drawn in all
    drawn = [p.id for i in range(iterations) for p in prompts_of_iteration(pool, run_seed, i, count)]
    assert len(drawn) == iterations * count
    for start in range(0, len(drawn), prompts):
        assert sorted(drawn[start : start + prompts]) == [prompt.id for prompt in pool]
    assert set(Counter(drawn).values()) == {count}


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 2**31 - 1), st.integers(0, 40))
def test_an_iteration_takes_a_prompt_once_if_there_are_enough(
    count: int, more: int, run_seed: int, iteration: int
) -> None:
    drawn = prompts_of_iteration(make_prompts(count + more), run_seed, iteration, count)
    assert len({prompt.id for prompt in drawn}) == count


def test_epoch_borders_of_a_usual_run_repeat_no_prompt() -> None:
    pool = make_prompts(128)
    drawn = [[prompt.id for prompt in prompts_of_iteration(pool, 0, i, 48)] for i in range(60)]
    assert [len(set(ids)) for ids in drawn] == [48] * 60


@given(st.permutations(range(6)), st.integers(0, 5), st.integers(1, 8))
def test_the_order_of_the_file_does_not_matter(order: list[int], iteration: int, count: int) -> None:
    pool = make_prompts(6)
    shuffled = [pool[index] for index in order]
    assert prompts_of_iteration(pool, 3, iteration, count) == prompts_of_iteration(
        shuffled, 3, iteration, count
    )


def test_passes_and_run_seeds_have_orders_of_their_own() -> None:
    pool = make_prompts(30)
    orders = {tuple(p.id for p in prompts_of_iteration(pool, seed, i, 30)) for seed in (0, 1) for i in (0, 1)}
    assert len(orders) == 4


def test_a_pass_over_the_prompts_is_hashed_once() -> None:
    prompts = make_prompts(1000)
    with mock.patch.object(module, "derive_seed", wraps=derive_seed) as derived:
        for iteration in range(31):
            prompts_of_iteration(prompts, 4321, iteration, 32)
    assert derived.call_count == len(prompts)
