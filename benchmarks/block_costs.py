"""What a transformer's block costs besides arithmetic: operators, bytes, and the host's time.

    python -m benchmarks.block_costs [--side 512] [--batch 16] [--text 64] [--json FILE]
    python -m benchmarks.block_costs --every

Counted, at full width, on tensors without memory: operators of one block that a GPU would launch kernels for
(all but views and allocations; an attention call is one), the bytes that these read and write, and
floating-point operations. A block is what a forward through the family costs more with one layer of its kind
more. Operators are torch's before any compiler, as dispatched for a CPU under its autocast. A GPU's kernels
are about as many; ``python -m benchmarks.gpu --part B --only launches`` counts those. ``--every`` counts the
blocks of one model of each family. ``fused`` is with ``model.kernels: fused``.

Besides, what one block more keeps for the backward under each ``learner.recompute``: storages that are alive
when the forward has returned, in tensors of [tokens, width].

Timed, on this machine, for Qwen-Image: the host's milliseconds for a forward of 60 layers, and with its
backward, most of which is Python and dispatch, with a width and pictures so small that arithmetic takes next
to nothing. A GPU that computes for less than this waits for the host. Kernels of fused operators are compiled
for a GPU, and all but the driver's own launch is done. Variants take turns; medians.
"""

from __future__ import annotations

import atexit
import copy
import json as jsonlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks._flop_counter import flop_counter
from benchmarks._measure import Clock, machine, ratio, take_turns, wide_console
from benchmarks._no_gpu import launches_nothing
from spotlight.models import peft_layers
from spotlight.models.condition import Condition
from spotlight.models.experts import denoisers
from spotlight.models.family import MediaSize, ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.shared.flop_count import KnownRows
from spotlight.models.slots import LoraSlots
from spotlight.registry import FAMILIES
from spotlight.training.recompute import Mode, recompute
from spotlight_files.pipeline_export import keeps_float32
from spotlight_kernels.fuse import fuse
from spotlight_plan.commands.gpu.random_blocks import depth_of, in_pipeline, with_depth

QWEN = "Qwen/Qwen-Image"
EVERY = {
    QWEN: "qwen-image",
    "Qwen/Qwen-Image-2.1": "qwen-image-2.1",
    "black-forest-labs/FLUX.1-dev": "flux",
    "black-forest-labs/FLUX.2-klein-4B": "flux2-klein",
    "black-forest-labs/FLUX.2-dev": "flux2-dev",
    "krea/Krea-2-Raw": "krea-2",
    "stabilityai/stable-diffusion-3.5-medium": "sd3",
    "Tongyi-MAI/Z-Image": "z-image",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan",
    "hunyuanvideo-community/HunyuanVideo": "hunyuan-video",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": "hunyuan-video-1.5",
}
"""A model of each family with blocks of its own (Qwen-Image-Edit has Qwen-Image's), and the family."""
LAYERS = 60
RANK = 64
NARROW = {"num_attention_heads": 1}
VARIANTS = ("no adapters", "bfloat16 copies", "float32 adapters, autocast")
"""The second is what a bfloat16 model trains with, the third what a float32 model would."""
FUSED = "bfloat16 copies, fused"
MODES: tuple[Mode, ...] = ("none", "elementwise", "blocks")
_NAMESPACES = ("aten", "spotlight_kernels")
_ALLOCATIONS = ("empty", "detach", "alias", "_unsafe_view", "lift_fresh")
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


