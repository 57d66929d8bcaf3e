"""From names to functions: every way a reward can fail to load is told apart, with its remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spotlight_rewards import reward_registry as registry
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.registry import REWARDS
from spotlight_rewards.results import require_names
from spotlight_rewards.reward import RewardContext, RewardInputError, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_facts import Reads
from spotlight_rewards.reward_registry import Reference, facts_of, load, parse, tiny_params

MODULE = """
import json
limit = 3

def plain(images, prompts, metadata):
    return [1.0] * len(images)

def with_params(images, prompts, metadata, *, factor, offset=0.0):
    return [factor * len(prompts) + offset] * len(images)

def anything(images, prompts, metadata, **params):
    return [params["factor"]] * len(images)

def two_arguments(images, prompts):
    return [1.0] * len(images)

class Scorer:
    def __call__(self, images, prompts, metadata, *, factor=1.0):
        return [factor] * len(images)

scorer = Scorer()
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


def failure(name: str, **params: object) -> str:
    with pytest.raises(RewardSetupError) as error:
        load(name, params)
    return str(error.value)


ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "model": "any"}
NEEDED: dict[str, dict[str, object]] = {
    "vlm-judge": {"endpoint": ENDPOINT},
    "vlm-rank": {"endpoint": ENDPOINT},
    "ocr-vlm": {"endpoint": ENDPOINT},
    "geneval2": {"endpoint": ENDPOINT},
    "unified-reward": {"endpoint": ENDPOINT},
    "edit-score": {"endpoint": ENDPOINT},
    "flow-factory": {"server": {"base_url": "http://127.0.0.1:1"}},
    "http": {"server": {"base_url": "http://127.0.0.1:1"}, "reward": "any"},
    "http-video": {"server": {"base_url": "http://127.0.0.1:1"}, "reward": "any", "fps": 16},
}


@pytest.mark.parametrize("name", list(REWARDS))
def test_every_built_in_loads(name: str) -> None:
    assert f"{parse(name).module}:{parse(name).attribute}" == REWARDS.locate(name)
    assert callable(load(name, NEEDED.get(name, {})).function)


@pytest.mark.parametrize("name", list(REWARDS))
def test_every_built_in_tells_its_facts(name: str) -> None:
    facts = facts_of(name)
    assert facts is not None
    assert bool(facts.weights) == (facts.licence != "-")
    if facts.example is not None:
        low, high = facts.example.score
        assert low <= high
        assert bool(facts.example.prompt) == (facts.reads is not Reads.NOTHING)
        assert example_picture(facts.example.picture).dtype == np.uint8


def test_facts_of_another_type_are_refused(own: Path) -> None:
    (own / "bad_facts.py").write_text("FACTS = {}\ndef f(images, prompts, metadata): return []\n")
    with pytest.raises(RewardSetupError, match=r"'FACTS' of its module is of type 'dict'; expected a"):
        facts_of("bad_facts:f")
    assert facts_of("own_rewards:plain") is None
    assert tiny_params("own_rewards:plain", own, {}) is None


def test_parsing_imports_nothing() -> None:
    assert parse("torchless.module:Class.method") == Reference("torchless.module", "Class.method")
    assert "torchless" not in sys.modules


def test_params_are_bound() -> None:
    function = load("own_rewards:with_params", {"factor": 2.0}).function
    image = np.zeros((1, 1, 3), np.uint8)
    assert function([image], ["a"], [{}]) == [2.0]
    assert load("own_rewards:anything", {"factor": 5.0}).function([image], ["a"], [{}]) == [5.0]
    assert load("own_rewards:scorer", {"factor": 4.0}).function([image], ["a"], [{}]) == [4.0]


def test_the_modules_check_gets_the_params_it_names(own: Path) -> None:
    (own / "checked_reward.py").write_text(
        "def f(images, prompts, metadata, *, a=1, b=2): return []\n"
        "def check(prompts, metadata, *, b=2): raise ValueError((prompts, metadata, b))\n"
    )
    check = load("checked_reward:f", {"a": 7, "b": 8}).check
    assert check is not None
    with pytest.raises(ValueError, match="8"):
        check(["x"], [{}])
    assert load("own_rewards:plain", {}).check is None


