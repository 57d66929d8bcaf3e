"""What families with the same VAE of pictures have in common."""

from __future__ import annotations

from torch import Tensor

from spotlight.models.family import MediaSize, ModelFamily, decode_normalised, encode_normalised, pack, unpack
from spotlight.models.family_facts import Dimensions, config_integer, config_list, dimensions
from spotlight_files.pipeline_files import PipelineFiles


class ScaledVaeFamily(ModelFamily):
    """A VAE for single pictures, whose configuration names a scale and a shift."""

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        config = self.vae.config
        whole = unpack(latents, self.dimensions.grid(size)) if self.packed else latents
        scaled = whole / config.scaling_factor + config.shift_factor
        decoded: Tensor = self.vae.decode(scaled, return_dict=False)[0]
        return decoded.unsqueeze(2)

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        latents = self.encode_picture(frames)
        return pack(latents) if self.packed else latents

    def encode_picture(self, frames: Tensor) -> Tensor:
        """[batch, 3, 1, height, width] to [batch, channels, height, width], not packed."""
        latents: Tensor = self.vae.encode(frames.squeeze(2)).latent_dist.mode()
        scaled: Tensor = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return scaled


class QwenVaeFamily(ModelFamily):
    """Qwen-Image's VAE, a video's, whose latents are packed 2x2."""

    packed = True

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(
            files,
            patch_px=2 * 2 ** len(config_list(files, "vae", "temperal_downsample")),
            vae_width=config_integer(files, "vae", "base_dim"),
        )

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        return decode_normalised(self.vae, unpack(latents, self.dimensions.grid(size)).unsqueeze(2))

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        return pack(encode_normalised(self.vae, frames).squeeze(2))
