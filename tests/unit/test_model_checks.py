"""What a model, ranks or rewards cannot do is refused before anything is downloaded or loaded."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from safetensors.numpy import save_file

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts, load_prompts
from spotlight.dry_run.model_checks import (
    require_model,
    require_prompts,
    require_references,
    require_supported,
)
from spotlight.dry_run.model_plan import NotHere, planned_files, read_transformer
from spotlight.dry_run.run_plan import make_plan, text_tokens
from spotlight.models.families.qwen_image_21 import QwenImage21
from spotlight.registry import FAMILIES
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.reward import RewardSetupError

A14B = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
KLEIN = "black-forest-labs/FLUX.2-klein-4B"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: no model is here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def config(family: str, path: str, **sections: object) -> RunConfig:
    size = {"height": 512, "width": 512}
    rollout = size | sections.pop("rollout", {})  # type: ignore[operator]
    model = {"family": family, "path": path} | sections.pop("model", {})  # type: ignore[operator]
    return build_config({"model": model, "rollout": rollout, **sections}, "the test")


@pytest.mark.parametrize(
    ("family", "path", "sections", "message"),
    [
        (
            "sd3",
            "stabilityai/stable-diffusion-3.5-large",
            {"rollout": {"height": 4096}},
            r"rollout\.height is 4096; expected at most 3072: .*no later positions",
        ),
        (
            "flux2-klein",
            KLEIN,
            {"rollout": {"true_cfg_scale": 4.0}},
            r"rollout\.true_cfg_scale is 4; expected 1: .*klein-4B is distilled.*Set it to 1",
        ),
        (
            "flux2-dev",
            "black-forest-labs/FLUX.2-dev",
            {"rollout": {"true_cfg_scale": 4.0, "embedded_guidance": 4.0}},
            r"rollout\.true_cfg_scale is 4; expected 1: Flux2Pipeline takes no negative prompt. Set it to 1",
        ),
        (
            "flux2-klein",
            "nobody/unpublished",
            {"model": {"max_text_tokens": 513}},
            r"model\.max_text_tokens is 513; expected 1 to 512",
        ),
        (
            "wan",
            "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            {"rollout": {"frames": 6}},
            r"rollout\.frames is 6; expected 1 more than a multiple of 4",
        ),
        (
            "wan",
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            {"fleet": {"driver": "ray", "sequence_parallel": {"degrees": [1, 8]}}},
            r"fleet\.sequence_parallel\.degrees has 8; expected divisors of 12, .*attention heads",
        ),
        (
            "wan",
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            {
                "fleet": {"driver": "ray", "sequence_parallel": {"degrees": [1, 8, 16], "guidance": True}},
                "rollout": {"true_cfg_scale": 4.0},
            },
            r"fleet\.sequence_parallel\.degrees has 16; expected divisors of 12, .*attention heads, times 2",
        ),
        (
            "wan",
            A14B,
            {"exploration": {"step_cache": 2}},
            r"exploration\.step_cache: found 2; expected nothing with .*two transformers",
        ),
        (
            "sd3",
            "nobody/unpublished",
            {"exploration": {"step_cache": 2}},
            r"diffusers has no step cache for model\.family=sd3: leave it out",
        ),
    ],
)
def test_a_refusal_names_key_value_and_remedy(
    family: str, path: str, sections: dict[str, object], message: str
) -> None:
    settings = config(family, path, **sections)
    with pytest.raises((ModelError, ConfigError), match=message):
        require_model(settings)


@pytest.mark.parametrize(
    ("family", "model"), [(name, model) for name in FAMILIES for model in FAMILIES.load(name).published]
)
def test_published_models_can_do_what_is_usual(family: str, model: str) -> None:
    require_model(config(family, model))


def test_fixed_noise_levels_fix_the_number_of_steps() -> None:
    (published,) = QwenImage21.published.values()
    known = {**published.configs, "model_index": {"sample_sigmas": [1.0, 0.5, 0.2]}}
    files = PipelineFiles(Path("somebody/turbo"), known=known)
    QwenImage21.check_steps(files, 3)
    with pytest.raises(ModelError, match=r"steps is 4; expected as many as .*sample_sigmas"):
        QwenImage21.check_steps(files, 4)


@pytest.mark.parametrize(
    ("exploration", "key"),
    [
        ({"steps": 2}, r"exploration\.steps is 2"),
        (
            {"planner": {"seed_counts": [64], "step_counts": [1, 3]}},
            r"exploration\.planner\.step_counts is 1",
        ),
    ],
)
def test_previews_of_another_number_of_steps_are_refused_too(
    exploration: dict[str, object], key: str
) -> None:
    (published,) = QwenImage21.published.values()
    files = PipelineFiles(
        Path("turbo"), known={**published.configs, "model_index": {"sample_sigmas": [1.0, 0.5, 0.2]}}
    )
    sections = {"rollout": {"steps": 3}, "evaluation": {"steps": 3}}
    require_supported(config("qwen-image-2.1", "turbo", **sections, exploration={"steps": 3}), files)
    with pytest.raises(ModelError, match=key + "; expected as many as .*sample_sigmas"):
        require_supported(config("qwen-image-2.1", "turbo", **sections, exploration=exploration), files)


@pytest.mark.parametrize(
    ("family", "references", "message"),
    [
        (
            "qwen-image",
            ("/cat.png",),
            r"found /cat\.png; expected none, .*qwen-image draws",
        ),
        ("qwen-image-edit", (), r"references of the prompt 'a cat': found none; .*draws from a picture"),
        ("flux2-dev", ("/cat.png",), r"found /cat\.png; expected none, .*flux2-dev draws"),
        ("flux-kontext", ("/cat.png",) * 2, r"found 2; expected at most 1, .*flux-kontext reads"),
    ],
)
def test_reference_pictures_are_for_families_that_edit(
    family: str, references: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        require_references(config(family, "nobody/unpublished"), references, "a cat")


@pytest.fixture
def kontext(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its published model, which scales references to one of two sizes."""
    sizes = "diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS"
    monkeypatch.setattr(sizes, [(800, 1328), (1024, 1024)])
    return "black-forest-labs/FLUX.1-Kontext-dev"


