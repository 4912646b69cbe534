"""CUDA kernels at realistic sizes: tiles of every kind, tile boundaries, 8-bit operands with zero points at padding."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from whet.composites.quantized import make_quantized_sample
from whet.network import Network
from whet.ops import sample_layer
from whet.ops._base import Sample

_rng = np.random.default_rng(3)


def weights(*shape):
    return _rng.integers(-127, 128, shape).astype(np.int8)


def scales(k, fan):
    return (_rng.uniform(0.5, 2, k) / (60 * np.sqrt(fan))).astype(np.float32)


def real(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


def conv(relu=False, add=False, activation="", **attrs):
    """The body of a fused layer: Conv, a residual Add, an activation."""

    def build(body, values):
        n = len(values) - int(add)
        y = body.add("Conv", *values[:n], **attrs)
        if add:
            y = body.add("Add", y, values[n])
        if activation == "silu":
            y = body.add("Mul", y, body.add("Sigmoid", y))
        return body.add("Relu", y) if relu else y

    return build


def qconv(x, zero, k, c, r, *, store, residual=None, groups=1, **how):
    """A quantized convolution of `x` ("u8[n,c,h,w]")."""
    data = [(f"full {x}", 0.02, zero, 1), (weights(k, c // groups, r, r), scales(k, c // groups * r * r), None, 0), real(k)]
    if residual is not None:
        data.append(residual if isinstance(residual, str) else (f"full {residual[0]}", 0.03, residual[1], 1))
    return make_quantized_sample("Conv", data, conv(add=residual is not None, group=groups, **how), store)


PAD = {"pads": (1,) * 4}
QUANTIZED = {
    "3x3": qconv("u8[4,64,28,28]", 0, 64, 64, 3, store=(0.02, 0, "u8"), residual=("u8[4,64,28,28]", 0), relu=True, **PAD),
    "3x3 zero points": qconv("u8[4,64,28,28]", 77, 96, 64, 3, store=(0.03, -9, "i8"), activation="silu", **PAD),
    "3x3 small": qconv("i8[1,256,14,14]", 3, 256, 256, 3, store=(0.02, 0, "u8"), residual=("i8[1,256,14,14]", -4), relu=True, **PAD),
    "3x3 strided": qconv("u8[3,64,29,27]", 200, 128, 64, 3, store=(0.03, 100, "u8"), strides=(2, 2), **PAD),
    "1x1": qconv("u8[4,128,28,28]", 0, 256, 128, 1, store=(0.02, 0, "u8"), residual=("i8[4,256,28,28]", 5), relu=True),
    "1x1 zero point": qconv("u8[4,128,28,28]", 9, 48, 128, 1, store=(0.03, 0, "i8")),
    "1x1 of 24": qconv("u8[4,96,28,28]", 0, 24, 96, 1, store=(0.03, 3, "i8"), residual=("i8[4,24,28,28]", 5)),
    "1x1 deep": qconv("u8[1,2048,7,7]", 0, 512, 2048, 1, store=(0.03, 0, "u8"), relu=True),
    "3x3 many": qconv("u8[16,64,56,56]", 0, 64, 64, 3, store=(0.02, 0, "u8"), relu=True, **PAD),
    "1x1 many": qconv("u8[16,64,56,56]", 0, 256, 64, 1, store=(0.02, 0, "u8"), residual=("i8[16,256,56,56]", 5), relu=True),
    "1x1 strided": qconv("u8[4,256,56,56]", 0, 512, 256, 1, store=(0.02, 0, "i8"), strides=(2, 2)),
    "floats out": qconv("u8[2,64,20,20]", 7, 255, 64, 1, store=None),
    "floats added": qconv("u8[2,64,20,20]", 7, 64, 64, 3, store=(0.03, 0, "u8"), residual="f32[2,64,20,20]", relu=True, **PAD),
    "groups": qconv("u8[1,64,9,9]", 7, 64, 64, 3, store=(0.03, 0, "u8"), groups=4, relu=True, **PAD),
    "24 in": qconv("u8[2,24,28,28]", 0, 144, 24, 1, store=(0.03, 0, "u8"), relu=True),
    "first": qconv("u8[2,3,64,64]", 114, 64, 3, 7, store=(0.03, 0, "u8"), relu=True, strides=(2, 2), pads=(3,) * 4),
    "first 32": qconv("i8[2,3,65,63]", 0, 40, 3, 3, store=(0.03, 3, "i8"), strides=(2, 2), **PAD),
    "depthwise": qconv("u8[8,64,56,56]", 0, 64, 64, 3, store=(0.01, 0, "u8"), groups=64, relu=True, **PAD),
    "depthwise strided": qconv("i8[16,96,57,55]", 0, 96, 96, 3, store=(0.01, 4, "i8"), groups=96, strides=(2, 2), **PAD),
    "depthwise zero point": qconv("u8[2,64,20,20]", 50, 64, 64, 5, store=(0.01, 4, "u8"), groups=64, activation="silu", pads=(2,) * 4),
    "product": make_quantized_sample(
        "Gemm",
        [("full u8[128,2048]", 0.02, 0, 1), (weights(1000, 2048), scales(1000, 2048), None, 0), real(1000)],
        lambda body, v: body.add("Gemm", *v, transB=1),
        None,
    ),
}
FLOATS = {
    "depthwise": Sample(["f32[8,64,56,56]", "const f32[64,1,3,3]", "const f32[64]"], {"group": 64, **PAD}),
    "depthwise strided": Sample(["f32[16,144,57,55]", "const f32[144,1,3,3]", "const f32[144]"], {"group": 144, "strides": (2, 2), **PAD}),
    "depthwise 5x5": Sample(["f32[20,96,28,28]", "const f32[96,1,5,5]", "const f32[96]"], {"group": 96, "pads": (2,) * 4}),
    "depthwise small": Sample(["f32[60,480,7,7]", "const f32[480,1,3,3]", "const f32[480]"], {"group": 480, **PAD}),
    "1x1 of 96": Sample(["f32[4,32,32,32]", "const f32[96,32,1,1]", "const f32[96]"], {}),
    "1x1 of 144": Sample(["f32[4,24,32,32]", "const f32[144,24,1,1]", "const f32[144]"], {}),
    "3x3 many": Sample(["f32[16,64,56,56]", "const f32[64,64,3,3]", "const f32[64]"], PAD),
    "1x1 strided": Sample(["f32[4,128,56,56]", "const f32[256,128,1,1]", "const f32[256]"], {"strides": (2, 2)}),
    "1x1 of 160": Sample(["f32[4,96,32,32]", "const f32[160,96,1,1]", "const f32[160]"], {}),
}


FUSED = {
    "1x1 many": make_quantized_sample(
        "Conv", ["f32[16,64,56,56]", "const f32[256,64,1,1]", "const f32[256]", "f32[16,256,56,56]"], conv(add=True, relu=True), None
    ),
    "1x1 of 96 many": make_quantized_sample("Conv", ["f32[8,16,112,112]", "const f32[96,16,1,1]", "const f32[96]"], conv(relu=True), None),
}


def layer_of(op: str, sample: Sample):
    """(network, layer, arrays) of a sample."""
    return sample_layer(op, sample)


def near(got, want, dtype, where):
    """Integers may differ by one if the real value is halfway between two integers, which is rare in random data."""
    off = np.abs(got.astype(np.int64) - want.astype(np.int64))
    assert off.max(initial=0) <= 1, f"{where}: off by {off.max()} in {(off > 1).mean():.2%}"
    assert (off > 0).mean() < 0.002, f"{where}: {(off > 0).mean():.2%} of {dtype} differ"


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_layers_have_a_fast_kernel(name):
    _: Network
    _, layer, _ = layer_of("Fused", QUANTIZED[name])
    found = {t.name for t, *_ in planned(layer, HOPPER)}
    assert found
    if name != "groups":
        assert found - {"cuda/qconv_generic"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_layers(gpu, name):
    _net, layer, arrays = layer_of("Fused", QUANTIZED[name])
    wanted: dict = {}
    for t, signature, config, kernel in planned(layer, gpu, 40):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        kind = tuple(o and o.dtype for o in signature.inputs)
        if kind not in wanted:
            wanted[kind] = reference(layer, fed)
        for g, w, o in zip(got, wanted[kind], signature.outputs, strict=True):
            where = f"{t.name} {signature} {config}"
            if w.dtype.kind == "f":
                judge(g, w, kernel.rtol, o.dtype, where)
            else:
                near(g, w, o.dtype, where)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), [*(("Conv", n) for n in FLOATS), *(("Fused", n) for n in FUSED)])
def test_float_layers(gpu, op, name):
    _net, layer, arrays = layer_of(op, FLOATS[name] if op == "Conv" else FUSED[name])
    wanted: dict = {}
    for t, signature, config, kernel in planned(layer, gpu, 40):
        if signature.outputs[0].dtype.name != "f16" or t.fallback:
            continue
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        kind = tuple(o and o.dtype for o in signature.inputs)
        if kind not in wanted:
            wanted[kind] = reference(layer, fed)
        judge(got[0], wanted[kind][0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
