"""What a person can correct is said in words, exit status 2 and no traceback, before anything is touched."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotlight.cli.main import app


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def assert_refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    message = " ".join(result.stderr.split())
    assert message.startswith("Error: ")
    for words in said:
        assert words in message


DATA = ("data.train=testbed", "data.test=testbed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout.stepz=8"], ["rollout.stepz", "Did you mean 'steps'?"]),
        (["iterations=0"], ["iterations", "greater than 0"]),
        (["absent.yaml"], ["absent.yaml", "No such file"]),
        (["name=a", "other.yaml"], ["'other.yaml'", "key=value"]),
        (["model.path=absent/dir/here", *DATA], ["absent/dir/here does not exist"]),
        (
            ["model.path=my models/qwen", *DATA],
            ["my models/qwen does not exist (relative to the current"],
        ),
        (["data.train=absent.txt"], ["data.train: found absent.txt (relative to the current directory /"]),
        (["model.max_text_tokens=1025"], ["model.max_text_tokens", "1025", "less than or equal to 1024"]),
        (["learner.mode=full", "model.dtype=bfloat16"], ["model.dtype: found 'bfloat16'", "'float32'"]),
        (["evaluation.prompts=999"], ["evaluation.prompts: found 999", "at most"]),
        (["data.tags=[weather]"], ["data.tags: no prompt in"]),
    ],
)
def test_bad_arguments_of_a_dry_run(here: Path, arguments: list[str], said: list[str]) -> None:
    assert_refused(invoke("train", "--dry-run", *arguments), *said)
    assert not (here / "runs").exists()


def test_malformed_prompts_are_named_by_line(here: Path) -> None:
    lines = [json.dumps({"prompt": "a circle"}), "{not json", json.dumps({"text": "no prompt"})]
    (here / "bad.jsonl").write_text("\n".join(lines))
    assert_refused(invoke("train", "--dry-run", "data.train=bad.jsonl"), "bad.jsonl:2", "bad.jsonl:3")


@pytest.mark.parametrize("reward", ["shapes", "ocr-onnx"])
def test_a_dry_run_refuses_prompts_that_a_reward_cannot_score(here: Path, reward: str) -> None:
    (here / "train.txt").write_text("two cats\n")
    given = "data.train=train.txt", "data.test=train.txt", f"rewards=[{{name: {reward}}}]"
    assert_refused(invoke("train", "--dry-run", *given), f"{reward} reward", "'two cats'")


def test_a_target_that_matches_nothing_and_a_size_that_does_not_suit(
    here: Path, random_pipeline: Path
) -> None:
    model = (f"model.path={random_pipeline}", "data.train=testbed", "data.test=testbed")
    targets = invoke("train", "--dry-run", *model, "learner.lora.targets=[to_kk]")
    assert_refused(targets, "learner.lora.targets: 'to_kk' matches no linear layer", "attn.to_k")
    assert_refused(
        invoke("train", "--dry-run", *model, "rollout.height=34"), "rollout.height is 34", "32 or 36"
    )


def test_a_picture_of_nothing(here: Path) -> None:
    for text in ("", " \n"):
        result = invoke("generate", "any", "--prompt", "a cat", "--prompt", text)
        assert_refused(result, f"--prompt: found ['a cat', {text!r}]", "Say what to draw")


def test_a_component_that_is_missing(here: Path, random_pipeline: Path) -> None:
    import shutil

    shutil.copytree(random_pipeline, here / "broken")
    shutil.rmtree(here / "broken" / "vae")
    assert_refused(invoke("train", "--dry-run", "model.path=broken", *DATA), "component 'vae'", "is missing")


@pytest.mark.parametrize("command", ["audit", "card", "eval", "export"])
def test_commands_of_a_run_say_which_runs_there_are(here: Path, command: str) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "config.yaml").write_text("name: mine\n")
    assert_refused(invoke(command, "yours"), "'yours' is no run directory", "mine")


@pytest.mark.parametrize("option", ["--max-age-h", "--timeout-s"])
@pytest.mark.parametrize("value", ["inf", "1e12"])
def test_times_without_end_are_refused(here: Path, option: str, value: str) -> None:
    assert_refused(invoke("prices", option, value), f"{option}: found", "expected at most 1e+06")


def test_a_run_without_a_ledger_cannot_be_audited(here: Path) -> None:
    (here / "config.yaml").write_text("name: mine\n")
    assert_refused(invoke("audit", str(here)), "ledger.sqlite", "no ledger here")


@pytest.mark.parametrize(
    "name",
    [
        "spotlight.cluster.learner.learner_group.LearnerError",
        "spotlight.training.learner_state.StateError",
        "spotlight_weights.weight_errors.WeightsError",
    ],
)
def test_errors_that_end_a_run_with_a_remedy_have_no_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, _, kind = name.rpartition(".")
    error = getattr(import_module(module), kind)("use an earlier checkpoint")

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr("spotlight.cli.runs.train.driver_of", lambda *_: failing)
    assert_refused(invoke("train"), "use an earlier checkpoint")


def test_unexpected_errors_keep_their_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("spotlight.dry_run.run_plan.make_plan", broken)
    assert isinstance(invoke("train", "--dry-run").exception, ZeroDivisionError)
