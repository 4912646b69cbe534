"""Einsum of two operands that is a matrix product, perhaps batched and of transposed operands, becomes MatMul, Transposes and Reshapes.

Several axes of rows, columns or summed values count as one: Keras and XLNet project to heads by 'abc,cde->abde'.
"""

from __future__ import annotations

from whet.network import Dim, Layer, Tensor
from whet.network.dims import product
from whet.ops.einsum import parse_subscripts
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Einsum", phase=Phase.CLEAN, level=1)
def einsum_to_matmul(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if len(layer.inputs) != 2:
        return None
    a, b = layer.inputs
    (left, right), out = parse_subscripts(layer)
    if a is None or b is None or any(c.isdigit() for c in left + right):
        return None
    batch = [c for c in out if c in left and c in right]
    rows, columns = ([c for c in out if c in term and c not in batch] for term in (left, right))
    summed = [c for c in left if c in right and c not in out]
    is_product = all(len(term) == len(batch) + len(own) + len(summed) for term, own in ((left, rows), (right, columns)))
    if not rows or not columns or not summed or not is_product:
        return Skip(f"{layer.attrs['equation']!r} is not one product of matrices")
    sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
    merged = tuple(product(sizes[c] for c in own) for own in (rows, summed, columns))
    if any(d == 0 for d in (*sizes.values(), *merged)) or not g.is_sized((*sizes.values(), *merged)):
        return Skip(f"the shapes {a.type} and {b.type} are not known")
    first = [sizes[c] for c in batch]
    separate = [sizes[c] for c in rows] if not batch else [merged[0]]  # rows of one matrix of weights may have any axes
    x = _merge_axes(g, _reorder_axes(g, a, left, [*batch, *rows, *summed]), (*first, *separate, merged[1]))
    y = _merge_axes(g, _reorder_axes(g, b, right, [*batch, *summed, *columns]), (*first, *merged[1:]))
    whole = _merge_axes(g, g.add("MatMul", x, y), (*first, *(sizes[c] for c in (*rows, *columns))))
    return _reorder_axes(g, whole, "".join([*batch, *rows, *columns]), list(out))


def _merge_axes(g: Graph, t: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """`t` with neighbouring axes merged or split."""
    return t if tuple(t.shape) == shape else g.add("Reshape", t, shape=shape)


def _reorder_axes(g: Graph, t: Tensor, term: str, wanted: list[str]) -> Tensor:
    """`t` with its axes, which `term` names, in another order."""
    perm = tuple(term.index(c) for c in wanted)
    return t if perm == tuple(range(len(perm))) else g.add("Transpose", t, perm=perm)
