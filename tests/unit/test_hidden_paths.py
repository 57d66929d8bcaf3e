"""Paths that cannot be looked at, as below others' folders, are not there or are said: without traceback.

Root may look everywhere; a name that is too long for any folder is refused alike.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CLIPModel
from typer.testing import CliRunner

from spotlight.cli import doctor_checks
from spotlight.cli.doctor import Verdict
from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.dry_run.model_checks import require_model
from spotlight.models.text.prompt_encoder import EmbeddingsCache
from spotlight_files.model_errors import ModelError
from spotlight_rewards.models import pretrained_model
from spotlight_rewards.models.pretrained_model import find_file, load_pretrained, load_tokenizer
from spotlight_rewards.originals import original_of
from spotlight_rewards.reading.pp_ocr import read_settings
from spotlight_rewards.reward import RewardInputError, RewardSetupError

HIDDEN = "x" * 300
NOBODYS = "~nobody-of-this-name/model"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("export", HIDDEN), "config.yaml and ledger.sqlite). It cannot be looked at: File name too long."),
        (("train", HIDDEN), "expected a readable YAML file. File name too long"),
        (("tiny", "qwen-image", HIDDEN), "cannot write a small pipeline"),
        (("runs", HIDDEN), "It cannot be looked at: File name too long. Start one"),
        (("dashboard", HIDDEN), "run of that name in runs/. It cannot be looked at: File name too long."),
        (("simulate", HIDDEN), "expected a YAML file, or one of"),
        (("plan", HIDDEN, "--deadline-h", "3"), "expected a YAML file, or one of"),
        (("prompts", "ocr", HIDDEN), "File name too long"),
    ],
)
def test_commands_say_so(
    command: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert said in " ".join(done.output.split())


def test_the_doctor_looks_above(tmp_path: Path) -> None:
    runs, disk = doctor_checks.disk(tmp_path / HIDDEN)
    assert (runs.verdict, disk.what) == (Verdict.OK, "disk")


@pytest.mark.parametrize("key", ["model.path", "model.lora", "model.transformer"])
def test_a_models_file_is_named_by_its_key(key: str) -> None:
    rank = ["learner.lora.rank=8"] if key == "model.lora" else []
    with pytest.raises(ModelError, match=f"{key} is x+, which cannot be looked at .File name too long"):
        require_model(load_config(None, [f"{key}={HIDDEN}", *rank]))


@pytest.mark.parametrize("key", ["model.path", "model.lora", "model.transformer"])
def test_the_home_of_a_user_who_is_not_here_is_no_place(key: str) -> None:
    rank = ["learner.lora.rank=8"] if key == "model.lora" else []
    data = ["data.train=testbed", "data.test=testbed"]
    with pytest.raises(ModelError, match=NOBODYS):
        require_model(load_config(None, [f"{key}={NOBODYS}", *rank, *data]))


@pytest.mark.parametrize("source", [HIDDEN, NOBODYS])
def test_a_reward_names_the_parameter_whose_place_is_none(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_model, "unreachable", lambda: "no hub")
    about = {"key": "reward: model", "remedy": "Name another"}
    cpu = torch.device("cpu")
    for look in (
        lambda: find_file(source, ["weights"], **about),
        lambda: load_tokenizer(source, **about),
        lambda: load_pretrained(CLIPModel, source, unread="(?!)", device=cpu, **about),
        lambda: read_settings(source, {}, **about),
    ):
        with pytest.raises(RewardSetupError, match=r"reward: model is '[x~]"):
            look()
    with pytest.raises(RewardInputError, match="cannot be read as a picture"):
        original_of("first-frame", "a cat", {"reference": source})


def test_a_cache_that_is_hidden_has_nothing_and_says_so_when_written(tmp_path: Path) -> None:
    cache = EmbeddingsCache(tmp_path / HIDDEN, "model", "template", 8, torch.float32)
    assert not cache.has("a cat")
    assert cache.get("a cat") is None
    with pytest.raises(ModelError, match="cannot write prompt embeddings"):
        cache.put("a cat", {"embeds": torch.zeros(1, 1)})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("generate", "demo", "-p", "caf\udce9"), "expected text in UTF-8"),
        (("generate", "demo", "-p", "a cat", "--seed", str(2**64)), "'--seed'"),
        (("tiny", "qwen-image", "there", "--seed", str(2**64)), "'--seed'"),
    ],
)
def test_what_no_model_takes_is_refused(command: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert said in done.output
