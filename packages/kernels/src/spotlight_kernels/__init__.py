"""Fused operators for Diffusion Transformers that work without a compiler, with gradients."""

__version__ = "0.1.0"
