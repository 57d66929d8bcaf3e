"""Settings that contradict each other are refused with values that work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight_rewards.base.errors import ConfigError

BASE = (
    "algorithm.name=diffusion-nft",
    "rollout={sampler: ode, steps: 10, prompts_per_iteration: 12, group_size: 16}",
    "learner={updates_per_batch: 1, micro_batch_size: 64}",
    "evaluation.images_per_prompt=16",
)
"""What these tests count on, whatever the embedded default becomes."""
GRPO = ("algorithm.name=flow-grpo", "rollout.sampler=flow-sde")
WINDOW = (*GRPO, "rollout.sde_window.kind=random")
PARALLEL = ("fleet={driver: ray, sequence_parallel: {degrees: [1, 2], guidance: true}}",)
GUIDED = (*PARALLEL, "rollout.true_cfg_scale=4")


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (["rollout.sampler=cps"], "rollout.sampler", "set rollout.sampler=ode"),
        (["algorithm.name=flow-grpo"], "rollout.sampler", "flow-sde, cps or dance"),
        ([*GRPO, "rollout.noise_level=0"], "rollout.noise_level", "0.7"),
        ([*WINDOW, "rollout.sde_window.high=10"], "rollout.sde_window.high", "last step is never stochastic"),
        ([*WINDOW, "rollout.sde_window={size: 4, high: 3}"], "rollout.sde_window.size", "Widen [low, high)"),
        ([*WINDOW, "rollout.sde_window={low: 3, high: 5}"], "rollout.sde_window.size", "take fewer steps"),
        ([*WINDOW, "rollout.sde_window.every=5"], "rollout.sde_window.every", "kind=sliding"),
        ([*WINDOW, "rollout.sde_window.decay=.1"], "rollout.sde_window.decay", "leave it out"),
        (["algorithm.train_policy=random"], "algorithm.train_policy", "set algorithm.train_samples"),
        (
            [*GRPO, "learner={schedule_samples: 96, warmup_steps: 0, decay_iterations: null}"],
            "learner.schedule_samples",
            "set one, or leave it out",
        ),
        ([*GRPO, "algorithm.train_timesteps=10"], "algorithm.train_timesteps", "Lower it"),
        ([*WINDOW, "algorithm.train_timesteps=4"], "algorithm.train_timesteps", "widen rollout.sde_window"),
        (["rollout.negative_prompt=blurry"], "rollout.negative_prompt", "set rollout.true_cfg_scale above 1"),
        (["rollout.embedded_guidance=3.5"], "rollout.embedded_guidance", "rollout.true_cfg_scale"),
        (["model.family=sd3", "model.compile=regional"], "model.compile", "leave it out"),
        (["model.family=sd3", "model.attention=cudnn"], "model.attention", "leave it out"),
        (
            ["model={kernels: fused, compile: regional}"],
            "model.kernels",
            "fused by the compiler: leave it out",
        ),
        (["model.kernels=fused", "learner.mode=full"], "model.kernels", "for adapters: leave it out"),
        (["model.quantize=int8", "learner.mode=full"], "learner.mode", "set learner.mode=lora"),
        (["model={quantize: nf4, compile: regional}"], "model.compile", "or leave model.quantize out"),
        (["model={quantize: nf4, dtype: bfloat16, cuda_graphs: true}"], "model.cuda_graphs", "leave it out"),
        (
            ["model.quantize=nf4", "fleet={driver: ray, learner_ranks: 2}", "learner.micro_batch_size=48"],
            "learner.shard",
            "set learner.shard=none",
        ),
        (
            ["model={kernels: fused, dtype: float32}", "learner.autocast=bfloat16"],
            "model.kernels",
            "types change between operators: leave it out",
        ),
        (["model.attention=flash-varlen"], "model.attention", "as if this model's padding came last"),
        (["model.family=hunyuan-video", "model.attention=flash-3"], "model.attention", "always has one"),
        (
            [
                *("model={family: qwen-image-2.1, cuda_graphs: true, dtype: bfloat16}", "device=cuda"),
                "learner={autocast: bfloat16, mode: lora}",
            ],
            "model.family",
            "leave model.cuda_graphs out",
        ),
        (
            ["model.compile=regional", "fleet.sequence_parallel.degrees=[1, 2]"],
            "model.compile",
            "leave one of them out",
        ),
        (PARALLEL, "rollout.true_cfg_scale", "leave fleet.sequence_parallel.guidance out"),
        ([*GUIDED, "fleet.sequence_parallel.degrees=[1]"], "fleet.sequence_parallel.degrees", "Change it"),
        (
            [*GUIDED, "fleet.sequence_parallel.degrees=[1,2,3]"],
            "fleet.sequence_parallel.degrees",
            "Change it",
        ),
        ([*GUIDED, "exploration={step_cache: 2}"], "exploration.step_cache", "Change it"),
        (["learner.updates_per_batch=5"], "learner.updates_per_batch", "4 or 6"),
        (["learner.update_split=shuffled"], "learner.update_split", "leave one of the two keys out"),
        (
            ["learner={updates_per_batch: 5, update_split: shuffled}"],
            "learner.updates_per_batch",
            "Nearest: 4 or 6",
        ),
        (
            [
                "algorithm.advantage.std=group",
                "pipeline.axis=prompt",
                "learner={updates_per_batch: 2, update_split: shuffled, micro_batch_size: 48}",
            ],
            "learner.update_split",
            "only once all are complete",
        ),
        (
            [
                "algorithm.name=dgpo",
                "learner={updates_per_batch: 2, update_split: every_group, micro_batch_size: 48}",
            ],
            "learner.update_split",
            "compares the samples of a group",
        ),
        (["rollout.initial_noise=group"], "rollout.initial_noise", "set a stochastic sampler"),
        ([*GRPO, "rollout.initial_noise=group", "exploration={}"], "rollout.initial_noise", "leave one"),
        ([*GRPO, "algorithm.kl_scale=step"], "algorithm.kl_scale", "There is no KL"),
        (
            [*GRPO, "algorithm={kl_weight: 0.1, kl_scale: step}", "rollout={sampler: cps, noise_level: 0.8}"],
            "algorithm.kl_scale",
            "leave it out",
        ),
        (["learner.micro_batch_size=50"], "learner.micro_batch_size", "48 or 64"),
        (["learner.mode=full", "model.dtype=bfloat16"], "model.dtype", "set model.dtype=float32"),
        (["iterations=9", "learner.decay_iterations=8"], "iterations", "for a new run"),
        (
            ["iterations=2", "learner={decay_iterations: 3, warmup_steps: 3, micro_batch_size: 64}"],
            "learner.warmup_steps",
            "lengthen the decay",
        ),
        (
            [
                "fleet.publish=bfloat16",
                "fleet.driver=ray",
                "learner.mode=full",
                "learner.autocast=bfloat16",
            ],
            "fleet.publish",
            "different weights from those trained: leave it out.",
        ),
        (
            ["fleet.publish=bfloat16", "fleet.driver=ray"],
            "fleet.publish",
            "or set learner.autocast=bfloat16",
        ),
        (["fleet.publish=float32"], "fleet.publish", "Set fleet.driver=ray, or leave it out."),
        (["fleet.learner_placement=spot"], "fleet.learner_placement", "Set fleet.driver=ray, or leave it"),
        (
            ["fleet.learner_placement=spot", "fleet.driver=ray", "fleet.spot.nodes=1"],
            "fleet.spot.nodes",
            "Set fleet.spot.nodes to at least 2 or fleet.local.rollout_slots to at least 1",
        ),
        (
            [
                "fleet.learner_placement=spot",
                "fleet.driver=ray",
                "rewards=[{name: shapes, device: learner}]",
            ],
            "rewards[0].device",
            "cannot move with the learner",
        ),
        (
            ["fleet.learner_placement=spot", "fleet.driver=ray", "checkpoint.every=7"],
            "checkpoint.every",
            "saved after every iteration: leave it out",
        ),
        (
            ["fleet.learner_placement=spot", "fleet.driver=ray", "learner.mode=full"],
            "learner.mode",
            "set learner.mode=lora, or leave",
        ),
        (["learner.keep_gathered=true", "learner.shard=none"], "learner.keep_gathered", "share the model"),
        (["learner.keep_gathered=true", "fleet.driver=ray"], "learner.keep_gathered", "share the model"),
        (["learner.pass_memory_gib=4"], "learner.pass_memory_gib", "timesteps_per_pass=auto"),
        (["evaluation.weights=ema"], "evaluation.weights", "learner.ema.cap"),
        ([*GRPO, "evaluation.weights=old"], "evaluation.weights", "keeps no old policy"),
        (["evaluation.grid_images=17"], "evaluation.grid_images", "lower it or evaluate more"),
        (["rewards=[{name: shapes}, {name: shapes}]"], "rewards", "Add up their weights"),
        (["rewards=[{name: 'a:score'}, {name: 'b:of.score'}]"], "rewards", "give one a label"),
        (["rewards=[{name: 'a:score'}, {name: shapes, label: score}]"], "rewards", "give one a label"),
        (["rewards=[{name: shapes, weight: 0}]"], "rewards", "Nothing would be learnt"),
        (["evaluation.strict=nope/strict"], "evaluation.strict", "such as 'shapes'"),
        (
            ["algorithm.name=grpo-guard", "rollout.sampler=flow-sde", "algorithm.clip_range=1.5"],
            "algorithm.clip_range",
            "the default, 2e-06",
        ),
        (
            ["algorithm.name=dgpo", "learner.micro_batch_size=24", "fleet.driver=ray"],
            "learner.micro_batch_size",
            "set 16",
        ),
        (
            ["algorithm.name=dgpo", "fleet.driver=ray", "fleet.learner_ranks=3"],
            "rollout.group_size",
            "set 18",
        ),
        (["algorithm={name: dgpo, noisiest_steps: 3}"], "algorithm.train_timesteps", "Lower it"),
        (
            ["algorithm={name: dgpo, noise_levels: uniform, noisiest_steps: 3}"],
            "algorithm.noisiest_steps",
            "noise_levels=steps",
        ),
        (
            ["algorithm={name: diffusion-dpo, advantage: {std: group}}", "pipeline.axis=prompt"],
            "pipeline.axis",
            "set pipeline.axis=none",
        ),
        (
            ["algorithm={name: v-grpo, advantage: {std: group}}", "pipeline.axis=generation"],
            "pipeline.axis",
            "pipeline.axis=prompt",
        ),
        (
            ["algorithm.name=v-grpo", "learner={updates_per_batch: 2, micro_batch_size: 48}"],
            "learner.timesteps_per_pass",
            "set 4",
        ),
        (["algorithm={name: awm, clip_range: 0.1}"], "algorithm.clip_range", "old_log_probs=recompute"),
        (
            [
                "algorithm={name: awm, old_log_probs: recompute}",
                "pipeline.next_share=0.5",
                "fleet.driver=ray",
            ],
            "pipeline.next_share",
            "set algorithm.old_log_probs=stop_gradient",
        ),
        (["algorithm.advantage.combine=gdpo"], "algorithm.advantage.std", "std=group"),
        (
            ["algorithm.advantage={combine: gdpo, std: group}", "pipeline.axis=prompt"],
            "algorithm.advantage.combine",
            "pipeline.axis=none",
        ),
        (
            [
                "algorithm={train_samples: 8, advantage: {combine: gdpo, std: group, over: generated}}",
                "learner.micro_batch_size=48",
            ],
            "algorithm.advantage.over",
            "spread over all trained",
        ),
        (
            ["algorithm={silent_groups: skip, advantage: {combine: gdpo, std: group}}"],
            "algorithm.silent_groups",
            "spread over all trained",
        ),
        (["rollout.sde_window.per=iteration"], "rollout.sde_window.per", "kind=random"),
        (
            ["algorithm={name: flow-grpo, step_weights: noise}", "rollout.sampler=cps"],
            "algorithm.step_weights",
            "flow-sde",
        ),
        (
            [
                "algorithm={name: flow-grpo, step_weights: noise}",
                "rollout={sampler: flow-sde, sde_window: {kind: random}}",
            ],
            "algorithm.step_weights",
            "kind=all",
        ),
        (["rewards=[{name: shapes, deadline_s: 1e7}]"], "rewards.0.deadline_s", "default"),
        (["exploration.where=idle"], "exploration.where", "fleet.driver=ray"),
        (["exploration.steps=11"], "exploration.steps", "noise path"),
        (["exploration.seeds_per_prompt=16"], "exploration.seeds_per_prompt", "twice as many"),
        (["exploration.planner.step_counts=[4, 12]"], "exploration.planner.step_counts", "lower it"),
        (["exploration.planner.seed_counts=[12, 48]"], "exploration.planner.seed_counts", "preview more"),
        (
            ["exploration={seeds_per_prompt: 32, planner: {}}"],
            "exploration.seeds_per_prompt",
            "planner decides",
        ),
        (["exploration.planner.caution=2"], "exploration.planner.caution", "leave it out"),
        (
            ["exploration.planner={costs: {step_s: 0.1}, maximises: contrast}"],
            "exploration.planner.costs",
            "leave it out",
        ),
        (["exploration={drawn_seeds: 4}"], "exploration.drawn_seeds", "or set exploration.sampled"),
        (
            ["algorithm={name: awm, old_weight: 0, old_policy: {cap: 0.4}}"],
            "algorithm.old_policy",
            "Leave it out",
        ),
        (
            [
                "algorithm={name: dgpo, clip_range: null, old_policy: {cap: 0.4}}",
                "learner.micro_batch_size=48",
            ],
            "algorithm.old_policy",
            "a weight or a clip",
        ),
        (
            [
                "algorithm.name=grpo-guard",
                "rollout.sampler=flow-sde",
                "learner={schedule_samples: 96, warmup_steps: 0, decay_iterations: null}",
            ],
            "learner.schedule_samples",
            "set one, or leave it out",
        ),
        (["exploration={drawn_seeds: 17, sampled_prompts: 1}"], "exploration.drawn_seeds", "two are enough"),
        (["exploration.sampled_prompts=13"], "exploration.sampled_prompts", "Lower it"),
        (
            ["exploration={sampled_prompts: 1, policy: random}"],
            "exploration.sampled_prompts",
            "leave it out",
        ),
        (
            ["exploration={sampled_prompts: 1, drawn_seeds: 1}"],
            "exploration.sampled_prompts",
            "drawn_seeds=2",
        ),
        (["exploration.undo_selection=true"], "exploration.undo_selection", "policy=random"),
        (["learner.gradient_checkpointing=true"], "learner.gradient_checkpointing", "blocks for true"),
        ([*GRPO, "model.compile=regional"], "model.compile", "Fused operators"),
        (["learner.recompute=elementwise", "model.compile=regional"], "model.compile", "recompute=blocks"),
        (["exploration.rungs=[6]"], "exploration.rungs", "fewer exploration.steps"),
        (["exploration.finishers=12"], "exploration.finishers", "leave it out"),
        (["exploration.fidelity_min=.3"], "exploration.fidelity_min", "more exploration.steps"),
        (["exploration.policy=proportional"], "exploration.policy", "policy=max_variance"),
        (["exploration.guidance=2"], "exploration.guidance", "cheaper"),
        (["exploration={step_cache: 4, steps: 3}"], "exploration.step_cache", "2 ranks best"),
        (["exploration={step_cache: 7, planner: {}}"], "exploration.step_cache", "lower it"),
        (["exploration.step_cache=1"], "exploration.step_cache", "default"),
        (["exploration.dtype=bfloat16", "model.dtype=bfloat16"], "exploration.dtype", "leave it out"),
        (["exploration.dtype=bfloat16", "learner.autocast=bfloat16"], "exploration.dtype", "leave it out"),
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


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["fleet.driver=ray", "fleet.spot.nodes=0"],
            [
                "fleet.spot.nodes: found 0, with no other slot that rolls out; expected a slot that rolls "
                "out where the learner's do not (pipeline.trainers_generate=false)."
            ],
        ),
        (
            ["fleet.target.nodes_min=2"],
            [
                "fleet.target: found settings without a goal; expected a deadline_h or a budget_usd beside "
                "its other keys."
            ],
        ),
        (
            ["exploration={step_cache: 7, planner: {}}"],
            ["exploration.step_cache: found 7; expected at most the fewest steps of a preview, 6."],
        ),
        (
            [
                "learner={decay_iterations: 12, warmup_steps: 24, updates_per_batch: 2}",
                "learner.micro_batch_size=48",
                "iterations=12",
            ],
            [
                "learner.warmup_steps: found 24; expected fewer than the 24 optimizer steps of "
                "learner.decay_iterations=12."
            ],
        ),
        (
            ["algorithm.name=v-grpo", "evaluation.weights=old"],
            ["evaluation.weights: found 'old'; expected 'policy' or 'ema' with algorithm.name=v-grpo."],
        ),
        (["evaluation.weights=ema"], ["evaluation.weights: found 'ema'; expected 'policy' without"]),
        (
            ["model.attention=flash-3-varlen"],
            [
                "model.attention: found 'flash-3-varlen'; expected another kernel with "
                "model.family=qwen-image,"
            ],
        ),
        (
            ["model.family=sd3", "model.attention=flash-3-varlen"],
            ["model.attention: found 'flash-3-varlen'; expected nothing with model.family=sd3,"],
        ),
        (
            ["algorithm={name: dgpo, advantage: {std: group}}", "pipeline.axis=generation"],
            ["pipeline.axis: found 'generation'; expected 'none' with algorithm.name=dgpo,"],
        ),
        (
            ["fleet.publish=bfloat16"],
            [
                "fleet.publish: found 'bfloat16'; expected 'auto' with fleet.driver=inline.",
                "fleet.publish: found 'bfloat16'; expected 'auto' or 'float32' with learner.autocast=none.",
            ],
        ),
        (
            [
                "fleet={driver: ray, learner_placement: spot_then_on_demand}",
                "learner.mode=full",
                "model.cuda_graphs=true",
            ],
            [
                "model.dtype: found 'float32'; expected 'bfloat16' with model.cuda_graphs=true.",
                "learner.mode: found 'full'; expected 'lora' with model.cuda_graphs=true.",
                "learner.mode: found 'full'; expected 'lora' with fleet.learner_placement=spot_then",
            ],
        ),
    ],
)
def test_all_contradictions_are_named_with_their_figures(overrides: list[str], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, *overrides])
    found = [str(problem) for problem in caught.value.problems]
    assert len(found) == len(messages), found
    for problem, message in zip(found, messages, strict=True):
        assert problem.startswith(message)


def test_what_looks_odd_but_is_fine() -> None:
    for overrides in (
        [
            "algorithm={silent_groups: skip, advantage: {combine: normalise_each}}",
            "rewards=[{name: shapes}, {name: jpeg_size, weight: 0}]",
        ],
        ["learner.timesteps_per_pass=auto", "learner.pass_memory_gib=0.5"],
        ["learner.timesteps_per_pass=99"],
        GRPO,
        WINDOW,
        [*GRPO, "algorithm.train_timesteps=9"],
        ["learner.ema.cap=.5", "evaluation.weights=ema"],
        ["evaluation.weights=old"],
        ["exploration={}"],
        ["exploration.planner={}"],
        ["exploration.where=idle", "fleet.driver=ray"],
        ["exploration={undo_selection: false, rungs: null, finishers: null, fidelity_min: null}"],
        ["exploration.guidance=1", "rollout.true_cfg_scale=4"],
        ["exploration={step_cache: 3, steps: 3, dtype: bfloat16}"],
        ["learner.micro_batch_size=1000"],
        ["rewards=[{name: shapes, weight: -1}, {name: ocr, weight: 0}]"],
    ):
        load_config(None, [*BASE, *overrides])


def test_trainable_steps_of_a_rollout() -> None:
    assert load_config(None, BASE).rollout.kept_steps == 0
    assert load_config(None, [*BASE, *GRPO]).rollout.kept_steps == 9
    assert load_config(None, [*BASE, *WINDOW]).rollout.kept_steps == 3


def test_the_default_has_no_contradictions() -> None:
    assert list(RunConfig().every_problem()) == []


@given(st.integers(1, 30), st.integers(0, 12), st.booleans(), st.booleans())
def test_evaluations_are_due_as_often_as_counted(
    iterations: int, every: int, at_start: bool, at_end: bool
) -> None:
    evaluation = EvaluationConfig(every=every, at_start=at_start, at_end=at_end)
    due = [number for number in range(iterations + 1) if evaluation.is_due(number, iterations)]
    assert len(due) == evaluation.count(iterations)
    assert (0 in due, iterations in due) == (at_start, at_end)


def test_grids_show_no_more_images_than_there_are() -> None:
    assert load_config(None, ["evaluation.images_per_prompt=1"]).evaluation.grid[1] == 1
    assert EvaluationConfig().grid == (8, 4)
    assert EvaluationConfig(grid_images=16).grid == (8, 16)


def test_a_family_that_cannot_be_split_is_refused() -> None:
    split = ["model.family=sd3", "fleet={driver: ray, sequence_parallel: {degrees: [1, 2]}}"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, *split])
    (problem,) = caught.value.problems
    assert problem.key == "fleet.sequence_parallel.degrees"
    assert problem.expected.startswith("[1] with model.family=sd3, whose forwards cannot be split")
