"""Presets load, plan and give way to the user's own settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.config.load import (
    changed_keys,
    dump_config,
    load_config,
    load_dump,
    read_config,
    with_new_keys,
)
from spotlight.config.preset import load_preset, preset_names
from spotlight.config.schema import RunConfig
from spotlight.config.sections.newer_algorithms import DGPOConfig, DiffusionDPOConfig
from spotlight.dry_run.run_plan import make_plan
from spotlight_rewards.base.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROMPTS = [f"data.{name}={ROOT}/examples/prompts/ocr_{name}.txt" for name in ("train", "test")]
PAGE = (ROOT / "docs/howto/coming-from.md").read_text()
MODELS = {
    "Qwen/Qwen-Image": "Qwen-Image",
    "black-forest-labs/FLUX.1-dev": "FLUX.1-dev",
    "stabilityai/stable-diffusion-3.5-medium": "SD3.5-M",
}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_plans_and_is_described(name: str) -> None:
    config = load_config(None, [f"like={name}", *PROMPTS])
    assert config.like == name
    plan = make_plan(config)
    assert plan.memory
    preset = load_preset(name)
    assert "https://github.com/" in preset.source
    assert preset.differs
    assert f"`{name}`" in PAGE
    changed = changed_keys(config)
    for section, settings in preset.settings.items():
        assert any(key == section or key.startswith(f"{section}.") for key in changed), (section, settings)


def number(value: float) -> str:
    """As the page writes it: .04, 1e-4, 4.5."""
    if 0 < value < 1e-2:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}".removeprefix("0") or "0"


def trained_steps(config: RunConfig) -> str:
    window, stochastic = config.rollout.sde_window, config.rollout.steps - 1  # the last step is ODE
    trained = config.algorithm.train_timesteps
    if window.kind == "sliding":
        return f"{window.size} steps, sliding"
    if window.kind == "random":
        assert window.high is not None
        steps = f"steps {window.low} to {window.high - 1}"
        return steps if window.size == window.high - window.low else f"{window.size} of {steps}"
    return f"{trained} of {stochastic} steps" if trained else f"{stochastic} steps"


def cells(config: RunConfig) -> list[str]:
    """What the page's table says of a preset's settings."""
    algorithm, rollout, learner = config.algorithm.model_dump(), config.rollout, config.learner
    if rollout.sampler == "ode":
        beta = f"beta {number(algorithm['beta'])}, " if "beta" in algorithm else ""
        levels = algorithm["train_timesteps"]
        trained = f"{beta}{levels} level{'s' * (levels > 1)}"
        kl = ", ".join(
            number(algorithm[key])
            for key in ("reference_weight", "anchor_weight", "clip_range")
            if algorithm.get(key) is not None
        )
    else:
        sampler = "" if rollout.sampler == "flow-sde" else f"`{rollout.sampler}` "
        trained = f"{sampler}noise {number(rollout.noise_level)}, {trained_steps(config)}"
        kl = f"{number(algorithm['kl_weight'])}, {number(algorithm['clip_range'])}"
    assert rollout.height == rollout.width
    guidance = rollout.embedded_guidance or rollout.true_cfg_scale
    guided = "no guidance" if guidance == 1 else f"guidance {number(guidance)}"
    weights = "all" if learner.mode == "full" else f"LoRA {learner.lora.rank}"
    average = f", {number(learner.ema.cap)} every {learner.ema.every}" if learner.ema else ""
    advantage = config.algorithm.advantage
    divided = [
        "group" if advantage.std == "group" else "batch",
        "unbiased" if advantage.ddof else "population",
        *(["each reward"] if advantage.combine == "normalise_each" else []),
    ]
    return [
        f"`{algorithm['name']}`, {trained}",
        f"{MODELS[config.model.path]}, {rollout.height}, {rollout.steps}, {guided}",
        f"{weights}, {number(learner.learning_rate)}{average}",
        f"{rollout.prompts_per_iteration} x {rollout.group_size}, {learner.updates_per_batch}",
        " + ".join(
            f"{'' if reward.weight == 1 else number(reward.weight) + ' '}`{reward.name}`"
            for reward in config.rewards
        ),
        kl or "-",
        ", ".join(divided),
    ]


def test_the_pages_table_says_what_the_presets_set() -> None:
    table = PAGE.partition("| `like` |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert sorted(row[0].strip("`") for row in rows) == preset_names()
    for name, source, *found in rows:
        preset = load_preset(name.strip("`"))
        assert re.findall(r"`([^`]+)`", source)[0] in preset.source
        assert found == cells(load_config(None, [f"like={preset.name}"])), name


def test_the_page_of_algorithms_says_which_defaults_differ_from_the_authors() -> None:
    page = (ROOT / "docs/howto/compare-algorithms.md").read_text()
    table = page.partition("### DGPO and Diffusion-DPO")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    said = {(column, row[0].strip("`")): row[1] for column, row in rows_of_columns(rows)}
    dgpo, dpo = DGPOConfig(), DiffusionDPOConfig()
    assert said["DGPO", "beta"] == number(dgpo.beta)
    assert float(said["DGPO", "clip_range"]) == dgpo.clip_range
    assert said["DGPO", "reference_weight"] == number(dgpo.reference_weight)
    assert dgpo.noisiest_steps is None
    assert said["DGPO", "train_timesteps`, `noisiest_steps"] == f"{dgpo.train_timesteps} of all"
    assert said["Diffusion-DPO", "beta"].startswith(f"{number(dpo.beta)},")


def rows_of_columns(rows: list[list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Each row with what its table is of."""
    about = ""
    for row in rows:
        if "default" in row:
            about = row[0]
        else:
            yield about, row


