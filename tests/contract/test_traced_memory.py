"""Peaks of memory in the plan against published configurations, traced on tensors without memory.

FakeTensor and the storages' identities are torch's private interface; this is the only file that uses them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spotlight.models.condition import GRIDS, NEGATIVE_EMBEDS, REFERENCES
from spotlight.models.experts import denoisers
from spotlight.models.family import ConditionBatch, Guidance, MediaSize
from spotlight.models.shared.flop_count import KnownRows
from spotlight.registry import FAMILIES
from spotlight_files.pipeline_files import PipelineFiles

TINY = {
    *("in_channels", "out_channels", "patch_size", "pos_embed_max_size", "guidance_embeds"),
    *("joint_attention_dim", "text_dim", "text_embed_dim", "cap_feat_dim", "pooled_projection_dim"),
    *("context_in_dim", "text_embed_2_dim", "image_embed_dim"),
}
"""What a transformer takes from the tiny pipeline around it; all else is as published."""
FEW_LAYERS = {"num_layers": 1, "num_single_layers": 1, "n_layers": 1, "dual_attention_layers": [0]}


SEEN = (20, 20)
"""Rows and columns of a reference picture, where the family takes any."""


class Peak(TorchDispatchMode):
    """Largest sum of bytes that the tensors of a forward hold at once, weights apart."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.bytes = 0
        self._weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return output


def published(name: str, number: int = 0) -> tuple[dict[str, dict[str, Any]], Any]:
    """Configurations and dimensions of a published model of a family."""
    family = FAMILIES.load(name)
    model, found = list(family.published.items())[number]
    files = PipelineFiles(Path(model), known={**found.configs, "model_index": found.settings})
    return {part: dict(config) for part, config in found.configs.items()}, family.read_dimensions(files)


def families(*first: str) -> list[Any]:
    """All families, those besides ``first`` slow."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", families("hunyuan-video"))
def test_a_forwards_peak_is_within_a_quarter_of_the_plans(name: str, tmp_path: Path) -> None:
    kind = FAMILIES.load(name)
    kind.tiny(tmp_path / "pipeline", seed=0)
    family = kind.load(tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path)
    configs, dimensions = published(name)
    tiny: Any = denoisers(family.transformer)["transformer"]
    config = {key: value for key, value in configs["transformer"].items() if key not in TINY}
    few = {key: value for key, value in FEW_LAYERS.items() if key in config}
    with init_empty_weights():
        model = (
            type(tiny)
            .from_config(
                {**{key: value for key, value in tiny.config.items() if key in TINY}, **config, **few}
            )
            .requires_grad_(False)
        )
    family.adapt(model)
    side = 24 * family.dimensions.patch_px
    size, family.config = MediaSize(side, side, frames=5 if kind.video else 1), model.config
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in model.modules():
            for key, weight in part.named_parameters(recurse=False):
                part._parameters[key] = torch.nn.Parameter(torch.empty(weight.shape), requires_grad=False)
        shapes = family.condition_shapes(40)
        if REFERENCES in shapes:
            shapes[REFERENCES] = (math.prod(SEEN), *shapes[REFERENCES][1:])
        tensors = {key: torch.zeros(1, *shape) for key, shape in shapes.items()}
        latents = torch.zeros(1, *family.latent_shape(size))
    if GRIDS in shapes:
        tensors[GRIDS] = torch.tensor([[SEEN]])
    lengths = {key: shape[:1] for key, shape in shapes.items() if len(shape) == 2}
    condition = ConditionBatch(tensors, lengths)
    # Outside the mode: what the forward makes itself, masks and positions, has values that it may read.
    with torch.no_grad(), Peak(model) as peak, KnownRows():
        guidance = Guidance(embedded=kind.embedded_guidance)
        family.velocity(model, latents, torch.full([1], 0.5), condition, guidance, size)
    texts = [key for key in lengths if key not in (NEGATIVE_EMBEDS, GRIDS)]
    tokens = family.dimensions.tokens(size) + sum(shapes[key][0] for key in texts)
    found = peak.bytes / (4 * tokens * dimensions.width)
    assert kind.activations.forward == pytest.approx(found, rel=0.25)


SMALL, SMALL_VIDEO = MediaSize(256, 256), MediaSize(256, 256, frames=9)
DECODED = [
    *(
        pytest.param(
            name,
            0,
            SMALL_VIDEO if FAMILIES.load(name).video else SMALL,
            marks=() if name == "flux" else pytest.mark.slow,
        )
        for name in FAMILIES
    ),
    pytest.param("wan", 0, MediaSize(480, 832, frames=81), marks=pytest.mark.slow),
    pytest.param("wan", 3, SMALL_VIDEO, marks=pytest.mark.slow),
]
"""Family, number of its published model, size; of Wan also a real size, and 2.2-5B with a VAE of its own."""


@pytest.mark.parametrize(("name", "number", "size"), DECODED)
def test_decoding_is_within_a_quarter_of_the_plans(name: str, number: int, size: MediaSize) -> None:
    kind, (configs, dimensions) = FAMILIES.load(name), published(name, number)
    config = configs["vae"]
    channels = config.get("z_dim") or config["latent_channels"]
    factor = dimensions.patch_px // (1 if dimensions.channels == channels else 2)
    frames = (
        ()
        if config["_class_name"] in ("AutoencoderKL", "AutoencoderKLFlux2")
        else (dimensions.latent_frames(size),)
    )
    with FakeTensorMode(), torch.no_grad():
        vae = getattr(diffusers, config["_class_name"]).from_config(config)
        latents = torch.zeros(1, channels, *frames, size.height // factor, size.width // factor)
        with Peak(vae) as peak:
            decoded = vae.decode(latents, return_dict=False)[0]
    assert decoded.shape[-2:] == (size.height, size.width)
    found = peak.bytes / (4 * kind.decoded_pixels(size) * dimensions.vae_width)
    assert kind.activations.decode == pytest.approx(found, rel=0.25)
