"""Where oneDNN's kernels leave the ops' letter, all of it: what they make of NaN, and of infinities in a few. Tests hold each kernel to it.

x86's max and min instructions give their second operand when either is NaN, and oneDNN's kernels let the register be the first. So a
NaN loses against a number there: IEEE 754-2008's maxNum and C's fmax, where ONNX Runtime has IEEE 754-2019's maximum (its own MaxPool,
GlobalMaxPool and ReduceMax lose NaN too; tests/tactics/test_onednn_extremes.py looks). Algorithms that keep NaN exist but cost what
fusing saves: Relu as Elu with alpha 0 made 1x1 convolutions of 64 channels 23 to 25 % slower, PRelu with slope 0 makes NaN of -inf.

So: activations that are layers of their own keep NaN where one pass can do that (onednn_eltwise says how), at the same speed. Those in
an epilogue, and what needs two bounds, follow `KERNELS`; oneDNN's plain loops differ again, `PLAIN_LOOPS`. Every other algorithm keeps NaN
and infinities as the op says: measured one by one. Log is not used: it takes denormals for the smallest normal number; nor is Exp in
epilogues: it makes infinity of NaN; nor LeakyRelu with slope 0, which is the algorithm of Relu; nor ReduceMax and ReduceMin at all
(onednn_reduce says why).

Products in BF16 (`spreads`) take denormals for zero and fill odd counts up with zeros, and zero times infinity is NaN: where an
infinity or NaN is among their inputs, more of their outputs may be NaN, never fewer. Other than that, BF16 differs by its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from whet.network import Layer
from whet.tactics._fused import anchor

_LARGEST = float(np.finfo(np.float32).max)

Reference = Callable[..., np.ndarray]


def _relu(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 0."""
    return np.asarray(np.fmax(x, x.dtype.type(0)))


def _clip(own: Reference, layer: Layer, x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None) -> np.ndarray:
    """NaN gives the lower bound, -inf where there is none."""
    bound = x.dtype.type(-np.inf) if low is None else low.reshape(())
    return own(layer, np.where(np.isnan(x), bound, x), low, high)


def _hard_sigmoid(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 1."""
    return np.asarray(np.where(np.isnan(x), x.dtype.type(1), own(layer, x)))


def _max(own: Reference, layer: Layer, *xs: np.ndarray) -> np.ndarray:
    """The number, where the other operand is NaN."""
    return reduce(np.fmax, xs)


def _min(own: Reference, layer: Layer, *xs: np.ndarray) -> np.ndarray:
    """The number, where the other operand is NaN."""
    return reduce(np.fmin, xs)


def _largest(own: Reference, layer: Layer, x: np.ndarray, *rest: np.ndarray | None) -> np.ndarray:
    """The largest of what is no NaN; of nothing but NaN or -inf the lowest finite number, with which the kernels begin."""
    return own(layer, x if x.dtype.kind in "iu" else np.fmax(x, x.dtype.type(-_LARGEST)), *rest)


def _softmax(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """In a row with NaN or +inf those places are NaN and all others 0 (LogSoftmax: -inf), where the op makes the whole row NaN."""
    others = x.dtype.type(-np.inf if layer.op == "LogSoftmax" else 0)
    odd = np.isnan(x) | (x == np.inf)
    return np.asarray(np.where(odd.any(axis=layer.attrs["axis"], keepdims=True) & ~odd, others, own(layer, x)))


def _gelu(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """The erf form overflows from half the largest number on: infinity there, NaN for +inf."""
    y = np.array(own(layer, x))
    if layer.attrs.get("approximate", "none") == "none":
        y[x > _LARGEST / 2] = np.inf
        y[x == np.inf] = np.nan
    return y


def _resize(own: Reference, layer: Layer, x: np.ndarray, *rest: np.ndarray | None) -> np.ndarray:
    """Where an output lies exactly on an input, the kernels add that input times 1 and times 0: no neighbour is read, infinity gives NaN."""
    y = np.asarray(own(layer, x, *rest))
    if layer.attrs["mode"] != "linear":
        return y
    odd = ~np.isfinite(x)
    weight = own(layer, odd.astype(x.dtype), *rest)  # how much of each output comes from NaN and infinities
    y = np.where(weight < 1e-6, own(layer, np.where(odd, x.dtype.type(0), x), *rest), y)
    return np.asarray(np.where(np.isinf(y), x.dtype.type(np.nan), y))


def _relu_product(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """The negative times 0: -inf gives NaN, NaN stays."""
    return np.asarray(np.where(x > 0, x, x * x.dtype.type(0)))


def _sigmoid_plain(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """NaN gives 0."""
    return np.asarray(np.where(np.isnan(x), x.dtype.type(0), own(layer, x)))


def _softmax_plain(own: Reference, layer: Layer, x: np.ndarray) -> np.ndarray:
    """A row of -inf alone gives zeros (LogSoftmax: NaN, as the op says)."""
    empty = (x == -np.inf).all(axis=layer.attrs["axis"], keepdims=True)
    return np.asarray(np.where(empty, x.dtype.type(0), own(layer, x)))


KERNELS: dict[str, Reference] = {
    "Relu": _relu,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "Max": _max,
    "Min": _min,
    "MaxPool": _largest,
    "GlobalMaxPool": _largest,
    "Resize": _resize,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Gelu": _gelu,
}
"""By op: f(the op's own reference, layer, *arrays), what oneDNN's kernels compute; on usual numbers the same as the op."""

PLAIN_LOOPS: dict[str, Reference] = {
    **{op: KERNELS[op] for op in ("Clip", "Max", "Min", "MaxPool", "GlobalMaxPool", "Resize")},
    "Relu": _relu_product,
    "Sigmoid": _sigmoid_plain,
    "Softmax": _softmax_plain,
}
"""The same of oneDNN's implementations that are plain C++."""


def declared(layer: Layer, implementation: str) -> list[dict[str, Reference]]:
    """What holds for the ops of a layer (of its body, when fused) in a kernel that oneDNN calls so; either, where there are two.

    Where a product is a GEMM, its epilogue is one or the other, as its type and place have it.
    """
    ops = {x.op for x in layer.regions["body"].layers} if layer.op == "Fused" else {layer.op}
    tables = [PLAIN_LOOPS] if implementation.startswith(("ref", "simple")) else [KERNELS]
    if implementation.startswith("x64:gemm"):
        tables.append(PLAIN_LOOPS)
    return [{op: f for op, f in table.items() if op in ops} for table in tables]


def spreads(layer: Layer, dtype: str) -> bool:
    """Whether a layer's product is summed in BF16, so that an infinity or NaN may make NaN of more than it should."""
    return dtype == "bf16" and anchor(layer).op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
