"""Fixtures shared by the tiers."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No deadlines: a busy machine is slow now and then. `make test` draws the same few examples everywhere, so it
# passes or fails for all; `make test-long` draws new ones each time, and more, to find what nobody has seen.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("new", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Before torch is imported: tiny tensors on several threads mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Before huggingface_hub is imported: no test waits for the hub, or has its retries in the log.
os.environ["HF_HUB_OFFLINE"] = "1"

# Ranks and workers of tests are forked from one server, which imports once what each would take seconds for.
multiprocessing.set_forkserver_preload(
    [
        "spotlight.runtime.run",
        "spotlight.models.families.qwen_image",
        # What loading a pipeline imports.
        "diffusers.models.transformers.transformer_qwenimage",
        "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
        "diffusers.schedulers.scheduling_flow_match_euler_discrete",
        "spotlight.rollout.sequence_parallel.lockstep",
        "tests.frozen",
    ]
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One process more than cores: many tests wait for processes that they have started."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:  # pytest-xdist reads it
        return None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len(usable) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without garbage collection, which would look at half a million lasting objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(100_000, 20, 50)  # a twentieth of the time of tests that make many modules


@pytest.fixture(scope="session")
def random_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny QwenImagePipeline directory with random weights everywhere, zero-initialised ones included.

    So its pictures depend strongly on prompt, noise level, guidance and every layer: what is compared on it
    cannot agree by being constant.
    """
    import torch
    from tools.testbed.architecture import build, save

    with torch.random.fork_rng(devices=[]):
        parts = build(seed=0, layers=2)  # half the testbed's time
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in parts.transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name or "norm_added" in name or "txt_norm" in name:
                continue
            scale = 0.9 * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    channels = parts.vae.config.z_dim
    parts.vae.register_to_config(
        latents_mean=[0.1 * i - 0.5 for i in range(channels)],
        latents_std=[1 + 0.1 * i for i in range(channels)],
    )
    directory = tmp_path_factory.mktemp("pipeline") / "random"
    save(parts, directory)
    return directory


@pytest.fixture
def record_property(
    record_property: Callable[[str, object], None],
) -> Callable[[str, float], None]:
    """Record a figure of a test; pytest-xdist cannot send numbers of numpy to the main process."""
    return lambda name, figure: record_property(name, float(figure))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What other tests compiled does not count, and limits that the test sets end with it."""
    import torch

    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()
