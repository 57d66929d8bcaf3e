"""Diffusion Transformers by family (:data:`spotlight.registry.FAMILIES`), their weights and files."""
