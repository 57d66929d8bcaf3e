"""Every kernel that a family's blocks launch compiles for a GPU (sm_90), and keeps its values in registers.

No GPU is needed: what would be launched is noted instead, then compiled by Triton for that target.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tests.unit.kernels.fused_cases import CASES
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spotlight_kernels import registered
from spotlight_kernels.fuse import BLOCKS, _kind, _put
from spotlight_kernels.launch import INTERPRETED, Kernel

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.bool: "*i1"}
WIDE = 4096
"""Of a program on rows; that of models of width 3072."""
Launch = tuple[Any, tuple[torch.dtype, ...], tuple[float, ...], tuple[int | bool, ...], tuple[Any, ...]]


@pytest.fixture(scope="module")
def launches() -> set[Launch]:
    """Of a forward and a backward of every class of blocks, in bfloat16."""
    if INTERPRETED:
        pytest.skip("kernels are interpreted in this process")
    noted: set[Launch] = set()

    def note(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        types = tuple(tensor.dtype for tensor in tensors)
        noted.add((kernel._function, types, numbers, constants, tuple(options.items())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registered, "WHERE", "is_cpu")
        patch.setattr(Kernel, "launch", note)
        patch.setattr(registered, "_block", lambda width: WIDE)
        for make in CASES.values():
            _run(make().to(torch.bfloat16).requires_grad_(False))
    return noted


def _run(block: Any) -> None:
    kind = _kind(type(block).__name__)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    arguments = kind.example(block, new, 70, 5)
    _put(block, kind)
    found = block(**arguments)
    outputs = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


class _Looked:
    """A kernel in Triton's own hands, which looks at every argument; what it returns launches at once."""

    def __init__(self) -> None:
        self.looked = self.launched = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.looked += 1
        return lambda *arguments, **options: _AtOnce(self)


@dataclass
class _AtOnce:
    kernel: _Looked

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.kernel.launched += 1
        return lambda *arguments: None


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")
@pytest.mark.parametrize("name", CASES)
def test_what_was_launched_before_is_launched_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of CPU tensors
    kernels = [each for each in vars(registered).values() if isinstance(each, Kernel)]
    looks = [_Looked() for _ in kernels]
    for kernel, look in zip(kernels, looks, strict=True):
        monkeypatch.setattr(kernel, "_function", look)
        monkeypatch.setattr(kernel, "_known", {})
    monkeypatch.setattr(registered, "WHERE", "is_cpu")
    block = CASES[name]().to(torch.bfloat16).requires_grad_(False)
    _run(block)
    first = [look.looked for look in looks]
    _run(block)
    assert sum(first) > 0
    assert [look.looked for look in looks] == first
    assert sum(look.launched for look in looks) >= sum(first)


def compiled(launch: Launch) -> Any:
    function, types, numbers, constants, options = launch
    names = function.arg_names
    values = dict(zip(names[len(types) :], (*numbers, *constants), strict=True))
    fixed = {name: values[name] for name in names[len(names) - len(constants) :]}
    signature = dict(zip(names, (TYPES[each] for each in types), strict=False))
    signature |= {name: "fp32" if isinstance(values[name], float) else "i32" for name in values}
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(function, {name: signature[name] for name in names}, constexprs=fixed)
    return triton.compile(source, target=TARGET, options=dict(options))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_spill_nothing(launches: set[Launch], tmp_path: Path) -> None:
    unlike = {(each[0].fn.__name__, each[1], each[3], each[4]): each for each in launches}
    assert len(unlike) > len(BLOCKS)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for launch in unlike.values():
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(compiled(launch).asm["cubin"])
        listed = subprocess.run(
            [tool, "-res-usage", binary], capture_output=True, text=True, check=True, encoding="utf-8"
        ).stdout
        spilled = [int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", listed)]
        assert len(spilled) > 1, listed
        assert not any(spilled), (launch, listed)