@dataclass(frozen=True, slots=True)
class Work:
    """Pictures of one forward, or videos of two latent frames."""

    side_px: int
    batch: int
    text: int

    @property
    def grid(self) -> int:
        """Tokens along a side; of every published model one per 16 pixels."""
        return self.side_px // 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one block.

    Attributes:
        operators: that launch a kernel.
        products: those of them that are matrix products or attention.
        bytes: read and written by all operators.
        elementwise_bytes: by those that are no products.
        flops: of the products.
    """

    operators: float
    products: float
    bytes: float
    elementwise_bytes: float
    flops: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.products = self.bytes = self.elementwise_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace not in _NAMESPACES or func.is_view or name.startswith(_ALLOCATIONS):
            return output
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)}
        moved, product = sum(map(_stored, tensors.values())), name in _PRODUCTS or "attention" in name
        self.operators += 1
        self.products += product
        self.bytes += moved
        self.elementwise_bytes += 0 if product else moved
        return output


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operators made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in [] if func.is_view else tree_leaves(output):  # views of weights are no activations
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return output

    @property
    def bytes(self) -> int:
        """At this moment."""
        gone: Callable[[StorageWeakRef], bool] = StorageWeakRef.expired
        return sum(size for storage, size in self._made.values() if not gone(storage))


def _stored(tensor: Tensor) -> int:
    """Bytes of the elements; expanded ones count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()


@cache
def family_of(model: str) -> ModelFamily:
    """The family with a tiny pipeline, in bfloat16."""
    kind, directory = FAMILIES.load(EVERY[model]), Path(tempfile.mkdtemp(prefix="block-costs-"))
    atexit.register(shutil.rmtree, directory)
    kind.tiny(directory / "pipeline", seed=0)
    return kind.load(directory / "pipeline", device="cpu", dtype=torch.bfloat16, embeddings_cache=directory)


def published(model: str) -> dict[str, Any]:
    """Configuration of the transformer."""
    return dict(FAMILIES.load(EVERY[model]).published[model].configs["transformer"])


def kinds_of(model: str) -> list[str]:
    """Kinds of the transformer's blocks."""
    return list(depth_of(published(model)))


def _with_layers(model: str, kind: str, layers: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Published, but with so many blocks of the kind, and one of each other."""
    depth = {each: layers if each == kind else 1 for each in kinds_of(model)}
    return {**with_depth(published(model), depth), **extra}


def make_slots(
    model: str, config: Mapping[str, Any], rank: int, compute: torch.dtype | None, *, fused: bool = False
) -> tuple[LoraSlots, nn.Module]:
    """Slots of a transformer with adapters applied in ``compute``, and itself; its weights have no memory."""
    from accelerate import init_empty_weights

    family = family_of(model)
    tiny: Any = denoisers(family.transformer)["transformer"]
    with init_empty_weights():
        module = type(tiny).from_config(in_pipeline(config, tiny.config))
    for name, parameter in module.named_parameters():
        if not keeps_float32(type(module), name):
            parameter.data = parameter.data.to(torch.bfloat16)
    family.adapt(module)
    spec = LoraSpec(rank, 2.0 * rank, family.lora_targets, seed=3)
    if fused:
        assert not fuse(module, torch.device("cpu"), compare=False).left
    slots = LoraSlots(module, spec, compute=compute)
    if fused:
        peft_layers.fuse(module)
    return slots, module


def fill(module: nn.Module) -> None:
    """Put zeros into all weights."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            trained = parameter.requires_grad
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
            part.register_parameter(name, nn.Parameter(value, trained))


@dataclass(frozen=True, slots=True)
class Forward:
    """Of a variant, with inputs."""

    slots: LoraSlots
    variant: str
    run: Callable[[nn.Module], Tensor]

    def __call__(self) -> Tensor:
        """The velocity."""
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.variant.endswith("autocast"))
        with self.slots.use("reference" if self.variant == "no adapters" else "policy") as module, autocast:
            return self.run(module)


def size_of(family: ModelFamily, work: Work) -> MediaSize:
    """Of the tiny pipeline's VAE: as many tokens as the published one's."""
    side = work.grid * family.dimensions.patch_px
    return MediaSize(side, side, frames=5 if family.video else 1)


