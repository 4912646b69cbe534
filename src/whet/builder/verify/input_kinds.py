"""Inputs of several kinds for single layers: a kernel that is correct on the actual values may be wrong for zeros, negative or very small values.

A fault of this sort belongs to the kernel, not to the shape, so it is enough to test each kernel on the cheapest of its layers. The kind "mixed"
has all values that can share a tensor, row by row, and comes first; whole tensors of one kind follow. The reference dominates the cost, so the
kinds together get a share of the cost of the first comparison: multiply-adds and elements, which are the same in every build, not seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.builder.candidates.enumerate import count_macs
from whet.engine.plan import Choice
from whet.network import DTYPES, DType, Layer, TensorType, static_shape
from whet.ops import list_fused_layers

SHARE = 0.1  # of the cost of comparing all layers once
LEAST = 2e7  # multiply-adds that are always affordable: about 50 ms of the reference
_PER_ELEMENT = 100  # cost of an element in multiply-adds: conversions and comparisons of the reference
_MAGNITUDE = 3.0  # largest magnitude of the values of the kind "random" if a layer's own magnitude is 0
LARGE = 1024.0
KINDS = ("mixed", "zero", "non-positive", "random", "constant", "large", "denormal", "not finite")

_MOVES = {"Reformat", "Transpose", "Concat", "Identity", "Reshape", "Flatten", "Slice", "Pad"}
_FINITE_OR_NOT = _MOVES | {"Add", "Sub", "Mul", "Neg"}  # IEEE arithmetic defines the result for NaN and infinities
_PIECEWISE_LINEAR = _FINITE_OR_NOT - {"Mul"} | {
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Relu", "LeakyRelu", "PRelu", "Clip", "Abs", "Max", "Min", "AveragePool", "MaxPool",
    "GlobalAveragePool", "GlobalMaxPool", "BatchNormalization",
}  # fmt: skip
#: results change little if an input value changes little, so that the bound of the tactic holds for any input
_WELL_CONDITIONED = _PIECEWISE_LINEAR | {
    "Mul", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Gelu", "Swish", "Erf", "Softplus", "Mish", "DequantizeLinear", "QuantizeLinear",
}  # fmt: skip


@dataclass(frozen=True)
class Magnitude:
    """Largest absolute finite values of a layer's inputs and outputs in the first comparison."""

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]

    @staticmethod
    def of(ins: Sequence[np.ndarray | None], outs: Sequence[np.ndarray]) -> Magnitude:
        return Magnitude(tuple(_find_largest_magnitude(a) for a in ins), tuple(_find_largest_magnitude(a) for a in outs))


def _find_largest_magnitude(a: np.ndarray | None) -> float:
    if a is None or a.dtype.kind in "bUOS" or not a.size:
        return 0.0
    if a.dtype == np.float16:
        a = a.astype(np.float32)  # NumPy's reductions of F16 are slow
    if a.dtype.kind == "f":
        most = max(float(a.max()), -float(a.min()))
        if np.isfinite(most):
            return most
    wide = a.astype(np.float64)
    return float(np.max(np.abs(wide), where=np.isfinite(wide), initial=0.0))


def list_tests(layers: Sequence[Layer], choices: Mapping[str, Choice], share: float = 1.0) -> list[tuple[int, str]]:
    """(index of the layer, kind) of the tests that the budget allows; `layers` have static shapes.

    `share` is the part of a batch that the reference computes.
    """
    costs = [_count_work(x) * share for x in layers]
    budget = max(LEAST, SHARE * sum(costs))
    cheapest: dict[tuple[object, ...], int] = {}
    for i, x in enumerate(layers):
        c = choices[x.name]
        key = (c.tactic, c.implementation, tuple(sorted(_list_ops(x))))
        if list_input_kinds(x, c) and (key not in cheapest or costs[i] < costs[cheapest[key]]):
            cheapest[key] = i
    tests = []
    for kind in KINDS:
        for i in sorted(cheapest.values(), key=lambda i: (costs[i], i)):
            if kind in list_input_kinds(layers[i], choices[layers[i].name]) and costs[i] <= budget:
                budget -= costs[i]
                tests.append((i, kind))
    return tests


