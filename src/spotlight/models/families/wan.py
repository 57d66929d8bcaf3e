"""Wan 2.1 and 2.2 text-to-video, over diffusers' ``WanPipeline``.

Traps of the reference:
- The hub's scheduler (UniPC) passes timesteps as integers and starts at 1 - 1e-6; Euler's are not rounded.
  The loading snippet steps as Euler does.
- A pipeline saved with diffusers' Euler scheduler shifts its noise levels twice, since ``WanPipeline`` leaves
  them to the scheduler.
- It cleans prompts with ftfy, as in training, but only where ftfy is installed.
- The text is zero-padded to ``max_text_tokens`` after encoding and not masked: the model attends to padding.
- A few parts of the transformer stay float32 in a bfloat16 model, the time embedding among them.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from spotlight.models.condition import EMBEDS, SEEN
from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily, decode_normalised
from spotlight.models.family_facts import ActivationCosts, Dimensions, config_integer, dimensions, read_models
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.noise_levels import scheduler_config
from spotlight_files.lora_names import renamed
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles


class Wan(ModelFamily):
    """A Wan model: 2.1, 2.2-A14B with two transformers, or 2.2-5B with a timestep per token."""

    name = "wan"
    pipeline_class = "WanPipeline"
    components = {
        "transformer": PipelineComponent(("WanTransformer3DModel",), weights=True),
        "transformer_2": PipelineComponent(("WanTransformer3DModel",), weights=True, optional=True),
        "vae": PipelineComponent(("AutoencoderKLWan",), weights=True),
        "scheduler": PipelineComponent(
            ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"), weights=False
        ),
        "tokenizer": PipelineComponent(("T5TokenizerFast", "T5Tokenizer"), weights=False),
        "text_encoder": PipelineComponent(("UMT5EncoderModel",), weights=True, lazy=True),
    }
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    native_layers = {
        f"{attention}.{name}": f"{own}.{letter}"
        for attention, own in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for name, letter in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    } | {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
    lora_names = {"comfyui": renamed(native_layers), "kohya": renamed(native_layers)}
    activations = ActivationCosts(
        lora=23.5, full=31.5, elementwise=13.0, checkpointed=1.15, forward=12.5, decode=14.0
    )
    video = True
    usual_frames_per_latent = 4
    reuses_blocks = True
    pads_last = pads_prompts = True  # the model attends to padding, without a mask
    guidance_argument = "guidance_scale"
    splits_sequence = True
    text_tokens_max = 512
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        px, frames = _factors(files)
        decoder = files.config("vae").get("decoder_base_dim")
        # The decoder of 2.2-5B works on 2 x 2 pixels at once: by its memory it has 3/8 of its channels.
        width = 3 * decoder // 8 if isinstance(decoder, int) else config_integer(files, "vae", "base_dim")
        return dimensions(
            files,
            latents="out_channels",
            latents_per_token=4,
            patch_px=2 * px,
            vae_width=width,
            frames_per_latent=frames,
        )

    @classmethod
    def loading_lines(cls, scale: float, text_tokens: int) -> tuple[str, ...]:
        """Euler's steps at the noise levels of the pipeline's scheduler."""
        return (
            "from diffusers import FlowMatchEulerDiscreteScheduler",
            "class Euler(FlowMatchEulerDiscreteScheduler):",
            "    levels = pipe.scheduler",
            "    def set_timesteps(self, steps, device=None):",
            "        self.levels.set_timesteps(steps)",
            "        sigmas = [1.0, *self.levels.sigmas[1:-1].tolist()]",
            "        super().set_timesteps(sigmas=sigmas, device=device)",
            "pipe.scheduler = Euler(shift=1.0)",
        )

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """Of one latent frame, which are four frames; above 720p of a tile, and the finished ones."""
        frame = size.height * size.width
        if frame <= _UNTILED_PX:
            return min(size.frames, 4) * frame
        return min(size.frames, 4) * _TILE_PX + size.pixels // _FINISHED

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Latent tokens attend to each other without a mask, so none can be padded."""
        if tokens % degree:
            raise ModelError(
                f"degrees has {degree}; expected divisors of {tokens}, the latent tokens of a sample. Change "
                "rollout.height, width or frames, or leave the degree out"
            )

    def check_parts(self) -> None:
        """Sizes of transformers, VAE and text encoder that must agree; variants of other pipelines."""
        vae = self.vae.config
        require_equal(
            self.files.folder("vae") / "config.json",
            vae,
            {
                "scale_factor_spatial": (
                    (vae.patch_size or 1) * 2 ** (len(vae.dim_mult) - 1),
                    "as its blocks and patches upsample",
                ),
                "scale_factor_temporal": (2 ** sum(vae.temperal_downsample), "as temperal_downsample says"),
            },
        )
        for name in ("transformer", "transformer_2"):
            if self.files.component_class(name) is None:
                continue
            require_equal(
                self.files.folder(name) / "config.json",
                self.files.config(name),
                {
                    "patch_size": ([1, 2, 2], "2x2 latents become one token"),
                    "out_channels": (vae.z_dim, "the VAE's z_dim"),
                    "text_dim": self.text_size("text_encoder", "d_model"),
                    **self.own_inputs(),
                },
            )
        two = self.files.component_class("transformer_2") is not None
        if two is (self._boundary is None):
            raise ModelError(
                f"{self.files.root}/model_index.json has boundary_ratio = "
                f"{self.files.setting('boundary_ratio')} and {'a' if two else 'no'} transformer_2; expected "
                "both (Wan2.2-A14B) or neither"
            )

    def own_inputs(self) -> dict[str, tuple[object, str]]:
        """Values of the transformer's configuration that tell this pipeline's from others', and why."""
        other = "it makes videos of pictures: model.family=wan-i2v"
        return {"in_channels": (self.vae.config.z_dim, other), "image_dim": (None, other)}

    @classmethod
    def make_scheduler(cls, files: PipelineFiles) -> Any:
        """The pipeline's own, for its noise levels; steps are Euler's with either."""
        import diffusers

        config = scheduler_config(files)
        kind = files.component_class("scheduler") or ""
        wanted: dict[str, tuple[object, str]] = {"use_dynamic_shifting": (False, "the pipeline passes no mu")}
        if kind == "UniPCMultistepScheduler":
            flow = "Wan is a flow-matching model"
            wanted |= {
                "prediction_type": ("flow_prediction", flow),
                "use_flow_sigmas": (True, flow),
                "final_sigmas_type": ("zero", flow),
            }
        known = {"use_dynamic_shifting": False, "final_sigmas_type": "zero", **config}
        require_equal(files.folder("scheduler") / "scheduler_config.json", known, wanted)
        return getattr(diffusers, kind).from_config(config)

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """As the pipeline leaves them to its scheduler."""
        self.scheduler.set_timesteps(steps, device="cpu")
        # UniPC starts at 1 - 1e-6, where the noise of an SDE step would be immense.
        self.scheduler.sigmas[0] = 1.0

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: UMT5's last hidden state without padding."""
        return {"embeds": (text_tokens, self.config.text_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings without the zeros after them."""
        if find_spec("ftfy") is None:
            raise ModelError(
                "the package ftfy is not installed; expected it, because Wan was trained on prompts that it "
                "cleaned, such as those with curly quotes: pip install ftfy"
            )
        embeds, _ = pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
            device=self.text_device,
        )
        tokens = int(embeds[0].any(dim=-1).nonzero().max()) + 1
        return {"embeds": embeds[0, :tokens]}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """A timestep per token in Wan2.2-5B."""
        timestep = sigma * self.scheduler.config.num_train_timesteps
        if self._time_per_token:
            timestep = timestep[:, None].expand(-1, self.dimensions.tokens(size))
        return self.forward(model, latents, timestep, condition)

    def forward(
        self, model: nn.Module, latents: Tensor, timestep: Tensor, condition: ConditionBatch
    ) -> Tensor:
        """The transformer's output; text is padded with zeros."""
        text = condition[EMBEDS]
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=F.pad(text, (0, 0, 0, self.max_text_tokens - text.shape[1])),
            encoder_hidden_states_image=condition.tensors.get(SEEN),
        )

    def first_transformer(self, sigma: Tensor) -> Tensor | None:
        steps, boundary = self.scheduler.config.num_train_timesteps, self._boundary
        return None if boundary is None else sigma * steps >= boundary * steps

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Frame by frame; above 720p in overlapping tiles."""
        self.tile(size)
        return decode_normalised(self.vae, latents)

    def tile(self, size: MediaSize) -> None:
        """Set whether the VAE works on frames of this size in tiles."""
        self.vae.use_tiling = size.height * size.width > _UNTILED_PX

    @cached_property
    def _boundary(self) -> float | None:
        ratio = self.files.setting("boundary_ratio")
        return ratio if isinstance(ratio, (int, float)) else None

    @cached_property
    def _time_per_token(self) -> bool:
        return bool(self.files.setting("expand_timesteps"))


_UNTILED_PX = 1280 * 720
"""Pixels of a frame up to which the VAE decodes it whole, as the pipeline does."""
_TILE_PX = 256 * 256
_FINISHED = 90
"""So much less memory takes a finished pixel than one in work: tiles overlap, are kept, joined and cut."""


def _factors(files: PipelineFiles) -> tuple[int, int]:
    """Pixels per latent, and frames per latent frame, by the configuration of the VAE."""
    config = files.config("vae")
    spatial, temporal = config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)
    if not (isinstance(spatial, int) and isinstance(temporal, int)):
        raise ModelError(
            f"{files.root / 'vae'}/config.json has scale_factor_spatial = {spatial!r} and "
            f"scale_factor_temporal = {temporal!r}; expected integers"
        )
    return spatial, temporal