def make_forward(
    model: str,
    config: Mapping[str, Any],
    variant: str,
    work: Work,
    *,
    rank: int = RANK,
    masked: bool = False,
    memory: AbstractContextManager[object] | None = None,
) -> Forward:
    """A forward through the family.

    Args:
        memory: where weights and inputs are made; default: real ones.
    """
    family = copy.copy(family_of(model))
    compute = None if variant.endswith("autocast") else torch.bfloat16
    slots, module = make_slots(model, config, rank, compute, fused=variant == FUSED)
    family.config, family.dimensions = module.config, replace(family.dimensions, side_max_px=None)
    size = size_of(family, work)
    with memory or nullcontext():
        fill(module)
        texts = [work.text - (masked and i % 2) for i in range(work.batch)]
        conditions = [
            Condition({key: torch.zeros(shape) for key, shape in family.condition_shapes(text).items()})
            for text in texts
        ]
        batch = family.collate(conditions)
        latents = torch.zeros(work.batch, *family.latent_shape(size), dtype=family.dtype)

    def run(part: nn.Module) -> Tensor:
        levels = torch.full([work.batch], 0.5)
        with nullcontext() if memory is None else KnownRows():
            return family.predict(part, latents, levels, batch, family.embedded_guidance, size)

    return Forward(slots, variant, run)


def count(
    model: str,
    config: Mapping[str, Any],
    variant: str,
    work: Work,
    *,
    masked: bool,
    gradient: bool,
    mode: Mode = "none",
) -> Cost:
    """Of a whole forward, with its backward if asked for."""
    without = FakeTensorMode(allow_non_fake_inputs=True)
    # Outside the mode: what the forward makes itself, masks and positions, has values that it may read.
    forward = make_forward(model, config, variant, work, masked=masked, memory=without)
    recompute(forward.slots.modules()["policy"], mode)
    with torch.no_grad():
        forward()  # rotary tables and bfloat16 copies are kept
    counting = flop_counter()
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradient))
        stack.enter_context(counting)
        counter = stack.enter_context(_Counter())
        output = forward()
        if gradient:
            output.float().square().mean().backward()  # type: ignore[no-untyped-call]
    total = float(counting.get_total_flops())
    return Cost(counter.operators, counter.products, counter.bytes, counter.elementwise_bytes, total)


def block(
    variant: str,
    work: Work,
    *,
    masked: bool = False,
    gradient: bool = False,
    model: str = QWEN,
    kind: str = "num_layers",
    mode: Mode = "none",
) -> Cost:
    """Of one block: what a third layer adds."""
    two, three = (
        count(
            model, _with_layers(model, kind, layers, {}), variant, work,
            masked=masked, gradient=gradient, mode=mode,
        )
        for layers in (2, 3)
    )  # fmt: skip
    return three - two


def kept(variant: str, work: Work, mode: Mode, *, model: str = QWEN, kind: str = "num_layers") -> float:
    """Tensors of [tokens, width] in bfloat16 that the forward of one block leaves for its backward."""
    found = []
    for layers in (2, 3):
        without = FakeTensorMode(allow_non_fake_inputs=True)
        forward = make_forward(model, _with_layers(model, kind, layers, {}), variant, work, memory=without)
        recompute(forward.slots.modules()["policy"], mode)
        with torch.no_grad():
            forward()
        with Alive() as alive:
            output = forward()
        found.append(alive.bytes)
        del output
    config = published(model)
    width = int(config.get("dim") or config["num_attention_heads"] * config["attention_head_dim"])
    return float(found[1] - found[0]) / (2 * tokens(model, work) * width)


