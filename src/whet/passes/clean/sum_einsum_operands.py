"""Axes that one operand of an Einsum has alone and that it sums are summed before; an Einsum of one operand becomes ReduceSum and Transpose."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops.einsum import parse_subscripts
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, rule


@rule("Einsum", phase=Phase.CLEAN, level=1)
def sum_einsum_operands(g: Graph, layer: Layer) -> Tensor | None:
    if len(layer.inputs) > 2 or layer.output.dtype.kind != "float":
        return None
    terms, out = parse_subscripts(layer)
    inputs = [layer.needs(i) for i in range(len(terms))]
    kept = [[c for c in term if c in out or sum(c in other for other in terms) > 1] for term in terms]
    if len(inputs) > 1 and all(len(own) == len(term) for own, term in zip(kept, terms, strict=True)):
        return None
    sums = []
    for t, term, own in zip(inputs, terms, kept, strict=True):
        axes = tuple(i for i, c in enumerate(term) if c not in own)
        sums.append(g.add("ReduceSum", t, axes=axes, keepdims=0) if axes else t)
    if len(sums) > 1:
        return g.add("Einsum", *sums, equation=make_equation(["".join(own) for own in kept], out))
    perm = tuple(kept[0].index(c) for c in out)
    if perm == tuple(range(len(perm))):
        return sums[0] if sums[0] is not inputs[0] else g.add("Identity", sums[0])
    return g.add("Transpose", sums[0], perm=perm)


def make_equation(terms: list[str], out: str) -> str:
    """The equation of terms of `parse_subscripts`: digits, the axes of an ellipsis, become unused letters."""
    used = {*"".join(terms), *out}
    free = (c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in used)
    letters = {ord(c): next(free) for c in sorted(used) if c.isdigit()}
    return f"{','.join(terms)}->{out}".translate(letters)
