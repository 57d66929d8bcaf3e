"""What cannot work is refused before any work, by a message that says what, where and what helps."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from main_job import (
    FILL_DISK,
    GRPO,
    NFT,
    At,
    Job,
    Straight,
    clean_audit,
    outcome,
    run_on_small_disk,
    run_process,
)
from test_resume import contents

from spotlight.config.load import dump_config
from spotlight.models.family import ModelError
from spotlight.store.run_directory import RunDirectory
from spotlight.store.store_errors import OtherConfigurationError, RunInUseError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompt_files import PromptFileError
from spotlight_rewards.reward import RewardInputError, RewardSetupError


class Place:
    """A folder for one case: files to spoil, and a place where no run directory must appear."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.path, self.runs = job, path, path / "runs"

    def model(self) -> Path:
        return Path(shutil.copytree(self.job.pipeline, self.path / "model"))

    def write(self, name: str, text: str) -> Path:
        (self.path / name).write_text(text)
        return self.path / name


def model_without_vae(place: Place) -> str:
    shutil.rmtree(place.model() / "vae")
    return f"model.path={place.path}/model"


def model_whose_heads_do_not_fit(place: Place) -> str:
    config = place.model() / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "axes_dims_rope": [8, 12, 8]}))
    return f"model.path={place.path}/model"


def malformed_prompts(place: Place) -> str:
    lines = ('{"prompt": "a circle"}', '{"prompt": 3}', "a square", '{"prompt": "a cross"}')
    return f"data.train={place.write('bad.jsonl', chr(10).join(lines))}"


def prompts_without_metadata(place: Place) -> str:
    return f"data.train={place.write('plain.txt', 'a circle')}"