def host_seconds(rounds: int, layers: int = LAYERS, *, backward: bool = False) -> dict[str, list[float]]:
    """Of a narrow Qwen-Image's forward on one picture of one token, by variant with adapters."""
    config, work = _with_layers(QWEN, "num_layers", layers, NARROW), Work(16, 1, 4)
    forwards = [make_forward(QWEN, config, variant, work, rank=1) for variant in (*VARIANTS[1:], FUSED)]

    def run(forward: Forward) -> None:
        output = forward()
        if backward:
            output.float().square().mean().backward()  # type: ignore[no-untyped-call]

    runs = {forward.variant: partial(run, forward) for forward in forwards}
    with torch.set_grad_enabled(backward), launches_nothing():
        return take_turns(runs, rounds, torch.device("cpu"), Clock.CPU)


def tokens(model: str, work: Work) -> int:
    """Of all pictures and prompts."""
    family = family_of(model)
    shapes = family.condition_shapes(work.text).values()
    text = sum(shape[0] for shape in shapes if len(shape) > 1)
    return work.batch * (family.dimensions.tokens(size_of(family, work)) + text)


Case = tuple[str, str, str, bool, bool, Cost]
"""Model, kind, variant, masked, backward."""


def main(
    side: Annotated[int, typer.Option(min=16, help="Pictures' height and width in pixels.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Pictures of a forward.")] = 16,
    text: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    every: Annotated[bool, typer.Option("--every", help="Count a model of each family; no timing.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """Count a block's operators and bytes, and time the host."""
    torch.set_num_threads(1)
    work, console = Work(side, batch, text), wide_console()
    cases: list[Case] = [
        (model, kind, variant, masked, gradient, cost)
        for model in (EVERY if every else (QWEN,))
        for kind in kinds_of(model)
        for gradient in (False, True)
        for masked in ((False,) if every else (False, True))
        for variant in (*VARIANTS, FUSED)
        if not (gradient and variant == "no adapters")
        for cost in [block(variant, work, masked=masked, gradient=gradient, model=model, kind=kind)]
    ]
    console.print(f"{batch} pictures of {side} px (videos: 5 frames), prompts of {text} tokens, rank {RANK}")
    console.print(_table(cases, work))
    left = Table("kept for the backward, in [tokens, width]", "a block of", *MODES, "fused")
    for model, kind in dict.fromkeys((case[0], case[1]) for case in cases):
        columns: list[tuple[str, Mode]] = [*((VARIANTS[1], mode) for mode in MODES), (FUSED, "none")]
        each = [f"{kept(variant, work, mode, model=model, kind=kind):.1f}" for variant, mode in columns]
        left.add_row(model.partition("/")[2], kind, *each)
    console.print(left)
    ways = {} if every else {"forward": False, "with backward": True}
    seconds = {way: host_seconds(rounds, backward=backward) for way, backward in ways.items()}
    for way, found in seconds.items():
        timed = Table(f"the host, {LAYERS} layers, {way}", "ms", "over the first")
        for variant, taken in found.items():
            over = ratio(taken, found[VARIANTS[1]])
            timed.add_row(variant, f"{1e3 * statistics.median(taken):.1f}", str(over))
        console.print(timed)
    if json is not None:
        names = ("model", "kind", "variant", "masked", "backward")
        result = {
            "work": asdict(work),
            "machine": machine(torch.device("cpu")),
            "blocks": [{**dict(zip(names, case, strict=False)), **asdict(case[-1])} for case in cases],
            "host_seconds": seconds,
        }
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(result, indent=1), encoding="utf-8")


def _table(cases: list[Case], work: Work) -> Table:
    columns = ("operators", "products", "GB moved", "elementwise kB a token", "TFLOP")
    table = Table("model", "a block of", "", "mask", *columns)
    for model, kind, variant, masked, gradient, cost in cases:
        table.add_row(
            model.partition("/")[2], kind, f"{variant}, with backward" if gradient else variant,
            "yes" if masked else "no", f"{cost.operators:.0f}", f"{cost.products:.0f}",
            f"{1e-9 * cost.bytes:.2f}",
            f"{1e-3 * cost.elementwise_bytes / tokens(model, work):.0f}", f"{1e-12 * cost.flops:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