def test_the_users_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "like: flow_grpo-sd3\nrollout: {steps: 12}\nlearner: {ema: null}\nevaluation: {weights: policy}\n"
    )
    config = load_config(file, ["algorithm.clip_range=1e-3", "rollout.group_size=12"])
    assert (config.rollout.steps, config.rollout.group_size, config.learner.ema) == (12, 12, None)
    assert config.algorithm.model_dump()["clip_range"] == 1e-3
    assert config.algorithm.model_dump()["kl_weight"] == 0.04
    assert config.rollout.true_cfg_scale == 4.5
    assert read_config(dump_config(config), "a dump") == config


def test_another_algorithm_starts_from_its_own_defaults_but_for_what_it_does_with_groups() -> None:
    config = load_config(None, ["like=flow_grpo-sd3", "algorithm.name=grpo-guard"])
    assert config.algorithm.model_dump()["clip_range"] == 2e-6
    assert config.algorithm.silent_groups == "skip"
    assert config.rollout.true_cfg_scale == 4.5
    config = load_config(
        None, ["like=dance-flux", "algorithm.name=grpo-guard", "algorithm.advantage.clip=4.0"]
    )
    advantage = {"std": "group", "ddof": 1, "epsilon": 1e-8, "clip": 4.0}
    assert config.algorithm.advantage.model_dump().items() >= advantage.items()
    assert config.algorithm.model_dump()["train_timesteps"] is None


def test_an_unknown_preset_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"like: found 'flow-grpo-sd3'.*Did you mean 'flow_grpo-sd3'"):
        load_config(None, ["like=flow-grpo-sd3"])


def test_a_finished_run_keeps_what_it_ran_with_whatever_its_preset_says_now(tmp_path: Path) -> None:
    config = load_config(None, ["like=flow_grpo-sd3", *PROMPTS])
    dump = tmp_path / "config.yaml"
    lines = [line for line in dump_config(config).splitlines() if "silent_groups" not in line]
    for name in ("flow_grpo-sd3", "of-long-ago"):
        dump.write_text("\n".join(lines).replace("like: flow_grpo-sd3", f"like: {name}"))
        algorithm = config.algorithm.model_copy(update={"silent_groups": "train"})
        ran_with = config.model_copy(update={"like": name, "algorithm": algorithm})
        assert load_dump(dump) == read_config(dump.read_text(), "a dump") == ran_with
        assert with_new_keys(dump.read_text()) == dump_config(ran_with)


def test_errors_name_the_preset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot use like: flow_grpo-sd3 with rollout\.steps=1:"):
        load_config(None, ["like=flow_grpo-sd3", "rollout.steps=1"])
    file = tmp_path / "mine.yaml"
    file.write_text("like: flow_grpo-sd3\nrollout: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"Cannot use .*mine\.yaml, like: flow_grpo-sd3:"):
        load_config(file)


@pytest.mark.parametrize(
    ("name", "line", "differs"),
    [
        ("diffusion-nft-sd3", "algorithm.old_policy.count=steps", "second-order solver"),
        ("flow_grpo-qwen-fast", "algorithm.name=flow-grpo-fast", "float32 under autocast"),
    ],
)
def test_differences_are_printed_as_overrides(name: str, line: str, differs: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--like", name, "--diff"])
    assert result.exit_code == 0, result.output
    lines = [line.split("  # default: ")[0] for line in result.output.splitlines() if "  # default" in line]
    arguments = [argument for line in lines for argument in shlex.split(line)]
    assert len(arguments) == len(lines)
    assert line in lines
    assert differs in result.output
    blank = tmp_path / "blank.yaml"
    blank.write_text("")
    rest = [argument for argument in arguments if not argument.startswith("like=")]
    found = load_config(blank, rest)
    assert found.model_copy(update={"like": name}) == load_config(None, [f"like={name}"])


def test_a_presets_window_is_left_out_by_its_kind_alone() -> None:
    config = load_config(None, ["like=verl-omni-qwen-ocr", "rollout.sde_window={kind: all}", *PROMPTS])
    assert config.rollout.kept_steps == config.rollout.steps - 1
