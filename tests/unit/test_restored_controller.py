"""A checkpoint's controller that is damaged or of another version is refused by the key that is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from test_exploration import planned, ran, revised

from spotlight.config.sections.target import TargetConfig
from spotlight.data.datasets import Prompts
from spotlight.runtime.recorder import restored_controller
from spotlight.scheduler import effects as ef
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.iteration import Snapshot
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import PolicyVersion
from spotlight.training.learner_state import StateError
from spotlight_rewards.base.prompts import Prompt

Key = str | int
Saved = tuple[Plan, list[Prompt], dict[str, Any]]


@pytest.fixture(scope="module")
def saved() -> Saved:
    """Of a run that explores and holds a deadline."""
    run = ran(revised(planned(), where="idle"), iterations=12)
    newest = [one for one in run.seen if isinstance(one, ef.CommitCheckpoint)][-2]
    plan = run.controller.plan
    fleet = dataclasses.replace(plan.fleet, target=TargetConfig(deadline_h=1.0))
    tree = json.loads(json.dumps(newest.snapshot))
    tree["policies"]["target"] = {"wanted": 2, "done": 1, "measured": [[60.0, 2.0, 80.0, 2.0, None]]}
    return dataclasses.replace(plan, fleet=fleet), run.train, tree


def places(tree: object) -> Iterator[tuple[Key, ...]]:
    """Of everything in a tree; of a list's items the first."""
    items: list[tuple[Key, object]] = []
    if isinstance(tree, dict):
        items = [*tree.items()]
    elif isinstance(tree, list):
        items = [*enumerate(tree)][:1]
    for key, value in items:
        yield (key,)
        yield from ((key, *inner) for inner in places(value))


@pytest.mark.parametrize("other", [None, [], [None], {"x": None}, "x", 1e400])
def test_whatever_stands_in_place_of_a_value_is_read_or_refused_as_a_bad_value(
    saved: Saved, other: object
) -> None:
    plan, train, tree = saved
    refused = 0
    for *above, key in places(tree):
        damaged = copy.deepcopy(tree)
        inside: Any = damaged
        for one in above:
            inside = inside[one]
        inside[key] = other
        try:
            Controller.restore(plan, train, [], damaged)
        except ValueError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    ("policy", "state", "message"),
    [
        ("target", {"wanted": 1, "done": 1, "measured": [3]}, r"target\.measured\.0: .*tuple, found 3"),
        ("target", {"wanted": 1, "done": 1, "measured": [[1.0, 2.0]]}, r"measured\.0\.2: Field required"),
        ("target", {"wanted": 1, "done": 1}, r"target\.measured: Field required"),
        ("exploration", {"policy": 3}, "policy: .*dictionary, found 3"),
    ],
)
def test_a_policy_s_state_names_its_key(
    saved: Saved, policy: str, state: dict[str, object], message: str
) -> None:
    plan, train, tree = saved
    with pytest.raises(ValueError, match=message):
        Controller.restore(plan, train, [], {**tree, "policies": {policy: state}})


def test_a_chosen_group_s_seeds_are_numbers(saved: Saved) -> None:
    plan, train, tree = saved
    damaged = copy.deepcopy(tree)
    damaged["policies"]["exploration"]["groups"]["0"]["seeds"][1] = None
    with pytest.raises(ValueError, match=r"groups\.0\.seeds\.1: .*integer, found None"):
        Controller.restore(plan, train, [], damaged)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"iteration": 1}'])
def test_a_resumed_run_names_the_file_and_what_to_do(saved: Saved, tmp_path: Path, text: str) -> None:
    plan, train, tree = saved
    prompts = Prompts(train, [])
    path = tmp_path / "controller.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert restored_controller(tmp_path, plan, prompts).snapshot().ledger == tree["ledger"]
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match=r"controller\.json cannot be read .*package_version"):
        restored_controller(tmp_path, plan, prompts)


def test_a_policy_may_say_its_state_as_any_mapping() -> None:
    said = Snapshot(
        3, PolicyVersion(4), 5, Ledger().snapshot(), {"added": MappingProxyType({"seen": [1, 2]})}
    )
    tree = json.loads(json.dumps(said.to_dict()))
    assert Snapshot.from_dict(tree).policies == {"added": {"seen": [1, 2]}}
