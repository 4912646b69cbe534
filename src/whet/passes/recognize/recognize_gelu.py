"""GELU in its erf form, x * (1 + Erf(x / sqrt 2)) / 2, or its tanh form becomes Gelu; factors in any order."""

from __future__ import annotations

import math

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, is_close, is_factor, match_add_constant, match_product
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", "Div", phase=Phase.RECOGNIZE)
def recognize_gelu(g: Graph, layer: Layer) -> Tensor | Skip | None:
    p = match_product(g, layer.output)
    if len(p.factors) != 2:
        return None
    for x, gate in (p.factors, p.factors[::-1]):
        inner_value = match_add_constant(g, gate, 1.0)
        inner = g.maker(inner_value)
        if inner is None or inner.op not in ("Erf", "Tanh"):
            continue
        interior = [*(y for y in p.layers if y is not layer), *filter(None, (g.maker(gate), inner))]
        match = _match_erf(g, inner, x) if inner.op == "Erf" else _match_tanh(g, inner, x)
        if match is None:
            continue
        number, below = match
        if not is_close(p.number, number):
            return None if is_factor(g, layer) else Skip(f"the factor is {p.number:g}, that of a GELU is {number:g}")
        if not x.dtype.is_float or x.type != layer.output.type:
            return None
        if reason := find_interior_escape(g, layer, [*interior, *below]):
            return Skip(reason)
        return g.add("Gelu", x, approximate="none" if inner.op == "Erf" else "tanh")
    return None


def _match_erf(g: Graph, erf: Layer, x: Tensor) -> tuple[float, list[Layer]] | None:
    """(the outer factor of a GELU, layers) when `erf` is Erf(x / sqrt 2)."""
    arg = erf.inputs[0]
    if arg is None:
        return None
    p = match_product(g, arg)
    return (0.5, p.layers) if p.factors == [x] and is_close(p.number, math.sqrt(0.5)) else None


def _match_tanh(g: Graph, tanh: Layer, x: Tensor) -> tuple[float, list[Layer]] | None:
    """The same when `tanh` is Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)), or with x factored out of the sum."""
    arg = tanh.inputs[0]
    if arg is None:
        return None
    p = match_product(g, arg)
    outside = sum(f is x for f in p.factors)
    sums = [f for f in p.factors if f is not x]
    if not is_close(p.number, math.sqrt(2 / math.pi)) or len(sums) != 1 or outside > 1:
        return None
    add = find_maker_of_op(g, sums[0], "Add")
    if add is None:
        return None
    layers = [*p.layers, add]
    terms = []
    for t in add.inputs:
        term = _match_monomial(g, t, x)
        if term is None:
            return None
        terms.append(term[:2])
        layers += term[2]
    (c0, k0), (c1, k1) = sorted(terms, key=lambda t: t[1])
    fits = is_close(c0, 1.0) and is_close(c1, 0.044715) and (k0 + outside, k1 + outside) == (1, 3)
    return (0.5, layers) if fits else None


def _match_monomial(g: Graph, t: Tensor | None, x: Tensor) -> tuple[float, int, list[Layer]] | None:
    """(c, k, layers) when `t` is c * x^k; None otherwise."""
    number = scalar_value(t)
    if number is not None:
        return number, 0, []
    if t is None:
        return None
    p = match_product(g, t)
    power, layers = 0, list(p.layers)
    for f in p.factors:
        pow_ = find_maker_of_op(g, f, "Pow")
        exponent = scalar_value(pow_.inputs[1]) if pow_ is not None else None
        if f is x:
            power += 1
        elif pow_ is not None and pow_.inputs[0] is x and exponent in (1.0, 2.0, 3.0):
            power += int(exponent)
            layers.append(pow_)
        else:
            return None
    return p.number, power, layers