def list_input_kinds(layer: Layer, choice: Choice) -> tuple[str, ...]:
    """The kinds of inputs for which a layer's results are defined within the tactic's bound."""
    ops = _list_ops(layer)
    if choice.tactic.rpartition("/")[2] == "numpy_reference" or not ops <= _WELL_CONDITIONED:
        return ()
    types = [_get_stored_type(t.type, o) for t, o in zip(layer.inputs, choice.inputs, strict=True) if t is not None and not t.is_constant]
    if not types or not all((t.is_float and t.name in ("f32", "f16", "bf16")) or t.name in ("i8", "u8") for t in types):
        return ()
    kinds = ["mixed", "zero", "non-positive", "random", "constant"]
    if all(t.is_float for t in types):
        kinds += ["denormal"]
        kinds += ["large"] if ops <= _PIECEWISE_LINEAR and all(t.name != "f16" for t in types) and _is_all_float(layer) else []
        kinds += ["not finite"] if ops <= _FINITE_OR_NOT and _is_all_float(layer) else []
    return tuple(kinds)


def _is_all_float(layer: Layer) -> bool:
    return all(t.dtype.is_float for t in layer.outputs)


def _get_stored_type(type_: TensorType, operand: tuple[str, str] | None) -> DType:
    return type_.dtype if operand is None else DTYPES[operand[1]]


def _list_ops(layer: Layer) -> set[str]:
    if layer.op == "Fused":
        return set().union(*(_list_ops(x) for x in list_fused_layers(layer)))
    return {layer.op} if not layer.regions else {"region"}


def _count_work(layer: Layer) -> float:
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None and not t.is_constant]
    return float(count_macs(layer)) + _PER_ELEMENT * sum(float(np.prod(static_shape(t.shape))) for t in tensors)


def make_values(kind: str, shape: tuple[int, ...], dtype: np.dtype, magnitude: float, rng: np.random.RandomState) -> np.ndarray:
    """An input of a kind, of the magnitude that the layer's actual input had."""
    magnitude = magnitude or _MAGNITUDE
    integer = dtype.kind in "iu"
    if integer:
        low = -min(magnitude, 127.0) if dtype.kind == "i" else 0.0
        a = np.floor(rng.uniform(low, min(magnitude, 127.0 if dtype.kind == "i" else 255.0) + 1, shape))
        a = np.clip(a, np.iinfo(dtype).min, np.iinfo(dtype).max)
    else:
        a = rng.random_sample(shape) * (2 * magnitude) - magnitude
    least = float(np.finfo(np.float32).tiny) / 64
    if kind == "zero":
        a = np.zeros(shape)
    elif kind == "non-positive":
        a = -np.abs(a) if dtype.kind != "u" else np.zeros(shape)
        a.reshape(-1)[::5] = 0
    elif kind == "constant":
        a = np.full(shape, np.floor(magnitude / 2) if integer else magnitude / 2)
    elif kind == "large":
        a = a * LARGE
    elif kind == "denormal":
        a = np.where(rng.uniform(size=shape) < 0.5, a, np.sign(a) * least)
    elif kind == "not finite":
        flat = a.reshape(-1)
        flat[:: max(flat.size // 7, 1)] = np.nan
        flat[1 :: max(flat.size // 5, 1)] = np.inf
    elif kind == "mixed":
        for part, block in _split_blocks(a):
            if part == 0:
                block[...] = 0
            elif part == 2 and dtype.kind != "u":
                block[...] = -np.abs(block)
            elif part == 4:
                block[...] = np.floor(magnitude / 3) if integer else magnitude / 3
            elif part == 6 and not integer:
                block[...] = np.sign(block) * least
    return np.asarray(a).astype(dtype)


def _split_blocks(a: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Eight interleaved parts of an array: rows of the last axis, or columns where there are fewer than eight rows."""
    rows = a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a.reshape(1, -1)
    for part in range(8):
        yield part, rows[part::8] if len(rows) >= 8 else rows[:, part::8]
