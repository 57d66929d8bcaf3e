"""Part B: rows that say how fast, on the whole model."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from benchmarks.gpu import lab as model
from benchmarks.gpu.captured import captured
from benchmarks.gpu.correct import compiled, distance, learning
from benchmarks.gpu.lab import Lab, Shape
from benchmarks.gpu.suite import Outcome
from benchmarks.gpu.timing import (
    flops,
    interleaved,
    kernels,
    matmul_tflops,
    medians,
    peak_tflops,
    spread,
)
from spotlight.models.shared.flop_count import Trained, forward_operations
from spotlight.models.shared.sharded import gathered
from spotlight.rollout.state import RolloutState
from spotlight.training.device_memory import free_bytes, measure_peak, release
from spotlight.training.learner import Learner
from spotlight.training.recompute import Mode, Recomputation, modes_of
from spotlight_kernels.measure.device_rates import wait
from spotlight_weights.bundle import bind, pack
from spotlight_weights.node_cache import SHARED_MEMORY, NodeCache

STEPS = 4
PICTURE_STEPS = 20
"""Denoising steps of a picture, for shares."""
COMMITTED_STEP = 10


def denoise_small(lab: Lab) -> Outcome:
    """MFU of denoising small pictures, many at once."""
    return _denoising(lab, lab.scale.small)


def denoise_large(lab: Lab) -> Outcome:
    """MFU of denoising large pictures, few at once."""
    return _denoising(lab, lab.scale.large)


def _forward_flops(lab: Lab, shape: Shape) -> int:
    """Of the model without adapters."""
    with lab.slots().use("reference") as module:
        return flops(lambda: lab.velocity(lab.family(), module, shape))


def _utilisation(lab: Lab, operations: float, seconds: float) -> tuple[float, dict[str, object]]:
    peak, source = peak_tflops(lab)
    rate, ceiling = 1e-12 * operations / seconds, matmul_tflops(lab)
    details = {"tflop_s": rate, "of_measured_ceiling": rate / ceiling, "peak_tflop_s": peak, "peak": source}
    return rate / peak, details


def _denoising(lab: Lab, shape: Shape) -> Outcome:
    family, engine = lab.family(), lab.engine(lab.family(), shape)
    states = lab.start(family, engine, shape, STEPS)
    with lab.slots().use("policy", merged=True) as module:
        eager = module.forward
        with captured(lab, lab.slots()) as replayed:

            def step(forward: Callable[..., object]) -> None:
                module.forward = forward
                engine.step(module, states)

            step(replayed)  # the second call captures
            seconds = interleaved(lab, {"step": lambda: step(eager), "captured": lambda: step(replayed)})
    operations = _forward_flops(lab, shape)
    value, details = _utilisation(lab, operations, medians(seconds)["step"])
    tokens = shape.batch * (family.latent_shape(model.size(shape))[0] + shape.text)
    return Outcome(
        value,
        {
            **details,
            **spread(seconds),
            "captured_mfu": value * medians(seconds)["step"] / medians(seconds)["captured"],
            "tflop_a_picture": 1e-12 * operations / shape.batch,
            "tokens_a_s": tokens / medians(seconds)["step"],
            "picture_timesteps_a_s": shape.batch / medians(seconds)["step"],
            "shape": dataclasses.asdict(shape),
        },
    )


def launches(lab: Lab) -> Outcome:
    """Kernels that a block launches in one forward with adapters; on a CPU, operators called."""
    family, shape, per_block = lab.family(), lab.scale.small, lab.scale.layers
    counted = {}
    for name, lora in (("lora", True), ("base", False)):
        with model.using(lab.slots(), lora=lora) as module:
            counted[name] = kernels(partial(lab.velocity, family, module, shape), lab.device)
    most = {name[:100]: count for name, count in counted["lora"].most_common(12)}
    return Outcome(
        sum(counted["lora"].values()) / per_block,
        {"without_adapters": sum(counted["base"].values()) / per_block, "most_frequent": most},
    )


def mask_cost(lab: Lab) -> Outcome:
    """Time of a batch of unequal prompts over that of equal ones, padded to the same length."""
    family, shape = lab.family(), lab.scale.small
    equal = lab.conditions(family, shape)
    unequal = [lab.condition(family, shape.text - i % 5, i) for i in range(shape.batch)]
    with lab.slots().use("policy", merged=True) as module:
        seconds = interleaved(
            lab,
            {
                "equal": lambda: lab.velocity(family, module, shape, equal),
                "unequal": lambda: lab.velocity(family, module, shape, unequal),
            },
        )
    typical = medians(seconds)
    return Outcome(typical["unequal"] / typical["equal"], spread(seconds))


def lora_cost(lab: Lab) -> Outcome:
    """Time of a forward with adapters over one without."""
    family, shape, slots = lab.family(), lab.scale.small, lab.slots()

    def run(lora: bool) -> None:
        with model.using(slots, lora=lora) as module:
            lab.velocity(family, module, shape)

    seconds = interleaved(lab, {"lora": lambda: run(True), "base": lambda: run(False)})
    typical = medians(seconds)
    return Outcome(typical["lora"] / typical["base"], spread(seconds))


def fused_gain(lab: Lab) -> Outcome:
    """Time of a denoising step with diffusers' and peft's operators over one with fused operators."""
    family, shape = lab.family(), lab.scale.small
    lab.budget_s /= 3
    with lab.slots().use("policy", merged=True) as module:

        def timed(name: str) -> dict[str, list[float]]:
            return interleaved(lab, {name: lambda: lab.velocity(family, module, shape)})

        seconds = timed("fused")
        with model.reference(module):
            seconds |= timed("reference")
        seconds["fused"] += timed("fused")["fused"]
    typical = medians(seconds)
    return Outcome(typical["reference"] / typical["fused"], spread(seconds))


# -- training ----------------------------------------------------------------------------------------------


def train_small(lab: Lab) -> Outcome:
    """MFU of training on small pictures, with as little recomputation as fits."""
    return _training(lab, lab.scale.train_small, recompute="auto")


def train_compiled(lab: Lab) -> Outcome:
    """MFU of training on small pictures with compiled blocks."""
    with compiled(lab, lab.family().transformer):
        return _training(lab, lab.scale.train_small)


def train_large(lab: Lab) -> Outcome:
    """MFU of training on one large picture, three timesteps a pass, with as little recomputation as fits."""
    return _training(lab, lab.scale.train_large, recompute="auto")


def _training(lab: Lab, shape: Shape, **settings: object) -> Outcome:
    family, slots = lab.family(), lab.slots()
    samples = lab.samples(family, slots, shape, STEPS)
    # All timesteps in one pass: with smaller passes the GPU waits for the host.
    with learning(lab, family, slots, shape, timesteps_per_pass=STEPS, **settings) as learner:
        began = time.perf_counter()
        report = model.train(learner, samples)
        a_pass, level = report["train/timesteps_per_pass"], report.get("train/recompute_level")
        wait(lab.device)
        first = time.perf_counter() - began
        seconds = interleaved(lab, {"update": lambda: model.train(learner, samples)})
        kept = samples[0].tensors.log_probs if samples[0].tensors is not None else None
        timesteps = learner.algorithm.timesteps(0 if kept is None else len(kept)) * shape.batch
        performed = flops(lambda: model.train(learner, samples))  # with what is computed again
        trained = Trained.of(family.transformer)
    update_s = medians(seconds)["update"]
    counted = forward_operations(family, model.size(shape), shape.text, trained=trained)
    assert counted is not None, "Qwen-Image's forward can be counted"
    value, details = _utilisation(lab, timesteps * counted.training(frozen=trained.frozen), update_s)
    details |= {"hardware_utilisation": _utilisation(lab, performed, update_s)[0], "update_s": update_s}
    details |= {"picture_timesteps": timesteps, "picture_timesteps_a_s": timesteps / update_s}
    details |= {"timesteps_a_pass": a_pass, "recompute_level": level, "first_s": first}
    return Outcome(value, {**details, **spread(seconds), "shape": dataclasses.asdict(shape)})


RECOMPUTED: Mapping[str, Mode | int] = {
    "none": "none",
    "elementwise": "elementwise",
    "every 1": "blocks",
    "every 2": 2,
    "every 4": 4,
}


def recomputed(lab: Lab) -> Outcome:
    """Time of an update that recomputes whole blocks over one that keeps their products; and of others."""
    family, slots, shape = lab.family(), lab.slots(), lab.scale.train_small
    samples = lab.samples(family, slots, shape, STEPS)
    peaks: dict[str, object] = {}
    variants: dict[str, Callable[[], object]] = {}

    def update(learner: Learner, setting: Mode | int) -> None:
        again.use(modes_of(setting, again.blocks))
        model.train(learner, samples)

    # Small passes wait for the host, which has more to do where products are kept.
    times = STEPS if lab.tiny or free_bytes(lab.device) > 60e9 else 1
    with learning(lab, family, slots, shape, timesteps_per_pass=times) as learner:
        again = Recomputation(family.transformer)
        for name, setting in RECOMPUTED.items():
            variants[name] = partial(update, learner, setting)
            try:
                variants[name]()  # allocates, too, what later updates find
                peaks[name] = measure_peak(lab.device, variants[name])[1] / 1e9
            except torch.OutOfMemoryError:
                del variants[name]
                peaks[name] = "does not fit"
                learner = lab.learner(family, slots, shape, timesteps_per_pass=times)
                again = Recomputation(family.transformer)  # the learner has put its own there
                release(lab.device)
        seconds = interleaved(lab, variants)
    typical = medians(seconds)
    if "elementwise" not in typical:
        raise RuntimeError(f"updates that keep their products do not fit: {peaks}")
    details = {**spread(seconds), "peaks_gb": peaks, "timesteps_a_pass": times}
    return Outcome(typical["every 1"] / typical["elementwise"], details)


# -- compilation -------------------------------------------------------------------------------------------


def compile_time(lab: Lab) -> Outcome:
    """Seconds of the first forward after compiling by region; and what later ones gain."""
    from torch._dynamo.utils import counters

    family, shape = lab.family(), lab.scale.small
    blocks = list(family.transformer.transformer_blocks)  # type: ignore[arg-type]
    with lab.slots().use("policy", merged=True) as module:
        eager = lab.velocity(family, module, shape)
        counters.clear()
        with compiled(lab, module):
            began = time.perf_counter()
            found = lab.velocity(family, module, shape)
            wait(lab.device)
            first = time.perf_counter() - began
            calls = [block._compiled_call_impl for block in blocks]

            def run(chosen: bool) -> Tensor:
                for block, call in zip(blocks, calls, strict=True):
                    block._compiled_call_impl = call if chosen else None
                return lab.velocity(family, module, shape)

            lab.budget_s = max(lab.budget_s - first, 5.0)
            seconds = interleaved(lab, {"compiled": lambda: run(True), "eager": lambda: run(False)})
            graphs = int(counters["stats"]["unique_graphs"])
    typical = medians(seconds)
    gain = typical["eager"] / typical["compiled"]
    mfu, _ = _utilisation(lab, _forward_flops(lab, shape), typical["compiled"])
    details = {
        "speedup": gain,
        "mfu": mfu,
        "graphs": graphs,
        "difference": distance(found, eager),
        **spread(seconds),
    }
    return Outcome(first, details)


# -- the rest of a picture ---------------------------------------------------------------------------------


def vae(lab: Lab) -> Outcome:
    """Decoding a picture as a share of denoising it."""
    family, shape = lab.family(), lab.scale.small
    engine = lab.engine(family, shape)
    states = lab.start(family, engine, shape, PICTURE_STEPS)
    done = [dataclasses.replace(state, step=PICTURE_STEPS) for state in states]
    with lab.slots().use("policy", merged=True) as module:
        seconds = interleaved(
            lab, {"step": lambda: engine.step(module, states), "decode": lambda: engine.finish(done)}
        )
    typical = medians(seconds)
    details = {**spread(seconds), "decode_ms_a_picture": 1e3 * typical["decode"] / shape.batch}
    return Outcome(typical["decode"] / (PICTURE_STEPS * typical["step"]), details)


def publish_and_bind(lab: Lab) -> Outcome:
    """Seconds from adapters on the device to the same, rounded, bound from a node's shared memory."""
    slots, turn, rounded = lab.slots(), [0], torch.bfloat16
    state = slots.state("policy")
    size = sum(tensor.numel() * rounded.itemsize for tensor in state.values())
    parent = _room(lab, 4 * size)
    before = {name: tensor.clone() for name, tensor in state.items()}
    parts: dict[str, list[float]] = {"pack": [], "cache": [], "bind": []}
    cache = NodeCache(f"gpu-suite-{os.getpid()}", parent=parent)

    def publish() -> None:
        turn[0] += 1
        next(iter(state.values())).view(-1)[0] = turn[0]  # another digest: nothing is cached
        marks = [time.perf_counter()]
        states = {"policy": gathered(slots.state("policy"), stay=True)}  # as learner ranks publish
        manifest, data = pack(turn[0], 0, states, slots.modules_bound, dtype=rounded)
        marks.append(time.perf_counter())
        bundle = cache.get(manifest, lambda: data)
        marks.append(time.perf_counter())
        bind(bundle, slots, needs=("policy",), dtype=rounded)
        wait(lab.device)
        marks.append(time.perf_counter())
        for name, (start, end) in zip(parts, pairwise(marks), strict=True):
            parts[name].append(end - start)

    try:
        seconds = interleaved(lab, {"publish": publish})
    finally:
        slots.load_state("policy", before)
        cache.close()
        shutil.rmtree(cache.directory, ignore_errors=True)
    return Outcome(
        medians(seconds)["publish"],
        {
            "gb": size / 1e9,
            "where": str(parent),
            "seconds": seconds["publish"],
            "last": {k: v[-1] for k, v in parts.items()},
        },
    )


