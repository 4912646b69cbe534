"""Operations on quantized values become one layer that reads integers: Q/DQ layers and the operation between them.

The kind of such a layer is its root operation: a convolution or matrix product (see epilogue.py), an Add or Mul (see pointwise.py), or an average
pooling. It stores integers when the result is quantized, floats otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, make_body
from whet.network import F8E4M3, Layer, Network, Tensor, parse_type
from whet.ops import Sample
from whet.rewrite.fusing import find_root_op, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import WEIGHTED, find_activation_obstacle, find_dequantizer, find_quantized_members
from whet.rewrite.rules import Phase, Skip

BuildBody = Callable[[Network, list[Tensor]], Tensor]


def make_quantized_sample(kind: str, data: list[Any], build: BuildBody, store: tuple[float, int | None, str] | None) -> Sample:
    """A fused layer of `kind`. `data` are (specification, scale(s), zero point or None, axis) of quantized inputs, or specifications of plain ones.
    `build(body, values)` computes with the dequantized values. `store` is (scale, zero point, type) of the output, None: floats. Float8 has no
    zero point: None."""
    inputs: list[Any] = []
    for d in data:
        if not isinstance(d, tuple):
            inputs.append(d)
            continue
        spec, scale, zero, _ = d
        inputs += [spec, np.asarray(scale, np.float32)]
        if zero is not None:
            dtype = spec.dtype if isinstance(spec, np.ndarray) else parse_type(spec.split()[-1]).dtype.numpy
            inputs.append(np.asarray(zero, dtype))
    if store is not None:
        inputs.append(np.asarray(store[0], np.float32))
        if store[1] is not None:
            inputs.append(np.asarray(store[1], parse_type(store[2] + "[]").dtype.numpy))

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        at, values = 0, []
        for d in data:
            if not isinstance(d, tuple):
                values.append(own[at])
                at += 1
                continue
            n = 2 if d[2] is None else 3
            values.append(body.add("DequantizeLinear", *own[at : at + n], axis=d[3]))
            at += n
        y = build(body, values)
        to_float8: dict[str, Any] = {} if store is None or store[1] is not None else {"output_dtype": F8E4M3}
        body.mark_output(y if store is None else body.add("QuantizeLinear", y, *own[at : at + 2], **to_float8))
        return {"body": body}

    return Sample(inputs, {"composite": kind}, build_regions)


def make_conv_body_builder(act: str = "", residual_last: bool = False, **attrs: Any) -> BuildBody:
    """act(conv(x, w, b) + residual); with `residual_last` the residual is added after the activation."""

    def build(body: Network, values: list[Tensor]) -> Tensor:
        y = body.add("Conv", *values[:3], **attrs)
        if len(values) > 3 and not residual_last:
            y = body.add("Add", y, values[3])
        y = activate(body, y, act) if act else y
        return body.add("Add", y, values[3]) if len(values) > 3 and residual_last else y

    return build


def make_op_body_builder(op: str, **attrs: Any) -> BuildBody:
    """One operation on all values."""
    return lambda body, values: body.add(op, *values, **attrs)


def _add_relu(body: Network, values: list[Tensor]) -> Tensor:
    return body.add("Relu", body.add("Add", *values))


_rng = np.random.default_rng(8)
_STEP = np.float32(1 / 2000)
_W = _rng.integers(-127, 128, (32, 16, 3, 3)).astype(np.int8)
_EXTREME = np.where(_rng.random((32, 16, 3, 3)) < 0.9, np.int8(127), np.int8(-128))
_CHANNELS = _rng.uniform(0.5, 2, 32).astype(np.float32) * _STEP
_BIAS = _rng.standard_normal(32).astype(np.float32)
_DEPTHWISE = _rng.integers(-127, 128, (32, 1, 3, 3)).astype(np.int8)
_FIRST = _rng.integers(-127, 128, (16, 3, 7, 7)).astype(np.int8)
_SQUARE = _rng.integers(-127, 128, (32, 32, 3, 3)).astype(np.int8)
_MATRIX = _rng.integers(-127, 128, (64, 24)).astype(np.int8)
_IDENTITY = np.eye(16, dtype=np.int8).reshape(16, 16, 1, 1)

QUANTIZED = register_composite(
    "AveragePool",
    "GlobalAveragePool",
    title="quantized operation",
    samples=[
        make_quantized_sample(
            "Conv",
            [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS],
            make_conv_body_builder("Relu", pads=(1,) * 4),
            (0.05, 0, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full i8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, 32 * [0], 0), _BIAS, ("full i8[2,32,8,8]", 0.03, 0, 1)],
            make_conv_body_builder("Relu", pads=(1,) * 4),
            (0.04, 0, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[1,32,4,4]", 0.03, 100, 1)],
            make_conv_body_builder(pads=(1,) * 4, strides=(2, 2)),
            (0.04, -20, "i8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, "f32[1,32,8,8]"],
            make_conv_body_builder("Relu", pads=(1,) * 4),
            (0.05, 0, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[1,32,20,24]", 0.02, 40, 1), (_SQUARE, _CHANNELS, None, 0), _BIAS],
            make_conv_body_builder("Relu", pads=(1,) * 4),
            (0.05, 3, "u8"),
        ),
        # the largest accumulators of u8 by i8: pairs of products overflow 16 bits
        make_quantized_sample(
            "Conv", [("extreme u8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _STEP, None, 0), _BIAS], make_conv_body_builder(pads=(1,) * 4), (0.3, 0, "i8")
        ),
        make_quantized_sample(
            "Conv", [("extreme u8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _STEP, None, 0), _BIAS], make_conv_body_builder(pads=(1,) * 4), None
        ),
        make_quantized_sample(
            "Conv", [("extreme i8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _STEP, None, 0), _BIAS], make_conv_body_builder(pads=(1,) * 4), None
        ),
        # zero points: padding is the zero point, not 0
        make_quantized_sample(
            "Conv", [("full u8[1,16,8,8]", 0.02, 128, 1), (_W, _CHANNELS, None, 0), _BIAS], make_conv_body_builder(pads=(1,) * 4), (0.05, 3, "u8")
        ),
        make_quantized_sample(
            "Conv", [("full i8[1,16,8,8]", 0.02, -5, 1), (_W, _STEP, 0, 0), _BIAS], make_conv_body_builder(pads=(1,) * 4), (0.05, 7, "i8")
        ),
        # half of the results are ties between two integers
        make_quantized_sample(
            "Conv", [("full i8[1,16,8,8]", 0.5, 0, 1), (_IDENTITY, np.float32(1), None, 0)], make_conv_body_builder(), (1.0, 0, "i8")
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[1,32,9,9]", 0.02, 0, 1), (_DEPTHWISE, _CHANNELS, None, 0), _BIAS],
            make_conv_body_builder("Relu", pads=(1,) * 4, group=32),
            (0.005, 0, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full i8[1,3,16,16]", 0.02, 0, 1), (_FIRST, _STEP, None, 0)],
            make_conv_body_builder(strides=(2, 2), pads=(3,) * 4),
            (0.02, 0, "i8"),
        ),
        # SiLU: alone, after and before a residual Add, depthwise and in a stem
        make_quantized_sample(
            "Conv",
            [("full u8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS],
            make_conv_body_builder("silu", pads=(1,) * 4),
            (0.05, 6, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[2,16,8,8]", 0.02, 40, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[2,32,8,8]", 0.03, 100, 1)],
            make_conv_body_builder("silu", pads=(1,) * 4),
            (0.04, -90, "i8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full i8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[2,32,8,8]", 0.03, 100, 1)],
            make_conv_body_builder("silu", residual_last=True, pads=(1,) * 4),
            (0.05, 50, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full u8[1,32,9,9]", 0.02, 0, 1), (_DEPTHWISE, 9 * _CHANNELS, None, 0), _BIAS],
            make_conv_body_builder("silu", pads=(1,) * 4, group=32),
            (0.02, 14, "u8"),
        ),
        make_quantized_sample(
            "Conv",
            [("full i8[1,3,16,16]", 0.02, 9, 1), (_FIRST, 5 * _STEP, None, 0)],
            make_conv_body_builder("silu", strides=(2, 2), pads=(3,) * 4),
            (0.02, -114, "i8"),
        ),
        make_quantized_sample(
            "Conv", [("full i8[1,16,20]", 0.02, 0, 1), (_W[..., 0], _CHANNELS, None, 0), _BIAS], make_conv_body_builder(pads=(1, 1)), (0.05, 0, "i8")
        ),
        make_quantized_sample(
            "Gemm", [("full u8[5,64]", 0.02, 0, 1), (_MATRIX, _CHANNELS[:24], None, 1), _BIAS[:24]], make_op_body_builder("Gemm"), (0.02, 0, "i8")
        ),
        make_quantized_sample(
            "Gemm",
            [("full i8[5,24]", 0.02, 0, 1), (_MATRIX, 2 * [*_CHANNELS], None, 0), 2 * _BIAS.repeat(2)],
            make_op_body_builder("Gemm", transB=1),
            None,
        ),
        make_quantized_sample(
            "MatMul", [("full i8[2,5,64]", 0.02, 9, 1), (_MATRIX, _CHANNELS[:24], None, 1)], make_op_body_builder("MatMul"), (0.02, 0, "i8")
        ),
        make_quantized_sample("MatMul", [("full u8[2,3,5,8]", 0.02, 0, 1), ("full i8[2,3,8,6]", 0.01, 0, 1)], make_op_body_builder("MatMul"), None),
        make_quantized_sample("Add", [("full i8[1,16,8,8]", 0.02, 0, 1), ("full u8[1,16,8,8]", 0.0317, 10, 1)], _add_relu, (0.0413, 5, "u8")),
        make_quantized_sample("Add", [("full i8[3,17]", 0.02, 0, 1), ("full i8[3,17]", 0.0317, 0, 1)], _add_relu, (0.0413, 0, "i8")),
        make_quantized_sample("Mul", [("full i8[2,32,9,9]", 0.02, 0, 1), "f32[2,32,1,1]"], make_op_body_builder("Mul"), (0.02, 0, "i8")),
        make_quantized_sample("Mul", ["f32[1,17,5,5]", ("full u8[1,17,5,5]", 0.02, 130, 1)], make_op_body_builder("Mul"), (0.0317, -7, "i8")),
        make_quantized_sample(
            "AveragePool",
            [("full u8[1,16,8,8]", 0.02, 0, 1)],
            make_op_body_builder("AveragePool", kernel_shape=(3, 3), pads=(1,) * 4),
            (0.015, 0, "u8"),
        ),
        make_quantized_sample(
            "AveragePool",
            [("full i8[1,16,8,8]", 0.02, 4, 1)],
            make_op_body_builder("AveragePool", kernel_shape=(2, 2), strides=(2, 2)),
            (0.0213, 4, "i8"),
        ),
        make_quantized_sample("GlobalAveragePool", [("full i8[2,16,7,7]", 0.02, 0, 1)], make_op_body_builder("GlobalAveragePool"), (0.003, 0, "i8")),
    ],
)


@QUANTIZED.matcher(
    "QuantizeLinear",
    phase=Phase.FUSE,
    after=["fuse_conv_activation", "fuse_gemm_activation", "fuse_gemm_scale", "fuse_matmul_bias", "fuse_silu"],
    level=0,
)
def fuse_quantized(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Dequantize, convolution, matrix product, Add, gate or average pool, and quantize become one layer that reads and stores integers."""
    value = layer.inputs[0]
    head = g.maker(value)
    if head is None or value is None:
        return None
    if find_root_op(head, WEIGHTED):
        return _fuse_weighted(g, layer, head, value)
    if head.op == "Add":
        return _fuse_unweighted(g, layer, "Add", [head], value)
    if head.op == "Mul":
        return _fuse_gate(g, layer, head, value)
    if head.op in ("Relu", "Clip") and all(t is None or t.is_constant for t in head.inputs[1:]):
        inner = g.maker(head.inputs[0])
        if inner is not None and inner.op == "Add":
            if reason := g.escapes(inner.output, head):
                return Skip(reason)
            return _fuse_unweighted(g, layer, "Add", [inner, head], value)
        return None
    if head.op in QUANTIZED.kinds:
        return _fuse_unweighted(g, layer, head.op, [head], value)
    return None


