"""``spotlight export --format``: ComfyUI and kohya's scripts apply our update to the right weights, whole.

What they do with a file is written down here again, from their side: which weights a model has, in which rows
of them diffusers' layers are, and how keys are looked up.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots
from spotlight.registry import FAMILIES
from spotlight.training.lora_export import export_renamed_lora
from spotlight_files.lora_names import FLUX, Layout
from spotlight_files.model_errors import ModelError
from spotlight_files.renamed_lora import save_renamed

RANK, ALPHA = 2, 3.0
Rules = Mapping[str, tuple[str, int]]
"""Of a layer of diffusers, the weight it is in and which of its parts, in order; ``N``: a block's number."""

QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def parts(layers: tuple[str, ...], whole: str) -> Rules:
    return {layer: (whole, number) for number, layer in enumerate(layers)}


def under(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def double(ff: tuple[str, str], mlp: tuple[str, str], attention: str = "attn.") -> Rules:
    block = "transformer_blocks.N"
    return {
        **parts(under(f"{block}.attn", QKV), f"double_blocks.N.img_{attention}qkv"),
        **parts(under(f"{block}.attn", ADDED), f"double_blocks.N.txt_{attention}qkv"),
        f"{block}.attn.to_out.0": (f"double_blocks.N.img_{attention}proj", 0),
        f"{block}.attn.to_add_out": (f"double_blocks.N.txt_{attention}proj", 0),
        f"{block}.ff.{ff[0]}": (f"double_blocks.N.img_mlp.{mlp[0]}", 0),
        f"{block}.ff.{ff[1]}": (f"double_blocks.N.img_mlp.{mlp[1]}", 0),
        f"{block}.ff_context.{ff[0]}": (f"double_blocks.N.txt_mlp.{mlp[0]}", 0),
        f"{block}.ff_context.{ff[1]}": (f"double_blocks.N.txt_mlp.{mlp[1]}", 0),
    }


SINGLE: Rules = {
    **parts(
        (*under("single_transformer_blocks.N.attn", QKV), "single_transformer_blocks.N.proj_mlp"),
        "single_blocks.N.linear1",
    ),
    "single_transformer_blocks.N.proj_out": ("single_blocks.N.linear2", 0),
}
GELU = ("net.0.proj", "net.2")


def hunyuan(attention: str, mlp: tuple[str, str]) -> Rules:
    ours, own = "context_embedder.token_refiner.refiner_blocks.N", "txt_in.individual_token_refiner.blocks.N"
    return {
        **double(GELU, mlp, f"attn{attention}"),
        **SINGLE,
        **parts(under(f"{ours}.attn", QKV), f"{own}.self_attn{attention}qkv"),
        f"{ours}.attn.to_out.0": (f"{own}.self_attn{attention}proj", 0),
        f"{ours}.ff.net.0.proj": (f"{own}.mlp.{mlp[0]}", 0),
        f"{ours}.ff.net.2": (f"{own}.mlp.{mlp[1]}", 0),
    }


SD3: Rules = {
    **parts(under("transformer_blocks.N.attn", QKV), "joint_blocks.N.x_block.attn.qkv"),
    **parts(under("transformer_blocks.N.attn", ADDED), "joint_blocks.N.context_block.attn.qkv"),
    **parts(under("transformer_blocks.N.attn2", QKV), "joint_blocks.N.x_block.attn2.qkv"),
    "transformer_blocks.N.attn.to_out.0": ("joint_blocks.N.x_block.attn.proj", 0),
    "transformer_blocks.N.attn2.to_out.0": ("joint_blocks.N.x_block.attn2.proj", 0),
    "transformer_blocks.N.attn.to_add_out": ("joint_blocks.N.context_block.attn.proj", 0),
    "transformer_blocks.N.ff.net.0.proj": ("joint_blocks.N.x_block.mlp.fc1", 0),
    "transformer_blocks.N.ff.net.2": ("joint_blocks.N.x_block.mlp.fc2", 0),
    "transformer_blocks.N.ff_context.net.0.proj": ("joint_blocks.N.context_block.mlp.fc1", 0),
    "transformer_blocks.N.ff_context.net.2": ("joint_blocks.N.context_block.mlp.fc2", 0),
}
FLUX2: Rules = {
    **double(("linear_in", "linear_out"), ("0", "2")),
    "single_transformer_blocks.N.attn.to_qkv_mlp_proj": ("single_blocks.N.linear1", 0),
    "single_transformer_blocks.N.attn.to_out": ("single_blocks.N.linear2", 0),
}
WAN: Rules = {
    **{
        f"blocks.N.{ours}.{name}": (f"blocks.N.{own}.{letter}", 0)
        for ours, own in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for name, letter in zip((*QKV, "to_out.0"), "qkvo", strict=True)
    },
    "blocks.N.ffn.net.0.proj": ("blocks.N.ffn.0", 0),
    "blocks.N.ffn.net.2": ("blocks.N.ffn.2", 0),
}

KREA2: Rules = {
    f"{ours}.N.{end}": (f"{own}.N.{name}", 0)
    for ours, own in (
        ("transformer_blocks", "blocks"),
        ("text_fusion.layerwise_blocks", "txtfusion.layerwise_blocks"),
        ("text_fusion.refiner_blocks", "txtfusion.refiner_blocks"),
    )
    for end, name in (
        *((f"attn.{each}", f"attn.w{each[-1]}") for each in QKV),
        ("attn.to_out.0", "attn.wo"),
        ("attn.to_gate", "attn.gate"),
        *((f"ff.{each}", f"mlp.{each}") for each in ("gate", "up", "down")),
    )
}


def z_image(qkv: str, out: str) -> Rules:
    rules: dict[str, tuple[str, int]] = {}
    for block in ("layers.N", "noise_refiner.N", "context_refiner.N"):
        for number, name in enumerate(QKV):
            whole = qkv or name
            rules[f"{block}.attention.{name}"] = (f"{block}.attention.{whole}", number if qkv else 0)
        rules[f"{block}.attention.to_out.0"] = (f"{block}.attention.{out}", 0)
        rules |= {f"{block}.feed_forward.w{n}": (f"{block}.feed_forward.w{n}", 0) for n in (1, 2, 3)}
    return rules


COMFYUI: Mapping[str, Rules | None] = {
    "qwen-image": None,  # its code has diffusers' names
    "qwen-image-edit": None,
    "flux": {**double(GELU, ("0", "2")), **SINGLE},
    "flux-kontext": {**double(GELU, ("0", "2")), **SINGLE},
    "flux2-klein": FLUX2,
    "flux2-dev": FLUX2,
    "krea-2": KREA2,
    "sd3": SD3,
    "z-image": z_image("qkv", "out"),
    "wan": WAN,
    "wan-i2v": WAN,
    "hunyuan-video": hunyuan(".", ("0", "2")),
}
KOHYA = {**COMFYUI, "z-image": z_image("", "to_out.0"), "hunyuan-video": hunyuan("_", ("fc1", "fc2"))}
PROGRAMS: Mapping[Layout, Mapping[str, Rules | None]] = {"comfyui": COMFYUI, "kohya": KOHYA}
DIFFUSERS_READS = {(name, layout) for name in ("flux2-klein", "wan", "qwen-image") for layout in PROGRAMS}
DIFFUSERS_READS |= {("z-image", "kohya"), ("krea-2", "comfyui")}
"""Files that diffusers' own converters read, too: another's reading of the same names."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFamily]:
    def load_one(name: str) -> ModelFamily:
        kind = FAMILIES.load(name)
        directory = tmp_path_factory.mktemp(name) / "pipeline"
        kind.tiny(directory, seed=0, variant=2 if name == "wan" else 0)  # of two transformers
        family: ModelFamily = kind.load(
            directory, device="cpu", dtype=torch.float32, embeddings_cache=directory.parent / "cache"
        )
        return family

    return load_one


def adapted(family: ModelFamily, targets: tuple[str, ...] | None = None) -> LoraSlots:
    slots = LoraSlots(
        family.transformer, LoraSpec(rank=RANK, alpha=ALPHA, targets=targets or family.lora_targets)
    )
    generator = torch.Generator().manual_seed(7)
    state = {n: torch.randn(t.shape, generator=generator) for n, t in slots.state("policy").items()}
    slots.load_state("policy", state)
    return slots


def updates(slots: LoraSlots, prefix: str) -> dict[str, Tensor]:
    """What is added to the weight of each adapted layer, by diffusers' name."""
    state = {n.removeprefix(prefix): t for n, t in slots.state("policy").items() if n.startswith(prefix)}
    modules = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    scale = ALPHA / RANK
    return {m: scale * state[f"{m}.lora_B.weight"] @ state[f"{m}.lora_A.weight"] for m in modules}


Places = Mapping[str, tuple[str, int, int]]


def places(transformer: nn.Module, rules: Rules | None) -> Places:
    """Of each linear layer, the weight and the rows of it where the program has it."""
    found: dict[str, tuple[str, int, int]] = {}
    next_row: dict[str, int] = {}
    numbered = []
    for name, layer in transformer.named_modules():
        linear = getattr(layer, "base_layer", layer)
        if not isinstance(linear, nn.Linear) or ".lora_" in name or name.endswith("base_layer"):
            continue
        number = (re.findall(r"\.(\d+)\.", name) or [""])[0]
        rule = (name, 0) if rules is None else rules.get(re.sub(r"\.\d+\.", ".N.", name, count=1))
        if rule is not None:
            numbered.append((rule[1], name, rule[0].replace(".N.", f".{number}."), linear.out_features))
    for _, name, whole, height in sorted(numbered):
        first = next_row.get(whole, 0)
        next_row[whole] = first + height
        found[name] = whole, first, height
    return found


def applied(file: Mapping[str, Tensor], weights: set[str], layout: Layout) -> dict[str, Tensor]:
    """What the program adds to each of its weights; every key must be looked up."""
    added, used = {}, set()
    for weight in weights:
        if layout == "comfyui":
            key = f"diffusion_model.{weight}"
            down, up, alpha = f"{key}.lora_A.weight", f"{key}.lora_B.weight", f"{key}.alpha"
        else:
            key = "lora_unet_" + weight.replace(".", "_")
            down, up, alpha = f"{key}.lora_down.weight", f"{key}.lora_up.weight", f"{key}.alpha"
        if down not in file:
            continue
        used |= {down, up, alpha} & file.keys()
        rank = file[down].shape[0]
        assert layout == "comfyui" or alpha in file, "kohya's scripts expect one"
        added[weight] = (float(file[alpha]) / rank if alpha in file else 1.0) * file[up] @ file[down]
    assert used == file.keys(), "keys that are not loaded"
    return added


def assert_whole(added: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: Places) -> None:
    left = {weight: tensor.clone() for weight, tensor in added.items()}
    for layer, update in expected.items():
        weight, first, height = where[layer]
        torch.testing.assert_close(left[weight][first : first + height], update, rtol=1e-6, atol=1e-6)
        left[weight][first : first + height] = 0
    assert all(not tensor.any() for tensor in left.values()), "rows of layers that are not adapted"


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
@pytest.mark.parametrize("name", COMFYUI)
def test_the_update_of_every_weight_is_ours(
    load: Callable[[str], ModelFamily], tmp_path: Path, name: str, layout: Layout
) -> None:
    family = load(name)
    slots = adapted(family)
    files = export_renamed_lora(family, slots, "policy", tmp_path, "trained", layout)
    transformers = denoisers(family.transformer)
    names = ["trained.safetensors", *(f"trained-{part}.safetensors" for part in list(transformers)[1:])]
    assert [file.name for file in files] == names
    for file, (part, transformer) in zip(files, transformers.items(), strict=True):
        where = places(transformer, PROGRAMS[layout][name])
        expected = updates(slots, f"{part}." if len(transformers) > 1 else "")
        added = applied(load_file(file), {weight for weight, _, _ in where.values()}, layout)
        assert_whole(added, expected, where)
        if (name, layout) in DIFFUSERS_READS:
            assert_same(as_diffusers_reads(family.pipeline_class, load_file(file)), expected)


def as_diffusers_reads(pipeline_class: str, file: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a pipeline of diffusers would add to each layer."""
    reader = getattr(diffusers, pipeline_class).lora_state_dict
    apart = {"return_alphas": True} if "return_alphas" in inspect.signature(reader).parameters else {}
    found = reader(file, **apart)
    state, alphas = found if apart else (found, {})
    assert not alphas, "the ranks, which scale by 1"
    state = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
    layers = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    return {each: state[f"{each}.lora_B.weight"] @ state[f"{each}.lora_A.weight"] for each in layers}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert {layer for layer, update in found.items() if update.any()} == expected.keys()
    for layer, update in expected.items():
        torch.testing.assert_close(found[layer], update, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_diffusers_reads_a_whole_flux_in_kohyas_names_as_ours(tmp_path: Path) -> None:
    """Its converter knows the published width only."""
    width = 3072
    heights = {"proj_mlp": 4 * width, "ff.net.0.proj": 4 * width, "ff_context.net.0.proj": 4 * width}
    targets = (*QKV, "to_out.0", *ADDED, "to_add_out")
    double_block = [f"transformer_blocks.0.attn.{each}" for each in targets]
    double_block += [f"transformer_blocks.0.{ff}.{end}" for ff in ("ff", "ff_context") for end in GELU]
    single_block = [f"single_transformer_blocks.0.attn.{each}" for each in QKV]

    def rows(name: str) -> int:
        return next((high for end, high in heights.items() if name.endswith(end)), width)

    generator, layers = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for module in (*double_block, *single_block):
        columns = 4 * width if module.endswith("net.2") else width
        layers[f"{module}.lora_A.weight"] = torch.randn(1, columns, generator=generator)
        layers[f"{module}.lora_B.weight"] = torch.randn(rows(module), 1, generator=generator)
    (file,) = save_renamed(tmp_path, "x", layers, 1.0, FLUX, "kohya", {"transformer": rows})
    expected = {
        module: layers[f"{module}.lora_B.weight"] @ layers[f"{module}.lora_A.weight"]
        for module in (*double_block, *single_block)
    }
    assert_same(as_diffusers_reads("FluxPipeline", load_file(file)), expected)


def test_a_weight_of_which_a_part_is_adapted_keeps_its_other_rows(
    load: Callable[[str], ModelFamily], tmp_path: Path
) -> None:
    family = load("flux")
    slots = adapted(family, ("to_k", "proj_mlp"))
    (file,) = export_renamed_lora(family, slots, "policy", tmp_path, "trained", "comfyui")
    where = places(family.transformer, COMFYUI["flux"])
    added = applied(load_file(file), {weight for weight, _, _ in where.values()}, "comfyui")
    assert_whole(added, updates(slots, ""), where)


def test_what_has_no_name_there_is_refused_by_name(
    load: Callable[[str], ModelFamily], tmp_path: Path
) -> None:
    family = load("flux")
    slots = adapted(family, ("to_q", "norm1.linear"))
    with pytest.raises(ModelError, match=r"comfyui has no name for .*'transformer_blocks\.0\.norm1\.linear'"):
        export_renamed_lora(family, slots, "policy", tmp_path, "trained", "comfyui")
    unknown = load("qwen-image-2.1")
    with pytest.raises(ModelError, match=r"--format kohya: .*family 'qwen-image-2\.1' is not known"):
        export_renamed_lora(unknown, adapted(unknown), "policy", tmp_path, "trained", "kohya")
    assert not list(tmp_path.iterdir())
