"""The effect that the error of a float8 sum has on a layer's results, on the layer's actual inputs.

A tactic declares its bound without knowing the operands (tactics/_error_bounds.py): for products of random signs, relative to the largest sum.
Both assumptions can fail. Results that reach the limits of an activation (sigmoid, tanh, clip), that cancel with a bias or a residual, or that are
all on the flat side of GELU, are smaller than the sums. And tensor cores truncate relative to the running sum and to the largest product, which
can be much larger than the result, and lose more of products of one sign. So the error of each sum is bounded from the squares and signs of its
products (`count_lost_units`), and the results are computed with the sums moved by that.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from whet.builder.batching.batch_items import NO_BATCH_AXES, BatchAxes, BatchItems
from whet.builder.verify.emulation import compute_reference_outputs
from whet.engine.plan import Choice
from whet.network import F8E4M3, Layer, Network, Tensor, TensorType, Weight
from whet.tactics._error_bounds import FLOAT8_UNIT, bound_float8_sum, count_lost_units

_PRODUCTS = ("Conv", "Gemm", "MatMul")


def bound_sum_effect(layer: Layer, choice: Choice, ins: list, images: BatchItems | None = None, axes: BatchAxes = NO_BATCH_AXES) -> float:
    """How much the error of the layer's float8 sums may exceed what its tactic declares for them, relative to the results: 0 if it does not.

    The results are computed with every sum moved up and down by the bound of its error, and compared as verification compares: by
    max|e|/max|ref| and by ||e||/||ref||.
    """
    product = find_float8_product(layer)
    if product is None:
        return 0.0
    (want,) = compute_reference_outputs(_copy(layer, product)[0], choice, ins, images, axes)
    finite = np.isfinite(want)
    size, norm = float(np.max(np.abs(want), initial=0.0, where=finite)), float(np.linalg.norm(want[finite]))
    effect = 0.0
    for sign in (1.0, -1.0):
        (moved,) = compute_reference_outputs(_move_sums(layer, product, sign), choice, ins, images, axes)
        error = np.abs(moved - want)[finite & np.isfinite(moved)]
        if size:
            effect = max(effect, float(np.max(error, initial=0.0)) / size, float(np.linalg.norm(error)) / norm)
    return max(0.0, effect - bound_float8_sum(count_products(product)))


def find_float8_product(layer: Layer) -> Layer | None:
    """The only product in the body of a fused layer with one float output, if it multiplies float8 values."""
    if layer.op != "Fused" or len(layer.outputs) != 1 or not layer.outputs[0].dtype.is_float:
        return None
    products = [x for x in layer.regions["body"].layers if x.op in _PRODUCTS]
    if len(products) != 1:
        return None
    source = products[0].needs(0).maker
    reads = source is not None and source.op == "DequantizeLinear" and source.needs(0).dtype == F8E4M3
    return products[0] if reads else None


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


def _move_sums(layer: Layer, product: Layer, sign: float) -> Layer:
    """The layer with each sum moved by the bound of its error, which the body itself computes."""
    copy, body, end = _copy(layer, product)
    users, place = body.users().get(end.output, []), itertools.count(body.layers.index(end) + 1)

    def add(op: str, *inputs: Tensor | float, **attrs: Any) -> Tensor:
        scalar = TensorType(end.output.dtype, ())  # its value in float64: small values are 0 in float16
        tensors = (a if isinstance(a, Tensor) else Tensor("constant", scalar, weight=Weight(np.asarray(a, np.float64))) for a in inputs)
        made: Tensor = body.add(op, *tensors, at=next(place), **attrs)
        return made

    def add_sum(x: Tensor, w: Tensor) -> Tensor:
        return add(end.op, x, w, **(end.attrs | {"alpha": 1.0} if end.op == "Gemm" else end.attrs))

    x, w = end.needs(0), end.needs(1)
    size, excess = add("Abs", add_sum(x, w)), add("Abs", add_sum(add("Sign", x), add("Sign", w)))
    spread = add("Sqrt", add_sum(add("Mul", x, x), add("Mul", w, w)))
    unit = FLOAT8_UNIT / 2 * abs(end.attrs.get("alpha", 1.0))
    lost = add("Add", add("Mul", excess, 0.5), count_lost_units(count_products(product)))
    amount = add("Mul", add("Mul", add("Add", size, spread), lost), sign * unit)
    moved = add("Add", end.output, amount)
    for user, i in users:
        user.inputs = tuple(moved if j == i else t for j, t in enumerate(user.inputs))
    body.outputs[:] = [moved if t is end.output else t for t in body.outputs]
    return copy
