"""The effect that the error of a sum of float8 products, or of a sum in f16, has on a layer's results, on the layer's actual inputs.

A tactic declares its bound without knowing the sums (tactics/_error_bounds.py). Results that reach the limits of an activation (sigmoid, tanh,
clip), that cancel with a bias or a residual, or that are all on the flat side of GELU, are smaller than the sums, and the errors of the sums are
relative to those.
"""

from __future__ import annotations

import numpy as np

from whet.builder.batching.batch_items import NO_BATCH_AXES, BatchAxes, BatchItems
from whet.builder.verify.emulation import compute_reference_outputs
from whet.engine.plan import Choice
from whet.network import F8E4M3, Layer, Network, Tensor, TensorType, Weight
from whet.tactics._base import TACTICS
from whet.tactics._error_bounds import bound_float8_sum

_PRODUCTS = ("Conv", "Gemm", "MatMul")


def bound_sum_effect(layer: Layer, choice: Choice, ins: list, images: BatchItems | None = None, axes: BatchAxes = NO_BATCH_AXES) -> float:
    """How much the error of the layer's sums may exceed what its tactic declares for them, relative to the results: 0 if it does not.

    The results are computed with the sums moved up and down by their error: by that of the largest sum for max|e|/max|ref|, by that of the sums'
    root mean square for ||e||/||ref||.
    """
    product, sum_error = _find_inexact_sum(layer, choice)
    if product is None:
        return 0.0
    (sums,) = compute_reference_outputs(_stop_after(layer, product), choice, ins, images, axes)
    (want,) = compute_reference_outputs(_copy(layer, product)[0], choice, ins, images, axes)
    finite = np.isfinite(want)
    size, norm = float(np.max(np.abs(want), initial=0.0, where=finite)), float(np.linalg.norm(want[finite]))
    effect = 0.0
    for level, measure, reference in ((np.max(np.abs(sums)), np.max, size), (np.sqrt(np.mean(np.square(sums))), np.linalg.norm, norm)):
        if not np.isfinite(level) or not reference:
            continue
        for sign in (1.0, -1.0):
            (moved,) = compute_reference_outputs(_move_sums(layer, product, sign * sum_error * float(level)), choice, ins, images, axes)
            effect = max(effect, float(measure(np.abs(moved - want)[finite & np.isfinite(moved)])) / reference)
    return max(0.0, effect - sum_error)


def _find_inexact_sum(layer: Layer, choice: Choice) -> tuple[Layer | None, float]:
    """The layer's only product if it has inexact sums, and their error relative to the largest one."""
    if choice.tactic in TACTICS and (declared := TACTICS[choice.tactic].sum_error):
        return find_only_product(layer), declared
    product = find_float8_product(layer)
    return product, 0.0 if product is None else bound_float8_sum(count_products(product))


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
    copy, body, end = _copy(layer, product)
    body.outputs[:] = [end.output]
    return copy


def _move_sums(layer: Layer, product: Layer, by: float) -> Layer:
    copy, body, end = _copy(layer, product)
    users = body.users().get(end.output, [])
    amount = Tensor(f"{end.name} error", TensorType(end.output.dtype, ()), weight=Weight(np.asarray(by, np.float64)))
    moved = body.add("Add", end.output, amount, at=body.layers.index(end) + 1)
    for user, i in users:
        user.inputs = tuple(moved if j == i else t for j, t in enumerate(user.inputs))
    body.outputs[:] = [moved if t is end.output else t for t in body.outputs]
    return copy
