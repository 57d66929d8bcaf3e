"""The pipeline's settings: contradictions are refused with values that work; the plan says what was set."""

from __future__ import annotations

import itertools

import pytest

from spotlight.algorithms.advantages import exploration_advantages, slice_advantages
from spotlight.config.load import load_config
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.config.sections.pipeline import NO_OVERLAP
from spotlight.diffusion.schedule import RandomWindow
from spotlight.runtime.assembly.components import cluster_plan_of, make_window, plan_of
from spotlight.scheduler.plan import require_usable
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompts import Prompt, PromptId

BASE = (
    "algorithm={name: diffusion-nft, advantage: {std: group}}",
    "rollout={sampler: ode, steps: 10, prompts_per_iteration: 12, group_size: 16}",
    "learner={updates_per_batch: 1, micro_batch_size: 64}",
    "evaluation.images_per_prompt=16",
)
"""What these tests count on, whatever the embedded default becomes."""
SLICES = "pipeline={axis: generation, slice_size: 4, baseline: slice}"
BY_EXPLORATION = "pipeline={axis: generation, slice_size: 4, baseline: exploration}"
RAY = "fleet.driver=ray"
IDLE = "exploration.where=idle"
TRAINERS_ALONE = (RAY, "fleet.spot.nodes=0", "fleet.local.rollout_slots=0", "pipeline.trainers_generate=true")
PROMPT = Prompt(PromptId("p"), "one red circle", {})
GRPO = ("algorithm={name: flow-grpo, advantage: {std: group}}", "rollout.sampler=flow-sde")
GUARD = ("algorithm={name: grpo-guard, advantage: {std: group}}", "rollout.sampler=flow-sde")


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (
            ["pipeline.axis=prompt", "algorithm.advantage.std=global"],
            "algorithm.advantage.std",
            "advantage.std=group",
        ),
        (
            ["pipeline.axis=generation", "algorithm.advantage.std=global"],
            "algorithm.advantage.std",
            "pipeline.axis=none",
        ),
        (
            [BY_EXPLORATION, "exploration={}", "algorithm.advantage.std=global"],
            "algorithm.advantage.std",
            "only once it is complete",
        ),
        (
            [SLICES, "algorithm.advantage.std=global"],
            "algorithm.advantage.std",
            "only once it is complete",
        ),
        (["pipeline.axis=prompt", "learner.micro_batch_size=192"], "learner.micro_batch_size", "lower it"),
        (
            [SLICES, RAY, "fleet.learner_ranks=3", "learner.micro_batch_size=64"],
            "learner.micro_batch_size",
            "pipeline.axis=none",
        ),
        (["pipeline={axis: generation, slice_size: 16}"], "pipeline.slice_size", "pipeline.axis=prompt"),
        (["pipeline={axis: prompt, baseline: slice}"], "pipeline.baseline", "pipeline.axis=generation"),
        (["pipeline.baseline=exploration", "exploration={}"], "pipeline.baseline", "leave it out"),
        ([SLICES, "pipeline.slice_size=2"], "pipeline.slice_size", "raise it"),
        ([BY_EXPLORATION], "pipeline.baseline", "pipeline.baseline=slice"),
        ([SLICES, "algorithm.silent_groups=skip"], "algorithm.silent_groups", "pipeline.baseline=group"),
        (["pipeline.trainers_generate=true"], "pipeline.trainers_generate", "fleet.driver=ray"),
        (
            [RAY, "pipeline.trainers_generate=true", "learner.timesteps_per_pass=auto"],
            "learner.pass_memory_gib",
            "to another value",
        ),
        (["pipeline.switch_s=1.5"], "pipeline.switch_s", "trainers_generate=true"),
        (["pipeline.next_share=0.5"], "pipeline.next_share", "fleet.driver=ray"),
        ([*TRAINERS_ALONE, "pipeline.next_share=.5"], "pipeline.next_share", "fleet.local.rollout_slots"),
        ([*TRAINERS_ALONE, IDLE], "exploration.where", "exploration.where=critical_path"),
        ([RAY, "pipeline.next_share=.05"], "pipeline.next_share", "less than one group"),
        ([RAY, "pipeline.next_share=.5", "exploration={}"], "pipeline.next_share", "exploration.where=idle"),
        ([RAY, "pipeline.next_share=1", IDLE], "pipeline.next_share", "lower it"),
        ([*GUARD, RAY, "pipeline.next_share=.5"], "pipeline.next_share", "take flow-grpo"),
        (["algorithm.name=v-grpo", RAY, "pipeline.next_share=.5"], "pipeline.next_share", "take flow-grpo"),
        ([*GRPO, RAY, "pipeline.next_share=.5"], "algorithm.old_log_probs", "only the rollout has"),
        (
            [*GRPO, RAY, "pipeline.next_share=.5", "algorithm.old_log_probs=stop_gradient"],
            "algorithm.old_log_probs",
            "pipeline.next_share=0",
        ),
        (["pipeline.next_share=1.5"], "pipeline.next_share", "default"),
        (["pipeline.axis=time"], "pipeline.axis", "default"),
    ],
)
def test_a_contradiction_is_named_with_its_remedy(overrides: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, *overrides])
    (problem,) = caught.value.problems
    assert problem.key == key
    assert remedy in problem.remedy
    assert problem.found
    assert problem.expected


