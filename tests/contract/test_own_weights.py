"""A run starts from a LoRA or from a fine-tuned transformer; wrong ones are refused by name and shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor

from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots, Slot, WeightSlots
from spotlight.report.loading import loading_snippet
from spotlight.runtime.assembly import components as build
from spotlight.training.lora_export import save_lora
from spotlight_files.lora_file import read_lora
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError

SIZE = MediaSize(16, 16)
SPEC = LoraSpec(rank=3, alpha=6.0, targets=("to_q", "img_mlp.net.2"))


def config(pipeline: Path, cache: Path, *settings: str) -> RunConfig:
    fixed = (f"model.path={pipeline}", f"cache_dir={cache}", "learner.lora.targets=[to_q, img_mlp.net.2]")
    return load_config(None, [*fixed, "learner.lora.rank=3", "learner.lora.alpha=6", *settings])


def slots_of(settings: RunConfig) -> tuple[QwenImage, WeightSlots]:
    family = build.load_family(settings, torch.device("cpu"))
    assert isinstance(family, QwenImage)
    return family, build.make_slots(settings, family, build.make_algorithm(settings))


@torch.no_grad()
def velocity(family: QwenImage, slots: WeightSlots, slot: Slot) -> Tensor:
    latents = torch.randn(1, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(3))
    condition = family.collate(family.encode(["one red circle"]))
    with slots.use(slot) as model:
        return family.velocity(model, latents, torch.tensor([0.6]), condition, None, SIZE)


@pytest.fixture(scope="module")
def lora(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A LoRA as an earlier run left it, and the velocity with it."""
    folder = tmp_path_factory.mktemp("lora")
    family = QwenImage.load(random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=folder)
    slots = LoraSlots(family.transformer, SPEC)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in slots.parameters("policy").values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_lora(family, folder, slots.state("policy"), slots.metadata())
    return folder, velocity(family, slots, "policy")


@pytest.mark.parametrize("named", ["directory", "file"])
def test_policy_and_reference_start_with_the_lora(
    random_pipeline: Path, tmp_path: Path, lora: tuple[Path, Tensor], named: str
) -> None:
    folder, expected = lora
    path = folder if named == "directory" else next(folder.glob("*.safetensors"))
    family, slots = slots_of(config(random_pipeline, tmp_path, f"model.lora={path}"))
    assert {
        slot: torch.equal(velocity(family, slots, slot), expected) for slot in slots.slots
    } == dict.fromkeys(slots.slots, True)
    with torch.no_grad():
        for parameter in slots.trainable_parameters().values():
            parameter.add_(1.0)
    assert torch.equal(velocity(family, slots, "reference"), expected)
    assert not torch.equal(velocity(family, slots, "policy"), expected)


def test_a_lora_acts_alike_under_another_alpha(
    random_pipeline: Path, tmp_path: Path, lora: tuple[Path, Tensor]
) -> None:
    folder, expected = lora
    settings = config(random_pipeline, tmp_path, f"model.lora={folder}", "learner.lora.alpha=7")
    family, slots = slots_of(settings)
    assert slots.metadata()["lora_alpha"] == 7  # type: ignore[attr-defined]
    for slot in slots.slots:
        torch.testing.assert_close(velocity(family, slots, slot), expected)


def test_a_lora_that_does_not_fit_is_refused(
    random_pipeline: Path, tmp_path: Path, lora: tuple[Path, Tensor]
) -> None:
    folder, _ = lora
    starts = f"model.lora={folder}"
    with pytest.raises(ModelError, match=r"learner\.lora\.rank is 4; expected 3, that of model\.lora"):
        slots_of(config(random_pipeline, tmp_path, starts, "learner.lora.rank=4"))
    with pytest.raises(ModelError, match=r"model\.lora=.*lacks 4 tensors, first .*to_k.*other LoRA targets"):
        slots_of(
            config(random_pipeline, tmp_path, starts, "learner.lora.targets=[to_q, to_k, img_mlp.net.2]")
        )
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, other)
    with pytest.raises(ModelError, match=r"model\.lora: .*has 1 tensors, none of a transformer's LoRA"):
        slots_of(config(random_pipeline, tmp_path, f"model.lora={other}"))
    with pytest.raises(ModelError, match=r"model\.lora: cannot read a LoRA from .*nowhere"):
        slots_of(config(random_pipeline, tmp_path, f"model.lora={tmp_path / 'nowhere'}"))
    with pytest.raises(ConfigError, match=r"model\.lora: found .*expected nothing with learner\.mode=full"):
        config(random_pipeline, tmp_path, starts, "learner.mode=full")


