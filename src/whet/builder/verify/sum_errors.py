"""The effect that the error of a sum of float8 products, or of a sum in f16, has on a layer's results, on the layer's actual inputs.

A tactic declares its bound without knowing the operands (tactics/_error_bounds.py): for products of random signs, relative to the largest sum.
Both assumptions can fail. Results that reach the limits of an activation (sigmoid, tanh, clip), that cancel with a bias or a residual, or that are
all on the flat side of GELU, are smaller than the sums. And tensor cores truncate relative to the running sum and to the largest product, which
can be much larger than the result, and lose more of products of one sign. So the error of each sum is bounded from the squares and signs of its
products (`count_lost_units`), and the results are computed with the sums moved by that. Kernels that add in f16 declare the error of their sums
themselves (`sum_error`), relative to the largest one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from whet.builder.batching.batch_items import NO_BATCH_AXES, BatchAxes, BatchItems
from whet.builder.verify.emulation import compute_reference_outputs
from whet.engine.plan import Choice
from whet.network import F8E4M3, Layer, Network, Tensor, TensorType, Weight
from whet.tactics._base import TACTICS
from whet.tactics._error_bounds import FLOAT8_UNIT, bound_float8_sum, count_lost_units

_PRODUCTS = ("Conv", "Gemm", "MatMul")


def bound_sum_effect(layer: Layer, choice: Choice, ins: list, images: BatchItems | None = None, axes: BatchAxes = NO_BATCH_AXES) -> float:
    """How much the error of the layer's sums may exceed what its tactic declares for them, relative to the results: 0 if it does not.

    The results are computed with the sums moved up and down by their error, and compared as verification compares: by max|e|/max|ref| and by
    ||e||/||ref||. Each float8 sum is moved by its own bound. The error that a tactic declares for its sums is that of the largest sum for the first
    measure, and that of the sums' root mean square for the second.
    """

    def compute(changed: Layer) -> np.ndarray:
        (result,) = compute_reference_outputs(changed, choice, ins, images, axes)
        return result

    declared = TACTICS[choice.tactic].sum_error if choice.tactic in TACTICS else 0.0
    product = find_only_product(layer) if declared else find_float8_product(layer)
    if product is None:
        return 0.0
    moves: list[tuple[_Bound, list[_Measure]]]
    if declared:
        sums = compute(_stop_after(layer, product))
        sums = sums[np.isfinite(sums)]
        levels = {_find_largest: _find_largest(sums), _find_norm: _find_norm(sums) / max(1.0, sums.size**0.5)}
        moves = [(partial(_multiply, declared * level), [measure]) for measure, level in levels.items()]
    else:
        declared, moves = bound_float8_sum(count_products(product)), [(_bound_float8_errors, [_find_largest, _find_norm])]
    want = compute(_copy(layer, product)[0])
    finite, effect = np.isfinite(want), 0.0
    for bound, measures in moves:
        for sign in (1.0, -1.0):
            moved = compute(_move_sums(layer, product, bound, sign))
            both = finite & np.isfinite(moved)
            error = moved[both] - want[both]
            for measure in measures:
                size = float(measure(want[finite]))
                effect = max(effect, float(measure(error)) / size if size else 0.0)
    return max(0.0, effect - declared)


def _find_largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _find_norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def find_only_product(layer: Layer) -> Layer | None:
    """The only product in the body of a fused layer with one float output, or None."""
    if layer.op != "Fused" or len(layer.outputs) != 1 or not layer.outputs[0].dtype.is_float:
        return None
    products = [x for x in layer.regions["body"].layers if x.op in _PRODUCTS]
    return products[0] if len(products) == 1 else None


def find_float8_product(layer: Layer) -> Layer | None:
    """`find_only_product`, if it multiplies float8 values."""
    product = find_only_product(layer)
    source = None if product is None else product.needs(0).maker
    reads = source is not None and source.op == "DequantizeLinear" and source.needs(0).dtype == F8E4M3
    return product if reads else None


def count_products(product: Layer) -> int:
    """The products that one sum of a convolution or matrix product adds."""
    w = product.needs(1)
    sizes = [int(d) for d in w.shape if isinstance(d, int)]
    if product.op == "Conv":
        return int(np.prod(sizes[1:]))
    return sizes[-1] if product.op == "Gemm" and product.attrs["transB"] else sizes[-2]


def _copy(layer: Layer, product: Layer) -> tuple[Layer, Network, Layer]:
    """A copy of the layer with a body of its own, whose output is not rounded to 8 bits, the body, and the product in it."""
    body = layer.regions["body"].clone()
    last = body.outputs[0].maker
    if last is not None and last.op == "QuantizeLinear":
        body.outputs[:] = [last.needs(0)]
    copy = Layer(layer.op, layer.name, layer.inputs, layer.attrs, {**layer.regions, "body": body}, layer.sources)
    copy.outputs = layer.outputs
    return copy, body, body.layers[layer.regions["body"].layers.index(product)]


def _stop_after(layer: Layer, product: Layer) -> Layer:
    """The layer with the sums as its output."""
    copy, body, end = _copy(layer, product)
    body.outputs[:] = [end.output]
    return copy


class _Adder:
    """Adds layers behind the product of a body."""

    def __init__(self, body: Network, end: Layer) -> None:
        self.body, self.end, self._place = body, end, itertools.count(body.layers.index(end) + 1)

    def add(self, op: str, *inputs: Tensor | float, **attrs: Any) -> Tensor:
        scalar = TensorType(self.end.output.dtype, ())  # its value in float64: small values are 0 in float16
        tensors = (a if isinstance(a, Tensor) else Tensor("constant", scalar, weight=Weight(np.asarray(a, np.float64))) for a in inputs)
        made: Tensor = self.body.add(op, *tensors, at=next(self._place), **attrs)
        return made

    def add_sum(self, x: Tensor, w: Tensor) -> Tensor:
        """The sums of the products of `x` and `w`, as the body's product computes those of its own inputs."""
        return self.add(self.end.op, x, w, **(self.end.attrs | {"alpha": 1.0} if self.end.op == "Gemm" else self.end.attrs))


_Bound = Callable[[_Adder, float], Tensor | float]  # what each sum is moved by, times the sign
_Measure = Callable[[np.ndarray], float]


def _multiply(amount: float, adder: _Adder, sign: float) -> float:
    return sign * amount


def _bound_float8_errors(adder: _Adder, sign: float) -> Tensor:
    """The bound of the error of each sum, from the squares and signs of its products."""
    add, end = adder.add, adder.end
    x, w = end.needs(0), end.needs(1)
    size, excess = add("Abs", adder.add_sum(x, w)), add("Abs", adder.add_sum(add("Sign", x), add("Sign", w)))
    spread = add("Sqrt", adder.add_sum(add("Mul", x, x), add("Mul", w, w)))
    unit = FLOAT8_UNIT / 2 * abs(end.attrs.get("alpha", 1.0))
    lost = add("Add", add("Mul", excess, 0.5), count_lost_units(count_products(end)))
    return add("Mul", add("Mul", add("Add", size, spread), lost), sign * unit)


def _move_sums(layer: Layer, product: Layer, bound: _Bound, sign: float) -> Layer:
    """The layer with each sum moved by the bound of its error, which the body itself computes."""
    copy, body, end = _copy(layer, product)
    users, adder = body.users().get(end.output, []), _Adder(body, end)
    moved = adder.add("Add", end.output, bound(adder, sign))
    for user, i in users:
        user.inputs = tuple(moved if j == i else t for j, t in enumerate(user.inputs))
    body.outputs[:] = [moved if t is end.output else t for t in body.outputs]
    return copy
