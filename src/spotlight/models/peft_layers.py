"""The only module that touches peft's layers: inject adapters, find them, select the active one.

peft's public ``set_adapter`` and ``enable_adapters`` flip ``requires_grad``, from which FSDP2 builds its
gradient buffers: the policy would have no gradients after a forward under another slot. Hence adapters are
selected through private fields, ``_active_adapter`` and ``_disable_adapters``;
`tests/contract/test_peft_layers.py` fails if a peft release moves them.

peft is imported lazily: it takes seconds, and a cluster's head, which holds no model, imports this module.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlight.models.family_facts import target_pattern
from spotlight_files.model_errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    from spotlight_kernels.lora import AdaptedLinear


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of the LoRA adapters.

    Attributes:
        rank: r of the product B A.
        alpha: the update is scaled by alpha / rank.
        targets: suffixes of linear layers' names, e.g. ``to_q`` or ``transformer_blocks.*.ff.net.2``.
        seed: of the initial A (B starts at zero).
        init: its distribution: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0
    init: Literal["uniform", "gaussian"] = "uniform"


def check_targets(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers that the targets match, by module name.

    Raises:
        ModelError: no targets, or one that matches nothing or not a linear layer.
    """
    if not targets:
        raise ModelError(
            "targets are empty: name at least one linear layer, e.g. 'to_q' "
            "(or leave them out for the family's lora_targets)"
        )
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    bound: dict[str, nn.Linear] = {}
    for target in targets:
        hits = [name for name, _ in model.named_modules() if re.fullmatch(target_pattern(target), name)]
        if not hits:
            raise ModelError(
                f"targets: {target!r} matches no module of {type(model).__name__}; "
                f"nearest linear layers: {', '.join(_nearest(target, linears)) or 'none'}"
            )
        for name in hits:
            if name not in linears:
                kind = type(model.get_submodule(name)).__name__
                inside = sorted({n.removeprefix(name + ".") for n in linears if n.startswith(name + ".")})
                raise ModelError(
                    f"targets: {target!r} matches {name!r}, a {kind}; expected a linear layer"
                    + (f", e.g. {', '.join(inside[:6])}" if inside else "")
                )
            bound[name] = linears[name]
    return bound


def _nearest(target: str, linears: Mapping[str, nn.Linear]) -> list[str]:
    ends: dict[str, None] = {}
    for name in linears:
        parts = name.split(".")
        for length in range(1, min(4, len(parts)) + 1):
            end = ".".join(parts[-length:])
            if not end.isdigit():
                ends[end] = None
    return difflib.get_close_matches(target, list(ends), n=4, cutoff=0.4) or list(ends)[:4]


def inject(
    model: nn.Module, spec: LoraSpec, adapters: Sequence[str], *, copied: bool = False
) -> dict[str, LoraLayer]:
    """Add one LoRA adapter per name to the model, in place; returns the layers by module name.

    All adapters start equal: B zero, A uniform in ±1/sqrt(fan_in) (Kaiming, as in peft), drawn from
    ``spec.seed`` in the order of module names, independent of global generator and device. Always float32:
    bfloat16 would lose small updates. On a model without memory (meta device) they are on the CPU, from
    where sharding takes them.

    Args:
        copied: adapters are applied in the dtype of the base (:class:`AdapterCopies`, or gathered in it).
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    if spec.rank < 1:
        raise ModelError(f"LoRA rank is {spec.rank}; expected at least 1")
    if not spec.alpha > 0:
        raise ModelError(f"LoRA alpha is {spec.alpha}; expected a positive number (often 2 x rank)")
    if any(isinstance(module, LoraLayer) for module in model.modules()):
        raise ModelError("the transformer carries LoRA adapters already: load it again for another run")
    check_targets(model, spec.targets)
    # nn.Linear's own initialisation draws from the global generator: restore its state.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
        for adapter in adapters:
            inject_adapter_in_model(lora_config(spec), model, adapter_name=adapter)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    _initialise(layers, spec, adapters)
    if copied:
        _prepare_copies(layers, adapters)
    return layers


def eject(model: nn.Module) -> None:
    """Undo :func:`inject`: the model's own layers, which were never changed, take their places again."""
    from peft.tuners.lora import LoraLayer

    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def fuse(model: nn.Module) -> None:
    """Let all adapted layers add their adapter within their product (``model.kernels: fused``)."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.forward = MethodType(_in_one, module)
            module.adapted = MethodType(_adapted, module)


def restore(model: nn.Module) -> None:
    """Undo :func:`fuse`."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _in_one:
            del module.forward, module.adapted