@pytest.mark.parametrize("named", ["directory", "file"])
def test_a_fine_tuned_transformer_replaces_the_pipelines(
    random_pipeline: Path, tmp_path: Path, named: str
) -> None:
    family, slots = slots_of(config(random_pipeline, tmp_path))
    before = velocity(family, slots, "reference")
    tuned = QwenImage.load(random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path)
    with torch.no_grad():
        tuned.transformer.get_parameter("proj_out.weight").mul_(2.0)
    folder = tmp_path / "tuned"
    tuned.transformer.save_pretrained(folder)
    path = folder if named == "directory" else next(folder.glob("*.safetensors"))
    family, slots = slots_of(config(random_pipeline, tmp_path, f"model.transformer={path}"))
    after = velocity(family, slots, "reference")
    snippet = loading_snippet(config(random_pipeline, tmp_path, f"model.transformer={path}"), Path("lora"))
    *loading, _lora, _picture = snippet.splitlines()
    plain: dict[str, Any] = {}
    exec("\n".join(loading), plain)  # what users are told to run
    assert torch.equal(plain["pipe"].transformer.proj_out.weight, tuned.transformer.proj_out.weight)
    bias = family.transformer.get_parameter("proj_out.bias")
    assert torch.allclose(after - bias, 2 * (before - bias), atol=1e-5)


def test_a_transformer_of_another_model_is_refused_by_name_and_shape(
    random_pipeline: Path, tmp_path: Path
) -> None:
    family = QwenImage.load(random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path)
    state = {name: tensor.clone() for name, tensor in family.transformer.state_dict().items()}
    for change, message in (
        (
            {"proj_out.weight": torch.ones(2, 2)},
            r"'proj_out\.weight' .* has shape \[2, 2\]; expected \[48, 128\]",
        ),
        (
            {"model.other": torch.ones(1)},
            r"has unknown 1 tensors, first 'model\.other'; expected the \d+ of Qwen",
        ),
        ({"proj_out.weight": None}, r"lacks 1 tensors, first 'proj_out\.weight'"),
    ):
        changed = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        safetensors.torch.save_file(changed, tmp_path / "t.safetensors")
        with pytest.raises(ModelError, match=rf"model\.transformer: .*{message}"):
            slots_of(config(random_pipeline, tmp_path, f"model.transformer={tmp_path / 't.safetensors'}"))
    folder = tmp_path / "other"
    family.transformer.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "zero_cond_t": True}))
    for source, message in (
        (folder, r"other/config\.json has zero_cond_t = True; expected False"),
        (random_pipeline, r"is a whole pipeline; expected its transformer: .*/transformer"),
    ):
        with pytest.raises(ModelError, match=rf"model\.transformer: .*{message}"):
            slots_of(config(random_pipeline, tmp_path, f"model.transformer={source}"))
    twice = tmp_path / "twice"
    twice.mkdir()
    safetensors.torch.save_file(state, twice / "model.safetensors")
    safetensors.torch.save_file({n: 0 * t for n, t in state.items()}, twice / "model_1.safetensors")
    with pytest.raises(ModelError, match=r"model\.transformer: .*model\.safetensors and model_1\.saf"):
        slots_of(config(random_pipeline, tmp_path, f"model.transformer={twice}"))
    with pytest.raises(ModelError, match=r"model\.transformer: .*nowhere is neither"):
        slots_of(config(random_pipeline, tmp_path, f"model.transformer={tmp_path / 'nowhere'}"))


def test_one_of_several_lora_files_is_not_guessed(lora: tuple[Path, Tensor], tmp_path: Path) -> None:
    file = next(lora[0].glob("*.safetensors"))
    for name in ("step-10.safetensors", "step-20.safetensors"):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(ModelError, match=r"has 2 .safetensors files: step-10.*, step-20.*; expected one"):
        read_lora("QwenImagePipeline", str(tmp_path))
    assert read_lora("QwenImagePipeline", str(tmp_path / "step-20.safetensors")).rank == SPEC.rank


def test_the_folder_of_a_peft_adapter_is_read_with_its_alpha(
    random_pipeline: Path, tmp_path: Path, lora: tuple[Path, Tensor]
) -> None:
    family = QwenImage.load(random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path)
    fields = LoraConfig(r=3, lora_alpha=6, target_modules=[*SPEC.targets])
    layers = read_lora("QwenImagePipeline", str(lora[0])).with_alpha(6).layers
    adapted = get_peft_model(family.transformer, fields)
    set_peft_model_state_dict(adapted, {f"base_model.model.{name}": each for name, each in layers.items()})
    adapted.save_pretrained(tmp_path / "peft")  # as flow_grpo does
    family, slots = slots_of(config(random_pipeline, tmp_path, f"model.lora={tmp_path / 'peft'}"))
    assert torch.equal(velocity(family, slots, "policy"), lora[1])
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({**described, "use_rslora": True}))
    with pytest.raises(ModelError, match=r"scales its layers differently \(\['use_rslora'\]\)"):
        read_lora("QwenImagePipeline", str(tmp_path / "peft"))


