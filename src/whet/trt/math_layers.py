"""Layers of arithmetic: activations, elementwise functions, reductions, products, normalizations, quantization, attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import BOOL, I32, I64, Layer, Tensor
from whet.ops import find_known_values
from whet.trt.enums import (
    ActivationType,
    AttentionNormalizationOp,
    CumulativeOperation,
    DataType,
    ElementWiseOperation,
    LayerType,
    MatrixOperation,
    ReduceOperation,
    TopKOperation,
    UnaryOperation,
    to_whet,
)
from whet.trt.layers import Emission, ILayer, Option, list_mask_axes

_ACTIVATIONS = {
    "RELU": "Relu", "SIGMOID": "Sigmoid", "TANH": "Tanh", "LEAKY_RELU": "LeakyRelu", "ELU": "Elu", "SELU": "Selu", "SOFTSIGN": "Softsign",
    "SOFTPLUS": "Softplus", "CLIP": "Clip", "HARD_SIGMOID": "HardSigmoid", "THRESHOLDED_RELU": "ThresholdedRelu", "GELU_ERF": "Gelu",
}  # fmt: skip
_BINARY = {
    "SUM": "Add", "PROD": "Mul", "MAX": "Max", "MIN": "Min", "SUB": "Sub", "DIV": "Div", "POW": "Pow", "AND": "And", "OR": "Or", "XOR": "Xor",
    "EQUAL": "Equal", "GREATER": "Greater", "LESS": "Less",
}  # fmt: skip
_UNARY = {"RECIP": "Reciprocal", "ISINF": "IsInf", "ISNAN": "IsNaN"}
_REDUCE = {"SUM": "ReduceSum", "PROD": "ReduceProd", "MAX": "ReduceMax", "MIN": "ReduceMin", "AVG": "ReduceMean"}


class IActivationLayer(ILayer):
    """An activation; `alpha` and `beta` are its parameters, with ONNX's defaults."""

    layer_type = LayerType.ACTIVATION
    type = Option(ActivationType.RELU)
    alpha = Option()
    beta = Option()

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        name, a, b = ActivationType(self.type).name, self.alpha, self.beta
        if name == "CLIP":
            return e("Clip", x, e.like(-np.inf if a is None else a, x), e.like(np.inf if b is None else b, x))
        if name == "SCALED_TANH":
            return e("Mul", e("Tanh", e("Mul", x, e.like(1 if b is None else b, x))), e.like(1 if a is None else a, x))
        if name == "SOFTPLUS" and (a, b) != (None, None):
            return e("Mul", e("Softplus", e("Mul", x, e.like(1 if b is None else b, x))), e.like(1 if a is None else a, x))
        if name == "GELU_TANH":
            return e("Gelu", x, approximate="tanh")
        attrs = {}
        if a is not None and name in ("LEAKY_RELU", "ELU", "SELU", "HARD_SIGMOID", "THRESHOLDED_RELU"):
            attrs["alpha"] = float(a)
        if b is not None and name in ("SELU", "HARD_SIGMOID"):
            attrs["gamma" if name == "SELU" else "beta"] = float(b)
        return e(_ACTIVATIONS[name], x, **attrs)

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        names = {op: name for name, op in _ACTIVATIONS.items()}
        attrs = layer.attrs
        return {"type": ActivationType[names[layer.op]], "alpha": attrs.get("alpha"), "beta": attrs.get("beta", attrs.get("gamma"))}


class IElementWiseLayer(ILayer):
    """A function of two tensors; sizes of 1 are broadcast."""

    layer_type = LayerType.ELEMENTWISE
    op = Option(ElementWiseOperation.SUM)

    def emit(self, e: Emission, a: Tensor, b: Tensor) -> Tensor:
        name = ElementWiseOperation(self.op).name
        if name != "FLOOR_DIV":
            return e(_BINARY[name], a, b)
        if a.dtype.kind in ("float", "bfloat"):
            return e("Floor", e("Div", a, b))
        return e("Div", e("Sub", a, e("Mod", a, b)), b)  # Div of integers truncates

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        names = {op: name for name, op in _BINARY.items()}
        return {"op": ElementWiseOperation[names[layer.op]]} if layer.op in names else {}


