"""``spotlight config`` prints what loads as the same configuration, with every key explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spotlight.cli.config_command import documented_yaml, split_arguments
from spotlight.cli.main import app
from spotlight.config.load import dump_config, load_config
from spotlight.config.sections.outputs import WandbConfig
from spotlight.data.datasets import keys_to_set

OVERRIDES: tuple[list[str], ...] = (
    [],
    ["algorithm={name: flow-grpo}", "rollout.sampler=cps"],
    ["learner.ema.cap=0.5", "model.revision=main", "data.tags=[counting, colors]"],
    ["rewards=[{name: shapes, params: {train_on: strict}}, {name: jpeg_size, weight: 0.5}]"],
    ["rollout.true_cfg_scale=2", 'rollout.negative_prompt=": #"', "evaluation.strict=shapes/strict"],
    ["metrics.wandb.project=mine"],
)


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_the_documented_configuration_loads_as_itself(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(None, overrides)
    path = tmp_path / "documented.yaml"
    path.write_text(documented_yaml(config))
    assert load_config(path) == config


def test_every_key_stands_below_a_comment() -> None:
    lines = documented_yaml(load_config(None)).splitlines()
    keys = [index for index, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    plain = len(dump_config(load_config(None)).splitlines())
    assert len(keys) > 0.8 * plain
    for index in keys:
        above = lines[index - 1].strip()
        assert above.startswith("#"), f"{lines[index]!r} is not explained"


def test_the_command_takes_a_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    output = CliRunner().invoke(app, ["config", str(path), "run_seed=7"]).output
    assert "\nname: mine\n" in f"\n{output}"
    assert "\nrun_seed: 7\n" in output


def test_the_command_takes_a_run_as_the_dry_run_prints_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(dump_config(load_config(None, ["run_seed=7"])))
    output = CliRunner().invoke(app, ["config", str(tmp_path / "mine"), "iterations=20"]).output
    for line in ("name: mine", "run_seed: 7", "iterations: 20"):
        assert f"\n{line}\n" in f"\n{output}"


def test_addresses_and_other_packages_policies_are_printed() -> None:
    config = load_config(None, ["runs_dir=s3://bucket/runs"]).model_copy(
        update={"policies": {"x": WandbConfig()}}
    )
    lines = documented_yaml(config).splitlines()
    assert {"runs_dir: s3://bucket/runs", "policies: {x: {entity: null, project: spotlight}}"} <= set(lines)


def test_the_first_argument_without_an_equals_sign_is_the_file() -> None:
    assert split_arguments([]) == (None, [])
    assert split_arguments(["a=1", "b=2"]) == (None, ["a=1", "b=2"])
    assert split_arguments(["x.yaml", "a=1"]) == (Path("x.yaml"), ["a=1"])


def test_prompts_that_have_to_be_set_are_not_set_by_printing(tmp_path: Path) -> None:
    path = tmp_path / "printed.yaml"
    path.write_text(CliRunner().invoke(app, ["config", "like=awm-sd3", "data.test=mine.txt"]).output)
    printed = load_config(path)
    assert keys_to_set(printed) == ["data.train"]
    assert printed.data.test == "mine.txt"
    assert "\n  # train: FILE\n" in path.read_text()