def _in_one(layer: Any, x: Tensor) -> Tensor:
    from spotlight_kernels.lora import lora_linears

    if layer._disable_adapters:
        return cast(Tensor, layer.get_base_layer()(x))
    if (parts := _adapted(layer, x)) is None:
        return cast(Tensor, type(layer).forward(layer, x))
    return lora_linears(x, [parts])[0]


def _adapted(layer: Any, x: Tensor) -> AdaptedLinear | None:
    """What a layer applies to ``x`` at once; None: no adapter, or types that differ.

    Modules' attributes are looked up past ``nn.Module.__getattr__``, which takes longer than all the rest.
    """
    from spotlight_kernels.lora import AdaptedLinear
    from spotlight_kernels.quantised.linear import QuantisedLinear

    if layer._disable_adapters or torch.is_autocast_enabled(x.device.type):
        return None
    (adapter,) = layer._active_adapter
    modules = layer._modules
    base, own = modules["base_layer"], modules["base_layer"]._parameters
    whole = base if isinstance(base, QuantisedLinear) else own["weight"]
    a, b = (_applied(modules[half]._modules[adapter]) for half in ("lora_A", "lora_B"))
    if not x.dtype == whole.dtype == a.dtype:
        return None
    return AdaptedLinear(whole, own["bias"], a, b, layer.scaling[adapter])


def _applied(half: Any) -> Tensor:
    applied: Tensor | None = vars(half).get("applied")
    weight: Tensor = half._parameters["weight"]
    return weight if applied is None else applied


def _prepare_copies(layers: Mapping[str, LoraLayer], adapters: Sequence[str]) -> None:
    for layer in layers.values():
        layer.cast_input_dtype_enabled = False  # it would cast to the weights' dtype, not to the copies'
        for halves in (layer.lora_A, layer.lora_B):
            for adapter in adapters:
                half = halves[adapter]
                halves[adapter] = _CopiedLinear(
                    half.in_features, half.out_features, bias=False, device="meta"
                )
                halves[adapter].weight = half.weight


def _initialise(layers: Mapping[str, LoraLayer], spec: LoraSpec, adapters: Sequence[str]) -> None:
    generator = torch.Generator().manual_seed(spec.seed)
    for name in sorted(layers):
        layer = layers[name]
        shape = layer.lora_A[adapters[0]].weight.shape
        if spec.init == "gaussian":
            start = torch.empty(shape).normal_(0.0, 1 / spec.rank, generator=generator)
        else:
            start = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator) / shape[1] ** 0.5
        for adapter in adapters:
            for half, value in (
                (layer.lora_A[adapter], start),
                (layer.lora_B[adapter], torch.zeros(layer.lora_B[adapter].weight.shape)),
            ):
                device = "cpu" if half.weight.is_meta else half.weight.device
                half.weight = nn.Parameter(value.to(device, copy=True))


def lora_config(spec: LoraSpec) -> LoraConfig:
    from peft import LoraConfig

    # peft takes a list of suffixes, or one regular expression.
    patterns = any("*" in target for target in spec.targets)
    targets = "|".join(map(target_pattern, spec.targets)) if patterns else list(spec.targets)
    return LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets, init_lora_weights=False)


def lora_fields(spec: LoraSpec) -> dict[str, object]:
    """Rank, alpha, targets and whatever else of :func:`lora_config` is not peft's default."""
    from peft import LoraConfig

    fields: dict[str, object] = lora_config(spec).to_dict()
    defaults: dict[str, object] = LoraConfig().to_dict()
    always = ("r", "lora_alpha", "target_modules")
    return {name: each for name, each in fields.items() if name in always or each != defaults.get(name)}


def adapter_parameters(layers: Mapping[str, LoraLayer], adapter: str) -> dict[str, nn.Parameter]:
    """An adapter's parameters under peft's state-dict names, e.g. ``blocks.0.to_q.lora_A.weight``."""
    return {
        f"{name}.{half}.weight": getattr(layer, half)[adapter].weight
        for name, layer in layers.items()
        for half in ("lora_A", "lora_B")
    }