class IUnaryLayer(ILayer):
    """A function of one tensor."""

    layer_type = LayerType.UNARY
    op = Option(UnaryOperation.EXP)

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        name = UnaryOperation(self.op).name
        return e(_UNARY.get(name, name.capitalize()), x)

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        names = {op: name for name, op in _UNARY.items()}
        return {"op": UnaryOperation[names.get(layer.op, layer.op.upper())]}


class ISelectLayer(ILayer):
    """Elements of input 1 where input 0 is true, else of input 2."""

    layer_type = LayerType.SELECT

    def emit(self, e: Emission, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return e("Where", condition, a, b)


class IParametricReLULayer(ILayer):
    """x, or slope (input 1) * x below 0."""

    layer_type = LayerType.PARAMETRIC_RELU

    def emit(self, e: Emission, x: Tensor, slopes: Tensor) -> Tensor:
        return e("PRelu", x, slopes)


class ISoftMaxLayer(ILayer):
    """e ** x divided by its sum along the axis of the bit mask `axes`; by default the third last, or 0."""

    layer_type = LayerType.SOFTMAX
    axes = Option()

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        axes = (max(x.type.rank - 3, 0),) if self.axes is None else list_mask_axes(int(self.axes))
        if len(axes) != 1:
            raise NetworkError(f"a softmax has one axis, not {axes}")
        return e("Softmax", x, axis=axes[0])

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        return {"axes": 1 << layer.attrs["axis"] % layer.output.type.rank}


class IRaggedSoftMaxLayer(ILayer):
    """Softmax along the last axis over the first `bounds` (input 1, last axis of size 1) entries; zeros after them."""

    layer_type = LayerType.RAGGED_SOFTMAX

    def emit(self, e: Emission, x: Tensor, bounds: Tensor) -> Tensor:
        n = x.shape[-1]
        if not isinstance(n, int):
            raise UnsupportedError("a ragged softmax needs a static last axis")
        inside = e("Less", e.constant(np.arange(n), np.int64), e("Cast", bounds, to=I64))
        y = e("Softmax", e("Where", inside, x, e.like(-np.inf, x)), axis=x.type.rank - 1)
        return e("Where", inside, y, e.like(0, x))


class IReduceLayer(ILayer):
    """A reduction over the axes of a bit mask."""

    layer_type = LayerType.REDUCE
    op = Option(ReduceOperation.SUM)
    axes = Option(0)
    keep_dims = Option(False)

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e(_REDUCE[ReduceOperation(self.op).name], x, axes=list_mask_axes(int(self.axes)), keepdims=int(self.keep_dims))


class ITopKLayer(ILayer):
    """The `k` (or input 1) largest or smallest entries along the axis of a bit mask, and their indices."""

    layer_type = LayerType.TOPK
    min_outputs = 2
    op = Option(TopKOperation.MAX)
    k = Option(1)
    axes = Option(1)
    indices_type = Option(DataType.INT32)

    def emit(self, e: Emission, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        axes = list_mask_axes(int(self.axes))
        if len(axes) != 1:
            raise NetworkError(f"a top-k has one axis, not {axes}")
        attrs = {"axis": axes[0], "largest": int(self.op == TopKOperation.MAX)}
        count = [e("Reshape", e("Cast", k, to=I64), shape=(1,))] if k is not None else []
        values, indices = e("TopK", x, *count, **attrs, **({} if count else {"k": (int(self.k),)}))
        return values, indices if self.indices_type == DataType.INT64 else e("Cast", indices, to=I32)


class IMatrixMultiplyLayer(ILayer):
    """The matrix product over the last two axes; operands may be transposed or vectors."""

    layer_type = LayerType.MATRIX_MULTIPLY
    op0 = Option(MatrixOperation.NONE)
    op1 = Option(MatrixOperation.NONE)

    def emit(self, e: Emission, a: Tensor, b: Tensor) -> Tensor:
        if self.op0 == MatrixOperation.VECTOR:
            a = e("Unsqueeze", a, axes=(a.type.rank - 1,))
        if self.op1 == MatrixOperation.VECTOR:
            b = e("Unsqueeze", b, axes=(b.type.rank,))
        y = e("MatMul", _emit_operand(e, a, self.op0), _emit_operand(e, b, self.op1))
        rank = y.type.rank
        gone = tuple(i for op, i in ((self.op0, rank - 2), (self.op1, rank - 1)) if op == MatrixOperation.VECTOR)
        return e("Squeeze", y, axes=gone) if gone else y


def _emit_operand(e: Emission, t: Tensor, op: MatrixOperation) -> Tensor:
    rank = t.type.rank
    return e("Transpose", t, perm=(*range(rank - 2), rank - 1, rank - 2)) if op == MatrixOperation.TRANSPOSE else t


class IEinsumLayer(ILayer):
    """Einstein summation, as numpy.einsum."""

    layer_type = LayerType.EINSUM
    equation = Option("")

    def emit(self, e: Emission, *inputs: Tensor) -> Tensor:
        return e("Einsum", *inputs, equation=self.equation)

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        return {"equation": layer.attrs["equation"]}


class ICumulativeLayer(ILayer):
    """Cumulative sums along the axis of input 1."""

    layer_type = LayerType.CUMULATIVE
    op = Option(CumulativeOperation.SUM)
    exclusive = Option(False)
    reverse = Option(False)

    def emit(self, e: Emission, x: Tensor, axis: Tensor) -> Tensor:
        known = find_known_values(axis)
        if known is None:
            raise UnsupportedError("the axis of a cumulative sum must be known at build time")
        return e("CumSum", x, axis=tuple(known), exclusive=int(self.exclusive), reverse=int(self.reverse))


class INormalizationLayer(ILayer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes of a bit mask; in groups of channels if num_groups is not 1."""

    layer_type = LayerType.NORMALIZATION
    axes = Option(0)
    epsilon = Option(1e-5)
    num_groups = Option(1)
    compute_precision = Option(DataType.FLOAT)
    is_v2 = Option(False)

    def emit(self, e: Emission, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        axes, rank, eps = list_mask_axes(int(self.axes)), x.type.rank, float(self.epsilon)
        if self.num_groups != 1:
            if axes != tuple(range(2, rank)) and axes != tuple(range(1, rank)):
                raise UnsupportedError(f"a group normalization is over all axes after the channels, not over {axes}")
            flat = [e("Reshape", t, shape=(-1,)) for t in (scale, bias)]
            if self.is_v2 or flat[0].shape[0] == x.shape[1]:
                return e("GroupNormalization", x, *flat, num_groups=int(self.num_groups), epsilon=eps)
            ones, zeros = (e.constant(np.full(x.shape[1], v), x.dtype.numpy) for v in (1, 0))  # one scale per group
            y = e("GroupNormalization", x, ones, zeros, num_groups=int(self.num_groups), epsilon=eps)
            per = x.shape[1] // self.num_groups
            wide = [_emit_per_channel(e, t, per, rank) for t in flat]
            return e("Add", e("Mul", y, wide[0]), wide[1])
        mean = e("ReduceMean", x, axes=axes, keepdims=1)
        centered = e("Sub", x, mean)
        variance = e("ReduceMean", e("Mul", centered, centered), axes=axes, keepdims=1)
        y = e("Div", centered, e("Sqrt", e("Add", variance, e.like(eps, x))))
        return e("Add", e("Mul", y, scale), bias)


def _emit_per_channel(e: Emission, per_group: Tensor, channels: int, rank: int) -> Tensor:
    """[groups] to [1, groups * channels, 1, ...]."""
    repeated = e("Expand", e("Unsqueeze", per_group, axes=(1,)), shape=(per_group.shape[0], channels))
    return e("Reshape", repeated, shape=(1, -1, *(1,) * (rank - 2)))


class IQuantizeLayer(ILayer):
    """saturate(round(x / scale)) as INT8 or FP8, with one scale or one per entry of `axis`."""

    layer_type = LayerType.QUANTIZE
    axis = Option(-1)
    to_type = Option(DataType.INT8)
    block_shape = Option()

    def emit(self, e: Emission, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        _check_blocks(self.block_shape)
        scale = _emit_scale(e, scale)
        zero = [] if zero_point is None else [zero_point]
        attrs = {} if zero else {"output_dtype": to_whet(self.to_type)}
        return e("QuantizeLinear", x, scale, *zero, axis=_get_axis(self.axis), **attrs)


class IDequantizeLayer(ILayer):
    """x * scale, with one scale or one per entry of `axis`."""

    layer_type = LayerType.DEQUANTIZE
    axis = Option(-1)
    to_type = Option(DataType.FLOAT)
    block_shape = Option()

    def emit(self, e: Emission, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        _check_blocks(self.block_shape)
        zero = [] if zero_point is None else [zero_point]
        y = e("DequantizeLinear", x, _emit_scale(e, scale), *zero, axis=_get_axis(self.axis))
        return y if y.dtype == to_whet(self.to_type) else e("Cast", y, to=to_whet(self.to_type))


def _emit_scale(e: Emission, scale: Tensor) -> Tensor:
    """A scale of one element as a scalar."""
    return e("Reshape", scale, shape=()) if scale.shape == (1,) else scale


def _get_axis(axis: Any) -> int:
    return 1 if axis is None or axis < 0 else int(axis)


def _check_blocks(shape: Any) -> None:
    if shape is not None:
        raise UnsupportedError("blocks of two dimensions have no op here; give the network as ONNX with block_size")


class IAttention(ILayer):
    """softmax(query key^T [+ mask]) value. Heads of keys may be shared by several heads of queries."""

    layer_type = LayerType.PLUGIN
    norm_op = Option(AttentionNormalizationOp.SOFTMAX)
    causal = Option(False)
    decomposable = Option(False)
    mask = Option()
    normalization_quantize_scale = Option()

    def emit(self, e: Emission, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.normalization_quantize_scale is not None:
            raise UnsupportedError("attention with quantized scores is not composed here; give the network as ONNX with Q/DQ")
        shared = q.shape[1] // k.shape[1] if isinstance(q.shape[1], int) and isinstance(k.shape[1], int) else 1
        if shared > 1:
            k, v = (_emit_repeated_heads(e, t, shared) for t in (k, v))
        scores = e("MatMul", q, e("Transpose", k, perm=(0, 1, 3, 2)))
        if self.causal:
            rows, columns = q.shape[2], k.shape[2]
            if not isinstance(rows, int) or not isinstance(columns, int):
                raise UnsupportedError("causal attention needs static sequence lengths; give a mask")
            scores = e("Where", e.constant(np.tril(np.ones((rows, columns), bool))), scores, e.like(-np.inf, scores))
        if self.mask is not None:
            mask = self.mask.tensor
            scores = e("Where", mask, scores, e.like(-np.inf, scores)) if mask.dtype == BOOL else e("Add", scores, mask)
        if self.norm_op == AttentionNormalizationOp.SOFTMAX:
            scores = e("Softmax", scores, axis=3)
        return e("MatMul", scores, v)


def _emit_repeated_heads(e: Emission, t: Tensor, count: int) -> Tensor:
    """[batch, heads, length, size] with each head repeated."""
    batch, heads, length, size = t.shape
    if not all(isinstance(d, int) for d in (batch, heads, length, size)):
        raise UnsupportedError("attention with shared heads needs static shapes; give the network as ONNX")
    wide = e("Expand", e("Unsqueeze", t, axes=(2,)), shape=(batch, heads, count, length, size))
    return e("Reshape", wide, shape=(batch, heads * count, length, size))
