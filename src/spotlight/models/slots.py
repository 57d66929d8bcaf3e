"""Named weights of one DiT behind one interface: LoRA adapters, or full copies of the module.

Slots: ``policy`` (trained), ``reference`` (initial), ``old`` (behaviour policy) and ``ema``.

Invariants:
- Outside of ``use`` the policy is active, so a checkpointed backward recomputes with the policy.
- Only the policy's parameters have ``requires_grad``, and no call changes that, so FSDP2 may wrap the
  modules at any time. (Callers run frozen slots under ``torch.no_grad``.)
- All slots have the same parameter names and shapes.
- Parameters are looked up at each call, so sharding in place is safe. FSDP2 leaves the root's gathered
  parameters in place after a forward, and the next reshard would lose writes to them; so modules are
  resharded before their parameters are handed out.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from spotlight.models import peft_layers
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelError
from spotlight.models.peft_layers import AdapterCopies, LoraSpec
from spotlight.models.shared.checks import difference
from spotlight.models.shared.quantised import held, packed_state
from spotlight.models.shared.sharded import gathered, gathers, write_whole
from spotlight_files.update_rounding import UpdateRounding

Slot = Literal["policy", "reference", "old", "ema"]
"""Must equal ``spotlight.algorithms.base.Slot`` (models may not import algorithms)."""
_Written: TypeAlias = list[tuple[WeakIdRef, int]]


class WeightSlots(ABC):
    """The weights of one DiT by slot. Build a :class:`LoraSlots` or a :class:`CopySlots`.

    Attributes:
        slots: ``policy`` first.
        active: the slot in use.
        modules_bound: number of modules with replaced weights (> 0); verified when weights are pulled.
        compute: dtype that float32 adapters are applied in without autocast; None: their own.
    """

    slots: tuple[Slot, ...]
    active: Slot = "policy"
    modules_bound: int
    compute: torch.dtype | None = None
    _equal: dict[Slot, _Written]
    """By slot that was made equal to the policy, how often the weights of both had been written then."""

    @abstractmethod
    @contextmanager
    def use(self, slot: Slot, *, merged: bool = False) -> Iterator[nn.Module]:
        """Yield the module to run with the weights of ``slot``; on exit the policy is active again.

        Args:
            merged: for many forwards without gradient: add the adapter to the base weights first if possible.
                Changes results by rounding only.
        """

    @abstractmethod
    def parameters(self, slot: Slot) -> dict[str, nn.Parameter]:
        """The parameters that a slot owns, by name (DTensors once sharded). ModelError if it owns none."""

    @abstractmethod
    def modules(self) -> dict[Slot, nn.Module]:
        """The distinct modules behind the slots, for sharding or compiling in place."""

    @abstractmethod
    def merged_state(
        self, slot: Slot, *, keep: bool = True, rounding: UpdateRounding | None = None
    ) -> dict[str, Tensor]:
        """The whole transformer with the weights of ``slot``, on the CPU, under its original names.

        Collective on sharded parameters: every rank must call it. With ``keep=False`` a rank drops each
        gathered tensor at once and returns an empty dictionary.

        Args:
            rounding: rounds the trained tensors to its types; default: they get those of the base.
        """

    def packed(self) -> dict[str, Tensor]:
        """What a frozen base holds in few bits, the same for all slots."""
        return {}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The policy's parameters, by name, for the optimizer."""
        return self.parameters("policy")

    def state(self, slot: Slot) -> dict[str, Tensor]:
        """Detached views of a slot's parameters; clone what must survive the next update."""
        return {name: parameter.detach() for name, parameter in self.parameters(slot).items()}

    @torch.no_grad()
    def load_state(self, slot: Slot, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into a slot. Full tensors are accepted for sharded parameters.

        Raises:
            ModelError: names or shapes differ; nothing has been written then.
        """
        parameters = self.parameters(slot)
        if odd := difference({name: list(each.shape) for name, each in tensors.items()}, parameters):
            raise ModelError(
                f"state for slot {slot!r} {odd}: it was saved from another model, or with other LoRA targets "
                "or another rank"
            )
        for name, parameter in parameters.items():
            write_whole(parameter, tensors[name])

    @torch.no_grad()
    def blend(self, dst: Slot, src: Slot, decay: float) -> None:
        """``dst <- decay * dst + (1 - decay) * src``, parameter by parameter; 0 and 1 are exact.

        LoRA's A and B are averaged separately (not their product), as in DiffusionNFT.
        """
        if not 0.0 <= decay <= 1.0:
            raise ModelError(f"decay of {src} into {dst} is {decay}; expected a value in [0, 1]")
        source = self.parameters(src)
        for name, parameter in self.parameters(dst).items():
            parameter.lerp_(source[name].detach(), 1.0 - decay)
        if src == "policy" and decay == 0:
            self._equal[dst] = self._written(dst)

    def copy(self, dst: Slot, src: Slot) -> None:
        """Make ``dst`` bitwise equal to ``src``."""
        self.load_state(dst, self.state(src))
        if src == "policy":
            self._equal[dst] = self._written(dst)

    def equals_policy(self, slot: Slot) -> bool:
        """Whether ``slot`` is known to be bitwise the policy: it was made so, and neither written since."""
        return slot in self._equal and self._equal[slot] == self._written(slot)

    def _written(self, slot: Slot) -> _Written:
        both = (*self.parameters("policy").values(), *self.parameters(slot).values())
        # Sharding replaces parameters; those count their writes from zero.
        return [(WeakIdRef(parameter), parameter._version) for parameter in both]

    def _check_slot(self, slot: Slot) -> None:
        if slot not in self.slots:
            raise ModelError(
                f"weight slot {slot!r} does not exist; this run has {', '.join(self.slots)} "
                "(an algorithm names what it needs in extra_slots)"
            )


class LoraSlots(WeightSlots):
    """Slots as peft LoRA adapters on one module; ``reference`` is the module with adapters disabled, or the
    adapter that training started with.

    Args:
        module: the transformer; adapters are injected in place and its own weights frozen.
        spec: of all adapters.
        extra: slots besides ``policy``; ``reference`` always exists and costs nothing without ``initial``.
        initial: an adapter under peft's state-dict names that every slot starts with; ``reference`` keeps it.
        compute: dtype that adapters are applied in, that of the adapted layers: no autocast is needed then.
            The parameters stay float32; copies follow them. Sharded, they are to be gathered in it. Default:
            float32, or what autocast says.
        files: reads a weight that the module holds in few bits, by its name; to merge adapters into.

    Raises:
        ModelError: ``initial`` has other names or shapes, or an adapted layer's dtype is not ``compute``.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: LoraSpec,
        extra: Sequence[Slot] = (),
        initial: Mapping[str, Tensor] | None = None,
        *,
        compute: torch.dtype | None = None,
        files: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.slots = _ordered([*extra, "reference"])
        self.spec = spec
        self._module, self.compute, self._files = module, compute, files
        self._copies: dict[Slot, AdapterCopies] = {}
        self._adapters: tuple[Slot, ...] = tuple(
            slot for slot in self.slots if slot != "reference" or initial is not None
        )
        module.requires_grad_(False)
        self._layers = peft_layers.inject(module, spec, self._adapters, copied=compute is not None)
        self._check_compute()
        self.modules_bound = len(self._layers)
        for adapter in self._adapters:
            for parameter in self.parameters(adapter).values():
                parameter.requires_grad_(adapter == "policy")
        peft_layers.activate(self._layers, "policy")
        if initial is not None:
            for adapter in self._adapters:
                self.load_state(adapter, initial)
        self._equal = {adapter: self._written(adapter) for adapter in self._adapters[1:]}

    @contextmanager
    def use(self, slot: Slot, *, merged: bool = False) -> Iterator[nn.Module]:
        """Yield the module with the slot's adapter active (``reference`` may have none: bitwise the base).

        While merged, a second copy of the adapted layers' weights is held in memory.
        """
        self._check_slot(slot)
        self._refresh_copies(slot)
        self.active = slot
        try:
            adapter = slot if slot in self._adapters else None
            peft_layers.activate(self._layers, adapter)
            whole = merged and adapter is not None and self._mergeable()
            with peft_layers.merged(self._layers, slot) if whole else nullcontext():
                yield self._module
        finally:
            self.active = "policy"
            peft_layers.activate(self._layers, "policy")

    def _check_compute(self) -> None:
        for name, weight in peft_layers.base_weights(self._layers).items():
            if self.compute not in (None, weight.dtype) and weight.is_floating_point():
                raise ModelError(
                    f"targets: {name!r} is {weight.dtype}, but adapters are applied in {self.compute}: leave "
                    "it out (of learner.lora.targets), or set learner.autocast=none"
                )

    def _refresh_copies(self, slot: Slot) -> None:
        if self.compute is None or slot not in self._adapters:
            return
        if any(gathers(part) for part in denoisers(self._module).values()):
            while self._copies:  # made before sharding, which gathers parameters in the dtype instead
                self._copies.popitem()[1].drop()
        elif slot in self._copies:
            self._copies[slot].refresh()
        else:
            self._copies[slot] = AdapterCopies(self._layers, slot, self.compute)

    def _mergeable(self) -> bool:
        # Sharded weights are not available here, and half precision would lose small updates.
        if any(gathers(part) for part in self._module.modules()):
            return False
        weights = peft_layers.base_weights(self._layers).values()
        return all(weight.dtype == torch.float32 for weight in weights)

    def parameters(self, slot: Slot) -> dict[str, nn.Parameter]:
        """The slot's adapter under peft's state-dict names; ModelError for a ``reference`` without one."""
        self._check_slot(slot)
        if slot not in self._adapters:
            raise ModelError(
                "with LoRA the reference is the base without adapters: it has no weights of its own to "
                "read, write or blend"
            )
        _reshard(self._module)
        return peft_layers.adapter_parameters(self._layers, slot)

    def modules(self) -> dict[Slot, nn.Module]:
        return {"policy": self._module}

    def packed(self) -> dict[str, Tensor]:
        return packed_state(self._module)

    def metadata(self) -> dict[str, object]:
        """peft's LoraConfig fields, as ``save_lora`` stores them beside the weights: those that are not its
        defaults, because an older peft refuses fields that it does not know.
        """
        return peft_layers.lora_fields(self.spec)

    def merged_state(
        self, slot: Slot, *, keep: bool = True, rounding: UpdateRounding | None = None
    ) -> dict[str, Tensor]:
        """Base weights plus ``alpha / rank * B A``, summed in float32, in the base's dtype.

        Those that are held in few bits are read from their files.
        """
        self._check_slot(slot)
        state = gathered(self._base(), keep)
        adapter = gathered(self.parameters(slot), keep) if slot in self._adapters else {}
        if not adapter:
            return state
        for layer in self._layers:
            name = f"{layer}.weight"
            base, a, b = state[name], adapter[f"{layer}.lora_A.weight"], adapter[f"{layer}.lora_B.weight"]
            exact = base.float() + (b @ a) * (self.spec.alpha / self.spec.rank)
            state[name] = exact.to(base.dtype) if rounding is None else rounding.round(name, exact, base)
        return state

    def _base(self) -> dict[str, Tensor]:
        packed = self.packed()
        own = peft_layers.without_adapters(self._module.named_parameters()).items()
        base = {name: tensor for name, tensor in own if name not in packed}
        for name, layer in held(self._module).items() if packed else ():
            assert self._files is not None, "a quantised base comes with its files"
            base[f"{name}.weight"] = self._files(f"{name}.weight").to(layer.dtype)
        return base


class CopySlots(WeightSlots):
    """Slots as whole modules: the policy is the given module, every other slot a frozen copy in memory.

    Args:
        module: the transformer, in float32 (use autocast for speed): bfloat16 weights lose updates below
            0.4 % of their magnitude.
        extra: slots besides ``policy``.

    Raises:
        ModelError: a parameter is not float32.
    """

    def __init__(self, module: nn.Module, extra: Sequence[Slot] = ()) -> None:
        self.slots = _ordered(extra)
        parameters = module.named_parameters()
        odd = next((f"{n} is {p.dtype}" for n, p in parameters if p.dtype != torch.float32), None)
        if odd is not None:
            raise ModelError(
                f"full fine-tuning needs float32 weights, but {odd}: load the model with dtype float32 "
                "(and autocast to bfloat16 for speed), or train LoRA adapters"
            )
        self._modules: dict[Slot, nn.Module] = {"policy": module.requires_grad_(True)}
        for slot in self.slots[1:]:
            self._modules[slot] = copy.deepcopy(module).requires_grad_(False)
        self.modules_bound = sum(bool(list(m.parameters(recurse=False))) for m in module.modules())
        self._equal = {slot: self._written(slot) for slot in self.slots[1:]}

    @contextmanager
    def use(self, slot: Slot, *, merged: bool = False) -> Iterator[nn.Module]:
        """Yield the slot's own module; ``merged`` has no effect."""
        self._check_slot(slot)
        yield self._modules[slot]

    def parameters(self, slot: Slot) -> dict[str, nn.Parameter]:
        """All parameters of the slot's module, under its state-dict names."""
        self._check_slot(slot)
        _reshard(self._modules[slot])
        return dict(self._modules[slot].named_parameters())

    def modules(self) -> dict[Slot, nn.Module]:
        return dict(self._modules)

    def merged_state(
        self, slot: Slot, *, keep: bool = True, rounding: UpdateRounding | None = None
    ) -> dict[str, Tensor]:
        state = gathered(self.parameters(slot), keep)
        if rounding is not None:
            for name in state:
                state[name] = rounding.round(name, state[name])
        return state


def _ordered(extra: Sequence[Slot]) -> tuple[Slot, ...]:
    known: tuple[Slot, ...] = ("policy", "reference", "old", "ema")
    unknown = [slot for slot in extra if slot not in known]
    if unknown:
        raise ModelError(f"unknown weight slot {unknown[0]!r}; expected one of {', '.join(known)}")
    return tuple(slot for slot in known if slot == "policy" or slot in extra)


def _reshard(module: nn.Module) -> None:
    if not dist.is_initialized():  # nothing is sharded; walking all modules of a DiT is slow
        return
    for part in module.modules():
        if gathers(part):
            part.reshard()