def activate(layers: Mapping[str, LoraLayer], adapter: str | None) -> None:
    """Select the adapter that runs (None: the base alone), leaving ``requires_grad`` untouched."""
    active = {} if adapter is None else {"_active_adapter": [adapter]}
    for layer in layers.values():
        # nn.Module.__setattr__ takes ten times as long, at every forward.
        vars(layer).update(active, _disable_adapters=adapter is None)


@contextmanager
def merged(layers: Mapping[str, LoraLayer], adapter: str) -> Iterator[None]:
    """Run on base weights with ``adapter`` added, frozen as these are; afterwards no adapter is active.

    The base is restored bitwise: layers hold new tensors in the meantime, so nothing is subtracted.
    """
    weights = base_weights(layers)
    own = {name: weight.data for name, weight in weights.items()}
    try:
        with torch.no_grad():  # not around the block: a caller that keeps it open does other things meanwhile
            for name, layer in layers.items():
                weights[name].data = own[name] + layer.get_delta_weight(adapter)
        activate(layers, None)
        yield
    finally:
        for name, weight in weights.items():
            weight.data = own[name]


class _CopiedLinear(nn.Linear):
    """Half of an adapter.

    Attributes:
        applied: a copy of ``weight`` in another dtype that replaces it, and leads gradients to it.
    """

    applied: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` has the dtype of what is applied: that of the base layer's input."""
        return F.linear(x, self.weight if self.applied is None else self.applied)


class _Copied(torch.autograd.Function):
    """Copies in the place of the weights they were made of, whose gradients get the weights' dtype.

    Nothing is saved and nothing computed: one call serves any number of forwards and backwards, and copies
    may be written between them.
    """

    @staticmethod
    def forward(ctx: Any, copies: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        exact = [None if each is None else torch.empty_like(each, dtype=ctx.dtype) for each in gradients]
        torch._foreach_copy_(
            [each for each in exact if each is not None], [each for each in gradients if each is not None]
        )
        return None, *exact


_TOGETHER = 128
"""Copies whose gradients are cast at once, at the end of a backward: all, beside those of earlier ones, would
take as much memory again."""


class AdapterCopies:
    """An adapter's copies in ``dtype``, which its layers apply instead of its float32 weights.

    Equal to autocast's, which are made at every forward: rounded alike, gradients of a backward likewise
    added up in ``dtype``, those of several in float32.

    Args:
        layers: whose weights are whole: not sharded.
    """

    def __init__(self, layers: Mapping[str, LoraLayer], adapter: str, dtype: torch.dtype) -> None:
        halves = [half[adapter] for layer in layers.values() for half in (layer.lora_A, layer.lora_B)]
        self._halves: list[_CopiedLinear] = halves
        self._weights: list[Tensor] = [half.weight for half in halves]
        self._copies = [weight.detach().to(dtype) for weight in self._weights]
        self._versions = self._written()
        for at in range(0, len(halves), _TOGETHER):
            part = slice(at, at + _TOGETHER)
            with torch.enable_grad():  # the first use may be a rollout
                applied = _Copied.apply(self._copies[part], *self._weights[part])  # type: ignore[no-untyped-call]
            for half, copy in zip(halves[part], applied, strict=True):
                half.applied = copy

    def _written(self) -> list[int]:
        return [weight._version for weight in self._weights]

    @torch.no_grad()
    def refresh(self) -> None:
        """Round again if a weight was written since, at the same addresses."""
        written = self._written()
        if written != self._versions:
            torch._foreach_copy_(self._copies, self._weights)
            self._versions = written

    def drop(self) -> None:
        """Apply the weights themselves again."""
        for half in self._halves:
            half.applied = None


def base_weights(layers: Mapping[str, LoraLayer]) -> dict[str, nn.Parameter]:
    """The weights that adapters add to, by module name."""
    return {name: layer.get_base_layer().weight for name, layer in layers.items()}


def largest_rank(model: nn.Module) -> int:
    """Of the adapters that :func:`inject` added; 0: none."""
    halves = (weight for name, weight in model.named_parameters() if ".lora_A." in name)
    return max((half.shape[0] for half in halves), default=0)


def without_adapters(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Those of a model's tensors that are its own, under their names before adapters were injected."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in named
        if ".lora_A." not in name and ".lora_B." not in name
    }
