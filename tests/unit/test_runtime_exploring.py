"""Exploration between configuration, controller and people: plans, recipes, rows of metrics, a line."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from spotlight.cluster.head import Head
from spotlight.config.load import load_config
from spotlight.data.datasets import Prompts
from spotlight.models.shared.flop_count import Compute
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.preview_settings import (
    report_note,
    report_row,
)
from spotlight.runtime.inline import NODE, WORKER
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import DiscardSamples, FormGroup, GrantLease, ReportExploration
from spotlight.scheduler.policies.exploration.bandit import Arm
from spotlight.scheduler.policies.exploration.explorer import arms_of
from spotlight.scheduler.seeds import prompts_of_iteration, spares_of_iteration
from spotlight.scheduler.types import LeaseId, PolicyVersion, Purpose
from spotlight.training.step_metrics import IterationLog
from spotlight_rewards.base.prompts import Prompt, PromptId

SDE = ("algorithm.name=flow-grpo", "rollout.sampler=flow-sde")
REPORT: dict[str, object] = {
    "iteration": 3,
    "decision": {
        "iteration": 3,
        "chosen": "32x6",
        "why": "fits, and was not tried yet",
        "capacity": {"expected_s": 9.5, "workers": 2},
        "arms": {"32x6": {"fits": True, "mean": None, "work_s": 4.0}},
    },
    "arm": "32x6",
    "staleness": 1,
    "selection": {"policy": "max_variance", "chosen": 7, "pool_contrast": None},
    "contrast": {"gain": 0.03, "random": 0.05},
    "fidelity": {"reward": {"tau_by_slope": 0.625}},
}


def test_defaults_are_resolved_by_the_size_of_groups_and_rollouts() -> None:
    assert arms_of(build.plan_of(load_config(None))) == ()
    plan = build.plan_of(load_config(None, ["exploration={}"]))
    assert arms_of(plan) == (Arm(32, 10),)
    assert plan.pool_max is None, "on the critical path, only what was planned"
    planned = build.plan_of(
        load_config(None, ["exploration.planner={seed_counts: [20, 40], step_counts: [5]}"])
    )
    assert arms_of(planned) == (Arm(20, 5), Arm(40, 5))


def test_the_controller_takes_the_section_itself() -> None:
    config = load_config(None, ["fleet.driver=ray", "exploration={where: idle, seeds_per_prompt_max: 50}"])
    plan = build.cluster_plan_of(config)
    assert plan.exploration is config.exploration
    assert plan.pool_max == 50


@pytest.mark.parametrize(("sampler", "path"), [((), None), (SDE, 10)])
def test_previews_follow_the_path_of_their_rollouts(sampler: tuple[str, ...], path: int | None) -> None:
    explores = ("exploration={steps: 6, guidance: 1}", "rollout.true_cfg_scale=4")
    config = load_config(None, [*sampler, *explores])
    recipes = build.make_recipes(config, build.make_algorithm(config))
    preview, train = recipes[Purpose.EXPLORE], recipes[Purpose.TRAIN]
    assert (preview.sampler, preview.window) == (train.sampler, train.window)
    assert (preview.path_steps, preview.keeps) == (path, "final")
    assert (preview.guidance_scale, train.guidance_scale) == (1, 4)
    assert config.preview_steps == (6,)
    as_rollouts = load_config(None, ["exploration={}", "rollout.true_cfg_scale=4"])
    recipes = build.make_recipes(as_rollouts, build.make_algorithm(as_rollouts))
    assert recipes[Purpose.EXPLORE].guidance_scale == 4


@pytest.mark.parametrize(
    ("exploration", "kept"),
    [
        ("{}", True),
        ("{guidance: 4}", True),
        ("{guidance: 1}", False),
        ("{step_cache: 2}", False),
        ("{dtype: bfloat16}", False),
        ("{where: idle}", False),
    ],
)
def test_previews_are_kept_if_they_are_made_as_rollouts_are(exploration: str, kept: bool) -> None:
    config = load_config(
        None, [*SDE, "rollout.true_cfg_scale=4", "fleet.driver=ray", f"exploration={exploration}"]
    )
    assert build.plan_of(config).keeps_previews is kept
    recipes = build.make_recipes(config, build.make_algorithm(config))
    assert recipes[Purpose.TRAIN].keeps == "trajectory"
    assert recipes[Purpose.EXPLORE].keeps == ("trajectory" if kept else "final")


def test_shortcuts_are_those_of_previews_alone() -> None:
    config = load_config(None, [*SDE, "exploration={step_cache: 2, dtype: bfloat16}"])
    recipes = build.make_recipes(config, build.make_algorithm(config))
    preview = recipes[Purpose.EXPLORE]
    assert (preview.step_cache, preview.autocast) == (2, torch.bfloat16)
    assert not any(recipes[purpose].approximate for purpose in (Purpose.TRAIN, Purpose.EVAL))


def test_spare_prompts_are_among_those_that_a_run_prepares_for() -> None:
    prompts = tuple(Prompt(PromptId(f"p{n}"), f"p{n}", {}) for n in range(60))
    overrides = ["iterations=2", "learner.decay_iterations=null", "rollout.prompts_per_iteration=4"]
    config = load_config(None, [*overrides, "learner.micro_batch_size=64", "exploration.spare_prompts=3"])
    used = {prompt.id for prompt in Prompts(prompts, ()).used(config)}
    assert len(used) > 8
    for iteration in range(2):
        planned = prompts_of_iteration(prompts, config.run_seed, iteration, 4)
        spares = spares_of_iteration(prompts, config.run_seed, iteration, planned, 3)
        met = {prompt.id for prompt in (*planned, *spares)}
        assert len(met) == 7
        assert met <= used


def test_a_report_becomes_numbers_and_a_line() -> None:
    row = report_row(REPORT)
    assert row == {
        "exploration/decision/capacity/expected_s": 9.5,
        "exploration/decision/capacity/workers": 2,
        "exploration/decision/arms/32x6/fits": 1,
        "exploration/decision/arms/32x6/work_s": 4,
        "exploration/staleness": 1,
        "exploration/selection/chosen": 7,
        "exploration/contrast/gain": 0.03,
        "exploration/contrast/random": 0.05,
        "exploration/fidelity/reward/tau_by_slope": 0.625,
        "exploration/seeds_per_prompt": 32,
        "exploration/steps": 6,
    }
    assert all(type(value) is float for value in row.values())
    assert report_note(REPORT) == (
        "iteration 3 explored 32x6 (seeds x steps): fits, and was not tried yet; "
        "contrast +0.0300 to 0.0500 of random seeds; previews rank with tau 0.62"
    )


def test_a_line_is_said_only_where_something_was_decided() -> None:
    fixed = {"decision": {"iteration": 0, "chosen": "32x6", "why": "the only arm"}, "arm": "32x6"}
    assert report_note(fixed) is None
    doubted = {"decision": {"iteration": 0, "chosen": None, "why": "random seeds: ..."}, "arm": None}
    assert report_note(doubted) == "iteration 0 explored nothing: random seeds: ..."
    assert report_row(doubted) == {}


def test_the_head_writes_a_report_into_the_iterations_row_and_says_why() -> None:
    notes: list[str] = []

    class Watcher:
        def note(self, text: str) -> None:
            notes.append(text)

    required = [each.name for each in fields(Head) if each.default is each.default_factory is MISSING]
    head: Any = Head(**dict.fromkeys(required, Mock()) | {"observer": Watcher()})
    for _ in range(2):  # the second after a learner was lost: the same iteration again
        head._carry_out(ReportExploration(3, REPORT))
    assert head.log.take()["exploration/contrast/gain"] == 0.03
    assert notes == [report_note(REPORT)] * 2
    assert head.log.take() == {}


def test_what_is_put_does_not_average() -> None:
    log = IterationLog()
    log.put({"a": 1.0})
    log.put({"a": 3.0})
    log.add("b", 1.0)
    log.add("b", 3.0)
    assert log.take() == {"a": 3.0, "b": 2.0}


def test_throughput_is_all_work_over_all_seconds() -> None:
    log = IterationLog()
    log.worked("rollout", Compute(90, 9e12), 1.0, 8e12)
    log.worked("rollout", Compute(10, 7e12), 3.0, 8e12)
    log.worked("train", Compute(4, None), 2.0, None)
    assert log.take() == {
        "throughput/rollout_tokens_s": 25.0,
        "throughput/rollout_tflop_s": 4.0,
        "throughput/rollout_mfu": 0.5,
        "throughput/train_tokens_s": 2.0,
    }
    assert log.take() == {}


def test_utilisation_is_of_what_all_devices_could_do() -> None:
    log = IterationLog()
    log.worked("rollout", Compute(1, 6e12), 1.0, 8e12)
    log.worked("rollout", Compute(1, 1e12), 2.0, 1e12)
    assert log.take()["throughput/rollout_mfu"] == pytest.approx(0.7)
    log.worked("rollout", Compute(1, 6e12), 1.0, 8e12)
    log.worked("rollout", Compute(1, 1e12), 2.0, None)
    assert "throughput/rollout_mfu" not in log.take()


@pytest.mark.parametrize("steps", [5, 10])
def test_a_scored_previews_tensors_are_let_go_unless_it_may_be_kept(steps: int) -> None:
    overrides = ["rollout={prompts_per_iteration: 1, group_size: 2}", "learner.micro_batch_size=2"]
    config = load_config(
        None, [*overrides, f"exploration={{seeds_per_prompt: 3, steps: {steps}}}", "evaluation.every=9"]
    )
    prompts = [Prompt(PromptId(name), name, {}) for name in ("a", "b")]
    controller = Controller(build.plan_of(config), prompts[:1], prompts[1:])
    controller.handle(ev.RunStarted(), 0.0)
    controller.handle(ev.NodeJoined(NODE), 0.0)
    controller.handle(ev.WorkerStarted(WORKER, 1), 0.0)
    (form,) = controller.handle(ev.WeightsPulled(WORKER, 1, PolicyVersion(0), 0), 0.0)
    assert isinstance(form, FormGroup)
    controller.handle(ev.GroupFormed(WORKER, form.epoch), 0.0)
    granted: list[GrantLease] = []
    while not granted or granted[-1].rollouts[0].purpose is not Purpose.EXPLORE:  # evaluation comes first
        held = tuple(grant.lease.id for grant in granted)
        pull = ev.GroupPulled(WORKER, form.epoch, 1000, held[-1] if held else LeaseId(0), held)
        effects = controller.handle(pull, 0.0)
        granted += [effect for effect in effects if isinstance(effect, GrantLease)]
    lease, preview = granted[-1].lease, granted[-1].rollouts[0]
    done = ev.LeaseCompleted(WORKER, lease.id, lease.epoch, (preview.id,), preview.version)
    controller.handle(done, 0.0)
    effects = controller.handle(ev.SamplesRewarded({preview.id: {"reward": 1.0}}, 0), 0.0)
    assert (DiscardSamples((preview.id,)) in effects) is (steps < 10)
    controller.check()
