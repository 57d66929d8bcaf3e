"""Every shipped recipe runs for two iterations on a small random pipeline of its family."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.test_fork import files_of_at_most
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.cli.runs.smoke import smoke_overrides
from spotlight.cli.runs.train import _configured
from spotlight.config.load import load_config
from spotlight.config.preset import preset_names
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.testbed import TESTBEDS
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.reward import Reward
from spotlight_rewards.reward_registry import load, parse

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(
    path.name for path in EXAMPLES.glob("*.yaml") if load_config(path, []).model.path not in TESTBEDS
)
FIRST = "flux2-klein-nft.yaml"
"""Runs in the first tier too, with short texts; the others take the same way, with more steps."""
SHORT_TEXTS = "model.max_text_tokens=32"
"""Of the first tier: a small model spends two thirds of its time on a text's padding."""


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [(FIRST, [SHORT_TEXTS]), *(pytest.param(name, [], marks=pytest.mark.slow) for name in RECIPES)],
)
def test_a_recipe_runs_on_a_small_random_pipeline(
    recipe: str,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, float], None],
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    before = load_config(EXAMPLES / recipe, [])
    settings = [f"runs_dir={tmp_path / 'runs'}", f"cache_dir={tmp_path / 'cache'}"]
    settings += texts
    begun_s = time.monotonic()
    done = CliRunner().invoke(app, ["train", f"examples/{recipe}", "--smoke", *settings])
    record_property(f"{before.model.family}/smoke_s", time.monotonic() - begun_s)
    assert done.exit_code == 0, done.output
    run = tmp_path / "runs" / f"{before.name}-smoke"
    assert audit(run, AuditLimits(group_size=4, staleness_max=1)).violations == ()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 2
    kept = load_config(run / "config.yaml", [])
    for section in ("algorithm", "learner"):
        assert getattr(kept, section) == getattr(before, section)
    for reward, original in zip(kept.rewards, before.rewards, strict=True):
        tiny = {name for name, value in reward.params.items() if original.params.get(name) != value}
        assert not tiny or makes_tiny(reward.name)
        assert reward.model_copy(update={"params": {}}) == original.model_copy(update={"params": {}})
    assert (kept.rollout.steps, kept.rollout.sampler) == (before.rollout.steps, before.rollout.sampler)
    replaced = [line.strip().partition("=")[0] for line in done.output.splitlines() if line.startswith("  ")]
    assert {"model.path", "iterations"} <= set(replaced)


def makes_tiny(name: str) -> bool:
    """Whether a reward can write small models of its own."""
    reference = parse(name)
    module = importlib.import_module(reference.module)
    found = getattr(module, reference.attribute)
    return hasattr(module, "tiny") or getattr(found, "tiny", Reward.tiny) is not Reward.tiny


