"""Memory and disk of a run, by part, each with its formula. Estimates are within about 25 %.

Notation: B micro-batch, K timesteps per pass, N samples per iteration, L layers, D width, n = image + text
tokens, g = 2 with guidance else 1, P trained parameters, b bytes per number (4, or 2 in bfloat16).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from spotlight.config.schema import RunConfig
from spotlight.config.sections.algorithm import BatchStartSection
from spotlight.data.media_size import media_size
from spotlight.dry_run.model_plan import ModelSizes, NotHere, TransformerSizes, adapted_layers, family_of
from spotlight.models.shared.quantised import held_bytes, held_of
from spotlight.training.timesteps import largest_pass

Phase = Literal["text encoding", "denoising", "decoding", "training"]
"""What runs on a device, in turn; none needs what only another one allocates."""
When = Literal["always", "once loaded"] | Phase | Literal["host"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_LEDGER_BYTES_PER_ROLLOUT = 1000  # measured: 860 with three scores per sample
_BILL_BYTES = 60  # measured: 58
_MERGED = "merged adapters"
_ADAPTERS = ("trained adapters", "copies of the adapters")
_ADAM, _OF_WORKER = "Adam", " (worker)"
_OF_ROLLOUTS: tuple[Phase, ...] = ("denoising", "decoding")
_APPLIED = "bfloat16 adapters"
"""Sharded weights are not merged, and adapters gathered in bfloat16."""
_PNG_SHARE = 0.6  # of the raw bytes for photographs; images with few colours compress better
_NCCL_CHANNELS = 32
"""Default of ``maxCTAs`` in NCCL's API reference (``ncclConfig_t``); it may use fewer."""
_NCCL_CHANNEL_MIB = 4 + 0.5 + 4.69
"""Of a channel to one peer: the defaults of NCCL_BUFFSIZE (documented), NCCL_LL_BUFFSIZE and
NCCL_LL128_BUFFSIZE (NCCL's ``init.cc``: 8 x 512 x 8 x 16 B, and 120 x 640 x 8 x 8 B)."""
EMBEDDINGS_BYTES = 4 << 30
"""Kept in memory on a node, divided over its ranks; others are read from the disk cache when they are used.

An embedding has up to 3.7 MB with Qwen-Image, 15.7 MB with FLUX.2-dev, 31 MB with Krea 2.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One part; ``formula`` gives ``bytes``.

    Attributes:
        when: the phase that allocates it on the device; ``once loaded`` is in all phases but text encoding,
            after which the DiT is read; ``host`` is CPU memory.
        divided: whether ranks that share the model (``learner.shard``) each hold a part of it.
    """

    part: str
    bytes: float
    formula: str
    when: When = "always"
    divided: bool = False


def memory_parts(
    config: RunConfig, model: ModelSizes, trained: int, text_tokens: int
) -> tuple[Estimate, ...]:
    """Memory of one process that holds the whole model; :func:`shared_parts` is for several.

    With ``pipeline.trainers_generate``, of a learner's GPU: a rank and the worker beside it.
    """
    tokens = model.tokens(media_size(config.rollout)) + text_tokens
    weights = tuple(_weights(config, model, trained))
    parts = (
        *weights,
        *_merged(config, model),
        *_optimizer(config, trained),
        *_activations(config, model, tokens),
        *_samples(config, model),
        *_groups(config),
    )
    return _with_worker(parts, weights) if config.pipeline.trainers_generate else parts


def host_parts(
    config: RunConfig, model: ModelSizes, text_tokens: int, *, prompts: int, evaluated: int
) -> tuple[Estimate, ...]:
    """What a run holds in the memory of the host whatever it trains.

    Args:
        text_tokens: of the longest prompt.
        prompts: all of the run's.
        evaluated: pictures of an evaluation; 0: there is none.
    """
    every = _embeddings(config, model, prompts * text_tokens)
    embeddings = replace(
        every,
        bytes=min(EMBEDDINGS_BYTES, every.bytes),
        formula=f"{every.formula}, at most {EMBEDDINGS_BYTES >> 30} GiB a node",
        when="host",
    )
    if not evaluated:
        return (embeddings,)
    pixels = media_size(config.rollout).pixels
    pictures = Estimate(
        "pictures of an evaluation", 3.0 * evaluated * pixels, f"3 B x {evaluated} x pixels", "host"
    )
    return pictures, embeddings


def _embeddings(config: RunConfig, model: TransformerSizes, tokens: int) -> Estimate:
    size = 2 if config.model.dtype == "bfloat16" else 4
    formula = f"{size} B x text tokens of the prompts x {model.text_width} (width)"
    return Estimate("text embeddings", float(size) * tokens * model.text_width, formula)