def test_a_reward_may_be_a_class_of_its_params(own: Path) -> None:
    (own / "class_reward.py").write_text(
        "from dataclasses import dataclass\n"
        "from spotlight_rewards.reward import Reward, RewardInputError, best_with\n"
        "@best_with(batch_size=3)\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Level(Reward):\n"
        "    level: float\n"
        "    def __call__(self, images, prompts, metadata):\n"
        "        return [self.level + self.context.deadline_s] * len(images)\n"
        "    def check(self, prompts, metadata):\n"
        "        raise RewardInputError(str(self.level))\n"
    )
    reward = load("class_reward:Level", {"level": 2.0}, context=RewardContext(deadline_s=5))
    assert reward.function([np.zeros((1, 1, 3), np.uint8)], ["a"], [{}]) == [7.0]
    assert reward.traits.batch_size == 3
    assert reward.check is not None
    with pytest.raises(RewardInputError, match=r"2\.0"):
        reward.check(["a"], [{}])
    assert reward.scored_by is not None
    assert str(reward.scored_by()).startswith("code of class_reward.py@")
    assert tiny_params("class_reward:Level", own, {"level": 1.0}) is None
    assert "params lack 'level'" in failure("class_reward:Level")
    assert "it accepts level" in failure("class_reward:Level", level=1, context=2)


def test_function_and_hooks_that_name_it_get_the_context(own: Path) -> None:
    (own / "aware.py").write_text(
        "def f(images, prompts, metadata, *, context): return [context.deadline_s]\n"
        "def scored_by(context): return context.run_directory\n"
        "def g(images, prompts, metadata, *, run_directory=''): return []\n"
    )
    reward = load("aware:f", {}, context=RewardContext(3.0, "runs/a"))
    assert reward.function([], [], []) == [3.0]
    assert reward.scored_by is not None
    assert reward.scored_by() == "runs/a"
    assert "Take it from there: context.run_directory" in failure("aware:g")


def test_an_unknown_name_lists_the_known_ones() -> None:
    assert (
        f"unknown reward 'shape'; the registered rewards are {', '.join(REWARDS)}. Did you mean 'shapes'?"
        in failure("shape")
    )
    assert "'module:function'" in failure("my_reward")


def test_a_retired_name_says_what_to_use_instead() -> None:
    assert "this version has no reward 'pickle-server'" in failure("pickle-server")
    assert "the reward http or flow-factory" in failure("pickle-server")


@pytest.mark.parametrize("name", ["rewards/own.py:plain", "own_rewards:", ":plain", "own rewards:plain"])
def test_paths_are_no_module_names(name: str) -> None:
    assert "not of the form 'module:function'" in failure(name)


def test_a_missing_module_tells_where_it_was_looked_for(own: Path) -> None:
    found = failure("elsewhere.rewards:f")
    assert "no module 'elsewhere'" in found
    assert str(own) in found


def test_a_missing_dependency_is_not_a_missing_module(own: Path) -> None:
    (own / "needy.py").write_text("import easyocr_of_mars\n")
    assert "its module 'needy' needs the module 'easyocr_of_mars', which is not installed" in failure(
        "needy:f"
    )


@pytest.mark.parametrize("reward", ["clip-score", "geneval"])
def test_without_torch_a_reward_that_needs_it_says_what_to_install(tmp_path: Path, reward: str) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-m", "spotlight_rewards", "check", reward],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"Error: reward {reward!r} needs torch, which is not installed; "
        "pip install 'spotlight-rewards[models]'"
    )


def test_an_error_at_import_is_passed_on(own: Path) -> None:
    (own / "broken.py").write_text("def f(:\n")
    assert "importing its module 'broken' raised SyntaxError" in failure("broken:f")


def test_a_missing_function_lists_those_defined() -> None:
    found = failure("own_rewards:plane")
    assert (
        "own_rewards.py) has no 'plane'; the functions it defines are: plain, with_params, anything" in found
    )


def test_a_value_is_no_function() -> None:
    assert "'limit' in " in failure("own_rewards:limit")
    assert "is of type 'int'; expected a function(images, prompts, metadata" in failure("own_rewards:limit")


def test_a_function_of_other_arguments() -> None:
    assert "its function takes (images, prompts); expected a function(images" in failure(
        "own_rewards:two_arguments"
    )


def test_params_must_fit() -> None:
    assert "unexpected params 'colour'; it accepts factor, offset." in failure(
        "own_rewards:with_params", colour="red", factor=1.0
    )
    assert "unexpected params 'a', 'b'; it accepts none." in failure("own_rewards:plain", b=1, a=1)
    assert "params lack 'factor'" in failure("own_rewards:with_params", offset=1.0)
    assert "unexpected params 'images'" in failure("own_rewards:plain", images=[])


def test_a_check_that_is_no_function(own: Path) -> None:
    (own / "odd.py").write_text("check = True\ndef f(images, prompts, metadata): return []\n")
    assert "'check' in " in failure("odd:f")


def test_the_registry_itself_is_light() -> None:
    assert "torch" not in vars(registry)


@pytest.mark.parametrize(
    ("name", "label"), [("my:reward", ""), ("jpeg_size", "a/b"), ("my:strict", ""), ("jpeg_size", "graded")]
)
def test_reserved_names_are_refused(name: str, label: str) -> None:
    with pytest.raises(RewardSetupError, match=r"Rename the function or set a label"):
        require_names([RewardConfig(name=name, label=label)])
