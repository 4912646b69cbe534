"""Arithmetic operations per layer, for FLOP counts, rooflines and pruning budgets.

A multiply-add counts as two; each element of a pointwise op as one, comparisons and exponentials included;
data movement (Reshape, Transpose, Concat, Gather, Reformat, ...) counts as zero. Padding counts as data, as in published tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from whet.errors import NetworkError
from whet.network import Layer, Network, Tensor, evaluate
from whet.ops._base import get_op

Env = Mapping[str, int]

FUSED_OPERATIONS: dict[str, Callable[[Layer, Env], int]] = {}
"""Operation counts of fused layers whose kernels differ from their bodies, by composite kind (`register_fused_kind`)."""


def count_operations(layer: Layer, env: Env | None = None) -> int:
    """Operations of one layer with the symbol values in `env`. An If counts its more expensive branch, a Loop or Scan one iteration.

    Raises NetworkError if a symbol has no value.
    """
    e = env or {}
    if layer.op == "Fused":
        count = FUSED_OPERATIONS.get(layer.composite)
        return count_network_operations(layer.regions["body"], e) if count is None else count(layer, e)
    if layer.regions:
        return max(count_network_operations(r, e) for r in layer.regions.values())
    rule = _RULES.get(layer.op)
    if rule is not None:
        return rule(layer, e)
    if layer.op.startswith("Reduce"):
        return _count_elements(layer.inputs[0], e)
    if get_op(layer.op).pointwise and layer.op not in _MOVES:
        return sum(_count_elements(t, e) for t in layer.outputs) * max(len([t for t in layer.inputs if t is not None]) - 1, 1)
    return 0


def count_network_operations(net: Network, env: Env | None = None) -> int:
    """Operations of all layers of a network."""
    return sum(count_operations(layer, env) for layer in net.layers)


_MOVES = frozenset({"Identity", "Cast", "CastLike", "Dropout", "Where"})


def _evaluate_sizes(t: Tensor | None, env: Env) -> tuple[int, ...]:
    if t is None:
        raise NetworkError("an input needed for the operation count is absent")
    return tuple(evaluate(d, env) for d in t.shape)


def _count_elements(t: Tensor | None, env: Env) -> int:
    return prod(_evaluate_sizes(t, env))


def _count_conv(layer: Layer, env: Env) -> int:
    w, out = _evaluate_sizes(layer.inputs[1], env), _count_elements(layer.output, env)
    return out * (2 * prod(w[1:]) + (layer.input(2) is not None))


def _count_conv_transpose(layer: Layer, env: Env) -> int:
    w = _evaluate_sizes(layer.inputs[1], env)
    bias = _count_elements(layer.output, env) if layer.input(2) is not None else 0
    return 2 * _count_elements(layer.inputs[0], env) * prod(w[1:]) + bias


def _count_gemm(layer: Layer, env: Env) -> int:
    a = _evaluate_sizes(layer.inputs[0], env)
    depth = a[0] if layer.attrs.get("transA") else a[1]
    return _count_elements(layer.output, env) * (2 * depth + (layer.input(2) is not None))


def _count_matmul(layer: Layer, env: Env) -> int:
    return 2 * _count_elements(layer.output, env) * _evaluate_sizes(layer.inputs[0], env)[-1]


def _count_einsum(layer: Layer, env: Env) -> int:
    terms = layer.attrs["equation"].replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    rest = 1
    for term, t in zip(terms, layer.inputs, strict=True):
        shape = _evaluate_sizes(t, env)
        if "..." in term:
            left, right = term.split("...")
            rest = max(rest, prod(shape[len(left) : len(shape) - len(right)]))
            shape, term = shape[: len(left)] + shape[len(shape) - len(right) :], left + right
        for label, d in zip(term, shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), d)
    return rest * prod(sizes.values()) * max(2 * (len(terms) - 1), 1)


def _count_window(layer: Layer, env: Env) -> int:
    return _count_elements(layer.output, env) * prod(layer.attrs["kernel_shape"])


def _make_recurrent_counter(gates: int) -> Callable[[Layer, Env], int]:
    def count(layer: Layer, env: Env) -> int:
        x, w, r = (_evaluate_sizes(layer.inputs[i], env) for i in range(3))
        steps = x[0] * x[1]  # sequence and batch, in either layout
        return 2 * steps * w[0] * gates * r[2] * (w[2] + r[2])

    return count


def _of_input(times: int) -> Callable[[Layer, Env], int]:
    """`times` operations per element of input 0."""
    return lambda layer, env: times * _count_elements(layer.inputs[0], env)


def _resize(layer: Layer, env: Env) -> int:
    taps = {"linear": 2, "cubic": 4}.get(str(layer.attrs.get("mode", "nearest")), 0)
    axes = sum(a != b for a, b in zip(_evaluate_sizes(layer.inputs[0], env), _evaluate_sizes(layer.output, env), strict=True))
    return 2 * taps**axes * _count_elements(layer.output, env) if taps and axes else 0


_RULES: dict[str, Callable[[Layer, Env], int]] = {
    "Conv": _count_conv,
    "ConvInteger": _count_conv,
    "ConvTranspose": _count_conv_transpose,
    "Gemm": _count_gemm,
    "MatMul": _count_matmul,
    "MatMulInteger": _count_matmul,
    "Einsum": _count_einsum,
    "AveragePool": _count_window,
    "LpPool": _count_window,
    "MaxPool": _count_window,
    "GlobalAveragePool": _of_input(1),
    "GlobalLpPool": _of_input(2),
    "GlobalMaxPool": _of_input(1),
    "Softmax": _of_input(5),  # maximum, difference, exponential, sum, quotient
    "LogSoftmax": _of_input(5),
    "Hardmax": _of_input(1),
    "BatchNormalization": _of_input(2),  # one multiply-add, folded
    "LayerNormalization": _of_input(8),  # mean, deviation, square, variance, scale and shift
    "RMSNormalization": _of_input(4),
    "InstanceNormalization": _of_input(8),
    "GroupNormalization": _of_input(8),
    "MeanVarianceNormalization": _of_input(6),
    "LpNormalization": _of_input(3),
    "LRN": lambda layer, env: (2 * layer.attrs["size"] + 3) * _count_elements(layer.inputs[0], env),
    "CumSum": _of_input(1),
    "ArgMax": _of_input(1),
    "ArgMin": _of_input(1),
    "QuantizeLinear": _of_input(2),
    "DequantizeLinear": _of_input(2),
    "Resize": _resize,
    "RNN": _make_recurrent_counter(1),
    "GRU": _make_recurrent_counter(3),
    "LSTM": _make_recurrent_counter(4),
}