def test_every_switch_works_alone_and_with_all_others() -> None:
    switches = (
        ["pipeline={axis: prompt}", SLICES, BY_EXPLORATION],
        ["pipeline.trainers_generate=true", "pipeline.switch_s=0"],
        ["pipeline.next_share=0.5", "pipeline.next_share=0"],
        ["exploration={where: idle}", "exploration={where: idle, planner: {}}"],
    )
    for overrides in itertools.product(*switches):
        config = load_config(None, [*BASE, RAY, *overrides])
        require_usable(cluster_plan_of(config), [PROMPT], [PROMPT])
    for overrides in (["pipeline.axis=prompt"], [SLICES]):
        load_config(None, [*BASE, *overrides])
    load_config(None, [*BASE, *GRPO, RAY, "pipeline.next_share=1", "algorithm.old_log_probs=rollout"])
    # A pool just above the group: a slice is compared with the rest of the group too.
    load_config(None, [*BASE, BY_EXPLORATION, "exploration.seeds_per_prompt=17"])


def test_the_smallest_that_is_allowed_is_what_baselines_need() -> None:
    """The limits shown to people are those of the maths."""
    params, weights = AdvantageConfig(), {"r": 1.0}
    rewards = [{"r": float(value)} for value in range(3)]
    assert len(slice_advantages(rewards, [], weights, params)) == 3
    with pytest.raises(ValueError, match="first slice"):
        slice_advantages(rewards[:2], [], weights, params)
    assert len(exploration_advantages(rewards[:1], rewards[1:], weights, params)) == 1
    with pytest.raises(ValueError, match="explore"):
        exploration_advantages(rewards[:1], rewards[2:], weights, params)


def test_learner_nodes_alone_can_roll_out() -> None:
    alone = [*BASE, RAY, "fleet.spot.nodes=0", "fleet.local.rollout_slots=0"]
    with pytest.raises(ConfigError, match="slot that rolls out"):
        load_config(None, alone)
    load_config(None, [*alone, "pipeline.trainers_generate=true"])


def test_gpus_that_would_wait_for_spot_nodes_are_told_what_to_do_meanwhile() -> None:
    spot_alone = [*BASE, RAY, "fleet.address=10.0.0.5:6379", "fleet.local.rollout_slots=0"]
    for given, said in (
        ([], True),
        (["pipeline.trainers_generate=true"], False),
        (["fleet.local.rollout_slots=1"], False),
    ):
        notes = " ".join(load_config(None, [*spot_alone, *given]).every_note())
        assert ("with pipeline.trainers_generate=true they roll out meanwhile" in notes) == said


def test_the_plan_says_what_was_set() -> None:
    assert plan_of(load_config(None, BASE)).pipeline == NO_OVERLAP
    config = load_config(
        None,
        [
            *BASE,
            RAY,
            "pipeline={axis: generation, slice_size: 5, baseline: slice, trainers_generate: true,"
            " switch_s: 1.5, next_share: .25}",
        ],
    )
    assert cluster_plan_of(config).pipeline is config.pipeline
    assert cluster_plan_of(config).bounded


def test_windows_shared_by_an_iteration_follow_the_run_seed() -> None:
    shared = [*BASE, *GRPO, "rollout.sde_window={kind: random, size: 2, per: iteration}"]
    window, again, other = (
        make_window(load_config(None, [*shared, f"run_seed={seed}"])) for seed in (0, 0, 1)
    )
    assert window == again != other
    assert make_window(load_config(None, [*shared, "rollout.sde_window.per=rollout"])) == RandomWindow(2)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["algorithm.name=rvm"], True),
        (["algorithm.name=rvm", "algorithm.anchor_weight=0.001"], False),
        (["algorithm.name=ram"], False),
    ],
)
def test_velocities_that_nothing_holds_are_told(keys: list[str], told: bool) -> None:
    notes = [note for note in load_config(None, keys).every_note() if "nothing holds velocities" in note]
    assert len(notes) == told
