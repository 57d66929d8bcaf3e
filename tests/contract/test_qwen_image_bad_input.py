"""A model that cannot be used is refused at once, by a message that names what is wrong and what helps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch

from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.training.lora_export import save_merged
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import weight_files
from spotlight_rewards.registry import RegistryError


def load(path: str | Path, cache: Path, **changes: object) -> QwenImage:
    arguments = {"device": "cpu", "dtype": torch.float32, "embeddings_cache": cache, **changes}
    return QwenImage.load(path, **arguments)  # type: ignore[arg-type]


@pytest.fixture
def broken(random_pipeline: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(random_pipeline, tmp_path / "model"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tensor(path: Path) -> None:
    tensors = safetensors.torch.load_file(path)
    del tensors["proj_out.weight"]
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


WEIGHTS = "diffusion_pytorch_model.safetensors"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (
        lambda d: (d / "model_index.json").unlink(),
        r"no model_index\.json: .*QwenImagePipeline.*, found scheduler/, text_encoder/, ",
    ),
    "another pipeline": (
        lambda d: edit(d / "model_index.json", _class_name="FluxPipeline"),
        r"describes a FluxPipeline; expected a QwenImagePipeline\. Set model\.family=flux,",
    ),
    "index cut": (lambda d: cut(d / "vae" / "config.json"), r"vae/config\.json is not JSON"),
    "component missing": (
        lambda d: shutil.rmtree(d / "vae"),
        r"component 'vae' \(AutoencoderKLQwenImage\) is missing; found .*transformer/",
    ),
    "component of another class": (
        lambda d: edit(d / "model_index.json", vae=["diffusers", "AutoencoderKL"]),
        r"component 'vae' is a AutoencoderKL; expected a AutoencoderKLQwenImage",
    ),
    "component not named": (
        lambda d: edit(d / "model_index.json", vae=None),
        r"component 'vae' .* is not named in model_index\.json",
    ),
    "no weights": (
        lambda d: (d / "transformer" / WEIGHTS).unlink(),
        r"transformer has no \*\.safetensors weights; found config\.json",
    ),
    "weights cut": (lambda d: cut(d / "transformer" / WEIGHTS), r"bytes\) is cut or corrupt .* again"),
    "text encoder cut": (
        lambda d: cut(d / "text_encoder" / "model.safetensors"),
        r"text_encoder/model\.safetensors .* is cut or corrupt",
    ),
    "weights are something else": (
        lambda d: (d / "vae" / WEIGHTS).write_bytes(b"<html>not found</html>" * 99),
        r"vae/.* is cut or corrupt",
    ),
    "shard missing": (
        lambda d: (d / "transformer" / f"{WEIGHTS}.index.json").write_text(
            json.dumps({"weight_map": {"proj_out.weight": "model-00001-of-00002.safetensors"}})
        ),
        r"1 of 1 weight files named in .* are missing, first model-00001-of-00002",
    ),
    "index of others": (
        lambda d: (
            (d / "vae" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": WEIGHTS}}))
            and shutil.copy(
                d / "vae" / WEIGHTS, d / "vae" / "diffusion_pytorch_model-00002-of-00002.safetensors"
            )
        ),
        r"vae has .*00002-of-00002.* beside the 1 weight files that .*index\.json names",
    ),
    "weights twice": (
        lambda d: shutil.copy(d / "vae" / WEIGHTS, d / "vae" / "model.safetensors"),
        r"vae: diffusion_pytorch_model\.safetensors and model\.safetensors both have '",
    ),
    "tensor missing": (
        lambda d: drop_tensor(d / "transformer" / WEIGHTS),
        r"1 missing tensors, first 'proj_out\.weight'",
    ),
    "weights of another shape": (
        lambda d: edit(d / "transformer" / "config.json", num_attention_heads=8),
        r"cannot load QwenImageTransformer2DModel from ",
    ),
    "decoder without blocks": (
        lambda d: edit(d / "vae" / "config.json", dim_mult=[]),
        r"cannot load AutoencoderKLQwenImage from .*vae: cannot access local",
    ),
    "layers missing": (
        lambda d: edit(d / "transformer" / "config.json", num_layers=3),
        r"missing tensors, first 'transformer_blocks\.2\.",
    ),
    "layers superfluous": (
        lambda d: edit(d / "transformer" / "config.json", num_layers=1),
        r"unexpected tensors, first 'transformer_blocks\.1\.",
    ),
    "rope does not fit heads": (
        lambda d: edit(d / "transformer" / "config.json", axes_dims_rope=[8, 12, 8]),
        r"sum of axes_dims_rope is 28; expected 32 \(attention_head_dim\)",
    ),
    "text width": (
        lambda d: edit(d / "text_encoder" / "config.json", text_config={"hidden_size": 128}),
        r"joint_attention_dim is 64; expected 128",
    ),
    "stochastic scheduler": (
        lambda d: edit(d / "scheduler" / "scheduler_config.json", stochastic_sampling=True),
        r"scheduler_config\.json sets stochastic_sampling",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_directory_is_refused(broken: Path, tmp_path: Path, what: str) -> None:
    spoil, message = SPOILED[what]
    spoil(broken)
    with pytest.raises(ModelError, match=message):
        load(broken, tmp_path / "cache")


def test_a_variant_beside_the_weights_is_not_read(broken: Path, tmp_path: Path) -> None:
    weights = broken / "transformer" / WEIGHTS
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert weight_files(weights.parent) == [weights]
    load(broken, tmp_path / "cache")


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "model", "a/b/c"])
def test_a_path_that_is_not_there_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelError, match=rf"model directory {path} does not exist( \(.*\))?: give the path"):
        load(path, tmp_path)


def test_a_hub_id_out_of_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'Qwen/Qwen-Image' is no directory here.*nor reachable"):
        load("Qwen/Qwen-Image", tmp_path)


def test_a_file_is_refused(random_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a file; expected a pipeline directory"):
        load(random_pipeline / "model_index.json", tmp_path)


def test_a_hub_model_in_the_hub_cache_is_used_offline(
    random_pipeline: Path, offline: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = offline / "models--acme--tiny"
    shutil.copytree(random_pipeline, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    family = load("acme/tiny", tmp_path / "cache")
    local = load(random_pipeline, tmp_path / "cache")
    assert torch.equal(
        family.encode(["one red circle"])[0]["embeds"],
        local.encode(["one red circle"])[0]["embeds"],
    )
    merged = save_merged(family, tmp_path / "merged", dict(local.transformer.state_dict()))
    assert (merged / "text_encoder" / "model.safetensors").is_file()


def test_arguments_out_of_range_are_refused(random_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype of the transformer is torch\.float16; expected"):
        load(random_pipeline, tmp_path, dtype=torch.float16)
    with pytest.raises(ModelError, match="max_text_tokens is 2000; expected 1 to 1024"):
        load(random_pipeline, tmp_path, max_text_tokens=2000)
    with pytest.raises(ModelError, match="revision 'main' is given for the local directory"):
        load(random_pipeline, tmp_path, revision="main")
    with pytest.raises(RegistryError, match=r"model\.family is 'fluxx'; expected 'qwen-image'"):
        FAMILIES.load("fluxx")
    assert FAMILIES.load("qwen-image") is QwenImage


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (MediaSize(34, 32), r"^height is 34; expected a multiple of 4 pixels .*nearest: 32 or 36"),
        (MediaSize(32, 33), r"^width is 33; .*nearest: 32 or 36"),
        (MediaSize(32, 2), r"^width is 2; .*nearest: 4$"),
        (MediaSize(0, 32), r"^height is 0; .*nearest: 4$"),
        (MediaSize(-4, 32), r"^height is -4; .*nearest: 4$"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    random_pipeline: Path, tmp_path: Path, size: MediaSize, message: str
) -> None:
    family = load(random_pipeline, tmp_path)
    for use in (family.check_size, family.latent_shape):
        with pytest.raises(ModelError, match=message):
            use(size)


def test_embeddings_of_another_encoder_are_refused(random_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\[3, 65\]}; .* takes {'embeds': \['tokens', 64\]}"):
        load(random_pipeline, tmp_path).collate([Condition({"embeds": torch.zeros(3, 65)})])
