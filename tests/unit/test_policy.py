"""What every scheduling policy has in common: it is loaded only where it is used, and found by its name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from test_cluster import PLAN

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.registry import POLICIES
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.iteration import Snapshot
from spotlight.scheduler.plan import Plan, TrainingChoice
from spotlight.scheduler.policy import Policy
from spotlight_rewards.base.prompts import Prompt, PromptId

PROMPTS = [Prompt(PromptId("p"), "a circle", {})]
USED: dict[str, Plan] = {
    "next-iteration": dataclasses.replace(PLAN, pipeline=PipelineConfig(next_share=1.0)),
    "exploration": dataclasses.replace(PLAN, exploration=ExplorationConfig()),
    "subset": dataclasses.replace(PLAN, choice=TrainingChoice(silent_groups="skip")),
    "overlap": dataclasses.replace(PLAN, pipeline=PipelineConfig(axis="prompt")),
    "trainers": dataclasses.replace(PLAN, bounded=True),
    "whole-groups": dataclasses.replace(PLAN, compares=True),
}


def test_a_run_without_policies_imports_none() -> None:
    folders = {place.rpartition(".")[0] for place in POLICIES.built_in.values()}
    script = (
        "import sys\n"
        "from spotlight.runtime import assembly\n"
        "from spotlight.config.load import load_config\n"
        "from spotlight.runtime.assembly.controller_plan import plan_of\n"
        "from spotlight.scheduler.controller import Controller\n"
        "from spotlight_rewards.base.prompts import Prompt\n"
        "Controller(plan_of(load_config(None)), [Prompt('p', 'a', {})], [])\n"
        f"print({folders} & {{*sys.modules}})\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize("name", POLICIES.built_in)
def test_a_plan_uses_exactly_what_it_is_set_to(name: str) -> None:
    (policy,) = Controller(USED[name], PROMPTS, []).policies
    assert isinstance(policy, Policy)
    assert policy.snapshot() == {} or name == "exploration"


def test_policies_are_asked_in_the_order_of_the_registry() -> None:
    plan = dataclasses.replace(USED["exploration"], bounded=True, compares=True)
    work = Controller(plan, PROMPTS, []).work
    assert [*work.policies] == ["exploration", "trainers", "whole-groups"]


def test_a_checkpoint_of_an_older_version_has_the_state_of_exploration() -> None:
    tree = Controller(USED["exploration"], PROMPTS, []).snapshot().to_dict()
    assert isinstance(tree["policies"], dict)
    older = {key: value for key, value in tree.items() if key != "policies"}
    older["exploration"] = tree["policies"]["exploration"]
    assert Snapshot.from_dict(older) == Snapshot.from_dict(tree)
    Controller.restore(USED["exploration"], PROMPTS, [], older)
    with pytest.raises(ValueError, match=r"controller\.policies\.exploration: .*dictionary, found 3"):
        Snapshot.from_dict(older | {"policies": 3, "exploration": 3})