CASES: dict[str, tuple[tuple[str | Callable[[Place], str], ...], type[Exception], tuple[str, ...]]] = {
    "model that is not there": (
        ("model.path=/no/such/model",),
        ModelError,
        ("model directory /no/such/model does not exist", "give the path"),
    ),
    "model that is something else": (
        (lambda place: f"model.path={place.path}",),
        ModelError,
        (r"no model_index\.json", "QwenImagePipeline"),
    ),
    "model without a component": (
        (model_without_vae,),
        ModelError,
        (r"/model: component 'vae' \(AutoencoderKLQwenImage\) is missing; found .*transformer/",),
    ),
    "heads that do not fit": (
        (model_whose_heads_do_not_fit,),
        ModelError,
        (r"transformer/config\.json: sum of axes_dims_rope is 28; expected 32",),
    ),
    "LoRA target that matches nothing": (
        ("learner.lora.targets=[to_nowhere]",),
        ModelError,
        (r"^learner\.lora\.targets: 'to_nowhere' matches no linear layer", "nearest: attn.add_k_proj"),
    ),
    "malformed prompts": (
        (malformed_prompts,),
        PromptFileError,
        (r"bad\.jsonl:2: 'prompt' is 3; expected a text", r"bad\.jsonl:3: no JSON .* a square; expected {"),
    ),
    "prompts file that is not there": (
        ("data.test=/no/such/prompts.txt",),
        ConfigError,
        ("data.test", "/no/such/prompts.txt", "readable prompts: a .txt", "No such file"),
    ),
    "tag that no prompt has": (
        ("data.tags=[weather]",),
        PromptFileError,
        (r"^data\.tags: no prompt in .* 'weather'", "counting"),
    ),
    "more held-out prompts than there are": (
        ("evaluation.prompts=100000",),
        ConfigError,
        (r"evaluation\.prompts: found 100000; expected at most \d+, the held-out prompts", "Lower it"),
    ),
    "weights too coarse for a full fine-tune": (
        ("learner.mode=full", "model.dtype=bfloat16"),
        ConfigError,
        (r"model\.dtype: found 'bfloat16'; expected 'float32'", "learner.mode=lora"),
    ),
    "more text than the tokenizer takes": (
        ("model.max_text_tokens=5000",),
        ConfigError,
        (r"model\.max_text_tokens: found 5000", "1024"),
    ),
    "prompts that the reward cannot judge": (
        (prompts_without_metadata, "rewards=[{name: shapes}]"),
        RewardInputError,
        ("a circle", "include"),
    ),
    "reward that does not exist": (
        ("rewards=[{name: shape}]",),
        RewardSetupError,
        ("unknown reward 'shape'", "Did you mean 'shapes'"),
    ),
    "reward whose module is not there": (
        ("rewards=[{name: 'no_such_module:reward'}]",),
        RewardSetupError,
        ("no_such_module",),
    ),
    "size that does not fit": (
        ("rollout.height=18",),
        ModelError,
        (r"^rollout\.height is 18; expected a multiple of 4 pixels", "nearest: 16 or 20"),
    ),
    "unknown key": (
        ("rollout.stepz=3",),
        ConfigError,
        (r"rollout\.stepz", "unknown key", "Did you mean 'steps'"),
    ),
    "value of another kind": (("rollout.steps=many",), ConfigError, (r"rollout\.steps", "many", "integer")),
    "batch that does not divide": (
        ("learner.micro_batch_size=4", "rollout.group_size=3"),
        ConfigError,
        (r"learner\.micro_batch_size: found 4; expected a divisor of the 6 samples", "Nearest: 3 or 6"),
    ),
    "sampler that contradicts the algorithm": (
        (*GRPO, "rollout.sampler=ode"),
        ConfigError,
        (r"rollout\.sampler: found 'ode'", "flow-sde, cps or dance"),
    ),
    "device that is not there": (
        ("device=cuda",),
        ConfigError,
        ("device: found 'cuda'", "Set device=auto or device=cpu"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_work(job: Job, tmp_path: Path, case: str) -> None:
    overrides, kind, said = CASES[case]
    place = Place(job, tmp_path)
    arguments = [each if isinstance(each, str) else each(place) for each in overrides]
    with pytest.raises(kind) as caught:
        job.train("refused", f"runs_dir={place.runs}", *arguments)
    for part in said:
        assert re.search(part, str(caught.value)), str(caught.value)
    assert not place.runs.exists()


def test_a_run_directory_of_another_configuration_is_left_alone(job: Job) -> None:
    job.train("mine", *NFT, "iterations=1")
    before = contents(job.root / "mine")
    with pytest.raises(OtherConfigurationError) as caught:
        job.train("mine", *NFT, "iterations=1", "rollout.steps=4", "run_seed=7")
    steps, seed = "rollout.steps: 3 in the run, 4 now", "run_seed: 0 in the run, 7 now"
    for part in (str(job.root / "mine"), steps, seed, "To start again: choose another name"):
        assert part in str(caught.value)
    assert contents(job.root / "mine") == before


def test_a_run_that_another_process_works_on_is_left_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spotlight.runtime.assembly.components.load_family", unreachable
    )  # refused before that
    config = dump_config(job.config("busy", f"runs_dir={tmp_path}", "iterations=1"))
    with RunDirectory.open(tmp_path, "busy", config), pytest.raises(RunInUseError, match="in use by process"):
        job.train("busy", f"runs_dir={tmp_path}", "iterations=1")


def unwritable(tmp_path: Path) -> Path:
    """A folder in which this user can make nothing: root must look for one where nobody can."""
    if os.geteuid() == 0:
        return Path("/sys/kernel")
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    return place


def unreachable(*_: object) -> None:
    raise AssertionError("the model was loaded")


def test_a_place_that_cannot_be_written_is_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = unwritable(tmp_path)
    before = sorted(place.iterdir())
    monkeypatch.setattr(
        "spotlight.runtime.assembly.components.load_family", unreachable
    )  # refused before that
    with pytest.raises(StoreError, match=r"^runs_dir: .* cannot be made: .*Set runs_dir to") as caught:
        job.train("refused", f"runs_dir={place}")
    assert str(place / "refused") in str(caught.value)
    assert sorted(place.iterdir()) == before

    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreError, match="Not a directory"):
        job.train("refused", f"runs_dir={file}")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(At("work training", 3, FILL_DISK), marks=pytest.mark.slow),
        At(".writing-000003", 1, FILL_DISK),
    ],
)
def test_a_full_disk_stops_the_run_and_loses_nothing_committed(
    job: Job, straight: Straight, moment: At
) -> None:
    name = f"full-{moment.count}"
    small, kept = job.root / f"disk-{moment.count}", job.root / name
    arguments, answer = job.arguments(name, *NFT), job.root / f"{name}.json"
    ended = run_on_small_disk([*arguments, f"runs_dir={small}"], moment, answer=answer, kept=kept)
    if ended is None:
        pytest.skip("this user may not mount a small disk")
    assert ended.error is not None
    assert ended.error.startswith("StoreError: ")
    for part in (str(small / name), "no space left (0 B free)", "run the same command again"):
        assert part in ended.error

    ended = run_process(arguments, answer=answer)
    assert any("resuming after iteration 2" in note for note in ended.notes)
    assert ended.iterations == (2, 3)
    assert outcome(kept) == straight("diffusion-nft with EMA")[1]
    clean_audit(kept)
