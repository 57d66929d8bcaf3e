"""Rotary embeddings in real numbers, in graphs that are compiled: inductor generates no complex arithmetic,
and falls back to a kernel and a trip through memory for each step of it.

    view_as_real(view_as_complex(x) * angles)  ->  (x0 cos - x1 sin, x0 sin + x1 cos)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""What makes kernels of a graph, for example inputs: a backend of torch.compile."""
_PRODUCTS = (operator.mul, torch.mul)


@cache
def real_rotary(backend: str) -> Compile:
    """The backend of that name, on graphs whose complex products of pairs are rewritten.

    One object, however often it is asked for: dynamo reuses a graph for the same backend alone.
    """
    compiled: Compile = torch._dynamo.lookup_backend(backend)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        rewrite(graph)
        return compiled(graph, inputs)

    return compile_graph


def rewrite(module: fx.GraphModule) -> int:
    """Replace the products in place; returns how many there were."""
    graph, count = module.graph, 0
    for node in list(graph.nodes):
        if (found := _rotated(node)) is None:
            continue
        product, wrapped, pairs, angles = found
        with graph.inserting_before(node):
            split = graph.call_function(torch.view_as_real, (angles,))
            (x0, x1), (cos, sin) = (
                [graph.call_function(torch.select, (whole, -1, i)) for i in range(2)]
                for whole in (pairs, split)
            )

            def times(one: fx.Node, other: fx.Node) -> fx.Node:
                return graph.call_function(torch.mul, (one, other))

            real = graph.call_function(torch.sub, (times(x0, cos), times(x1, sin)))
            imaginary = graph.call_function(torch.add, (times(x0, sin), times(x1, cos)))
            node.replace_all_uses_with(graph.call_function(torch.stack, ([real, imaginary], -1)))
        for dead in (node, product, wrapped):
            if not dead.users:
                graph.erase_node(dead)
        count += 1
    module.recompile()
    return count


def _rotated(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """The product, its complex pairs, those as [..., 2], and complex angles, if the node is its real view."""
    product = node.args[0] if node.target is torch.view_as_real and node.args else None
    if not (isinstance(product, fx.Node) and product.target in _PRODUCTS and len(product.args) == 2):
        return None
    wrapped, angles = product.args
    if not (isinstance(wrapped, fx.Node) and wrapped.target is torch.view_as_complex):
        return None
    (pairs,) = wrapped.args
    if isinstance(pairs, fx.Node) and isinstance(angles, fx.Node) and _is_complex(angles):
        return product, wrapped, pairs, angles
    return None


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.is_complex()
