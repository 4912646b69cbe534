"""All differences between oneDNN's kernels and the ops' references: results for NaN, and of a few ops for infinities. The contract tests use it.

x86's max and min instructions return their second operand if either is NaN, and oneDNN's kernels make the register the first operand. So the
result is the number, not NaN: IEEE 754-2008's maxNum and C's fmax. ONNX Runtime has IEEE 754-2019's maximum (but its MaxPool, GlobalMaxPool and
ReduceMax lose NaN too: tests/tactics/test_onednn_extremes.py). Algorithms that keep NaN exist, but cost as much as fusing saves: Relu as Elu with
alpha 0 made 1x1 convolutions of 64 channels 23 to 25 % slower; PRelu with slope 0 turns -inf into NaN.

Activations that are single layers keep NaN if one pass can do that at the same speed (onednn_eltwise.py). Activations in an epilogue, and those
with two bounds, follow `KERNELS`; oneDNN's scalar loops follow `PLAIN_LOOPS`. All other algorithms keep NaN and infinities like the op: each
was tested. Log is not used, because it reads denormals as the smallest normal number; Exp is not used in epilogues, because it turns NaN into
infinity; LeakyRelu with slope 0 is not used, because it is the algorithm of Relu; ReduceMax and ReduceMin are not used (onednn_reduce.py).

Products in BF16 (`spreads_nonfinite`) read denormals as zero and pad odd counts with zeros, and zero times infinity is NaN: with an infinity or NaN
among the inputs, more of the outputs may be NaN, never fewer. Otherwise BF16 differs by its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from whet.network import Layer
from whet.tactics._fused import get_root_layer

_LARGEST = float(np.finfo(np.float32).max)

Reference = Callable[..., np.ndarray]


def _compute_relu(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 0."""
    return np.asarray(np.fmax(x, x.dtype.type(0)))


def _clip(reference: Reference, layer: Layer, x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None) -> np.ndarray:
    """NaN gives the lower bound, -inf if there is none."""
    bound = x.dtype.type(-np.inf) if low is None else low.reshape(())
    return reference(layer, np.where(np.isnan(x), bound, x), low, high)


def _compute_hard_sigmoid(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 1."""
    return np.asarray(np.where(np.isnan(x), x.dtype.type(1), reference(layer, x)))


def _compute_max(reference: Reference, layer: Layer, *xs: np.ndarray) -> np.ndarray:
    """The other operand if one is NaN."""
    return reduce(np.fmax, xs)


def _compute_min(reference: Reference, layer: Layer, *xs: np.ndarray) -> np.ndarray:
    """The other operand if one is NaN."""
    return reduce(np.fmin, xs)


def _compute_largest(reference: Reference, layer: Layer, x: np.ndarray, *other_inputs: np.ndarray | None) -> np.ndarray:
    """The maximum without NaNs; for NaN and -inf only, the lowest finite number, which is the initial value."""
    return reference(layer, x if x.dtype.kind in "iu" else np.fmax(x, x.dtype.type(-_LARGEST)), *other_inputs)


def _compute_softmax(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """In a row with NaN or +inf these elements are NaN and the others 0 (LogSoftmax: -inf); with the op the whole row is NaN."""
    others = x.dtype.type(-np.inf if layer.op == "LogSoftmax" else 0)
    odd = np.isnan(x) | (x == np.inf)
    return np.asarray(np.where(odd.any(axis=layer.attrs["axis"], keepdims=True) & ~odd, others, reference(layer, x)))


def _compute_gelu(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """The erf form overflows above half of the largest number: infinity there, NaN for +inf."""
    y = np.array(reference(layer, x))
    if layer.attrs.get("approximate", "none") == "none":
        y[x > _LARGEST / 2] = np.inf
        y[x == np.inf] = np.nan
    return y


def _resize(reference: Reference, layer: Layer, x: np.ndarray, *other_inputs: np.ndarray | None) -> np.ndarray:
    """At positions that coincide with an input, the kernels add this input times 1 and times 0, not the adjacent input, so infinity gives NaN."""
    y = np.asarray(reference(layer, x, *other_inputs))
    if layer.attrs["mode"] != "linear":
        return y
    odd = ~np.isfinite(x)
    weight = reference(layer, odd.astype(x.dtype), *other_inputs)  # how much of each output comes from NaN and infinities
    y = np.where(weight < 1e-6, reference(layer, np.where(odd, x.dtype.type(0), x), *other_inputs), y)
    return np.asarray(np.where(np.isinf(y), x.dtype.type(np.nan), y))


def _compute_relu_product(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """Negative values times 0: -inf gives NaN, NaN stays."""
    return np.asarray(np.where(x > 0, x, x * x.dtype.type(0)))


def _compute_sigmoid_plain(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 0."""
    return np.asarray(np.where(np.isnan(x), x.dtype.type(0), reference(layer, x)))


def _compute_softmax_plain(reference: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """A row of -inf only gives zeros (LogSoftmax: NaN, like the op)."""
    empty = (x == -np.inf).all(axis=layer.attrs["axis"], keepdims=True)
    return np.asarray(np.where(empty, x.dtype.type(0), reference(layer, x)))


KERNELS: dict[str, Reference] = {
    "Relu": _compute_relu,
    "Clip": _clip,
    "HardSigmoid": _compute_hard_sigmoid,
    "Max": _compute_max,
    "Min": _compute_min,
    "MaxPool": _compute_largest,
    "GlobalMaxPool": _compute_largest,
    "Resize": _resize,
    "Softmax": _compute_softmax,
    "LogSoftmax": _compute_softmax,
    "Gelu": _compute_gelu,
}
"""By op: f(reference of the op, layer, *arrays), the results of oneDNN's kernels; for finite numbers those of the op."""

PLAIN_LOOPS: dict[str, Reference] = {
    **{op: KERNELS[op] for op in ("Clip", "Max", "Min", "MaxPool", "GlobalMaxPool", "Resize")},
    "Relu": _compute_relu_product,
    "Sigmoid": _compute_sigmoid_plain,
    "Softmax": _compute_softmax_plain,
}
"""The same for oneDNN's scalar C++ implementations."""


def list_declared_references(layer: Layer, implementation: str) -> list[dict[str, Reference]]:
    """The references for the ops of a layer (of its body if it is fused) in an implementation with this oneDNN name; with two tables either holds.

    The epilogue of a GEMM follows one or the other, depending on its type and position.
    """
    ops = {x.op for x in layer.regions["body"].layers} if layer.op == "Fused" else {layer.op}
    tables = [PLAIN_LOOPS] if implementation.startswith(("ref", "simple")) else [KERNELS]
    if implementation.startswith("x64:gemm"):
        tables.append(PLAIN_LOOPS)
    return [{op: f for op, f in table.items() if op in ops} for table in tables]


def spreads_nonfinite(layer: Layer, dtype: str) -> bool:
    """True if a layer's product is computed in BF16, so that an infinity or NaN may give more NaNs than the reference."""
    return dtype == "bf16" and get_root_layer(layer).op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
