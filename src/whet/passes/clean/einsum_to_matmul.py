"""Einsum of two operands that is a matrix product, perhaps batched and of transposed operands, becomes MatMul and Transposes."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops.einsum import subscripts
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Einsum", phase=Phase.CLEAN, level=1)
def einsum_to_matmul(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if len(layer.inputs) != 2:
        return None
    a, b = layer.inputs
    (left, right), out = subscripts(layer)
    if a is None or b is None or any(c.isdigit() for c in left + right):
        return None
    batch = [c for c in out if c in left and c in right]
    rows, columns = ([c for c in out if c in term and c not in batch] for term in (left, right))
    summed = [c for c in left if c in right and c not in out]
    if len(rows) != 1 or len(columns) != 1 or len(summed) != 1 or len(left) != len(batch) + 2 or len(right) != len(batch) + 2:
        return Skip(f"{layer.attrs['equation']!r} is not one product of matrices")
    product = g.add("MatMul", _reorder_axes(g, a, left, [*batch, *rows, *summed]), _reorder_axes(g, b, right, [*batch, *summed, *columns]))
    return _reorder_axes(g, product, "".join([*batch, *rows, *columns]), list(out))


def _reorder_axes(g: Graph, t: Tensor, term: str, wanted: list[str]) -> Tensor:
    """`t` with its axes, which `term` names, in another order."""
    perm = tuple(term.index(c) for c in wanted)
    return t if perm == tuple(range(len(perm))) else g.add("Transpose", t, perm=perm)
