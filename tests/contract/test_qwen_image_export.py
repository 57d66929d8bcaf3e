"""What we export, plain diffusers loads, and draws the same picture with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from spotlight.diffusion.samplers import ODE
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.shared.transformer_files import weight_sources
from spotlight.models.slots import CopySlots, LoraSlots, LoraSpec, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.lora_export import export_merged, measured_rounding, save_lora, save_merged
from spotlight.training.sharding import Ranks
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.prompts import PromptId

SIZE = MediaSize(32, 32)
PROMPT = "one red circle"
STEPS = 4


@pytest.fixture
def family(random_pipeline: Path, tmp_path: Path) -> QwenImage:
    return QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "embeds"
    )


def draw(family: QwenImage, slots: WeightSlots, slot: str = "policy") -> tuple[Tensor, np.ndarray]:
    """(initial latents, picture)."""
    rollout = Rollout(RolloutId("r"), Purpose.EVAL, 0, PromptId("p"), 0, 5, STEPS, PolicyVersion(0))
    engine = Engine(family, max_batch=1)
    states = engine.start([rollout], family.encode([PROMPT]), Recipe(SIZE, ODE(), None, 1.0, "final"))
    with slots.use(slot) as model:
        (result,) = engine.run(model, states)
    assert isinstance(result, FinishedRollout)
    return states[0].latents, family.decode_float(result.tensors.final[None], SIZE)[0, 0]


def plain(pipe: QwenImagePipeline, latents: Tensor) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        PROMPT,
        true_cfg_scale=1.0,
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        latents=latents[None],
        output_type="np",
    ).images[0]


def trained_lora(family: QwenImage, size: float = 0.1, targets: tuple[str, ...] | None = None) -> LoraSlots:
    """Both factors random, alpha unlike rank; default: every default target."""
    slots = LoraSlots(family.transformer, LoraSpec(rank=4, alpha=6.0, targets=targets or family.lora_targets))
    generator = torch.Generator().manual_seed(7)
    slots.load_state(
        "policy",
        {n: size * torch.randn(t.shape, generator=generator) for n, t in slots.state("policy").items()},
    )
    return slots


@pytest.mark.parametrize("targets", [None, ("transformer_blocks.*.attn.to_q", "img_mlp.net.2")])
def test_plain_diffusers_draws_our_picture_with_the_lora(
    family: QwenImage, random_pipeline: Path, tmp_path: Path, targets: tuple[str, ...] | None
) -> None:
    slots = trained_lora(family, targets=targets)
    latents, ours = draw(family, slots)
    file = save_lora(family, tmp_path / "lora", slots.state("policy"), slots.metadata())
    assert [file] == list((tmp_path / "lora").iterdir())

    pipe = QwenImagePipeline.from_pretrained(random_pipeline)
    before = plain(pipe, latents)
    pipe.load_lora_weights(tmp_path / "lora")
    after = plain(pipe, latents)
    assert np.abs(after - ours).max() <= 1e-5
    assert np.abs(before - draw(family, slots, "reference")[1]).max() <= 1e-5
    assert np.abs(after - before).max() > 0.01


def test_an_exported_lora_names_only_what_every_peft_knows(family: QwenImage, tmp_path: Path) -> None:
    """diffusers gives each field to LoraConfig, and an older peft refuses those that it lacks."""
    slots = trained_lora(family)
    with safe_open(save_lora(family, tmp_path, slots.state("policy"), slots.metadata()), "pt") as file:
        fields = json.loads(file.metadata()["lora_adapter_metadata"])
    said = {name.removeprefix("transformer."): value for name, value in fields.items()}
    assert said.keys() == {"r", "lora_alpha", "target_modules", "init_lora_weights"}
    assert said["r"] == said["lora_alpha"] == 4  # see the next test
    assert sorted(said["target_modules"]) == sorted(family.lora_targets)


def test_who_ignores_the_metadata_of_a_lora_applies_the_same_update(
    family: QwenImage, random_pipeline: Path, tmp_path: Path
) -> None:
    """As ComfyUI: times alpha / rank if the file has an ``.alpha`` of the layer, else as it is."""
    slots = trained_lora(family)
    trained = slots.merged_state("policy")
    tensors = load_file(save_lora(family, tmp_path, slots.state("policy"), slots.metadata()))
    base = load_file(random_pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    layers = {name.rsplit(".lora_", 1)[0] for name in tensors}
    for layer in layers:
        a, b, alpha = (tensors.get(f"{layer}.{end}") for end in ("lora_A.weight", "lora_B.weight", "alpha"))
        assert a is not None
        assert b is not None
        update = (b @ a) * (1.0 if alpha is None else float(alpha) / len(a))
        name = f"{layer.removeprefix('transformer.')}.weight"
        torch.testing.assert_close(base[name] + update, trained[name], rtol=0, atol=1e-6)
    assert 2 * len(layers) == len(slots.state("policy"))


def test_an_earlier_lora_is_replaced(family: QwenImage, tmp_path: Path) -> None:
    slots = trained_lora(family)
    first = save_lora(family, tmp_path, slots.state("policy"), slots.metadata()).read_bytes()
    slots.load_state("policy", {n: 2 * t for n, t in slots.state("policy").items()})
    assert save_lora(family, tmp_path, slots.state("policy"), slots.metadata()).read_bytes() != first


@pytest.mark.parametrize("form", ["lora", "full"])
def test_plain_diffusers_draws_our_picture_with_the_merged_pipeline(
    family: QwenImage, random_pipeline: Path, tmp_path: Path, form: str
) -> None:
    slots: WeightSlots
    if form == "lora":
        slots = trained_lora(family)
    else:
        slots = CopySlots(family.transformer)
        slots.load_state("policy", {n: 1.1 * t for n, t in slots.state("policy").items()})
    latents, ours = draw(family, slots)
    merged = save_merged(family, tmp_path / "merged", slots.merged_state("policy"))
    assert np.abs(plain(QwenImagePipeline.from_pretrained(merged), latents) - ours).max() <= 1e-5
    assert np.abs(plain(QwenImagePipeline.from_pretrained(random_pipeline), latents) - ours).max() > 0.01
    for path in random_pipeline.rglob("*"):
        twin = merged / path.relative_to(random_pipeline)
        assert twin.exists()
        if path.is_file() and path.parent.name != "transformer":
            assert twin.read_bytes() == path.read_bytes()
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_merged_weights_are_cast_to_the_family_s_type(
    family: QwenImage, random_pipeline: Path, tmp_path: Path
) -> None:
    slots = CopySlots(family.transformer)
    half = QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.bfloat16, embeddings_cache=tmp_path / "embeds"
    )
    merged = save_merged(half, tmp_path / "m", slots.merged_state("policy"))
    again = QwenImage.load(merged, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "e")
    for name, tensor in again.transformer.state_dict().items():
        assert torch.equal(tensor, slots.state("policy")[name].bfloat16().float()), name


@pytest.mark.parametrize("form", ["lora", "full"])
def test_what_bfloat16_files_lose_of_the_update_is_reported_and_float32_keeps_it(
    random_pipeline: Path, tmp_path: Path, form: str
) -> None:
    dtype = {"lora": torch.bfloat16, "full": torch.float32}[form]
    family = QwenImage.load(random_pipeline, device="cpu", dtype=dtype, embeddings_cache=tmp_path / "e")
    start = {name: tensor.float().clone() for name, tensor in family.transformer.state_dict().items()}
    update: dict[str, Tensor] = {}
    slots: WeightSlots
    if form == "lora":
        slots = trained_lora(family, 0.02)
        halves = slots.state("policy")
        for name in (name.removesuffix(".lora_A.weight") for name in halves if ".lora_A." in name):
            product = halves[f"{name}.lora_B.weight"] @ halves[f"{name}.lora_A.weight"]
            update[f"{name}.weight"] = 6.0 / 4 * product
    else:
        slots = CopySlots(family.transformer)
        update = {name: 0.003 * tensor for name, tensor in start.items()}
        slots.load_state("policy", {name: start[name] + update[name] for name in start})
    untrained = weight_sources(family.files, ["transformer"], None)
    read, reported = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        rounding = measured_rounding(family, dtype, untrained)
        path = export_merged(family, slots, "policy", tmp_path / str(dtype), Ranks(), rounding=rounding)
        assert path is not None
        read[dtype] = load_file(path / "transformer" / "diffusion_pytorch_model.safetensors")
        reported[dtype] = rounding.lost()
        assert {tensor.dtype for tensor in read[dtype].values()} == {dtype}
    lost, norm = {}, {}
    for name, change in update.items():
        assert torch.allclose(read[torch.float32][name] - start[name], change, rtol=0, atol=1e-6), name
        kept = read[torch.bfloat16][name].float() - start[name].bfloat16().float()
        lost[name], norm[name] = (kept - change).double().norm() ** 2, change.double().norm() ** 2
    shares = {name: float(lost[name] / norm[name]) ** 0.5 for name in update if norm[name]}
    assert reported[torch.float32] is None
    found = reported[torch.bfloat16]
    assert found is not None
    assert found.overall == pytest.approx(float(sum(lost.values()) / sum(norm.values())) ** 0.5, rel=1e-3)
    assert found.worst == pytest.approx(max(shares.values()), rel=1e-3)
    assert found.worst == pytest.approx(shares[found.tensor], rel=1e-3)
    assert 0.01 < found.overall < 1


def test_an_earlier_pipeline_gives_way_where_that_is_asked_for(family: QwenImage, tmp_path: Path) -> None:
    state = dict(family.transformer.state_dict())
    merged = save_merged(family, tmp_path / "merged", state)
    (merged / "of the earlier one").touch()
    (tmp_path / ".merged.replaced" / "left by a kill").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"merged exists and is not empty"):
        save_merged(family, merged, state)
    state["proj_out.weight"] = state["proj_out.weight"] + 1
    assert save_merged(family, merged, state, replace=True) == merged
    again = QwenImage.load(merged, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "e")
    assert torch.equal(again.transformer.state_dict()["proj_out.weight"], state["proj_out.weight"])
    assert not (merged / "of the earlier one").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "merged" in path.name) == ["merged"]
    (tmp_path / "latest").symlink_to("merged")
    for _ in range(2):
        assert save_merged(family, tmp_path / "latest", state, replace=True) == tmp_path / "latest"
    assert (tmp_path / "latest").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "merged"]
    (tmp_path / "latest").unlink()
    merged.rename(tmp_path / ".merged.replaced")  # killed between the two renames
    (tmp_path / ".merged.partial").mkdir()
    assert save_merged(family, merged, state) == merged
    assert sorted(path.name for path in tmp_path.iterdir() if "merged" in path.name) == ["merged"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(ModelError, match=r"notes exists and is not empty"):
        save_merged(family, tmp_path / "notes", state, replace=True)


def test_what_cannot_be_exported_is_said(
    family: QwenImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full" / "of").mkdir(parents=True)
    state = dict(family.transformer.state_dict())
    with pytest.raises(ModelError, match=r"full exists and is not empty: remove it"):
        save_merged(family, tmp_path / "full", state)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="is a folder you are in"):
        save_merged(family, Path(), state)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelError, match="is a folder you are in"):
        save_merged(family, Path(".."), state, replace=True)
    state.pop("proj_out.weight")
    with pytest.raises(ModelError, match=r"(?s)not those of the transformer in .*proj_out\.weight"):
        save_merged(family, tmp_path / "new", state)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ModelError, match="without layers"):
        save_lora(family, tmp_path / "lora", {}, {})
