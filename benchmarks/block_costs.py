"""What a transformer block of Qwen-Image costs besides arithmetic: operators, bytes, and the host's time.

    python -m benchmarks.block_costs [--side 512] [--batch 16] [--text 64] [--json FILE]

Two tables. Counted, at full width, on tensors without memory: operators of one block that a GPU would launch
kernels for (all but views and allocations; an attention call is one), the bytes that these read and write,
and floating-point operations. A block is the difference between models of three and of two layers. Operators
are torch's before any compiler, as dispatched for a CPU under its autocast. A GPU's kernels are about as
many; ``python -m benchmarks.gpu --part B --only launches`` counts those.

Timed, on this machine: the host's milliseconds for a forward of 60 layers, most of which is Python and
dispatch, with a width and pictures so small that arithmetic takes next to nothing. A GPU that computes for
less than this waits for the host. Variants take turns; medians.
"""

from __future__ import annotations

import json as jsonlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks._measure import Clock, machine, ratio, take_turns, wide_console
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots

PUBLISHED = QwenImage.published["Qwen/Qwen-Image"].configs["transformer"]
LAYERS = 60
RANK = 64
NARROW = {"num_attention_heads": 1, "joint_attention_dim": 16, "in_channels": 4, "out_channels": 1}
VARIANTS = ("no adapters", "bfloat16 copies", "float32 adapters, autocast")
"""The second is what a bfloat16 model trains with, the third what a float32 model would."""
_ALLOCATIONS = ("empty", "detach", "alias", "_unsafe_view", "lift_fresh")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _attention(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(gradient, q, k, v))  # type: ignore[no-untyped-call]


_UNKNOWN = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""What torch's counter of operations does not know."""


@dataclass(frozen=True, slots=True)
class Work:
    """Pictures of one forward."""

    side_px: int
    batch: int
    text: int

    @property
    def image_tokens(self) -> int:
        """Of one picture."""
        return (self.side_px // 16) ** 2

    @property
    def tokens(self) -> int:
        """Of all pictures and prompts."""
        return self.batch * (self.image_tokens + self.text)


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
        if func.namespace != "aten" or func.is_view or name.startswith(_ALLOCATIONS):
            return output
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)}
        moved, product = sum(map(_stored, tensors.values())), name in _PRODUCTS or "attention" in name
        self.operators += 1
        self.products += product
        self.bytes += moved
        self.elementwise_bytes += 0 if product else moved
        return output


def _stored(tensor: Tensor) -> int:
    """Bytes of the elements; expanded ones count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()


def make_slots(
    config: Mapping[str, object], layers: int, rank: int, compute: torch.dtype | None
) -> LoraSlots:
    """A transformer with adapters applied in ``compute``; its own weights have no memory."""
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        module = QwenImageTransformer2DModel.from_config({**config, "num_layers": layers})
    spec = LoraSpec(rank, 2.0 * rank, QwenImage.lora_targets, seed=3)
    half = nn.Module.to(module, torch.bfloat16)  # diffusers' own warns of layers to keep, even of none
    return LoraSlots(half, spec, compute=compute)


def fill(module: nn.Module) -> None:
    """Put zeros into all weights."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            trained = parameter.requires_grad
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
            part.register_parameter(name, nn.Parameter(value, trained))


def inputs(config: Any, work: Work, *, masked: bool) -> dict[str, Any]:
    """Arguments of a forward."""
    side = work.side_px // 16
    text = torch.zeros(work.batch, work.text, config["joint_attention_dim"], dtype=torch.bfloat16)
    return {
        "hidden_states": torch.zeros(
            work.batch, work.image_tokens, config["in_channels"], dtype=torch.bfloat16
        ),
        "timestep": torch.zeros(work.batch, dtype=torch.bfloat16),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": torch.ones(text.shape[:2], dtype=torch.bool) if masked else None,
        "img_shapes": [[(1, side, side)]] * work.batch,
        "return_dict": False,
    }


