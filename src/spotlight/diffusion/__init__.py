"""Diffusion maths: samplers with exact log-probs, SDE windows and counter-based noise."""
