"""Samples of layers with 2:4 weights: of every four input channels of an output channel and filter tap at most two are not zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._samples import Regions, make_body, parse_dims
from whet.composites.quantized import make_conv_body_builder, make_op_body_builder, make_quantized_sample
from whet.network import F8E4M3
from whet.ops import Sample


def draw_two_four_weights(*shape: int, axis: int = 1) -> np.ndarray:
    """float32 weights with two non-zeros at random positions of each group of four along `axis`; in some groups one of them is -0.0.

    Equal sizes give equal weights, whatever was asked before.
    """
    rng = np.random.default_rng((axis, *shape))
    lengths = [n for i, n in enumerate(shape) if i != axis]
    groups = rng.standard_normal((*lengths, shape[axis] // 4, 4)).astype(np.float32)
    order = rng.permuted(np.broadcast_to(np.arange(4), groups.shape), axis=-1)
    groups[order >= 2] = 0
    groups[(order == 1) & (rng.random(groups.shape) < 0.1)] = -0.0
    return np.ascontiguousarray(np.moveaxis(groups.reshape(*lengths, shape[axis]), -1, axis))


def draw_integer_weights(*shape: int) -> np.ndarray:
    """The same of int8."""
    return np.rint(np.clip(draw_two_four_weights(*shape) * 40, -127, 127)).astype(np.int8)


def make_sparse_conv_sample(x: str, k: int, r: int, *, added: str = "", activation: str = "Relu", **attrs: Any) -> Sample:
    """A convolution with a bias and an activation; a residual is added "before" or "behind" the activation."""
    n, c, h, w = parse_dims(x)
    stride, pad = attrs.get("strides", (1, 1))[0], attrs.get("pads", (0,) * 4)[0]
    p, q = ((d + 2 * pad - r) // stride + 1 for d in (h, w))
    inputs: list[Any] = [x, draw_two_four_weights(k, c, r, r), f"const f32[{k}]", *([f"f32[{n},{k},{p},{q}]"] if added else [])]

    def build_regions() -> Regions:
        body, own = make_body(inputs, "xwbz")
        y = body.add("Conv", *own[:3], **attrs)
        if added == "before":
            y = body.add("Add", y, own[3])
        y = body.add(activation, y)
        body.mark_output(body.add("Add", y, own[3]) if added == "behind" else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Conv"}, build_regions)


def make_sparse_matmul_sample(x: str, columns: int, activation: str) -> Sample:
    """Rows by a matrix, with a bias and an activation, as a transformer has it."""
    inputs: list[Any] = [x, draw_two_four_weights(parse_dims(x)[-1], columns, axis=0), f"const f32[{columns}]"]

    def build_regions() -> Regions:
        body, own = make_body(inputs, "xwb")
        body.mark_output(body.add(activation, body.add("Add", body.add("MatMul", *own[:2]), own[2])))
        return {"body": body}

    return Sample(inputs, {"composite": "MatMul"}, build_regions)


def make_sparse_qconv_sample(x: str, zero: int | None, k: int, r: int, store: tuple | None, residual: Any = None, **attrs: Any) -> Sample:
    """A quantized convolution of `x` with a bias, a residual and Relu; float8 has no zero point."""
    c = parse_dims(x)[1]
    weights = draw_two_four_weights(k, c, r, r).astype(F8E4M3.numpy) if zero is None else draw_integer_weights(k, c, r, r)
    rng = np.random.default_rng((c, k, r))
    scale = (rng.uniform(0.5, 2, k) / (np.sqrt(c * r * r) * (1 if zero is None else 40))).astype(np.float32)
    data: list[Any] = [(x if zero is None else f"full {x}", 0.5 if zero is None else 0.02, zero, 1), (weights, scale, None, 0)]
    data.append(rng.standard_normal(k).astype(np.float32))
    return make_quantized_sample("Conv", [*data, *([] if residual is None else [residual])], make_conv_body_builder("Relu", **attrs), store)


def make_sparse_qgemm_sample(x: str, zero: int, columns: int, store: tuple | None) -> Sample:
    """A quantized Gemm."""
    inner = parse_dims(x)[-1]
    rng = np.random.default_rng((columns, inner))
    scale = (rng.uniform(0.5, 2, columns) / (np.sqrt(inner) * 40)).astype(np.float32)
    data = [(f"full {x}", 0.02, zero, 1), (draw_integer_weights(columns, inner), scale, None, 0), rng.standard_normal(columns).astype(np.float32)]
    return make_quantized_sample("Gemm", data, make_op_body_builder("Gemm", transB=1), store)


PAD: dict[str, Any] = {"pads": (1, 1, 1, 1)}
SAMPLES = [
    make_sparse_conv_sample("f32[2,64,11,9]", 72, 3, added="before", **PAD),
    make_sparse_conv_sample("f32[3,136,8,8]", 40, 1, added="behind"),
    make_sparse_conv_sample("f32[2,72,13,11]", 136, 3, activation="Sigmoid", strides=(2, 2), **PAD),
    make_sparse_matmul_sample("f32[2,45,136]", 200, "Gelu"),
    make_sparse_qconv_sample("u8[2,64,11,9]", 0, 80, 3, (0.03, 0, "u8"), ("full u8[2,80,11,9]", 0.02, 5, 1), **PAD),
    make_sparse_qconv_sample("i8[2,80,9,9]", 7, 48, 1, (0.03, -20, "i8")),
    make_sparse_qconv_sample("i8[2,80,9,9]", 7, 48, 1, None),
    make_sparse_qconv_sample("f8e4m3[2,64,11,9]", None, 48, 3, (0.5, None, "f8e4m3"), **PAD),
    make_sparse_qgemm_sample("i8[50,208]", -3, 144, (0.03, 4, "i8")),
]
FEW_ROWS = [  # sizes that are no multiples of a GPU's units
    make_sparse_matmul_sample("f32[1,232]", 84, "Gelu"),  # one row; neither inputs nor outputs are whole vectors
    make_sparse_matmul_sample("f32[7,64]", 37, "Relu"),
    make_sparse_conv_sample("f32[1,72,1,1]", 96, 1, activation="Relu"),
    make_sparse_qgemm_sample("u8[1,104]", 11, 48, (0.03, 4, "u8")),
]
