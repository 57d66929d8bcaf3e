"""Operators equal torch's own, with all gradients, whatever their options, shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spotlight_kernels import registered
from spotlight_kernels.lora import AdaptedLinear, lora_linears
from spotlight_kernels.operators import (
    HeadStream,
    Modulation,
    add_norm,
    add_norm_reference,
    gated,
    gated_add,
    gated_halves,
    join_heads,
    join_heads_reference,
)

BATCH, EPS = 2, 1e-5
OPTIONS = st.fixed_dictionaries({"rounded": st.booleans(), "offset": st.sampled_from([0.0, 1.0])})
Options = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-6))


def results(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of something that depends on each of their elements differently."""
    loss = torch.stack(
        [(each.float() * torch.arange(each.numel()).view_as(each).cos()).sum() for each in outputs]
    )
    return [*outputs, *torch.autograd.grad(loss.sum(), leaves)]


def agree(
    compute: Callable[[], Sequence[Tensor]],
    reference: Callable[[], Sequence[Tensor]],
    leaves: Sequence[Tensor],
) -> None:
    found, wanted = results(compute(), leaves), results(reference(), leaves)
    if found[0].dtype == torch.float32:
        assert max(relative(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-5
    else:
        assert max(relative(f.float(), w.float()) for f, w in zip(found, wanted, strict=True)) < 3e-2
    with torch.no_grad():
        assert all(torch.equal(f, again) for f, again in zip(found, compute(), strict=False))


@st.composite
def rows(draw: Draw) -> tuple[Tensor, Tensor | None, Modulation, Options]:
    """Streams, a branch, and their modulation; some of it strided, some of another type than the streams."""
    torch.manual_seed(draw(st.integers(0, 9)))
    kind = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    made = draw(st.sampled_from([kind, torch.float32]))
    tokens, width = draw(st.integers(1, 5)), draw(st.sampled_from([4, 12, 33]))
    chosen = draw(st.none() | st.just(torch.rand(tokens) > 0.5))
    wide = torch.randn(BATCH + (chosen is not None), 3 * width).to(made)
    parts: list[Tensor | None] = [each.detach() for each in wide.chunk(3, dim=1)]
    parts[2] = parts[2] if chosen is None else None
    parts = [each if draw(st.booleans()) else None for each in parts]
    weights = [draw(st.none() | st.just(torch.randn(width).to(made))) for _ in range(2)]
    x, y = (torch.randn(tokens, BATCH, width).to(kind).transpose(0, 1) for _ in range(2))
    return x, y if draw(st.booleans()) else None, Modulation(*parts, *weights, chosen), draw(OPTIONS)


def leaves_of(*values: Tensor | None) -> list[Tensor]:
    return [each.requires_grad_() for each in values if each is not None and each.is_floating_point()]


@given(rows())
def test_rows_are_added_normalised_and_modulated(
    case: tuple[Tensor, Tensor | None, Modulation, Options],
) -> None:
    x, y, by, options = case
    unread = () if y is not None else ("gate", "branch_weight")
    used = [getattr(by, field.name) for field in fields(by) if field.name not in unread]
    leaves = leaves_of(x, y, *used)
    agree(
        lambda: add_norm(x, y, by, EPS, **options),
        lambda: add_norm_reference(x, y, by, EPS, **options),  # type: ignore[arg-type, return-value]
        leaves,
    )


@settings(max_examples=8)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans(), st.sampled_from([3, 1030])
)
def test_values_are_gated(kind: torch.dtype, silu: bool, halves: bool, width: int) -> None:
    torch.manual_seed(width)
    wide = torch.randn(BATCH, 5, 2 * width).to(kind)[:, 1:]
    value = torch.randn(5, BATCH, width).to(kind).transpose(0, 1)[:, 1:]
    gate = wide[..., :width] if not halves else torch.randn(BATCH, 4, width).to(kind)
    act = F.silu if silu else torch.sigmoid
    leaves = leaves_of(gate.detach(), value.detach())
    agree(lambda: [gated(*leaves, silu=silu)], lambda: [act(leaves[0]) * leaves[1]], leaves)
    (whole,) = leaves_of(wide.detach())
    agree(
        lambda: [gated_halves(whole)],
        lambda: [F.silu(whole[..., :width]) * whole[..., width:]],
        [whole],
    )


def test_a_gate_of_another_shape_or_type_is_refused() -> None:
    for other in (torch.randn(2, 4), torch.randn(2, 3).bfloat16()):
        with pytest.raises(ValueError, match=r"expected the value's \[2, 3\], torch\.float32"):
            gated(other, torch.randn(2, 3), silu=True)
    with pytest.raises(ValueError, match="with stride 2; expected 1"):
        gated(torch.randn(3, 2).t(), torch.randn(2, 3), silu=True)


@settings(max_examples=15)
@given(rows())
def test_branches_are_gated_and_added(case: tuple[Tensor, Tensor | None, Modulation, Options]) -> None:
    x, y, by, options = case
    y = torch.randn_like(x) if y is None else y
    leaves = leaves_of(x, y, by.gate, by.branch_weight)
    more = {"branch_weight": by.branch_weight, "chosen": by.chosen, "eps": EPS}
    agree(
        lambda: [gated_add(x, y, by.gate, **more, **options)],
        lambda: [add_norm_reference(x, y, by, EPS, norm=False, **options)[0]],
        leaves,
    )


@pytest.mark.parametrize("used", ["stream", "norm"])
def test_what_is_not_used_gives_no_gradient(used: str) -> None:
    x, y, gate, scale, shift = (torch.randn(1, 2, 8) for _ in range(5))
    by = Modulation(gate[0, :1], scale[0, :1], shift[0, :1])
    leaves = leaves_of(x, y)
    pick = ("stream", "norm").index(used)
    found = results(add_norm(x, y, by, EPS, rounded=False)[pick : pick + 1], leaves)
    wanted = results(add_norm_reference(x, y, by, EPS, rounded=False)[pick : pick + 1], leaves)  # type: ignore[arg-type]
    assert max(relative(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-5


@st.composite
def streams(draw: Draw) -> tuple[list[HeadStream], int, Options]:
    """Of one sequence, cut out of wider tensors."""
    torch.manual_seed(draw(st.integers(0, 9)))
    kind = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    made = draw(st.sampled_from([kind, torch.float32]))
    heads, size = draw(st.sampled_from([1, 3, 9])), draw(st.sampled_from([4, 8]))
    found = []
    for tokens in draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)):
        wide = torch.randn(BATCH, tokens + 1, 2 * heads * size).to(kind)
        weight = draw(st.sampled_from([None, size, heads * size]))
        turn = draw(st.sampled_from([None, (tokens, size), (BATCH, tokens, size)]))
        angles = None if turn is None else torch.randn(turn)[..., ::2]
        found.append(
            HeadStream(
                wide[:, 1:, : heads * size],
                None if weight is None else torch.randn(weight).to(made),
                None if angles is None else (angles.cos(), angles.sin()),
            )
        )
    return found, size, draw(OPTIONS)


@given(streams())
def test_heads_are_normalised_rotated_and_joined(case: tuple[list[HeadStream], int, Options]) -> None:
    parts, size, options = case
    leaves = leaves_of(*(each.x for each in parts), *(each.weight for each in parts))
    agree(
        lambda: [join_heads(parts, size, EPS, **options)],
        lambda: [join_heads_reference(parts, size, EPS, **options)],
        leaves,
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([(4,), (2, 3)]),
)
def test_adapted_layers_are_a_layer_and_a_product(
    ranks: list[tuple[int, bool]], shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape, 5)
    layers = [
        AdaptedLinear(
            torch.randn(4, 5),
            torch.randn(4) if bias else None,
            torch.randn(rank, 5),
            torch.randn(4, rank),
            0.5,
        )
        for rank, bias in ranks
    ]
    leaves = leaves_of(x, *(each for layer in layers for each in layer[:4]))  # type: ignore[arg-type]

    def reference() -> list[Tensor]:
        made = []
        for weight, bias, a, b, scale in layers:
            y = x @ weight.t() + scale * (x @ a.t() @ b.t())
            made.append(y if bias is None else y + bias)
        return made

    agree(lambda: lora_linears(x, layers), reference, leaves)


@pytest.mark.parametrize(
    "angles",
    [
        (torch.ones(4, 4), torch.ones(4, 4).t()),
        (torch.ones(3, 4), torch.ones(3, 4)),
        (torch.ones(3, 4, 4), torch.ones(3, 4, 4)),
    ],
)
def test_angles_that_do_not_fit_are_refused(angles: tuple[Tensor, Tensor]) -> None:
    stream = HeadStream(torch.ones(2, 4, 8), None, angles)
    with pytest.raises(ValueError, match="angles have shapes"):
        join_heads([stream], 8, 1e-6, rounded=False)


def test_one_row_of_modulation_or_angles_is_for_all_pictures() -> None:
    x, row = torch.randn(2, 4, 8), torch.randn(1, 8)
    by = Modulation(scale=row, shift=row)
    alone = Modulation(scale=row.expand(2, 8), shift=row.expand(2, 8))
    pairs = [add_norm(x, None, each, 1e-6, rounded=False)[1] for each in (by, alone)]
    assert torch.equal(*pairs)
    cos, sin = torch.randn(1, 4, 4), torch.randn(1, 4, 4)
    joined = [
        join_heads([HeadStream(x, None, each)], 8, 0.0, rounded=False)
        for each in ((cos, sin), (cos[0], sin[0]))
    ]
    assert torch.equal(*joined)
    with pytest.raises(ValueError, match="modulation of"):
        add_norm(x, None, Modulation(scale=torch.ones(3, 8)), 1e-6, rounded=False)


class _Heard(TorchDispatchMode):
    """Names of the operators that torch dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _every_operator(x: Tensor) -> list[Tensor]:
    """All operators with and without gradient, on ``x`` [batch, tokens, width]."""
    by, weight = Modulation(gate=x[:, 0], scale=x[:, 1]), x[0, 0, :8].detach()
    outputs = (
        join_heads([HeadStream(x, weight)], 8, EPS, rounded=True),
        *add_norm(x, x, by, EPS, rounded=True),
        gated_halves(x),
    )
    return [*outputs, *torch.autograd.grad(outputs, x, [torch.ones_like(each) for each in outputs])]


def test_torch_hears_of_operators_only_where_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = [each for each in vars(registered).values() if isinstance(each, registered._Operator)]
    names = {str(each._dispatched) for each in operators}
    assert len(names) == 6
    x = torch.randn(2, 3, 16, requires_grad=True)
    with _Heard() as heard:
        wanted = _every_operator(x)
    assert {each for each in heard.names if each.startswith("spotlight_kernels")} == names
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        sizes = [each.shape for each in _every_operator(fake.from_tensor(x))]
    assert sizes == [each.shape for each in wanted]
    compiled = torch.compile(_every_operator, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, wanted)
    for operator in operators:
        monkeypatch.setattr(operator, "_dispatched", None)
    assert all(map(torch.equal, _every_operator(x), wanted))


class _Sharded(Tensor):
    """Says which operator it was dispatched."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError(str(func))


def test_torch_hears_of_tensors_that_are_no_plain_ones_wherever_they_stand() -> None:
    x = torch.randn(2, 3, 16)
    other, row = (torch.Tensor._make_subclass(_Sharded, each) for each in (x, x[0, 0]))
    for compute in (
        lambda: gated(x, other, silu=True),
        lambda: join_heads([HeadStream(x), HeadStream(other)], 8, EPS, rounded=True),
        lambda: join_heads([HeadStream(x, row)], 8, EPS, rounded=True),
        lambda: add_norm(x, None, Modulation(scale=row), EPS, rounded=True),
    ):
        with torch.no_grad(), pytest.raises(LookupError, match="spotlight_kernels"):
            compute()
    nothing = x.to("meta")
    assert gated(nothing, nothing, silu=True).is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert isinstance(gated(fake, fake, silu=True), FakeTensor)