NATIVE = {
    "QwenImagePipeline": "diffusion_model.transformer_blocks.0.attn.to_q",
    "FluxPipeline": "transformer.transformer_blocks.0.attn.to_q",
    "WanPipeline": "diffusion_model.blocks.0.self_attn.q",
    "ZImagePipeline": "diffusion_model.layers.0.attention.to_q",
}
"""A layer's name in files that diffusers' classes convert."""


@pytest.mark.parametrize("pipeline_class", NATIVE)
def test_a_lora_of_which_something_would_be_dropped_is_refused(tmp_path: Path, pipeline_class: str) -> None:
    layer, file = NATIVE[pipeline_class], tmp_path / "file.safetensors"
    plain = {f"{layer}.lora_A.weight": torch.ones(8, 4), f"{layer}.lora_B.weight": torch.ones(4, 8)}
    safetensors.torch.save_file(plain, file)
    assert read_lora(pipeline_class, str(file)).rank == 8
    for more in ("dora_scale", "lora_magnitude_vector", "lora_B.bias"):
        safetensors.torch.save_file({**plain, f"{layer}.{more}": torch.ones(4)}, file)
        with pytest.raises(ModelError, match=rf"model\.lora: .*{more}|not a LoRA that {pipeline_class}"):
            read_lora(pipeline_class, str(file))


@pytest.mark.parametrize(
    ("pipeline_class", "names"),
    [
        ("FluxPipeline", ["x.processor.y", "double_blocks.a.processor.b"]),  # IndexError
        ("FluxPipeline", ["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"]),
        ("ZImagePipeline", ["diffusion_model.layers.0.lokr_w1"]),
        ("QwenImagePipeline", ["lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight"]),
    ],
)
def test_what_diffusers_cannot_convert_is_named(
    tmp_path: Path, pipeline_class: str, names: list[str]
) -> None:
    file = tmp_path / "file.safetensors"
    safetensors.torch.save_file({name: torch.ones(2, 2) for name in names}, file)
    with pytest.raises(ModelError, match=r"model\.lora: .*file\.safetensors"):
        read_lora(pipeline_class, str(file))


@pytest.mark.parametrize("pipeline_class", ["FluxPipeline", "WanPipeline"])
def test_the_alphas_of_a_file_are_its_scale(tmp_path: Path, pipeline_class: str) -> None:
    """Some of diffusers' classes take them out of the file, others leave them among the layers."""
    layer = "transformer.blocks.{}.to_q"
    tensors = {
        f"{layer.format(index)}.{name}": tensor
        for index in (0, 1)
        for name, tensor in (
            ("lora_A.weight", torch.ones(8, 4)),
            ("lora_B.weight", torch.ones(4, 8)),
            ("alpha", torch.tensor(2.0)),
        )
    }
    safetensors.torch.save_file(tensors, tmp_path / "one.safetensors")
    read = read_lora(pipeline_class, str(tmp_path / "one.safetensors"))
    assert (read.rank, read.alpha) == (8, 2.0)
    assert not [name for name in read.layers if name.endswith("alpha")]
    encoder = {f"text_encoder.layers.0.q_proj.lora_{half}.weight": torch.ones(8, 8) for half in "AB"}
    safetensors.torch.save_file({**tensors, **encoder}, tmp_path / "text.safetensors")
    with pytest.raises(ModelError, match=r"text.safetensors has 2 tensors besides .*first 'text_encoder\."):
        read_lora(pipeline_class, str(tmp_path / "text.safetensors"))
    about = {"lora_adapter_metadata": json.dumps({"transformer.r": 8, "transformer.use_rslora": True})}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("alpha")}
    safetensors.torch.save_file(plain, tmp_path / "rs.safetensors", about)
    with pytest.raises(
        ModelError, match=r"rs.safetensors scales its layers differently \(\['use_rslora'\]\)"
    ):
        read_lora(pipeline_class, str(tmp_path / "rs.safetensors"))
    other = {**tensors, f"{layer.format(1)}.alpha": torch.tensor(4.0)}
    safetensors.torch.save_file(other, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"two.safetensors scales its layers differently"):
        read_lora(pipeline_class, str(tmp_path / "two.safetensors"))
