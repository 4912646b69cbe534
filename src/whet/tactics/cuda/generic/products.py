"""Products that no tensor-core kernel takes: operands broadcast along batch axes, vectors, transposed first operands, integers with zero points,
and sums of products over any subscripts (Einsum)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.ops.einsum import parse_subscripts
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index


def _emit_matmul(layer: Layer) -> str:
    a, b, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    places = emit_coordinates(y)
    row = places[-1 if len(b) == 1 else -2] if len(a) > 1 else "0"
    column = places[-1] if len(b) > 1 else "0"
    batch = places[: len(y) - (len(a) > 1) - (len(b) > 1)]

    def list_batch_coordinates(shape: tuple[int, ...]) -> list[str]:
        own = batch[len(batch) - (len(shape) - 2) :] if len(shape) > 2 else []
        return [p if n > 1 else "0" for p, n in zip(own, shape[:-2], strict=True)]

    left, right = (
        [*list_batch_coordinates(a), *([row] if len(a) > 1 else []), "k"],
        [*list_batch_coordinates(b), "k", *([column] if len(b) > 1 else [])],
    )
    x, w, zeros = f"in0({emit_flat_index(left, a)})", f"in1({emit_flat_index(right, b)})", ""
    if layer.op == "MatMulInteger":
        for number, (where, name) in enumerate(((row, "zx"), (column, "zw")), 2):
            if layer.input(number) is not None:
                one = prod(static_shape(layer.needs(number).shape)) == 1
                zeros += f"const Number {name} = in{number}({'0' if one else where}); "
                x, w = (f"{x} - zx", w) if number == 2 else (x, f"{w} - zw")
    return f"{zeros} Number sum = 0; for (int k = 0; k < {a[-1]}; ++k) sum += ({x}) * ({w}); put0(i, sum);"


def _emit_gemm(layer: Layer) -> str:
    a, b, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    (row, column), at = emit_coordinates(y), layer.attrs
    x = emit_flat_index(["k", row] if at.get("transA") else [row, "k"], a)
    w = emit_flat_index([column, "k"] if at.get("transB") else ["k", column], b)
    text = f"Number sum = 0; for (int k = 0; k < {a[0] if at.get('transA') else a[1]}; ++k) sum += in0({x}) * in1({w});"
    result = f"(Number){float(at.get('alpha', 1.0))!r} * sum"
    if layer.input(2) is not None:
        c = static_shape(layer.needs(2).shape)
        own = [p if n > 1 else "0" for p, n in zip((row, column)[2 - len(c) :], c, strict=True)]
        result += f" + (Number){float(at.get('beta', 1.0))!r} * in2({emit_flat_index(own, c)})"
    return f"{text} put0(i, {result});"


def _emit_einsum(layer: Layer) -> str:
    """A loop over each subscript that the result lacks."""
    terms, out = parse_subscripts(layer)
    shapes, y = [static_shape(t.shape) for t in layer.inputs if t is not None], static_shape(layer.outputs[0].shape)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        sizes |= {c: max(n, sizes.get(c, 1)) for c, n in zip(term, shape, strict=True)}
    places = dict(zip(out, emit_coordinates(y), strict=True))
    summed = [c for c in sizes if c not in places]
    places |= {c: f"s{k}" for k, c in enumerate(summed)}
    factors = [
        f"in{k}({emit_flat_index([places[c] if n > 1 else '0' for c, n in zip(term, shape, strict=True)], shape)})"
        for k, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    ]
    loops = " ".join(f"for (int s{k} = 0; s{k} < {sizes[c]}; ++s{k})" for k, c in enumerate(summed))
    return f"Number sum = 0; {loops} sum += {' * '.join(factors)}; put0(i, sum);"


_BODIES = {"MatMul": _emit_matmul, "Gemm": _emit_gemm, "MatMulInteger": _emit_matmul, "Einsum": _emit_einsum}


@tactic
class Products(PerValueTactic):
    """Row-major."""

    ops = tuple(_BODIES)

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