def test_tiny_writes_a_pipeline_that_diffusers_loads(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tiny", "qwen-image", str(tmp_path / "tiny"), "--variant", "1"])
    assert done.exit_code == 0, done.output
    assert (
        json.loads((tmp_path / "tiny" / "model_index.json").read_text())["_class_name"] == "QwenImagePipeline"
    )
    again = CliRunner().invoke(app, ["tiny", "qwen-image", str(tmp_path / "tiny")])
    assert again.exit_code != 0
    assert "exists; expected a directory that does not" in " ".join(again.output.split())
    other = CliRunner().invoke(app, ["tiny", "quen-image", str(tmp_path / "other")])
    assert "Did you mean 'qwen-image'?" in " ".join(other.output.split())
    nowhere = CliRunner().invoke(
        app, ["tiny", "qwen-image", str(tmp_path / "tiny" / "model_index.json" / "x")]
    )
    assert isinstance(nowhere.exception, SystemExit)
    assert "cannot write a small pipeline" in " ".join(nowhere.output.split())


def smoked(given: list[str]) -> RunConfig:
    """The configuration that a smoke run has."""
    return load_config(None, [*given, *smoke_overrides(load_config(None, given))])


def test_a_disk_that_is_full_of_a_rewards_small_weights_is_told(tmp_path: Path) -> None:
    config = load_config(None, ["rewards=[{name: aesthetic}]", f"cache_dir={tmp_path}"])
    with files_of_at_most(2_000_000), pytest.raises(StoreError, match="cannot write a small pipeline"):
        smoke_overrides(config)


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_has_a_smoke_run_with_prompts_that_its_rewards_can_score(
    preset: str, tmp_path: Path
) -> None:
    config = smoked([f"like={preset}", f"cache_dir={tmp_path}"])
    prompts = load_prompts(config)
    assert prompts.notes(config) == ()
    every = (*prompts.train, *prompts.test)
    for reward in config.rewards:
        if (check := load(reward.name, reward.params).check) is not None:
            check([prompt.text for prompt in every], [prompt.metadata for prompt in every])


def test_no_more_prompts_are_evaluated_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a cat\n")
    prompts = [f"data.{key}={tmp_path / 'one.txt'}" for key in ("train", "test")]
    assert len(load_prompts(smoked([*prompts, f"cache_dir={tmp_path}"])).test) == 1


CLUSTER = ("fleet.driver=ray", "fleet.address=10.0.0.1:6379")
MOVES = "fleet.learner_placement=spot"


@pytest.mark.parametrize(
    "given",
    [
        (*CLUSTER, "fleet.head=any"),
        (*CLUSTER, f"{MOVES}_then_on_demand", "fleet.on_demand={start: begin, stop: end}"),
        (*CLUSTER, "fleet.target={deadline_h: 5, provider: skypilot, params: {}}"),
        (*CLUSTER, MOVES, "fleet.learner_ranks=4", "fleet.learner_ranks_min=2"),
        (*CLUSTER, "pipeline.next_share=0.1"),
        ("pipeline.axis=prompt", "algorithm.advantage.std=group", "learner.micro_batch_size=16"),
    ],
    ids=lambda given: given[-1].partition("=")[0],
)
def test_what_a_cluster_or_a_large_batch_allows_is_replaced(given: tuple[str, ...], tmp_path: Path) -> None:
    config = smoked([*given, f"cache_dir={tmp_path}"])
    assert (config.fleet.address, config.fleet.learner_ranks) == (None, 1)
    assert config.fleet.learner_placement == load_config(None, given).fleet.learner_placement


def test_a_smoke_run_stays_on_this_machine(tmp_path: Path) -> None:
    assert smoked(["runs_dir=s3://bucket/runs", f"cache_dir={tmp_path}"]).runs_dir == Path("runs")


def test_a_stages_smoke_run_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chain.yaml").write_text("stages: {one: {iterations: 3}, two: {iterations: 3}}\n")
    given = [str(tmp_path / "chain.yaml"), "stage=two", f"runs_dir={tmp_path}", f"cache_dir={tmp_path}"]
    before, _ = _configured(given, None, vote=False, fit=None, smoke=True)
    assert before.name == "chain-smoke-two"
    assert f"Smoke run {before.name}, as configured except for" in capsys.readouterr().out
    (tmp_path / before.name).mkdir()
    again, _ = _configured(given, None, vote=False, fit=None, smoke=True)
    assert again == before
    assert not (tmp_path / before.name).exists()


def test_whatever_the_micro_batch_the_fewer_samples_divide(tmp_path: Path) -> None:
    given = [f"cache_dir={tmp_path}", "rollout.prompts_per_iteration=35", "rollout.group_size=24"]
    for most in range(1, 9):
        config = smoked([*given, f"learner.micro_batch_size={most}"])
        fitting = max(size for size in (1, 2, 4, 8) if size <= most)
        assert config.learner.micro_batch_size == fitting
    for algorithm, trained in (("{name: dgpo}", 24), ("{name: diffusion-dpo, train_samples: 2}", 2)):
        for groups in (1, 5, 7, 35):
            micro = f"learner.micro_batch_size={groups * trained}"
            config = smoked([*given, f"algorithm={algorithm}", micro])
            group = config.algorithm.train_samples or config.rollout.group_size
            assert config.learner.micro_batch_size in (group, groups * trained)


def test_explored_prompts_divide_among_updates(tmp_path: Path) -> None:
    explores = [
        "exploration={sampled_prompts: 5}",
        "learner.updates_per_batch=2",
        "learner.micro_batch_size=48",
    ]
    config = smoked([f"cache_dir={tmp_path}", *explores])
    assert config.rollout.prompts_per_iteration == 6


def test_gpus_that_are_not_here_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = [f"cache_dir={tmp_path}", "model.attention=flash"]
    for device, settings in (
        ("cuda", ["fleet.driver=ray", "fleet.address=10.0.0.1:6379"]),
        ("learner", ["device=cuda"]),
        ("auto", []),
    ):
        asked = [*given, *settings, f"rewards=[{{name: jpeg_size, device: {device}}}]"]
        replaced = smoke_overrides(load_config(EXAMPLES / FIRST, asked))
        config = load_config(EXAMPLES / FIRST, [*asked, *replaced])
        assert config.rewards[0].device == ("cpu" if device == "cuda" else device)
        assert config.model.attention is None
    assert not {"data.train=testbed", "data.test=testbed"} & set(replaced)
    silent = ["like=awm-sd3", f"cache_dir={tmp_path}", "rewards=[{name: 'os.path:basename'}]"]
    assert {"data.train=testbed", "data.test=testbed"} <= set(smoke_overrides(load_config(None, silent)))
    comparing = "rewards=[{name: vote, params: {ask_name: true}}]"
    replaced = smoke_overrides(load_config(EXAMPLES / FIRST, [*given, comparing]))
    config = load_config(EXAMPLES / FIRST, [*given, comparing, *replaced])
    assert config.evaluation.images_per_prompt == 2
    assert config.rewards[0].params == {"ask_name": True, "stand_in": True}
