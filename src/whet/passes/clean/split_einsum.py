"""An Einsum of three operands or more becomes Einsums of two, in the order with the fewest multiplications."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from whet.network import Dim, Layer, Tensor
from whet.ops.einsum import parse_subscripts
from whet.passes.clean.sum_einsum_operands import make_equation
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_SYMBOL = 64  # entries that an axis of unknown size counts as
_SEARCHED = 5  # most operands for which every order is compared; of more, the cheapest pair comes first

Term = frozenset[str]


@rule("Einsum", phase=Phase.CLEAN, level=1)
def split_einsum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if len(layer.inputs) < 3 or layer.output.dtype.kind != "float":
        return None
    terms, out = parse_subscripts(layer)
    sizes: dict[str, Dim] = {}
    for term, t in zip(terms, (layer.needs(i) for i in range(len(terms))), strict=True):
        for c, d in zip(term, t.shape, strict=True):
            if c in sizes and d != sizes[c] and 1 in (d, sizes[c]):
                return Skip(f"subscript {c} broadcasts")
            sizes[c] = d
    counts = {c: d if isinstance(d, int) else _SYMBOL for c, d in sizes.items()}
    _, pairs = find_order(tuple(frozenset(t) for t in terms), frozenset(out), counts)
    operands = [(layer.needs(i), term) for i, term in enumerate(terms)]
    for i, j in pairs:
        (x, left), (y, right) = operands[i], operands[j]
        operands = [o for k, o in enumerate(operands) if k not in (i, j)]
        needed = {*out, *(c for _, term in operands for c in term)}
        result = out if not operands else "".join(dict.fromkeys(c for c in left + right if c in needed))
        operands.append((g.add("Einsum", x, y, equation=make_equation([left, right], result)), result))
    return operands[0][0]


def find_order(terms: tuple[Term, ...], out: Term, sizes: Mapping[str, int]) -> tuple[int, list[tuple[int, int]]]:
    """(multiplications, pairs of operands in order): each pair is removed from the list and its result appended."""
    if len(terms) < 2:
        return 0, []
    options = []
    for i, j in combinations(range(len(terms)), 2):
        rest = tuple(t for k, t in enumerate(terms) if k not in (i, j))
        joined = terms[i] | terms[j]
        cost = 1
        for c in joined:
            cost *= sizes[c]
        options.append((cost, (i, j), (*rest, joined & out.union(*rest))))
    if len(terms) > _SEARCHED:
        options = [min(options, key=lambda o: o[:2])]
    best: tuple[int, list[tuple[int, int]]] | None = None
    for cost, pair, following in options:
        more, pairs = find_order(following, out, sizes)
        if best is None or cost + more < best[0]:
            best = cost + more, [pair, *pairs]
    assert best is not None
    return best
