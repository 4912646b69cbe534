"""Einsum of two operands becomes MatMul, Transposes and Reshapes; Mul if it sums nothing, and Mul and ReduceSum if its results are single products.

Several axes of rows, columns or summed values count as one: Keras and XLNet project to heads by 'abc,cde->abde'.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Dim, Layer, Tensor
from whet.network.dims import product
from whet.ops.einsum import parse_subscripts
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Einsum", phase=Phase.CLEAN, level=1, after=["sum_einsum_operands"])
def einsum_to_matmul(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if len(layer.inputs) != 2 or layer.output.dtype.kind != "float":
        return None
    a, b = (layer.needs(i) for i in range(2))
    (left, right), out = parse_subscripts(layer)
    if _find_own(out, right, left) < _find_own(out, left, right) < len(out):  # the product's rows come first
        a, b, left, right = b, a, right, left
    batch = [c for c in out if c in left and c in right]
    rows, columns = ([c for c in out if c in term and c not in batch] for term in (left, right))
    summed = [c for c in left if c in right and c not in out]
    if any(len(term) != len(batch) + len(own) + len(summed) for term, own in ((left, rows), (right, columns))):
        return Skip(f"{layer.attrs['equation']!r} sums axes of one operand")
    sizes: dict[str, Dim] = {}
    for c, d in zip(left + right, (*a.shape, *b.shape), strict=True):
        if c in sizes and d != sizes[c] and 1 in (d, sizes[c]) and c in summed:
            return Skip(f"subscript {c} is summed and broadcasts")
        sizes[c] = d if sizes.get(c, 1) == 1 else sizes[c]
    merged = tuple(product(sizes[c] for c in own) for own in (rows, summed, columns))
    if any(d == 0 for d in (*sizes.values(), *merged)) or not g.is_sized((*sizes.values(), *merged)):
        return Skip(f"the shapes {a.type} and {b.type} are not known")
    if merged[1] == 1 or not (rows or columns):
        return _multiply(g, (a, left), (b, right), out, summed)
    own_batch = [[t.shape[term.index(c)] for c in batch] for t, term in ((a, left), (b, right))]
    separate = [sizes[c] for c in rows] if rows and not batch else [merged[0]]  # rows of one matrix of weights may have any axes
    x = _merge_axes(g, _reorder_axes(g, a, left, [*batch, *rows, *summed]), (*own_batch[0], *separate, merged[1]))
    y = _merge_axes(g, _reorder_axes(g, b, right, [*batch, *summed, *columns]), (*own_batch[1], *merged[1:]))
    whole = _merge_axes(g, g.add("MatMul", x, y), tuple(sizes[c] for c in (*batch, *rows, *columns)))
    return _reorder_axes(g, whole, "".join([*batch, *rows, *columns]), list(out))


def _find_own(out: str, term: str, other: str) -> int:
    """The index of the first subscript of `out` that only `term` has."""
    return next((i for i, c in enumerate(out) if c in term and c not in other), len(out))


def _multiply(g: Graph, a: tuple[Tensor, str], b: tuple[Tensor, str], out: str, summed: Sequence[str]) -> Tensor:
    """The product of every pair of entries, summed along the axes `summed`."""
    order = [*out, *summed]
    factors = []
    for t, term in (a, b):
        own = [c for c in order if c in term]
        reordered = _reorder_axes(g, t, term, own)
        lead = next((k for k, c in enumerate(order) if c in own), len(order))
        shape = tuple(t.shape[term.index(c)] if c in own else 1 for c in order[lead:])
        factors.append(_merge_axes(g, reordered, shape))
    whole = g.add("Mul", *factors)
    if all(d == 1 for d in whole.shape[len(out) :]):
        return _merge_axes(g, whole, tuple(whole.shape[: len(out)]))
    return g.add("ReduceSum", whole, axes=tuple(range(len(out), len(order))), keepdims=0)


def _merge_axes(g: Graph, t: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """`t` with neighbouring axes merged or split."""
    return t if tuple(t.shape) == shape else g.add("Reshape", t, shape=shape)


def _reorder_axes(g: Graph, t: Tensor, term: str, wanted: list[str]) -> Tensor:
    """`t` with its axes, which `term` names, in another order."""
    perm = tuple(term.index(c) for c in wanted)
    return t if perm == tuple(range(len(perm))) else g.add("Transpose", t, perm=perm)
