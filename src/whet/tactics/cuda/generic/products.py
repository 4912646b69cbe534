"""Products that no tensor-core kernel takes: operands broadcast along batch axes, vectors, transposed first operands, integers with zero points,
and sums of products over any subscripts (Einsum)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.ops.einsum import subscripts
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, coordinate_code, flat_index_code


def _matmul(layer: Layer) -> str:
    a, b, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    places = coordinate_code(y)
    row = places[-1 if len(b) == 1 else -2] if len(a) > 1 else "0"
    column = places[-1] if len(b) > 1 else "0"
    batch = places[: len(y) - (len(a) > 1) - (len(b) > 1)]

    def base(shape: tuple[int, ...]) -> list[str]:
        own = batch[len(batch) - (len(shape) - 2) :] if len(shape) > 2 else []
        return [p if n > 1 else "0" for p, n in zip(own, shape[:-2], strict=True)]

    left, right = [*base(a), *([row] if len(a) > 1 else []), "k"], [*base(b), "k", *([column] if len(b) > 1 else [])]
    x, w, zeros = f"in0({flat_index_code(left, a)})", f"in1({flat_index_code(right, b)})", ""
    if layer.op == "MatMulInteger":
        for number, (where, name) in enumerate(((row, "zx"), (column, "zw")), 2):
            if layer.input(number) is not None:
                one = prod(static_shape(layer.needs(number).shape)) == 1
                zeros += f"const Number {name} = in{number}({'0' if one else where}); "
                x, w = (f"{x} - zx", w) if number == 2 else (x, f"{w} - zw")
    return f"{zeros} Number sum = 0; for (int k = 0; k < {a[-1]}; ++k) sum += ({x}) * ({w}); put0(i, sum);"


def _gemm(layer: Layer) -> str:
    a, b, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    (row, column), at = coordinate_code(y), layer.attrs
    x = flat_index_code(["k", row] if at.get("transA") else [row, "k"], a)
    w = flat_index_code([column, "k"] if at.get("transB") else ["k", column], b)
    text = f"Number sum = 0; for (int k = 0; k < {a[0] if at.get('transA') else a[1]}; ++k) sum += in0({x}) * in1({w});"
    result = f"(Number){float(at.get('alpha', 1.0))!r} * sum"
    if layer.input(2) is not None:
        c = static_shape(layer.needs(2).shape)
        own = [p if n > 1 else "0" for p, n in zip((row, column)[2 - len(c) :], c, strict=True)]
        result += f" + (Number){float(at.get('beta', 1.0))!r} * in2({flat_index_code(own, c)})"
    return f"{text} put0(i, {result});"


def _einsum(layer: Layer) -> str:
    """A loop over each subscript that the result lacks."""
    terms, out = subscripts(layer)
    shapes, y = [static_shape(t.shape) for t in layer.inputs if t is not None], static_shape(layer.outputs[0].shape)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        sizes |= {c: max(n, sizes.get(c, 1)) for c, n in zip(term, shape, strict=True)}
    places = dict(zip(out, coordinate_code(y), strict=True))
    summed = [c for c in sizes if c not in places]
    places |= {c: f"s{k}" for k, c in enumerate(summed)}
    factors = [
        f"in{k}({flat_index_code([places[c] if n > 1 else '0' for c, n in zip(term, shape, strict=True)], shape)})"
        for k, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    ]
    loops = " ".join(f"for (int s{k} = 0; s{k} < {sizes[c]}; ++s{k})" for k, c in enumerate(summed))
    return f"Number sum = 0; {loops} sum += {' * '.join(factors)}; put0(i, sum);"


_BODIES = {"MatMul": _matmul, "Gemm": _gemm, "MatMulInteger": _matmul, "Einsum": _einsum}


@tactic
class Products(PerValueTactic):
    """Row-major."""

    ops = tuple(_BODIES)

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
