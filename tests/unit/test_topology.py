"""Who denoises together: degrees divide the heads, nobody is in two groups, and load decides."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.swarm import divisors

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.scheduler.cluster.placement import choose_degree, form_groups
from spotlight.scheduler.plan import ClusterPlan, Plan, require_usable
from spotlight_rewards.base.prompts import Prompt, PromptId

LARGE, SMALL = 1280 * 1280, 512 * 512
HEADS = 24

plans = st.builds(
    lambda low, more, pixels: ClusterPlan(
        pixels=pixels, heads=HEADS, degrees=divisors(HEADS, low, low + more)
    ),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(0, 6),
    st.sampled_from([SMALL, LARGE]),
)


@given(plans, st.integers(0, 64), st.integers(0, 200))
def test_a_degree_divides_the_heads_and_leaves_every_rollout_a_group(
    plan: ClusterPlan, workers: int, rollouts: int
) -> None:
    degree = choose_degree(plan, workers, rollouts)
    assert degree in plan.degrees
    assert HEADS % degree == 0
    smallest = plan.degrees[0]
    assert degree == smallest or degree * rollouts <= workers
    larger = [d for d in plan.degrees if d > degree and rollouts and d * rollouts <= workers]
    assert not larger or plan.pixels == SMALL


@given(plans, st.integers(0, 64), st.integers(1, 200))
def test_small_images_and_full_queues_get_the_smallest_degree(
    plan: ClusterPlan, workers: int, more: int
) -> None:
    assert choose_degree(plan, workers, workers + more) == plan.degrees[0]
    if plan.pixels == SMALL:
        assert choose_degree(plan, workers, 1) == plan.degrees[0]


@given(st.lists(st.integers(), unique=True, max_size=16), plans, st.integers(1, 8))
def test_groups_are_disjoint_and_only_too_few_workers_are_left_out(
    workers: list[int], plan: ClusterPlan, wanted: int
) -> None:
    groups = form_groups(workers, max(wanted, plan.degrees[0]), plan.degrees)
    members = [worker for group in groups for worker in group]
    assert members == workers[: len(members)], "neighbours stay together, and nobody serves twice"
    assert all(len(group) in plan.degrees for group in groups)
    assert all(len(group) <= max(wanted, plan.degrees[0]) for group in groups)
    assert len(workers) - len(members) < plan.degrees[0]


@pytest.mark.parametrize(
    ("rollouts", "degree"), [(0, 1), (1, 4), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (100, 1)]
)
def test_the_tail_of_a_batch_of_large_images(rollouts: int, degree: int) -> None:
    plan = ClusterPlan(pixels=LARGE, heads=HEADS, degrees=(1, 2, 3, 4))
    assert choose_degree(plan, 8, rollouts) == degree


@given(st.integers(0, 2_000_000), st.integers(1, 64), st.integers(1, 2_000_000))
def test_a_videos_frames_count_as_much_as_its_pixels(pixels: int, frames: int, pays_from: int) -> None:
    video = ClusterPlan(
        pixels=pixels, latent_frames=frames, sp_pays_from_pixels=pays_from, heads=HEADS, degrees=(1, 2, 3, 4)
    )
    image = dataclasses.replace(video, pixels=pixels * frames, latent_frames=1)
    assert choose_degree(video, 8, 2) == choose_degree(image, 8, 2)
    assert choose_degree(video, 8, 2) == (4 if pixels * frames >= pays_from else 1)


def test_three_survivors_of_four_become_two_and_one() -> None:
    assert form_groups(["a", "b", "d"], 4, (1, 2, 4)) == [("a", "b"), ("d",)]
    assert form_groups(["a", "b", "d"], 4, (2, 4)) == [("a", "b")]


@pytest.mark.parametrize("degrees", [(), (5,), (1, 7), (2, 1), (1, 1)])
def test_degrees_that_no_model_of_these_heads_allows_are_refused(degrees: tuple[int, ...]) -> None:
    prompt = Prompt(PromptId("a"), "a", {})
    plan = Plan(
        run_seed=0, iterations=1, prompts_per_iteration=1, group_size=2, rollout_steps=1,
        evaluation=EvaluationConfig(steps=1, images_per_prompt=1, every=1),
        updates_per_batch=1, micro_batch_size=1, checkpoint_every=1,
        lease_s=1.0, max_drop_share=None, cluster=ClusterPlan(heads=HEADS, degrees=degrees),
    )  # fmt: skip
    with pytest.raises(ValueError, match="dividing 24 attention heads"):
        require_usable(plan, [prompt], [prompt])