def stored_parts(config: RunConfig, model: TransformerSizes | NotHere, tokens: int) -> list[Estimate]:
    """Disk for what Ray's blob store holds for the whole run, all of which it may move there.

    Empty without workers of their own, or if the model is not here.

    Args:
        tokens: of all prompts that the run uses, without their reference pictures.
    """
    if config.fleet.driver != "ray" or isinstance(model, NotHere):
        return []
    return [_embeddings(config, model, tokens)]


def _with_worker(parts: Sequence[Estimate], weights: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Both stay on the GPU; neither process returns allocated memory to the other."""
    mine = [part for part in parts if part.when not in _OF_ROLLOUTS]
    rolls_out = tuple(part for part in parts if part.when in _OF_ROLLOUTS)
    held = [part for part in weights if part.when != "text encoding"]
    peaks = phase_bytes(rolls_out)
    largest = max(_OF_ROLLOUTS, key=lambda phase: peaks[phase])
    worker = [
        replace(part, part=f"{part.part}{_OF_WORKER}", when="once loaded", divided=False)
        for part in (*held, *(each for each in rolls_out if each.when == largest))
    ]
    return (*mine, *worker)


def worker_parts(parts: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Memory of a process that only rolls out, with whole weights in all slots, from :func:`memory_parts`."""
    beside = tuple(part for part in parts if part.part.endswith(_OF_WORKER))
    return beside or tuple(
        p for p in parts if p.when in ("always", "once loaded", *_OF_ROLLOUTS) and p.part != _ADAM
    )


def may_share(config: RunConfig) -> bool:
    """Whether several ranks could share the model."""
    return config.learner.shard != "none" and config.model.quantize == "none"


def shared_parts(
    config: RunConfig, model: ModelSizes, parts: Sequence[Estimate], ranks: int
) -> tuple[Estimate, ...]:
    """Memory of one of ``ranks`` that share the model, from :func:`memory_parts`.

    No rank ever holds more of it: weights are read after sharding, when the text encoder is freed.
    """
    full, size = config.learner.mode == "full", _gathered_size(config)
    block = model.parameters / model.dimensions.layers
    formula = f"{size} B x parameters / L x 2" + (f" + {size + 4} B x parameters / L (gradients)" * full)
    gathered = Estimate("gathered blocks", block * (2 * size + full * (size + 4)), formula)
    mine = [
        replace(part, bytes=part.bytes / ranks) if part.divided else part
        for part in parts
        if part.part not in (_MERGED, _APPLIED)
    ]
    return (
        *mine,
        gathered,
        *_nccl(config, 1, "always"),
        *((kept_gathered(config, model, parts),) if config.learner.keep_gathered is True else ()),
    )


def kept_gathered(config: RunConfig, model: ModelSizes, parts: Sequence[Estimate]) -> Estimate:
    """What rollouts of ranks that share the model hold if they keep it gathered."""
    size = _gathered_size(config)
    lora = config.learner.mode == "lora"
    adapters = sum(part.bytes / 4 for part in parts if lora and part.part in _ADAPTERS)
    formula = f"{size} B x parameters (learner.keep_gathered)"
    return Estimate("the whole model, gathered", size * (model.parameters + adapters), formula, "denoising")


def _gathered_size(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" or config.learner.autocast == "bfloat16" else 4


def phase_bytes(parts: Iterable[Estimate]) -> dict[Phase, float]:
    """Device memory at the peak of each phase."""
    held = defaultdict[When, float](float)
    for part in parts:
        held[part.when] += part.bytes
    loaded: dict[Phase, float] = {"text encoding": 0.0}
    return {phase: held["always"] + loaded.get(phase, held["once loaded"]) + held[phase] for phase in PHASES}


def peak_bytes(parts: Iterable[Estimate]) -> float:
    """Device memory at the peak of the largest phase."""
    return max(phase_bytes(parts).values())


def weight_copies(config: RunConfig) -> int:
    """Copies of the trained weights: old policy, moving average, and with ``full`` the reference."""
    old = config.algorithm.uses_old_policy
    # With LoRA the reference is the base model without adapters, which is in memory anyway.
    reference = config.learner.mode == "full" and config.algorithm.uses_reference
    return int(old) + int(config.learner.ema is not None) + int(reference)


def _weights(config: RunConfig, model: ModelSizes, trained: int) -> Iterator[Estimate]:
    size = 2 if config.model.dtype == "bfloat16" else 4
    if config.learner.mode == "lora":
        yield Estimate("frozen DiT", *_frozen(config, model), "once loaded", divided=True)
        if config.model.quantize != "none":
            held = held_of(model.linears, config.model.quantize)
            largest = max(math.prod(model.linears[name]) for name in held)
            formula = f"{size} B x the largest one's, while it computes"
            yield Estimate("a layer's whole weight", float(largest * size), formula, "once loaded")
    yield Estimate("VAE", model.vae_parameters * 4, "4 B x parameters")
    copies = weight_copies(config)
    what = "adapters" if config.learner.mode == "lora" else "DiT"
    yield Estimate(f"trained {what}", trained * 4, "4 B x P", "once loaded", divided=True)
    if copies:
        formula = f"4 B x P x {copies} (old, EMA, reference)"
        yield Estimate(f"copies of the {what}", trained * 4 * copies, formula, "once loaded", divided=True)
    if config.learner.mode == "lora" and config.model.dtype == config.learner.autocast:
        applied = 1 + copies
        yield Estimate(_APPLIED, trained * 2 * applied, f"2 B x P x {applied} (applied)", "once loaded")
    formula = f"{size} B x parameters, freed before the DiT is read"
    when: When = "host" if config.model.text_encoder == "cpu" else "text encoding"
    yield Estimate("text encoder", model.text_encoder_parameters * size, formula, when)


def _frozen(config: RunConfig, model: ModelSizes) -> tuple[float, str]:
    """Bytes of the base that adapters are trained on, and their formula."""
    size, quantize = 2 if config.model.dtype == "bfloat16" else 4, config.model.quantize
    if quantize == "none":
        return float(model.parameters * size), f"{size} B x parameters"
    held = [model.linears[name] for name in held_of(model.linears, quantize)]
    count = sum(map(math.prod, held))
    packed = sum(held_bytes(quantize, *shape) for shape in held)
    formula = f"{packed / count:.3f} B x weights of linear layers in blocks + {size} B x others"
    return float(packed + size * (model.parameters - count)), formula


def _merged(config: RunConfig, model: ModelSizes) -> Iterator[Estimate]:
    """Rollouts merge the adapter into float32 base weights: a second copy of the adapted layers."""
    learner = config.learner
    whole = config.model.dtype == "float32" and config.model.quantize == "none"
    if learner.mode == "lora" and whole and learner.autocast == "none":
        adapted = sum(outputs * inputs for outputs, inputs in adapted_layers(config, model).values())
        # A worker of Ray keeps them while the weights are the same.
        for phase in _OF_ROLLOUTS if config.fleet.driver == "ray" else _OF_ROLLOUTS[:1]:
            yield Estimate(_MERGED, adapted * 4, "4 B x weights of the adapted layers", phase)


def timesteps_per_pass(config: RunConfig) -> int:
    """K; 1 for ``auto``, which uses more only where they fit."""
    wanted = config.learner.timesteps_per_pass
    return 1 if wanted == "auto" else largest_pass(config.trained_timesteps, wanted)


def _optimizer(config: RunConfig, trained: int) -> Iterator[Estimate]:
    yield Estimate("gradients", trained * 4, "4 B x P", "training", divided=True)
    several = config.learner.timesteps_per_pass == "auto" and config.trained_timesteps > 1
    if several or config.learner.recompute == "auto":
        # Accumulated gradients are stored separately, so that a pass that runs out of memory can be
        # discarded.
        formula = f"4 B x P ({'timesteps_per_pass' if several else 'recompute'} auto)"
        yield Estimate("gradients of a pass", trained * 4, formula, "training", divided=True)
    yield Estimate(_ADAM, trained * 8, "2 x 4 B x P", "once loaded", divided=True)


def _activations(config: RunConfig, model: ModelSizes, tokens: int) -> Iterator[Estimate]:
    learner, guidance = config.learner, 2 if config.rollout.true_cfg_scale > 1 else 1
    family = family_of(config)
    costs = family.activations
    size = 2.0 if config.model.dtype == "bfloat16" else 4.0
    if learner.autocast == "bfloat16" and size == 4:
        size = 3.2  # measured: norms and residuals stay float32
    per_pass = timesteps_per_pass(config)
    per_layer = learner.micro_batch_size * per_pass * tokens * model.dimensions.width * size * guidance
    kept = costs.lora if learner.mode == "lora" else costs.full
    layers, every = model.dimensions.layers, learner.recompute
    if every == "none":
        values, formula = layers * kept, f"{kept:g} B K n L D b g"
    else:
        inputs = costs.elementwise if every == "elementwise" else costs.checkpointed
        recomputed = -(-layers // every) if isinstance(every, int) else layers
        # While a block is recomputed its own activations are there, too.
        whole = layers - recomputed + 1
        values = recomputed * inputs + whole * kept
        formula = f"B K n D b g ({inputs:g} x {recomputed} + {kept:g} x {whole})"
    formula += f", K = {per_pass}" + (
        " or what fits" if "auto" in (learner.timesteps_per_pass, learner.recompute) else ""
    )
    yield Estimate("activations", per_layer * values, formula, "training")
    batch, rollout = config.rollout.batch_size, config.rollout
    decoded = media_size(rollout).decoded_together(batch)
    forward = batch * tokens * model.dimensions.width * size * costs.forward
    yield Estimate("denoising forward", forward, f"{costs.forward:g} x batch n D b", "denoising")
    if config.model.cuda_graphs:
        yield Estimate("captured forwards", forward, "they keep the memory of the largest", "once loaded")
    yield Estimate(
        "decoding",
        decoded * family.decoded_pixels(media_size(rollout)) * model.dimensions.vae_width * 4 * costs.decode,
        f"{costs.decode:g} x 4 B x {decoded} samples x pixels decoded at once x VAE width",
        "decoding",
    )


def _samples(config: RunConfig, model: ModelSizes) -> Iterator[Estimate]:
    rollout = config.rollout
    samples = rollout.prompts_per_iteration * rollout.group_size
    steps = config.rollout.kept_steps
    kept = 1 if steps == 0 else 1 + steps + 1
    tokens = model.tokens(media_size(rollout))
    yield Estimate(
        "latents kept",
        samples * tokens * model.dimensions.channels * 4 * kept,
        f"4 B x N x tokens x channels x {kept}" + (" (x0 alone)" if kept == 1 else " (x0 and trajectory)"),
        "host",
    )
    yield Estimate("pictures to score", samples * media_size(rollout).pixels * 3, "3 B x N x pixels", "host")


def _groups(config: RunConfig) -> Iterator[Estimate]:
    """What GPUs need to exchange, where the configuration knows that they do."""
    parallel = config.fleet.sequence_parallel
    if parallel.degrees[-1] > 1:  # all-to-all has connections of its own, and a half a group
        yield from _nccl(config, 4 if parallel.guidance else 2, "denoising")
    if config.fleet.learner_ranks > 1 and config.learner.shard == "none":
        yield from _nccl(config, 1, "training")


def _nccl(config: RunConfig, connections: int, when: When) -> Iterator[Estimate]:
    if config.device != "cpu":
        size = connections * _NCCL_CHANNELS * _NCCL_CHANNEL_MIB * 2**20
        formula = f"{_NCCL_CHANNEL_MIB:.1f} MiB x {_NCCL_CHANNELS} channels x {connections}, NCCL's defaults"
        yield Estimate("NCCL buffers", size, formula, when)


def checkpoint_parts(config: RunConfig, trained: int | None) -> list[Estimate]:
    """Disk for checkpoints and export, exact; empty if ``trained`` is None."""
    if trained is None:
        return []
    copies = 3 + weight_copies(config)
    kept = config.checkpoint.keep + config.checkpoint.best + 1
    return [
        Estimate(
            "checkpoints",
            trained * 4.0 * copies * kept,
            f"4 B x P x {copies} (policy, 2 of Adam, copies) x {kept} (kept, and one being written)",
        ),
        Estimate("export", trained * 4.0, "4 B x P"),
    ]


def published_parts(config: RunConfig, trained: int | None) -> list[Estimate]:
    """What workers get of each version, as one object in Ray's store; empty without workers of their own."""
    if trained is None or config.fleet.driver != "ray":
        return []
    algorithm, size = config.algorithm, 2 if config.fleet.published_dtype(config) == "bfloat16" else 4
    slow = algorithm.uses_old_policy and not isinstance(algorithm, BatchStartSection)
    slots = 1 + int(slow and config.evaluation.weights != "old") + int(config.evaluation.weights == "ema")
    slots = min(slots, 2)  # the behaviour policy's and the evaluated weights
    return [
        Estimate("a version", trained * float(size) * slots, f"{size} B x P x up to {slots} weight slots")
    ]


def disk_parts(config: RunConfig, trained: int | None, evaluations: int, images: int) -> tuple[Estimate, ...]:
    """Disk of the finished run directory."""
    evaluation, rollout = config.evaluation, config.rollout
    parts = checkpoint_parts(config, trained)
    shown = min(math.prod(evaluation.grid), images)
    pixels = media_size(rollout).pixels
    parts.append(
        Estimate(
            "image grids",
            evaluations * shown * pixels * 3 * _PNG_SHARE,
            f"{_PNG_SHARE} x 3 B x pixels x {shown} pictures x {evaluations} evaluations",
        )
    )
    rollouts = config.iterations * rollout.prompts_per_iteration * rollout.group_size + evaluations * images
    parts.append(
        Estimate(
            "ledger", rollouts * float(_LEDGER_BYTES_PER_ROLLOUT), f"{_LEDGER_BYTES_PER_ROLLOUT} B x rollouts"
        )
    )
    if config.fleet.driver == "ray":
        formula = f"{_BILL_BYTES} B x 2 phases x 10 slots a second: of up to 600 slots"
        parts.append(Estimate("ledger's bills, a day", _BILL_BYTES * 2 * 10 * 86_400.0, formula))
    return tuple(parts)
