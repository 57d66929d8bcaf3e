"""Counts floating-point operations, also of what torch's counter takes for nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _attention(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(gradient, q, k, v))  # type: ignore[no-untyped-call]


def _added_product(_: Any, a: Any, b: Any, **__: object) -> int:
    return int(2 * a[0] * a[1] * b[1])


_UNKNOWN = {
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""What torch's counter of operations does not know."""


def flop_counter() -> FlopCounterMode:
    """A mode that counts matrix products, convolutions and attention by shape."""
    return FlopCounterMode(display=False, custom_mapping=_UNKNOWN)
