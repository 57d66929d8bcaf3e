"""The processes of new_worker.py: a worker that serves its weights, and a new worker that needs them.

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tools.testbed.architecture import TEXT_WIDTH

from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.skeleton import base_state, filling, modules_of
from spotlight_weights.flat import as_bytes, checksum
from spotlight_weights.peers import WeightServer, fetch_from_peer
from spotlight_weights.served_weights import ServedWeights

DIGEST = "base"
SIZE = MediaSize(16, 16)


@dataclass(frozen=True, slots=True)
class Ready:
    """A new worker that could start to denoise.

    Attributes:
        imported_s: when interpreter and libraries were loaded.
        ran_s: when the first forward was done.
        sums: over all weights: the same, however they came.
    """

    imported_s: float
    ran_s: float
    sums: tuple[tuple[int, ...], ...]


def serve(pipeline: Path, cache: Path, device: str, home: Path, pipe: Connection) -> None:
    """Hold the model and serve it until the pipe closes."""
    family = _load(pipeline, cache, device, read=True)
    # Copies: weights from disk are mapped on a CPU, which would keep the file in the page cache.
    base = {name: tensor.clone() for name, tensor in base_state(family.transformer).items()}
    del family
    with WeightServer(home, "w0", ServedWeights(base, modules_of(base), DIGEST)) as server:
        pipe.send(server.path)
        try:
            pipe.recv()
        except EOFError:
            return


def arrive(pipeline: Path, cache: Path, device: str, peer: Path | None, pipe: Connection) -> None:
    """Get the model, from a peer or from disk, and say when."""
    imported = time.monotonic()
    family = _load(pipeline, cache, device, read=peer is None)
    if peer is not None:
        with filling(family.transformer) as targets:
            fetch_from_peer(peer, DIGEST, targets, modules_of(targets))
    _forward(family)
    ran = time.monotonic()
    state = base_state(family.transformer)
    sums = tuple(tuple(checksum(as_bytes(tensor)).tolist()) for tensor in state.values())
    pipe.send(Ready(imported, ran, sums))


@torch.no_grad()
def _forward(family: QwenImage) -> None:
    latents = torch.zeros(1, *family.latent_shape(SIZE))
    condition = family.collate([Condition({"embeds": torch.zeros(8, TEXT_WIDTH)})])
    family.velocity(family.transformer, latents, torch.ones(1), condition, None, SIZE).cpu()


def _load(pipeline: Path, cache: Path, device: str, *, read: bool) -> QwenImage:
    return QwenImage.load(
        pipeline,
        device=device,
        dtype=torch.float32,
        embeddings_cache=cache,
        read_transformer=read,
    )