def _room(lab: Lab, size: int) -> Path:
    """Shared memory if it has room, as in Docker it often has not."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return SHARED_MEMORY if free > size else lab.home


# -- against others ----------------------------------------------------------------------------------------


@contextmanager
def _pipeline(lab: Lab) -> Iterator[QwenImagePipeline]:
    family = lab.family()
    pipeline = QwenImagePipeline.from_pretrained(
        lab.pipeline(lab.scale.layers),
        transformer=family.transformer,
        vae=family.vae,
        text_encoder=None,
        tokenizer=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    yield pipeline


def against_pipeline(lab: Lab) -> Outcome:
    """Our loop over diffusers' pipeline, both without adapters; a plain loop beside them."""
    family, shape, side = lab.family(), lab.scale.small, lab.scale.small.side_px
    engine = lab.engine(family, shape)
    text = family.collate(lab.conditions(family, shape))
    begun = lab.start(family, engine, shape, STEPS)
    noise, sigmas = torch.stack([state.latents for state in begun]), begun[0].sigmas.tolist()

    with ExitStack() as stack:
        pipeline = stack.enter_context(_pipeline(lab))
        module = stack.enter_context(lab.slots().use("reference"))

        def ours() -> list[RolloutState]:
            return model.all_steps(engine, module, lab.start(family, engine, shape, STEPS))

        def theirs() -> Tensor:
            with model.reference(module):
                made: Tensor = pipeline(
                    prompt_embeds=text["embeds"],
                    prompt_embeds_mask=text.mask("embeds"),
                    true_cfg_scale=1.0,
                    height=side,
                    width=side,
                    num_inference_steps=STEPS,
                    latents=noise.to(family.dtype),
                    output_type="latent",
                ).images
            return made

        @torch.no_grad()
        def plain() -> Tensor:
            x = noise.to(family.dtype)
            for sigma, following in pairwise(sigmas):
                levels = torch.full((shape.batch,), sigma, device=lab.device, dtype=family.dtype)
                v = module(
                    hidden_states=x,
                    timestep=levels,
                    encoder_hidden_states=text["embeds"],
                    encoder_hidden_states_mask=text.mask("embeds"),
                    img_shapes=[[(1, *family.dimensions.grid(model.size(shape)))]] * shape.batch,
                    return_dict=False,
                )[0]
                x = x + (following - sigma) * v
            return x

        final = torch.stack([state.latents for state in ours()])
        difference = distance(final, theirs())
        seconds = interleaved(lab, {"ours": ours, "pipeline": theirs, "plain": plain})
    typical = medians(seconds)
    return Outcome(
        typical["ours"] / typical["pipeline"],
        {"over_plain_loop": typical["ours"] / typical["plain"], "difference": difference, **spread(seconds)},
    )
