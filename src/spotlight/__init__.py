"""Spotlight: reinforcement-learning post-training of Diffusion Transformers on preemptible GPUs."""

__version__ = "0.1.0"
