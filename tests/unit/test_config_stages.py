"""A file with stages gives a run for each, which goes on with the LoRA of the one before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spotlight.api.arguments import overrides_of
from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.config.training_stages import stage_names
from spotlight_rewards.base.errors import ConfigError

FILE = """
iterations: 5
algorithm: {name: diffusion-nft, beta: 0.5}
learner: {lora: {rank: 2, alpha: 4.0}}
stages:
  warm:
    iterations: 2
    algorithm: {name: sft, train_timesteps: 1}
  rl: {learner: {lora: {alpha: 8.0}}}
  more: {model: {lora: null}}
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "chain.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_stage_has_the_common_settings_below_its_own(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert stage_names(path, []) == ["warm", "rl", "more"]
    assert stage_names(path, ["stage=rl"]) == stage_names(None, []) == []
    warm, rl, more = (
        load_config(path, ["runs_dir=there", f"stage={name}"]) for name in ("warm", "rl", "more")
    )
    assert (warm.name, warm.iterations, warm.algorithm.name) == ("chain-warm", 2, "sft")
    assert (warm.algorithm.train_timesteps, warm.learner.lora.rank) == (1, 2)
    assert (rl.name, rl.iterations, rl.learner.lora.rank, rl.learner.lora.alpha) == ("chain-rl", 5, 2, 8.0)
    assert (rl.algorithm.name, rl.algorithm.model_dump()["beta"]) == ("diffusion-nft", 0.5)
    (quoted,) = overrides_of({"stage": "rl"})  # as an argument of Python
    assert load_config(path, ["runs_dir=there", quoted]) == rl
    assert [each.model.lora for each in (warm, rl, more)] == [None, "there/chain-warm/lora", None]


def test_a_command_overrides_its_stage(tmp_path: Path) -> None:
    given = ["iterations=9", "name=other", "stage=rl"]
    for override, lora in (("model.lora=null", None), ("model={lora: other}", "other")):
        config = load_config(written(tmp_path), [*given, override])
        assert (config.name, config.iterations, config.model.lora) == ("other-rl", 9, lora)


@pytest.mark.parametrize(
    ("text", "chosen", "said"),
    [
        (FILE, [], "stage: found nothing; expected one of warm, rl, more. All, one after another: spotlight"),
        (FILE, ["stage=worm"], "stage: found 'worm'; expected one of warm, rl, more. Did you mean 'warm'"),
        ("iterations: 5", ["stage=rl"], "stage: found 'rl'; expected none, since no stages are configured"),
        ("stages: [a]", [], "stages: found list; expected settings by the name of each stage"),
        ("stages: {a: 5}", [], "stages.a: found 5; expected settings"),
        ("stages: {a: {name: b}}", ["stage=a"], "stages.a.name: found 'b'; expected nothing. Set it for all"),
        ("stages: {a: {step: 1}}", ["stage=a"], "step: found an unknown key"),
        ("stages: {a: {iterations: 2026-01-01}}", ["stage=a"], "iterations: found '2026-01-01'"),
        ("{model: qwen, stages: {a: {}, b: {}}}", ["stage=b"], "model: found 'qwen'; expected a section"),
        (FILE, ["stage=rl", "runs_dir=s3://b/c"], "runs_dir: found s3:/+b/c; expected a folder, because"),
        (
            FILE,
            ["stage=rl", "learner.mode=full"],
            "model.lora: found '.*lora'; expected nothing with learner.mode",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, chosen: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, text), chosen)
    assert re.search(said, str(refused.value)), str(refused.value)


def test_a_dry_run_plans_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = FILE.replace("sft, train_timesteps: 1", "dgpo")
    done = CliRunner().invoke(app, ["train", str(written(tmp_path, text)), "--dry-run"])
    assert done.exit_code == 0, done.output
    found = [
        line for line in done.output.splitlines() if line.startswith(("Stage", "It begins", "Every key"))
    ]
    assert found[:5] == [
        "Stage warm: the run chain-warm",
        f"Every key of this configuration: spotlight config {tmp_path}/chain.yaml stage=warm",
        "Stage rl: the run chain-rl",
        "It begins with runs/chain-warm/lora, which an earlier stage makes",
        f"Every key of this configuration: spotlight config {tmp_path}/chain.yaml stage=rl",
    ]
