"""How much memory text embeddings take. Free of torch, for use in plans."""

from __future__ import annotations

EMBEDDINGS_BYTES = 4 << 30
"""Kept in memory on a node, divided over its ranks; others are read from the disk cache when they are used.

An embedding has up to 3.7 MB with Qwen-Image, 12.6 MB with FLUX.2-klein-9B.
"""