def _fuse_weighted(g: Graph, layer: Layer, head: Layer, value: Tensor) -> Tensor | Skip | None:
    """A convolution or matrix product: its Q/DQ layers, it with its epilogue, and the quantizing layer."""
    members = find_quantized_members(g, head)
    if members is None:
        return None
    if isinstance(members, str):
        return Skip(members)
    if reason := find_activation_obstacle(layer) or g.escapes(value, layer):
        return Skip(reason)
    return fuse_flat(g, find_root_op(head, WEIGHTED), *members, head, layer)


def _fuse_unweighted(g: Graph, layer: Layer, kind: str, members: list[Layer], value: Tensor) -> Tensor | Skip | None:
    """Add and pools: a DequantizeLinear for every input, then `members`, then the quantizing layer."""
    head = members[0]
    makers = [find_dequantizer(g, t) for t in head.inputs]
    if not any(makers):
        return None
    if not all(makers):
        missing = next(t for t, m in zip(head.inputs, makers, strict=True) if m is None)
        return Skip(f"%{missing.name if missing else '?'} is not quantized: put Q/DQ on it too")
    dequantizers = list(dict.fromkeys(m for m in makers if m is not None))
    reason = next((r for m in dequantizers if (r := find_activation_obstacle(m))), None) or find_activation_obstacle(layer) or g.escapes(value, layer)
    if kind == "Add" and any(t is not None and t.type != head.output.type for t in head.inputs):
        reason = reason or "its inputs broadcast"
    if reason:
        return Skip(reason)
    return fuse_flat(g, kind, *dequantizers, *members, layer)


def _fuse_gate(g: Graph, layer: Layer, head: Layer, value: Tensor) -> Tensor | Skip | None:
    """Mul of a dequantized value by a float factor that broadcasts over it, as in squeeze-and-excitation."""
    pairs = [(find_dequantizer(g, a), b) for a, b in (head.inputs, head.inputs[::-1]) if a is not None and a.type == value.type]
    dequantizers = [m for m, other in pairs if m is not None and find_dequantizer(g, other) is None]
    if len(dequantizers) != 1:
        return None
    if reason := find_activation_obstacle(dequantizers[0]) or find_activation_obstacle(layer) or g.escapes(value, layer):
        return Skip(reason)
    return fuse_flat(g, "Mul", dequantizers[0], head, layer)


@QUANTIZED.matcher(*WEIGHTED, "Fused", level=0)
def fuse_dequantized(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A convolution or matrix product of dequantized values whose result is not quantized computes on integers and stores floats."""
    members = find_quantized_members(g, layer)
    if members is None:
        return None
    if isinstance(members, str):
        return Skip(members)
    return fuse_flat(g, find_root_op(layer, WEIGHTED), *members, layer)
