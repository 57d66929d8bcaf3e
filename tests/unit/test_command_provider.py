"""Spot nodes that two commands start and end, with real commands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_node_providers import node

from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.scaling.open_providers import open_providers
from spotlight.config.load import build_config, dump_config, load_config
from spotlight.scheduler.types import NodeKind
from spotlight.store.run_directory import RunDirectory
from spotlight_fleet.providers import command_provider
from spotlight_fleet.providers.command_provider import CommandProvider
from spotlight_fleet.providers.node_notes import NodeNotes
from spotlight_fleet.providers.node_provider import ProviderError, ProviderSetting
from spotlight_fleet.providers.skypilot_provider import SKYPILOT, SkyPilotSettings
from spotlight_rewards.base.file_errors import StoreError


@dataclass
class Clock:
    """The provider's clock, which passes as it is told."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(command_provider, "time", clock)
    return clock


def commands(folder: Path, start: str, stop: str, start_s: float = 30.0) -> CommandProvider:
    return CommandProvider(start, stop, NodeNotes(folder / "nodes.json"), start_s)


def ask(provider: CommandProvider, nodes: int, present: Sequence[RayNode] = ()) -> int:
    """Ask as often as it takes."""
    while (provided := provider.ask(nodes, present, [])) < nodes:
        pass
    return provided


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of this name that writes down what it was asked; the real one is in test_skypilot.py."""
    script = tmp_path / "bin" / "sky"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/said\ntest ! -s {tmp_path}/said\n'
    )
    script.chmod(0o700)
    (tmp_path / "said").touch()
    (tmp_path / "task of ours.yaml").touch()
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return tmp_path


def test_skypilots_jobs_join_a_group_and_one_that_has_ended_is_gone(sky: Path) -> None:
    setting = ProviderSetting(None, 1, NodeNotes(sky / "nodes.json"), 30.0)
    provider = SKYPILOT.open(SkyPilotSettings(task=sky / "task of ours.yaml", job_group="my group"), setting)
    assert ask(provider, 1) == 1  # type: ignore[arg-type]
    (name,) = json.loads((sky / "nodes.json").read_text())
    assert (sky / "asked").read_text().splitlines() == [
        f"jobs launch --yes --detach-run --name {name} --job-group my group {sky}/task of ours.yaml "
        "--env SPOTLIGHT_HEAD --env SPOTLIGHT_NODE --secret SPOTLIGHT_TOKEN"
    ]
    (sky / "said").write_text("sky.exceptions.Other: no answer")
    with pytest.raises(ProviderError, match=r"may still cost money.*no answer"):
        provider.close()
    (sky / "said").write_text("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.")
    provider.close()
    assert json.loads((sky / "nodes.json").read_text()) == []


def test_skypilot_needs_its_command_and_a_task(sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = ProviderSetting(None, 1, NodeNotes(sky / "nodes.json"), 30.0)
    with pytest.raises(ProviderError, match=r"task is none.yaml, which is no file here; .* Set it"):
        SKYPILOT.open(SkyPilotSettings(task=Path("none.yaml")), setting)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProviderError, match=r"no command `sky` in PATH.*pip install skypilot"):
        SKYPILOT.open(SkyPilotSettings(), setting)


def test_commands_start_and_end_nodes_by_name_and_a_killed_head_forgets_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    start, stop = f"echo start $SPOTLIGHT_NODE >> {log}", f"echo stop $SPOTLIGHT_NODE >> {log}"
    first = commands(tmp_path, start, stop)
    assert first.asked([]) == 0
    assert [first.ask(3, [], []) for _ in range(3)] == [1, 2, 3]
    names = [line.split()[1] for line in log.read_text().splitlines()]
    again = commands(tmp_path, start, stop)  # of the attempt after this one was killed
    present = [node(name) for name in names[:2]]
    assert again.asked(present) == 3
    # First the one that has not come; none that works unless it is empty.
    assert again.ask(1, present, []) == 2
    assert log.read_text().splitlines()[3:] == [f"stop {names[2]}"]
    assert again.ask(1, present, [present[0]]) == 1
    assert log.read_text().splitlines()[4:] == [f"stop {names[0]}"]
    again.close()
    assert log.read_text().splitlines()[5:] == [f"stop {names[1]}"]
    assert commands(tmp_path, start, stop).asked([]) == 0


def test_a_command_that_fails_is_reported_and_what_it_left_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    failing = commands(tmp_path, "echo no quota; exit 3", f"echo $SPOTLIGHT_NODE >> {log}")
    with pytest.raises(
        ProviderError, match=r"params.start ended with status 3; expected 0.*It said: no quota"
    ):
        failing.ask(2, [], [])
    assert len(log.read_text().split()) == 1
    assert failing.asked([]) == 0
    stubborn = commands(tmp_path, "true", f"test -e {tmp_path}/works")
    assert ask(stubborn, 2) == 2
    with pytest.raises(ProviderError, match=r"params.stop ended with status 1"):
        stubborn.ask(1, [], [])
    assert stubborn.asked([]) == 2, "asked again, it is tried again"
    (tmp_path / "works").touch()
    assert stubborn.ask(1, [], []) == 1


def test_a_node_that_stays_away_is_replaced(tmp_path: Path, clock: Clock) -> None:
    log = tmp_path / "log"
    nodes = commands(
        tmp_path, f"echo start $SPOTLIGHT_NODE >> {log}", f"echo stop $SPOTLIGHT_NODE >> {log}", start_s=100.0
    )
    ask(nodes, 2)
    one, other = (line.split()[1] for line in log.read_text().splitlines())
    clock.sleep(110.0)
    assert ask(nodes, 2, [node(one)]) == 2
    stopped, started = log.read_text().splitlines()[2:]
    assert stopped == f"stop {other}"
    assert started.startswith("start ")


def test_nodes_that_nobody_has_watched_for_long_have_time_to_join_again(tmp_path: Path, clock: Clock) -> None:
    log = tmp_path / "log"
    start, stop = f"echo start $SPOTLIGHT_NODE >> {log}", f"echo stop $SPOTLIGHT_NODE >> {log}"
    ask(commands(tmp_path, start, stop, start_s=100.0), 2)
    one, other = (line.split()[1] for line in log.read_text().splitlines())
    clock.sleep(110.0)
    again = commands(tmp_path, start, stop, start_s=100.0)  # the head was killed, and is started again
    assert again.ask(2, [], []) == 2
    assert again.ask(2, [node(one)], []) == 2
    assert len(log.read_text().splitlines()) == 2
    clock.sleep(110.0)
    again.ask(1, [node(one)], [])
    assert log.read_text().splitlines()[2:] == [f"stop {other}"]


def test_a_node_that_takes_long_to_start_has_as_long_to_join(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(key: str, command: str, variables: Mapping[str, str], timeout_s: float) -> None:
        clock.sleep(100.0)
        run(key, command, variables, timeout_s)

    log, run = tmp_path / "log", command_provider.run_shell_command
    monkeypatch.setattr(command_provider, "run_shell_command", slow)
    nodes = commands(tmp_path, "true", f"echo stop >> {log}", start_s=200.0)
    assert ask(nodes, 1) == 1
    clock.sleep(140.0)
    assert nodes.ask(1, [], []) == 1
    assert not log.exists()


def test_a_node_that_cannot_be_ended_keeps_no_other_from_being_started_or_ended(
    tmp_path: Path, clock: Clock
) -> None:
    log = tmp_path / "log"
    stop = f"echo $SPOTLIGHT_NODE >> {log}; test -e {tmp_path}/$SPOTLIGHT_NODE"
    nodes = commands(tmp_path, "true", stop, start_s=100.0)
    ask(nodes, 2)
    ghost, other = json.loads((tmp_path / "nodes.json").read_text())
    clock.sleep(110.0)
    with pytest.raises(ProviderError, match=f"params.stop ended with status 1.*SPOTLIGHT_NODE={ghost}"):
        nodes.ask(2, [node(other)], [])
    _, _, third = json.loads((tmp_path / "nodes.json").read_text())
    (tmp_path / third).touch()
    present = [node(other), node(third)]
    with pytest.raises(ProviderError, match=ghost):
        nodes.ask(1, present, [present[1]])
    assert log.read_text().split() == [ghost, ghost, third]
    (tmp_path / ghost).touch()
    assert nodes.ask(1, present[:1], []) == 1
    assert nodes.asked(present[:1]) == 1


def test_a_start_that_fails_is_reported_though_it_cannot_be_undone_and_the_next_is_started(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    start = f"echo $SPOTLIGHT_NODE >> {log}; test -e {tmp_path}/quota"
    nodes = commands(tmp_path, start, "echo no such job; exit 1")
    with pytest.raises(ProviderError, match=r"params.start ended with status 1"):
        nodes.ask(1, [], [])
    (tmp_path / "quota").touch()
    with pytest.raises(ProviderError, match=r"params.stop ended with status 1.*no such job"):
        nodes.ask(1, [], [])
    _, started = log.read_text().split()
    with pytest.raises(ProviderError, match="no such job"):
        nodes.ask(1, [node(started)], [])
    assert len(log.read_text().split()) == 2, "it is there"


def test_a_node_that_was_just_ended_is_not_counted_while_it_is_listed(tmp_path: Path, clock: Clock) -> None:
    log = tmp_path / "log"
    nodes = commands(tmp_path, "true", f"echo $SPOTLIGHT_NODE >> {log}", start_s=100.0)
    ask(nodes, 2)
    one, other = json.loads((tmp_path / "nodes.json").read_text())
    present = [node(one), node(other)]
    for _ in range(2):
        assert nodes.ask(1, present, [present[0]]) == 1
        assert log.read_text().split() == [one]
    clock.sleep(110.0)
    nodes.ask(1, present, [present[0]])
    assert log.read_text().split() == [one, one], "it lives on: it is ended again"


def test_a_node_that_is_back_before_its_loss_is_known_is_the_same_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    nodes = commands(tmp_path, "true", f"echo $SPOTLIGHT_NODE >> {log}")
    ask(nodes, 2)
    one, other = json.loads((tmp_path / "nodes.json").read_text())
    present = [node(f"{one}~ab12cd"), node(other), node("by~hand")]
    assert nodes.asked(present) == 3
    assert nodes.ask(3, present, []) == 3
    assert not log.exists(), "none is missing, and none too many"
    for _ in range(2):  # it is listed until it has ended
        assert nodes.ask(2, present, [present[0]]) == 2
        assert log.read_text().split() == [one]
    nodes.close()
    assert sorted(log.read_text().split()[1:]) == sorted([other, "by~hand"])


def test_nodes_of_a_goal_that_was_dropped_are_reported(tmp_path: Path) -> None:
    notes: list[str] = []
    config = load_config(None, ["fleet.driver=ray", f"runs_dir={tmp_path}"])
    with RunDirectory.open(tmp_path, config.name, dump_config(config)) as directory:
        assert open_providers(config, directory, None, notes.append) == {}
        killed = CommandProvider("true", "true", NodeNotes(directory.path / "spot-nodes.json"), 30.0)
        ask(killed, 2)
        assert open_providers(config, directory, None, notes.append) == {}
        killed.close()
        assert open_providers(config, directory, None, notes.append) == {}
    (once,) = notes
    assert re.search(r"found spot-\w+, spot-\w+, nodes of.*without fleet.target. Set it again", once)


@pytest.mark.parametrize("text", ["", '["spot-1"', "{}", "3", "[1]"])
def test_notes_that_are_no_list_of_nodes_say_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spot-nodes.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"spot-nodes\.json: found .*; expected a list .* delete the file"):
        NodeNotes(path).read()


def test_commands_for_nodes_on_demand_are_given_the_slots_and_named_in_errors(tmp_path: Path) -> None:
    fleet = {
        "driver": "ray",
        "learner_placement": "spot_then_on_demand",
        "learner_ranks": 4,
        "address": "auto",
        "on_demand": {
            "start": f"echo $SPOTLIGHT_NODE $SPOTLIGHT_SLOTS >> {tmp_path}/log",
            "stop": "echo no such job; exit 3",
        },
    }
    settings = {"fleet": fleet, "learner": {"mode": "lora"}, "runs_dir": str(tmp_path)}
    config = build_config(settings, "the test")
    with RunDirectory.open(tmp_path, config.name, dump_config(config)) as directory:
        ((kind, provider),) = open_providers(config, directory, None, print).items()
        assert kind is NodeKind.ON_DEMAND
        assert provider.ask(1, [], []) == 1
        name, slots = (tmp_path / "log").read_text().split()
        assert (name.startswith("on-demand-"), slots) == (True, "4")
        with pytest.raises(ProviderError, match=r"fleet\.on_demand\.stop ended with status 3; expected 0"):
            provider.ask(0, [], [])