@contextmanager
def ready(
    config: Mapping[str, object], layers: int, variant: str, rank: int, memory: AbstractContextManager[object]
) -> Iterator[tuple[nn.Module, Callable[[], AbstractContextManager[object]]]]:
    """The transformer of a variant, and the context of its forwards. ``memory``: where the weights are."""
    autocast = variant.endswith("autocast")
    slots = make_slots(config, layers, rank, None if autocast else torch.bfloat16)
    with memory:
        fill(slots.modules()["policy"])
        with slots.use("reference" if variant == "no adapters" else "policy") as module:
            yield module, lambda: torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


def count(layers: int, variant: str, work: Work, *, masked: bool, gradient: bool) -> Cost:
    """Of a whole forward, with its backward if asked for, at full width."""
    without = FakeTensorMode(allow_non_fake_inputs=True)
    with ready(PUBLISHED, layers, variant, RANK, without) as (module, context):
        given = inputs(PUBLISHED, work, masked=masked)
        with torch.no_grad():
            module(**given)  # rotary tables are cached
        counting = FlopCounterMode(display=False, custom_mapping=_UNKNOWN)
        with torch.set_grad_enabled(gradient), counting as flops, _Counter() as counter:
            with context():
                output = module(**given)[0]
            if gradient:
                output.float().square().mean().backward()
    total = float(flops.get_total_flops())
    return Cost(counter.operators, counter.products, counter.bytes, counter.elementwise_bytes, total)


def block(variant: str, work: Work, *, masked: bool, gradient: bool) -> Cost:
    """Of one block: what a third layer adds."""
    two, three = (count(layers, variant, work, masked=masked, gradient=gradient) for layers in (2, 3))
    return three - two


def host_seconds(rounds: int, layers: int = LAYERS) -> dict[str, list[float]]:
    """Of a narrow model's forward on one picture of one token, by variant."""
    config, work = {**PUBLISHED, **NARROW}, Work(16, 1, 4)
    given = inputs(config, work, masked=False)
    made = [ready(config, layers, variant, 1, nullcontext()) for variant in VARIANTS]
    with torch.no_grad():
        entered = [each.__enter__() for each in made]

        def forward(module: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> object:
            with torch.no_grad(), context():
                return module(**given)

        runs = {
            variant: lambda pair=pair: forward(*pair) for variant, pair in zip(VARIANTS, entered, strict=True)
        }
        return take_turns(runs, rounds, torch.device("cpu"), Clock.CPU)


def main(
    side: Annotated[int, typer.Option(min=16, help="Pictures' height and width in pixels.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Pictures of a forward.")] = 16,
    text: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """Count a block's operators and bytes, and time the host."""
    torch.set_num_threads(1)
    work, console = Work(side, batch, text), wide_console()
    cases = [
        (variant, masked, gradient, block(variant, work, masked=masked, gradient=gradient))
        for gradient in (False, True)
        for masked in (False, True)
        for variant in VARIANTS
        if not (gradient and variant == "no adapters")
    ]
    table = Table("a block", "mask", "operators", "products", "GB moved", "elementwise kB a token", "TFLOP")
    for variant, masked, gradient, cost in cases:
        table.add_row(
            f"{variant}, with backward" if gradient else variant, "yes" if masked else "no",
            f"{cost.operators:.0f}", f"{cost.products:.0f}", f"{1e-9 * cost.bytes:.2f}",
            f"{1e-3 * cost.elementwise_bytes / work.tokens:.0f}", f"{1e-12 * cost.flops:.2f}",
        )  # fmt: skip
    console.print(f"{batch} pictures of {side} px, prompts of {text} tokens, adapters of rank {RANK}")
    console.print(table)
    seconds = host_seconds(rounds)
    timed = Table(f"the host, {LAYERS} layers", "ms a forward", "over the first")
    for variant, taken in seconds.items():
        over = ratio(taken, seconds[VARIANTS[0]])
        timed.add_row(variant, f"{1e3 * statistics.median(taken):.1f}", str(over))
    console.print(timed)
    if json is not None:
        told = {
            "work": asdict(work),
            "machine": machine(torch.device("cpu")),
            "blocks": [
                {"variant": variant, "masked": masked, "backward": gradient, **asdict(cost)}
                for variant, masked, gradient, cost in cases
            ],
            "host_seconds": seconds,
        }
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(told, indent=1))


if __name__ == "__main__":
    typer.run(main)
