"""A GPU that a CPU computes for: its tensors say ``cuda:0`` and hold, to the bit, what the CPU's would.

One among tensors of the CPU raises :class:`MixedDevicesError`, as a GPU's kernels would.

Not simulated: streams, graphs, memory, and kernels but Triton's with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # noqa: F401 (looks at torch's functions when imported: before any is exchanged)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

ATEN = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BETWEEN_DEVICES = {ATEN.copy_.default}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._unsafe_index.Tensor}
"""Their indices may lie on the CPU."""
NO_VIEWS = {ATEN._conj.default, ATEN._neg_view.default}
"""Bits of a tensor, which :class:`GpuTensor` has not."""


class MixedDevicesError(RuntimeError):
    """An operator was given tensors of both."""


class GpuTensor(torch.Tensor):
    """``on_cpu`` is where its values lie."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> GpuTensor:
        on_cpu = on_cpu.detach().resolve_conj().resolve_neg()
        created: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=CPU,
        )
        created.on_cpu = on_cpu
        return created

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, **kwargs: object) -> str:
        return f"{type(self).__name__}({self.on_cpu})"

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if (known := memo.get(id(self))) is None:
            known = GpuTensor(self.on_cpu.clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                known = torch.nn.Parameter(known, self.requires_grad)
            memo[id(self)] = known
        return known

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["on_cpu"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], *others: object) -> GpuTensor:
        return GpuTensor(inner["on_cpu"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _check(func, args, tree_leaves((args, kwargs)))
        result = func(*tree_map(_cpu_values, args), **tree_map(_cpu_values, kwargs or {}))
        if func in BETWEEN_DEVICES and not isinstance(args[0], GpuTensor):
            return args[0]
        placed = tree_map(_on_gpu, result)
        return placed if func in NO_VIEWS else return_and_correct_aliasing(func, args, kwargs or {}, placed)


def _cpu_values(each: Any) -> Any:
    return each.on_cpu if isinstance(each, GpuTensor) else each


def _on_gpu(each: Any) -> Any:
    return GpuTensor(each) if isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor) else each


def _check(func: Any, args: Any, leaves: list[Any]) -> None:
    """Raises MixedDevicesError. As on a GPU, a tensor without dimensions may be the CPU's."""
    if func in BETWEEN_DEVICES:
        return
    if func in INDEXED:
        leaves = [args[0], *args[2:]]
    of_cpu = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor)]
    if any(each.dim() for each in of_cpu):
        shapes = [list(each.shape) for each in of_cpu]
        raise MixedDevicesError(f"{func} of tensors of a GPU and, of {shapes}, of the CPU")


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return GpuTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _cpu_values(gradients[0]).clone()


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.on_cpu.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _on_gpu(gradients[0].clone())


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and not isinstance(x, GpuTensor):
        return _ToGpu.apply(x)  # type: ignore[no-untyped-call]
    if device.type == "cpu" and isinstance(x, GpuTensor):
        return _ToCpu.apply(x)  # type: ignore[no-untyped-call]
    return x


class _NewOnGpu(TorchDispatchMode):
    """What C++ allocates for an operator of a GPU's tensors; it takes their device for the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs)))
        return result if given else tree_map(_on_gpu, result)


class _Devices(TorchFunctionMode):
    """Devices that are asked for by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # from below autograd
            return func(*args, **kwargs)
        if (special := _SPECIAL.get(func)) is not None:
            return special(*args, **kwargs)
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        device = kwargs.pop("device", None)
        on_gpu = any(isinstance(each, GpuTensor) for each in tree_leaves((args, kwargs)))
        if device is None or torch.device(device).type == "meta":
            kwargs |= {} if device is None else {"device": device}
            with _NewOnGpu() if on_gpu else ExitStack():
                return func(*args, **kwargs)
        created = _cpu_values(func(*args, **kwargs, **({} if on_gpu else {"device": CPU})))
        placed = _on_gpu(created) if torch.device(device).type == "cuda" else created
        return placed.requires_grad_(created.requires_grad)


def _to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As ``Tensor.to``: of a device, a type, both, or like another tensor."""
    (device, dtype), copied = (None, None), bool(kwargs.get("copy"))
    for each in (*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(each, torch.Tensor):
            device, dtype = GPU if isinstance(each, GpuTensor) else each.device, each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, (str, torch.device)):
            device = torch.device(each)
    if device is not None and device.type == "meta":
        return torch.empty_like(_cpu_values(x), device="meta", dtype=dtype)
    moved = x if device is None else _moved(x, device)
    with _NewOnGpu() if isinstance(moved, GpuTensor) else ExitStack():
        return moved.to(dtype=dtype or moved.dtype, copy=copied and moved is x)


def _set_data(x: Any, data: Any) -> None:
    if isinstance(x, GpuTensor) != isinstance(data, GpuTensor):
        raise MixedDevicesError("a tensor's data replaced by one's of another device")
    torch.Tensor.data.__set__(x, data)  # type: ignore[attr-defined]
    if isinstance(x, GpuTensor):
        x.on_cpu = data.on_cpu


_get = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _get[0]: lambda x: GPU if isinstance(x, GpuTensor) else _get[0](x),
    _get[1]: lambda x: isinstance(x, GpuTensor),
    _get[2]: lambda x: not isinstance(x, GpuTensor) and _get[2](x),
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda x, *args, **kwargs: _moved(x, CPU),
    torch.Tensor.cuda: lambda x, *args, **kwargs: _moved(x, GPU),
    torch.Tensor.tolist: lambda x: _cpu_values(x).tolist(),
    torch.Tensor.pin_memory: lambda x: x,
    torch.Tensor.is_pinned: lambda x: False,
    torch.Tensor.new_tensor: lambda x, data, **kwargs: _moved(
        _cpu_values(x).new_tensor(data, **kwargs), x.device
    ),
}


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:
        return GPU if self._device.type == "cuda" else CPU


class _Idle:
    """A stream or a context, in which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Event(_Idle):
    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at_s - self._at_s)


def _returns(value: object) -> Callable[..., Any]:
    def answer(*args: object, **kwargs: object) -> object:
        return value

    return answer


TOTAL_BYTES = 80 * 2**30
_OF_CUDA: dict[str, Any] = {
    **{name: _returns(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
    **{name: _returns(None) for name in ("set_device", "synchronize", "empty_cache", "_lazy_init")},
    **{name: _returns(0) for name in ("current_device", "memory_allocated", "max_memory_allocated")},
    **dict.fromkeys(("Stream", "stream", "device"), _Idle),
    "Event": _Event,
    "current_stream": _Idle,
    "reset_peak_memory_stats": _returns(None),
    "device_count": _returns(1),
    "mem_get_info": _returns((TOTAL_BYTES, TOTAL_BYTES)),
    "get_device_name": _returns("a simulated GPU"),
    "get_device_capability": _returns((9, 0)),
    "get_device_properties": _returns(
        SimpleNamespace(name="a simulated GPU", total_memory=TOTAL_BYTES, major=9, minor=0)
    ),
}


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Until the block ends, in all threads that it starts."""

    def in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Devices():
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, value in _OF_CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        # Modes are a thread's own, and off where torch's own functions call back.
        stack.enter_context(patch.object(threading.Thread, "run", in_mode(threading.Thread.run)))
        engine = in_mode(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", engine))
        stack.enter_context(_Devices())
        yield