def about(path: Path, size: tuple[int, int], orientation: int = 1) -> Prompts:
    """Prompts about one picture of (width, height), stored so that it is shown upright."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", size).save(path, exif=exif)
    prompt = Prompt(PromptId("p"), "a cat", {"references": [str(path)]})
    return Prompts((prompt,), (prompt,))


def test_degrees_must_divide_a_picture_its_text_and_its_reference(tmp_path: Path, kontext: str) -> None:
    split = {"driver": "ray", "sequence_parallel": {"degrees": [1, 2, 4]}}
    run, path = (
        config("flux-kontext", kontext, model={"max_text_tokens": 512}, fleet=split),
        tmp_path / "a.png",
    )
    require_model(run)  # 1,024 tokens of the picture, 512 of the text
    require_prompts(run, about(path, (200, 200)))  # 4,096
    uneven = (
        rf"fleet\.sequence_parallel\.degrees has 4; expected divisors of 5686, .*its reference {path}: .*"
        r"Cut the reference .*change rollout\.height or width, or leave the degree out"
    )
    for size, orientation in (((120, 200), 1), ((200, 120), 6)):  # 4,150
        with pytest.raises(ModelError, match=uneven):
            require_prompts(run, about(path, size, orientation))
    with pytest.raises(ModelError, match=r"a\.png has 8 x 200 pixels; expected at least 16 a side"):
        require_prompts(run, about(path, (8, 200)))
    path.unlink()
    with pytest.raises(ModelError, match=r"^reference picture .*a\.png cannot be read \("):
        require_prompts(
            run, Prompts((prompt := Prompt(PromptId("p"), "", {"references": [str(path)]}),), (prompt,))
        )


def test_a_published_model_of_another_family_is_reported_with_its_own() -> None:
    with pytest.raises(ModelError, match=r"is a StableDiffusion3Pipeline; .*Set model\.family=sd3,"):
        require_model(config("qwen-image", "stabilityai/stable-diffusion-3.5-medium"))


def test_flow_grpo_fast_without_a_window_is_noted() -> None:
    fast = {"algorithm": {"name": "flow-grpo-fast"}, "rollout": {"sampler": "flow-sde"}}
    (note,) = make_plan(build_config(fast, "the test")).notes
    assert "set rollout.sde_window={kind: random, size: 2, high: 5}" in note
    window = {"kind": "random", "size": 2, "high": 5}
    fast["rollout"]["sde_window"] = window  # type: ignore[assignment]
    assert make_plan(build_config(fast, "the test")).notes == ()


def test_references_are_planned_with_the_text(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b c", "references": ["cat.png", "cat.png"]}')
    data = {"train": str(tmp_path / "a.jsonl"), "test": str(tmp_path / "a.jsonl")}
    settings = config("qwen-image-edit", "Qwen/Qwen-Image-Edit-2511", data=data)
    assert text_tokens(settings, load_prompts(settings)) == 12 + 2 * (4096 + 169)


@pytest.mark.parametrize("path", ["my models/qwen", "models/a--b", "models/a..b", "a/b/c"])
def test_a_missing_directory_that_can_be_no_hub_id_is_named(path: str) -> None:
    with pytest.raises(ModelError, match=f"model directory {path} does not exist .*: give the path"):
        planned_files(config("qwen-image", path))


def test_a_model_without_its_second_transformer_counts_as_not_downloaded(hub_cache: Path) -> None:
    """Half of the weights would be half of the plan."""
    settings = config("wan", A14B)
    root = hub_cache / f"models--{A14B.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123456789abcdef"
    wan = FAMILIES.load("wan")
    names = {name: ["diffusers", part.classes[0]] for name, part in wan.components.items()}
    for name in ("transformer", "transformer_2", "vae"):
        (snapshot / name).mkdir(parents=True)
        (snapshot / name / "config.json").write_text(json.dumps(dict(wan.published[A14B].configs[name])))
        if name != "transformer_2":
            save_file({"w.weight": _numbers(3)}, snapshot / name / "w.safetensors")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(snapshot.name)
    index = {"_class_name": wan.pipeline_class, "boundary_ratio": 0.875, **names}
    (snapshot / "model_index.json").write_text(json.dumps(index))
    files = planned_files(settings)
    assert isinstance(files, PipelineFiles)
    assert files.known is not None
    assert isinstance(read_transformer(settings), NotHere)
    save_file({"w.weight": _numbers(5)}, snapshot / "transformer_2" / "w.safetensors")
    complete = read_transformer(settings)
    assert not isinstance(complete, NotHere)
    assert complete.parameters == 9 + 25


def _numbers(side: int) -> np.ndarray:
    return np.zeros((side, side), np.float32)


def test_what_does_not_fit_the_ranks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    split = build_config({"algorithm": {"name": "dgpo"}, "learner": {"micro_batch_size": 8}}, "the test")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (note, *_) = make_plan(split).notes
    assert note.startswith("In one process: learner.micro_batch_size: found 8; expected a multiple of ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    make_plan(split)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="this configuration on 1 ranks"):
        make_plan(split)


def test_a_reward_of_ones_own_is_resolved_and_its_params_compared_but_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_planned_rewards.py").write_text(
        "def redness(images, prompts, metadata, gain=1): raise AssertionError\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    name = "my_planned_rewards:redness"
    make_plan(build_config({"rewards": [{"name": name, "params": {"gain": 2}}]}, "the test"))
    for wrong, message in (
        ({"name": name.removesuffix("s")}, "has no 'rednes'; the functions it defines are: redness"),
        ({"name": f"un{name}"}, "there is no module 'unmy_planned_rewards'"),
        ({"name": name, "params": {"gian": 2}}, "unexpected params 'gian'; it accepts gain"),
    ):
        with pytest.raises(RewardSetupError, match=message):
            make_plan(build_config({"rewards": [wrong]}, "the test"))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_guidance_that_is_no_scale_is_refused(scale: float, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"guidance is .*; expected a finite number"):
        FAMILIES.load("qwen-image").check_guidance(PipelineFiles(tmp_path), scale, "guidance")
