"""What families have in common whose VAE is for single pictures, with a scale and a shift."""

from __future__ import annotations

from torch import Tensor

from spotlight.models.family import MediaSize, ModelFamily, pack, unpack


class ScaledVaeFamily(ModelFamily):
    """A VAE for single pictures, whose configuration names a scale and a shift."""

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        config = self.vae.config
        whole = unpack(latents, self.dimensions.grid(size)) if self.packed else latents
        scaled = whole / config.scaling_factor + config.shift_factor
        return self.output_of(self.vae.decode, scaled).unsqueeze(2)

    def encode_frames(self, frames: Tensor, size: MediaSize) -> Tensor:
        latents = self.encode_picture(frames)
        return pack(latents) if self.packed else latents

    def encode_picture(self, frames: Tensor) -> Tensor:
        """[batch, 3, 1, height, width] to [batch, channels, height, width], not packed."""
        latents: Tensor = self.vae.encode(frames.squeeze(2)).latent_dist.mode()
        scaled: Tensor = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return scaled
