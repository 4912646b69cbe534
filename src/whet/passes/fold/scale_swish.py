"""x * Sigmoid(a * x), the quick GELU for a = 1.702, becomes z * Sigmoid(z) / a with z = a * x, if both factors can go into weights.

The rest is a SiLU, which kernels compute in the epilogue of the product before it. The weights of that product take the factor a, those of the
product after it 1 / a.
"""

from __future__ import annotations

import numpy as np

from whet.network import F32, Layer, Tensor
from whet.ops._origin import make_literal
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, match_product
from whet.rewrite.rules import Phase, Skip, rule

_PRODUCTS = ("Conv", "Gemm", "MatMul")


@rule("Mul", phase=Phase.FOLD)
def scale_swish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        sigmoid = find_maker_of_op(g, gate, "Sigmoid")
        arg = sigmoid.inputs[0] if sigmoid is not None else None
        if sigmoid is None or arg is None or x is None or arg is x:
            continue
        p = match_product(g, arg)
        if p.factors != [x]:
            continue
        if x.dtype != F32 or not (np.isfinite(p.number) and p.number > 0):
            return Skip(f"%{x.name} is {x.dtype}, its factor {p.number:g}: only positive factors of f32 values go into weights")
        if reason := find_interior_escape(g, layer, [sigmoid, *p.layers]):
            return Skip(reason)
        if not _takes_factor(g, x, {layer, *p.layers}) or not _gives_factor(g, layer):
            return Skip(f"no weights around it take the factor {p.number:g}")
        z = g.add("Mul", x, g.constant(make_literal(np.array(p.number), x.dtype), "factor"), name=f"{layer.name}/scaled", sources=p.layers[0].sources)
        silu = g.add("Mul", z, g.add("Sigmoid", z, name=sigmoid.name, sources=sigmoid.sources), name=f"{layer.name}/silu", sources=layer.sources)
        return g.add("Mul", silu, g.constant(make_literal(np.array(1 / p.number), x.dtype), "inverse"))
    return None


def _takes_factor(g: Graph, x: Tensor, readers: set[Layer]) -> bool:
    """True if `x` is a product with constant weights, plus constants, that only `readers` read."""
    maker = g.maker(x)
    if maker is None or g.is_output(x) or not set(g.readers(x)) <= readers:
        return False
    if maker.op == "Add":
        value = next((a for a, b in (maker.inputs, maker.inputs[::-1]) if b is not None and b.is_constant), None)
        if value is None or g.is_output(value) or len(g.readers(value)) > 1:
            return False
        maker = g.maker(value)
    return maker is not None and maker.op in _PRODUCTS and all(t is None or t.is_constant for t in maker.inputs[1:])


def _gives_factor(g: Graph, layer: Layer) -> bool:
    """True if the only reader of the layer's result is a MatMul with constant weights, into which move_scales folds a factor."""
    readers = g.readers(layer.output)
    return len(readers) == 1 and not g.is_output(layer.output) and readers[0].op == "MatMul" and readers[0].needs(1).is_constant
