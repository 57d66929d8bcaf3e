"""What can be said of a DiT family without loading it, nor torch: what planning needs.

The values measured here (contract test in ``tests/contract/test_plan_reality.py``) are floats kept per token,
layer and unit of width; they do not depend on the size of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.models.model_errors import ModelError
from spotlight.models.pipeline_files import Component


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """A family's constants.

    Attributes:
        pipeline_class: the ``_class_name`` in ``model_index.json``.
        components: folder -> what must be there.
        lora_targets: ends of the names of the layers that LoRA adapts by default.
        reuses_blocks: whether previews may reuse what its blocks added (``exploration.step_cache``).
        kept_lora: values that a layer keeps for the backward pass when only adapters are trained.
        kept_full: the same with all weights trained.
        kept_checkpointed: the same with recomputed activations: the inputs of the layer.
        forward_peak: values alive at the peak of a forward without gradient.
        decode_peak: values alive at the peak of decoding, per pixel and unit of the VAE's base width.
    """

    pipeline_class: str
    components: Mapping[str, Component]
    lora_targets: tuple[str, ...]
    reuses_blocks: bool
    kept_lora: float
    kept_full: float
    kept_checkpointed: float
    forward_peak: float
    decode_peak: float


LAYOUTS: Mapping[str, FamilyLayout] = {
    "qwen-image": FamilyLayout(
        pipeline_class="QwenImagePipeline",
        components={
            "transformer": Component(("QwenImageTransformer2DModel",), weights=True),
            "vae": Component(("AutoencoderKLQwenImage",), weights=True),
            "scheduler": Component(("FlowMatchEulerDiscreteScheduler",), weights=False),
            "tokenizer": Component(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
            "text_encoder": Component(("Qwen2_5_VLForConditionalGeneration",), weights=True, lazy=True),
        },
        lora_targets=(
            *("to_q", "to_k", "to_v", "to_out.0"),
            *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ),
        reuses_blocks=True,
        kept_lora=20.0,
        kept_full=27.0,
        kept_checkpointed=1.5,
        forward_peak=15.0,
        decode_peak=21.0,
    )
}
"""By the names of :data:`spotlight.models.FAMILIES`."""


def check_size(height: int, width: int, unit: int, why: str) -> None:
    """Raise :class:`ModelError` when a side (pixels) is not a positive multiple of ``unit``.

    Args:
        why: where the unit comes from.
    """
    for side, value in (("height", height), ("width", width)):
        if value < unit or value % unit:
            below = max(value // unit, 1) * unit
            near = [below] if value <= unit else [below, below + unit]
            raise ModelError(
                f"{side} is {value}; expected a multiple of {unit} pixels ({why}); "
                f"nearest: {' or '.join(map(str, near))}"
            )
