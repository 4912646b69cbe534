"""FP8 (e4m3) layers on CUDA: offered tactics and packed operands on any machine, and on Hopper every tile against the reference."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_large import conv, layer_of
from test_tactics import HOPPER, compute, judge, planned, reference

from support.snr import compute_snr
from whet.builder import BuildConfig, build
from whet.builder.precision.float8_ranges import insert_float8
from whet.builder.precision.permissions import is_float8
from whet.builder.verify.differences import compute_float8_error
from whet.composites.quantized import make_quantized_sample
from whet.network import F8E4M3, Network, parse_type
from whet.ops import run_network
from whet.ops._base import Sample
from whet.precision import calibrate
from whet.precision.float8 import list_excluded_layers, skip_sums
from whet.runtime import Runtime

E4M3 = ml_dtypes.float8_e4m3fn
_rng = np.random.default_rng(8)
PAD = {"pads": (1,) * 4}


def spread(*shape):
    """Values of every exponent of e4m3, the largest included."""
    a = _rng.standard_normal(shape) * np.exp2(_rng.uniform(-10, 7, shape))
    return np.clip(a, -448, 448).astype(E4M3)


def weights(*shape):
    return (_rng.standard_normal(shape) * 100).clip(-448, 448).astype(E4M3)


def scales(k, fan):
    return (_rng.uniform(0.5, 2, k) / (100 * np.sqrt(fan))).astype(np.float32)


def real(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


def f8conv(x, k, c, r, *, store=None, residual=None, **how):
    """A convolution of float8 images of shape `x`. `store` is the scale of the output (None: float output), `residual` "f8" or "f32"."""
    data = [(f"f8e4m3[{','.join(map(str, x))}]", 0.5, None, 1), (weights(k, c, r, r), scales(k, c * r * r), None, 0), real(k)]
    if residual:
        h, w = (d if "strides" not in how else -(-d // 2) for d in x[2:])
        shape = f"[{x[0]},{k},{h},{w}]"
        data.append((f"f8e4m3{shape}", 0.7, None, 1) if residual == "f8" else f"f32{shape}")
    return make_quantized_sample("Conv", data, conv(add=residual is not None, **how), None if store is None else (store, None, "f8e4m3"))


def f8gemm(m, k, c, store=None):
    data = [(f"f8e4m3[{m},{c}]", 0.5, None, 1), (weights(k, c), scales(k, c), None, 0), real(k)]
    return make_quantized_sample("Gemm", data, lambda body, v: body.add("Gemm", *v, transB=1), None if store is None else (store, None, "f8e4m3"))


LAYERS = {
    "3x3": f8conv((4, 64, 28, 28), 64, 64, 3, store=0.2, residual="f8", relu=True, **PAD),
    "3x3 deep": f8conv((4, 512, 7, 7), 512, 512, 3, store=0.2, relu=True, **PAD),
    "3x3 deep floats": f8conv((4, 512, 7, 7), 512, 512, 3, **PAD),
    "3x3 small": f8conv((1, 256, 14, 14), 256, 256, 3, store=0.2, residual="f32", relu=True, **PAD),
    "3x3 strided": f8conv((3, 64, 29, 27), 128, 64, 3, store=0.4, strides=(2, 2), activation="silu", **PAD),
    "1x1": f8conv((4, 128, 28, 28), 256, 128, 1, store=0.2, residual="f8", relu=True),
    "1x1 deep": f8conv((1, 2048, 7, 7), 512, 2048, 1, relu=True),
    "1x1 strided": f8conv((4, 256, 56, 56), 512, 256, 1, store=0.2, strides=(2, 2)),
    "3x3 many": f8conv((16, 64, 56, 56), 64, 64, 3, store=0.2, relu=True, **PAD),
    "1x1 many": f8conv((16, 64, 56, 56), 256, 64, 1, store=0.2, residual="f8", relu=True),
    "of 16": f8conv((8, 16, 32, 32), 16, 16, 3, store=0.2, residual="f8", relu=True, **PAD),
    "of 16 strided": f8conv((8, 16, 32, 32), 32, 16, 3, store=0.2, relu=True, strides=(2, 2), **PAD),
    "sum in floats": f8conv((4, 64, 28, 28), 64, 64, 3, residual="f32", relu=True, **PAD),
    "saturates": f8conv((2, 64, 20, 20), 64, 64, 3, store=0.02, **PAD),
    "product": f8gemm(128, 1000, 2048),
    "product small": f8gemm(8, 64, 512, store=0.2),
}


def fill(arrays, layer):
    """The same arrays with float8 inputs of every exponent."""
    return [a if a is None or t.is_constant or a.dtype != E4M3 else spread(*a.shape) for t, a in zip(layer.inputs, arrays, strict=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_float8_layers_have_tensor_core_kernels(name):
    _net, layer, _ = layer_of("Fused", LAYERS[name])
    found = [(t.name, s, c) for t, s, c, _ in planned(layer, HOPPER, 40)]
    assert {t for t, *_ in found} <= {"cuda/qconv", "cuda/qgemm"}
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_float8_layers(gpu, name):
    _net, layer, arrays = layer_of("Fused", LAYERS[name])
    arrays = fill(arrays, layer)
    wanted: dict = {}
    for t, signature, config, kernel in planned(layer, gpu, 10):
        if signature.outputs[0].dtype.name == "bf16":
            continue
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        kind = tuple(o and o.dtype for o in signature.inputs)
        if kind not in wanted:
            wanted[kind] = reference(layer, fed)[0]
        where = f"{t.name} {signature} {config}"
        if got[0].dtype == E4M3:
            error, why = compute_float8_error(got[0], wanted[kind])
            assert error <= kernel.rtol, f"{where}: {why or error} of {kernel.rtol}"
        else:
            judge(got[0], wanted[kind], kernel.rtol, signature.outputs[0].dtype, where)


@pytest.mark.gpu
def test_nan_and_infinity_in_float8(gpu):
    _net, layer, arrays = layer_of("Fused", f8conv((2, 64, 20, 20), 64, 64, 3, store=0.2, relu=True, residual="f8", **PAD))
    arrays = fill(arrays, layer)
    bytes_ = arrays[0].view(np.uint8)
    bytes_[0, 3, 4, 5], bytes_[1, 60, 19, 19], bytes_[0, 7, 12, 12] = 0x7F, 0xFF, 0x7E  # NaN of both signs, the largest value
    arrays[0] = bytes_.view(E4M3)
    for _t, signature, config, kernel in planned(layer, gpu, 8):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        want = reference(layer, fed)[0]
        assert np.array_equal(np.isnan(got[0].astype(np.float32)), np.isnan(want.astype(np.float32))), config
        assert compute_float8_error(got[0], want)[0] <= kernel.rtol, config


def _sum(body, values):
    return body.add("Relu", body.add("Add", *values))


def _alone(op, **attrs):
    return lambda body, values: body.add(op, *values, **attrs)


IMAGE = ("f8e4m3[2,32,9,9]", 0.5, None, 1)
AROUND = {  # operations between the products
    "sum": ("Fused", make_quantized_sample("Add", [IMAGE, ("f8e4m3[2,32,9,9]", 0.7, None, 1)], _sum, (0.3, None, "f8e4m3"))),
    "average": ("Fused", make_quantized_sample("AveragePool", [IMAGE], _alone("AveragePool", kernel_shape=(3, 3), **PAD), (0.3, None, "f8e4m3"))),
    "mean": ("Fused", make_quantized_sample("GlobalAveragePool", [IMAGE], _alone("GlobalAveragePool"), (0.02, None, "f8e4m3"))),
    "maximum": ("MaxPool", Sample(["f8e4m3[2,32,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), **PAD})),
    "rounded": ("QuantizeLinear", Sample(["f32[2,32,9,9]", np.array(0.01, np.float32)], {"output_dtype": F8E4M3})),
}


@pytest.mark.parametrize("name", AROUND)
def test_operations_between_float8_products_have_a_kernel(name):
    _net, layer, _ = layer_of(*AROUND[name])
    assert list(planned(layer, HOPPER))


@pytest.mark.gpu
@pytest.mark.parametrize("name", AROUND)
def test_operations_between_float8_products_match_the_reference(gpu, name):
    _net, layer, arrays = layer_of(*AROUND[name])
    arrays = fill(arrays, layer)
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        error, why = compute_float8_error(got[0], reference(layer, fed)[0])
        assert error <= 1e-6, f"{t.name} {signature} {config}: {why or error}"


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
def test_a_whole_network_is_built_and_verified_in_float8(gpu, wide):
    """Verification of some samples of a batch; sums of skip connections in float8 and in 16 bits."""
    net, rng = Network("blocks"), np.random.default_rng(4)

    def convolved(t, k, stride=1, **how):
        w = (rng.standard_normal((k, t.shape[1], 3, 3)) / np.sqrt(9 * t.shape[1])).astype(np.float32)
        bias = net.constant(np.zeros(k, np.float32))
        return net.add("Conv", t, net.constant(w), bias, pads=(1,) * 4, strides=(stride, stride), **how)

    t = net.add("Relu", convolved(net.add_input("x", parse_type("f32[9,3,32,32]")), 16))
    for _ in range(2):
        t = net.add("Relu", net.add("Add", convolved(net.add("Relu", convolved(t, 16)), 16), t))
    t = net.add("Relu", convolved(net.add("Relu", convolved(t, 32, 2)), 32))
    pooled = net.add("Flatten", net.add("GlobalAveragePool", t), axis=1)
    net.mark_output(net.add("Gemm", pooled, net.constant(rng.standard_normal((32, 16)).astype(np.float32))), "y")
    data = [{"x": rng.standard_normal((9, 3, 32, 32)).astype(np.float32)} for _ in range(2)]
    ranges = calibrate(net, data, method="minmax")
    ranges = replace(ranges, float_sums=skip_sums(net, list_excluded_layers(net)) if wide else frozenset())
    config = BuildConfig(backend="cuda", precisions=("fp16", "fp8"), optimization_level=2, timing_cache="")
    plan = build(insert_float8(net, ranges), config)
    assert sum(map(is_float8, plan.network.layers)) >= 6
    assert plan.report.banned == []
    assert plan.report.verification.images is not None
    got = Runtime("cuda").load(plan).create_context().run(data[0])["y"]
    assert compute_snr(run_network(net, data[0])["y"], got) > 20
