"""Samples of quantized fused layers: every type and epilogue, largest sums of u8 by i8, ties of rounding, zero points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.network import F8E4M3, Network, Tensor, parse_type
from whet.ops._base import Sample

Build = Callable[[Network, list[Tensor]], Tensor]


def quantized(composite: str, data: list[Any], build: Build, store: tuple[float, int | None, str] | None) -> Sample:
    """A fused layer `composite`. `data` are (sample spec, scale(s), zero point or None, axis) or a plain spec that stays as it is;
    `build(body, values)` computes with the dequantized values; `store` is (scale, zero point, type) of the output, None: floats;
    float8 has no zero point: None."""
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

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(f"i{k}", _type(v)) for k, v in enumerate(inputs)]
        place, values = 0, []
        for d in data:
            if not isinstance(d, tuple):
                values.append(own[place])
                place += 1
                continue
            n = 2 if d[2] is None else 3
            values.append(body.add("DequantizeLinear", *own[place : place + n], axis=d[3]))
            place += n
        y = build(body, values)
        to_float8 = {} if store is None or store[1] is not None else {"output_dtype": F8E4M3}
        body.mark_output(y if store is None else body.add("QuantizeLinear", y, *own[place : place + 2], **to_float8))
        return {"body": body}

    return Sample(inputs, {"composite": composite}, regions)


def _type(v: Any):
    if isinstance(v, str):
        return parse_type(v.split()[-1])
    shape = ",".join(map(str, v.shape))
    return parse_type(f"{ {'float32': 'f32', 'int8': 'i8', 'uint8': 'u8', 'float8_e4m3fn': 'f8e4m3'}[v.dtype.name] }[{shape}]")


def _conv(relu: bool = False, **attrs: Any) -> Build:
    def build(body: Network, values: list[Tensor]) -> Tensor:
        y = body.add("Conv", *values[:3], **attrs)
        if len(values) > 3:
            y = body.add("Add", y, values[3])
        return body.add("Relu", y) if relu else y

    return build


def _product(op: str, **attrs: Any) -> Build:
    return lambda body, values: body.add(op, *values, **attrs)


def _add(body: Network, values: list[Tensor]) -> Tensor:
    return body.add("Relu", body.add("Add", *values))


def _silu(body: Network, values: list[Tensor]) -> Tensor:
    x = body.add("LeakyRelu", values[0], alpha=4.0)
    return body.add("Mul", x, body.add("Sigmoid", x))


def _conv_silu(late: bool = False, **attrs: Any) -> Build:
    """SiLU behind a convolution; what is added comes before it, or `late`."""

    def build(body: Network, values: list[Tensor]) -> Tensor:
        y = body.add("Conv", *values[:3], **attrs)
        if len(values) > 3 and not late:
            y = body.add("Add", y, values[3])
        y = body.add("Mul", y, body.add("Sigmoid", y))
        return body.add("Add", y, values[3]) if len(values) > 3 and late else y

    return build


_rng = np.random.default_rng(8)
_FAN = np.float32(1 / 2000)
_W = _rng.integers(-127, 128, (32, 16, 3, 3)).astype(np.int8)
_EXTREME = np.where(_rng.random((32, 16, 3, 3)) < 0.9, np.int8(127), np.int8(-128))
_CHANNELS = _rng.uniform(0.5, 2, 32).astype(np.float32) * _FAN
_BIAS = _rng.standard_normal(32).astype(np.float32)
_DEPTHWISE = _rng.integers(-127, 128, (32, 1, 3, 3)).astype(np.int8)
_FIRST = _rng.integers(-127, 128, (16, 3, 7, 7)).astype(np.int8)
_NARROW = _rng.integers(-127, 128, (32, 32, 3, 3)).astype(np.int8)
_MATRIX = _rng.integers(-127, 128, (64, 24)).astype(np.int8)
_ONES = np.eye(16, dtype=np.int8).reshape(16, 16, 1, 1)

SAMPLES = [
    quantized("Conv", [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS], _conv(True, pads=(1,) * 4), (0.05, 0, "u8")),
    quantized(
        "Conv",
        [("full i8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, 32 * [0], 0), _BIAS, ("full i8[2,32,8,8]", 0.03, 0, 1)],
        _conv(True, pads=(1,) * 4),
        (0.04, 0, "u8"),
    ),
    quantized(
        "Conv",
        [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[1,32,4,4]", 0.03, 100, 1)],
        _conv(pads=(1,) * 4, strides=(2, 2)),
        (0.04, -20, "i8"),
    ),
    quantized(
        "Conv",
        [("full u8[1,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, "f32[1,32,8,8]"],
        _conv(True, pads=(1,) * 4),
        (0.05, 0, "u8"),
    ),
    quantized("Conv", [("full u8[1,32,20,24]", 0.02, 40, 1), (_NARROW, _CHANNELS, None, 0), _BIAS], _conv(True, pads=(1,) * 4), (0.05, 3, "u8")),
    # the largest sums that u8 by i8 can have: pairs of them leave 16 bits
    quantized(
        "Conv", [("extreme u8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _FAN, None, 0), _BIAS], _conv(pads=(1,) * 4), (0.3, 0, "i8")
    ),
    quantized("Conv", [("extreme u8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _FAN, None, 0), _BIAS], _conv(pads=(1,) * 4), None),
    quantized("Conv", [("extreme i8[1,16,8,8]", 0.01, 0, 1), (_EXTREME, _FAN, None, 0), _BIAS], _conv(pads=(1,) * 4), None),
    # zero points: padding is the zero point, not 0
    quantized("Conv", [("full u8[1,16,8,8]", 0.02, 128, 1), (_W, _CHANNELS, None, 0), _BIAS], _conv(pads=(1,) * 4), (0.05, 3, "u8")),
    quantized("Conv", [("full i8[1,16,8,8]", 0.02, -5, 1), (_W, _FAN, 0, 0), _BIAS], _conv(pads=(1,) * 4), (0.05, 7, "i8")),
    # half of the results stand exactly between two integers
    quantized("Conv", [("full i8[1,16,8,8]", 0.5, 0, 1), (_ONES, np.float32(1), None, 0)], _conv(), (1.0, 0, "i8")),
    quantized(
        "Conv",
        [("full u8[1,32,9,9]", 0.02, 0, 1), (_DEPTHWISE, _CHANNELS, None, 0), _BIAS],
        _conv(True, pads=(1,) * 4, group=32),
        (0.005, 0, "u8"),
    ),
    quantized("Conv", [("full i8[1,3,16,16]", 0.02, 0, 1), (_FIRST, _FAN, None, 0)], _conv(strides=(2, 2), pads=(3,) * 4), (0.02, 0, "i8")),
    # SiLU: alone, behind a sum and before one, depthwise and of an image
    quantized("Conv", [("full u8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS], _conv_silu(pads=(1,) * 4), (0.05, 6, "u8")),
    quantized(
        "Conv",
        [("full u8[2,16,8,8]", 0.02, 40, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[2,32,8,8]", 0.03, 100, 1)],
        _conv_silu(pads=(1,) * 4),
        (0.04, -90, "i8"),
    ),
    quantized(
        "Conv",
        [("full i8[2,16,8,8]", 0.02, 0, 1), (_W, _CHANNELS, None, 0), _BIAS, ("full u8[2,32,8,8]", 0.03, 100, 1)],
        _conv_silu(late=True, pads=(1,) * 4),
        (0.05, 50, "u8"),
    ),
    quantized(
        "Conv",
        [("full u8[1,32,9,9]", 0.02, 0, 1), (_DEPTHWISE, 9 * _CHANNELS, None, 0), _BIAS],
        _conv_silu(pads=(1,) * 4, group=32),
        (0.02, 14, "u8"),
    ),
    quantized(
        "Conv",
        [("full i8[1,3,16,16]", 0.02, 9, 1), (_FIRST, 5 * _FAN, None, 0)],
        _conv_silu(strides=(2, 2), pads=(3,) * 4),
        (0.02, -114, "i8"),
    ),
    quantized("Conv", [("full i8[1,16,20]", 0.02, 0, 1), (_W[..., 0], _CHANNELS, None, 0), _BIAS], _conv(pads=(1, 1)), (0.05, 0, "i8")),
    quantized(
        "Gemm", [("full u8[5,64]", 0.02, 0, 1), (_MATRIX, _CHANNELS[:24], None, 1), _BIAS[:24]], _product("Gemm"), (0.02, 0, "i8")
    ),
    quantized(
        "Gemm", [("full i8[5,24]", 0.02, 0, 1), (_MATRIX, 2 * [*_CHANNELS], None, 0), 2 * _BIAS.repeat(2)], _product("Gemm", transB=1), None
    ),
    quantized("MatMul", [("full i8[2,5,64]", 0.02, 9, 1), (_MATRIX, _CHANNELS[:24], None, 1)], _product("MatMul"), (0.02, 0, "i8")),
    quantized("MatMul", [("full u8[2,3,5,8]", 0.02, 0, 1), ("full i8[2,3,8,6]", 0.01, 0, 1)], _product("MatMul"), None),
    quantized("Add", [("full i8[1,16,8,8]", 0.02, 0, 1), ("full u8[1,16,8,8]", 0.0317, 10, 1)], _add, (0.0413, 5, "u8")),
    quantized("Add", [("full i8[3,17]", 0.02, 0, 1), ("full i8[3,17]", 0.0317, 0, 1)], _add, (0.0413, 0, "i8")),
    quantized("Mul", [("full i8[2,32,9,9]", 0.02, 0, 1), "f32[2,32,1,1]"], _product("Mul"), (0.02, 0, "i8")),
    quantized("Mul", ["f32[1,17,5,5]", ("full u8[1,17,5,5]", 0.02, 130, 1)], _product("Mul"), (0.0317, -7, "i8")),
    quantized(
        "AveragePool", [("full u8[1,16,8,8]", 0.02, 0, 1)], _product("AveragePool", kernel_shape=(3, 3), pads=(1,) * 4), (0.015, 0, "u8")
    ),
    quantized(
        "AveragePool", [("full i8[1,16,8,8]", 0.02, 4, 1)], _product("AveragePool", kernel_shape=(2, 2), strides=(2, 2)), (0.0213, 4, "i8")
    ),
    quantized("GlobalAveragePool", [("full i8[2,16,7,7]", 0.02, 0, 1)], _product("GlobalAveragePool"), (0.003, 0, "i8")),
    # functions of one integer: odd sizes, results that saturate at both ends, another scale alone
    quantized("QuantizedTable", [("full u8[1,16,19,19]", 0.05, 40, 1)], _silu, (0.04, 7, "u8")),
    quantized("QuantizedTable", [("full i8[3,7,5]", 0.05, -3, 1)], _silu, (0.01, -100, "i8")),
    quantized("QuantizedTable", [("full u8[2,17,45,45]", 0.5, 0, 1)], lambda body, values: body.add("Gelu", *values), (0.25, 0, "i8")),
    quantized("QuantizedTable", [("full i8[40000]", 0.02, 0, 1)], lambda body, values: values[0], (0.0317, 130, "u8")),
]  # fmt: skip
