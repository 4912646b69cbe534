"""The oneDNN binding: every primitive kind against NumPy in float64, layouts, packing, errors, and no leaks."""

import ctypes
import gc
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from support.isa import LARGEST_WEIGHT
from whet.errors import BackendError
from whet.network import from_stored, to_stored
from whet.tactics.cpu.onednn import _api as dnn

rng = np.random.default_rng(7)
erf = np.vectorize(math.erf)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def md(array, fmt="linear", dtype="f32"):
    return dnn.describe(array.shape, dtype, fmt)


def result(descriptor, shape, fmt="linear", dtype=np.float32, **arrays):
    """Runs it and returns dst as a logical array."""
    raw = dnn.run(descriptor, **arrays)
    count = dnn.describe(shape, "f32", fmt).nbytes // 4
    stored = raw.view(dtype)[:count]
    if fmt == "linear":
        return stored.reshape(shape)
    n, c, *spatial = shape
    block = {"nChw16c": 16, "nChw8c": 8}.get(fmt)
    inner = (n, *spatial, c) if block is None else (n, -(-c // block), *spatial, block)
    return np.array(from_stored(stored.reshape(inner), fmt, shape))


def close(got, want, tol=2e-6):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tol * max(np.abs(want).max(), 1e-30)


def conv64(x, w, b=None, strides=(1, 1), dilations=(1, 1), pads=(0, 0, 0, 0), groups=1):
    """Direct convolution in float64, tap by tap."""
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    k, per, kh, kw = w.shape
    oh = (x.shape[2] - dilations[0] * (kh - 1) - 1) // strides[0] + 1
    ow = (x.shape[3] - dilations[1] * (kw - 1) - 1) // strides[1] + 1
    out = np.zeros((x.shape[0], k, oh, ow))
    for g in range(groups):
        xs, ks = x[:, g * per : (g + 1) * per], slice(g * k // groups, (g + 1) * k // groups)
        for i in range(kh):
            for j in range(kw):
                top, left = i * dilations[0], j * dilations[1]
                tap = xs[:, :, top : top + strides[0] * (oh - 1) + 1 : strides[0], left : left + strides[1] * (ow - 1) + 1 : strides[1]]
                out[:, ks] += np.einsum("nchw,kc->nkhw", tap, w[ks, :, i, j].astype(np.float64))
    return out if b is None else out + b.astype(np.float64).reshape(1, -1, 1, 1)


def make_conv(x, w, b, out_shape, fmt, strides, dilations, pads, groups, attributes=None, dtype="f32"):
    wshape = w.shape if groups == 1 else (groups, w.shape[0] // groups, *w.shape[1:])
    first = dnn.convolution(
        dnn.describe(x.shape, dtype, fmt), dnn.describe(wshape, dtype, "any"), None if b is None else dnn.describe(b.shape, "f32"),
        dnn.describe(out_shape, dtype, fmt), strides, dilations, (pads[:2], pads[2:]), attributes or dnn.Attributes(),
    )  # fmt: skip
    return first, dnn.describe(wshape, "f32")


CONVS = [
    ((2, 16, 9, 8), (32, 16, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    ((1, 17, 7, 7), (19, 17, 3, 3), (2, 2), (1, 1), (0, 1, 1, 0), 1),  # partial channel blocks, asymmetric pads
    ((1, 32, 10, 10), (32, 1, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 32),  # depthwise
    ((1, 32, 10, 10), (64, 16, 3, 3), (1, 1), (2, 2), (2, 2, 2, 2), 2),  # grouped, dilated
    ((1, 64, 6, 6), (32, 64, 1, 1), (2, 2), (1, 1), (0, 0, 0, 0), 1),
]


@pytest.mark.parametrize("fmt", ["linear", "nhwc", "nChw16c", "nChw8c"])
@pytest.mark.parametrize("case", CONVS)
def test_every_convolution_implementation(case, fmt):
    xs, ws, strides, dilations, pads, groups = case
    x, w, b = normal(*xs), normal(*ws), normal(ws[0])
    want = conv64(x, w, b, strides, dilations, pads, groups)
    first, layout = make_conv(x, w, b, want.shape, fmt, strides, dilations, pads, groups)
    names = []
    for one in first.implementations():
        packed = dnn.pack(w, layout, one.md("weights"))
        got = result(one, want.shape, fmt, src=to_stored(x, fmt) if fmt != "linear" else x, weights=packed, bias=b)
        close(got, want)
        names.append(one.name)
    assert len(names) == len(set(names)) >= 1
    assert [one.name for one in first.implementations()] == names, "a second walk gives the same list"
    assert first.select(names[-1]).name == names[-1]


def test_convolution_with_sum_activation_and_binary_post_ops():
    x, w, b, z = normal(1, 32, 8, 8), normal(32, 32, 3, 3), normal(32), normal(1, 32, 8, 8)
    channel = normal(1, 32, 1, 1)
    attributes = dnn.Attributes((dnn.Sum(), dnn.Eltwise("relu"), dnn.Binary("mul", md(channel))))
    first, layout = make_conv(x, w, b, z.shape, "nhwc", (1, 1), (1, 1), (1, 1, 1, 1), 1, attributes)
    want = np.maximum(conv64(x, w, b, pads=(1, 1, 1, 1)) + z, 0) * channel
    dst = to_stored(z, "nhwc").copy()
    got = result(first, z.shape, "nhwc", src=to_stored(x, "nhwc"), weights=dnn.pack(w, layout, first.md("weights")), bias=b,
                 post2=channel, dst=dst)  # fmt: skip
    close(got, want)
    other = dnn.Attributes((dnn.Binary("add", md(z, "nhwc")), dnn.Eltwise("relu")))
    first, layout = make_conv(x, w, b, z.shape, "nhwc", (1, 1), (1, 1), (1, 1, 1, 1), 1, other)
    got = result(first, z.shape, "nhwc", src=to_stored(x, "nhwc"), weights=dnn.pack(w, layout, first.md("weights")), bias=b,
                 post0=to_stored(z, "nhwc"))  # fmt: skip
    close(got, np.maximum(conv64(x, w, b, pads=(1, 1, 1, 1)) + z, 0))


@pytest.mark.skipif(not dnn.has_isa("avx512_core"), reason="oneDNN computes bf16 from AVX-512 on")
def test_bf16_convolution_rounds_inputs_and_output_only():
    x, w = (normal(*s).astype(ml_dtypes.bfloat16) for s in ((1, 64, 8, 8), (32, 64, 3, 3)))
    first, layout = make_conv(x, w, None, (1, 32, 8, 8), "nhwc", (1, 1), (1, 1), (1, 1, 1, 1), 1, dtype="bf16")
    packed = dnn.pack(w.astype(np.float32), layout, first.md("weights"))
    got = result(first, (1, 32, 8, 8), "nhwc", ml_dtypes.bfloat16, src=to_stored(x, "nhwc"), weights=packed)
    close(got, conv64(x, w, pads=(1, 1, 1, 1)), 2**-8)


def test_int8_convolution_with_scales_is_exact_before_rounding():
    x, w = rng.integers(0, 255, (1, 16, 6, 6)).astype(np.uint8), rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT, (16, 16, 3, 3)).astype(np.int8)
    attributes = dnn.Attributes(scales=(("src", 0, 1), ("weights", 1, 16)))
    scale, per = np.array([0.25], np.float32), (2.0 ** rng.integers(-6, -2, 16)).astype(np.float32)
    first = dnn.convolution(dnn.describe(x.shape, "u8", "nhwc"), dnn.describe(w.shape, "i8", "any"), None,
                            dnn.describe((1, 16, 4, 4), "f32", "nhwc"), (1, 1), (1, 1), ((0, 0), (0, 0)), attributes)  # fmt: skip
    packed = dnn.pack(w, dnn.describe(w.shape, "i8"), first.md("weights"))
    got = result(first, (1, 16, 4, 4), "nhwc", src=to_stored(x, "nhwc"), weights=packed, scale__src=scale, scale__weights=per)
    close(got, conv64(x, w) * 0.25 * per.reshape(1, -1, 1, 1), 1e-7)


@pytest.mark.parametrize("groups", [1, 4])
def test_deconvolution(groups):
    x, w = normal(1, 8, 5, 5), normal(8, 12 // groups, 3, 3)  # ONNX: (C in, C out / groups, kH, kW)
    want = np.zeros((1, 12, 11, 11))
    per_in, per_out = 8 // groups, 12 // groups
    for g in range(groups):
        for i in range(3):
            for j in range(3):
                part = np.einsum("nchw,ck->nkhw", x[:, g * per_in : (g + 1) * per_in], w[g * per_in : (g + 1) * per_in, :, i, j])
                want[:, g * per_out : (g + 1) * per_out, i : i + 9 : 2, j : j + 9 : 2] += part
    want = want[:, :, 1:10, 1:10]
    shape = (groups, per_out, per_in, 3, 3) if groups > 1 else (12, 8, 3, 3)
    weights = np.ascontiguousarray(w.reshape(groups, per_in, per_out, 3, 3).swapaxes(1, 2)).reshape(shape)
    first = dnn.convolution(md(x, "nhwc"), dnn.describe(shape, "f32", "any"), None, dnn.describe(want.shape, "f32", "nhwc"),
                            (2, 2), (1, 1), ((1, 1), (1, 1)), transposed=True)  # fmt: skip
    for one in first.implementations():
        packed = dnn.pack(weights, md(weights), one.md("weights"))
        close(result(one, want.shape, "nhwc", src=to_stored(x, "nhwc"), weights=packed), want)


def test_matmul_batched_transposed_broadcast_and_bias():
    a, b, bias = normal(2, 3, 5, 7), normal(1, 3, 7, 6), normal(1, 1, 1, 6)
    first = dnn.matmul(md(a), md(b), md(bias), dnn.describe((2, 3, 5, 6), "f32"))
    for one in first.implementations():
        close(result(one, (2, 3, 5, 6), src=a, weights=b, bias=bias), a.astype(np.float64) @ b + bias)
    bt = normal(6, 7)
    first = dnn.matmul(md(a[0, 0]), dnn.describe((7, 6), "f32", strides=(1, 7)), None, dnn.describe((5, 6), "f32"))
    close(result(first, (5, 6), src=a[0, 0], weights=bt), a[0, 0].astype(np.float64) @ bt.T)


def test_inner_product_with_packed_weights():
    x, w, b = normal(8, 128), normal(40, 128), normal(40)
    first = dnn.inner_product(md(x), dnn.describe(w.shape, "f32", "any"), md(b), dnn.describe((8, 40), "f32"))
    for one in first.implementations():
        close(result(one, (8, 40), src=x, weights=dnn.pack(w, md(w), one.md("weights")), bias=b), x.astype(np.float64) @ w.T + b)


@pytest.mark.parametrize("fmt", ["linear", "nhwc", "nChw16c"])
@pytest.mark.parametrize("alg", ["max", "avg_include_padding", "avg_exclude_padding"])
def test_pooling(alg, fmt):
    x = normal(2, 20, 9, 9)
    fill = -np.inf if alg == "max" else np.nan if alg == "avg_exclude_padding" else 0.0
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=fill)
    v = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    want = v.max((4, 5)) if alg == "max" else np.nanmean(v, axis=(4, 5))
    d = dnn.pooling(alg, md(x, fmt), dnn.describe(want.shape, "f32", fmt), (3, 3), (2, 2), (1, 1), ((1, 1), (1, 1)))
    close(result(d, want.shape, fmt, src=to_stored(x, fmt)), want)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ELTWISE = {
    "relu": (0.1, 0, lambda x: np.where(x > 0, x, 0.1 * x)), "elu": (0.7, 0, lambda x: np.where(x > 0, x, 0.7 * np.expm1(x))),
    "tanh": (0, 0, np.tanh), "logistic": (0, 0, sigmoid), "swish": (1, 0, lambda x: x * sigmoid(x)),
    "hardswish": (1 / 6, 0.5, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)), "hardsigmoid": (0.2, 0.5, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    "gelu_erf": (0, 0, lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))),
    "gelu_tanh": (0, 0, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "clip": (-0.5, 0.75, lambda x: np.clip(x, -0.5, 0.75)), "clip_v2": (-0.5, 0.75, lambda x: np.clip(x, -0.5, 0.75)),
    "exp": (0, 0, np.exp), "abs": (0, 0, np.abs), "square": (0, 0, np.square), "linear": (2, 1, lambda x: 2 * x + 1),
    "mish": (0, 0, lambda x: x * np.tanh(np.log1p(np.exp(x)))), "round": (0, 0, np.rint),
    "soft_relu": (1, 0, lambda x: np.log1p(np.exp(x))), "log": (0, 0, lambda x: np.log(np.abs(x))),
    "sqrt": (0, 0, lambda x: np.sqrt(np.abs(x))), "pow": (2, 0.5, lambda x: 2 * np.sqrt(np.abs(x))),
}  # fmt: skip


@pytest.mark.parametrize("alg", dnn.ELTWISE)
def test_eltwise(alg):
    alpha, beta, want = ELTWISE[alg]
    x = normal(3, 20, 5, 5) * 2
    fed = np.abs(x) if alg in ("log", "sqrt", "pow") else x
    d = dnn.eltwise(alg, md(x, "nChw16c"), md(x, "nChw16c"), alpha, beta)
    close(result(d, x.shape, "nChw16c", src=to_stored(fed, "nChw16c")), want(x.astype(np.float64)), 5e-6)


@pytest.mark.parametrize("alg", dnn.BINARY)
def test_binary_with_broadcast(alg):
    f = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "div": np.divide, "sub": np.subtract,
         "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal}[alg]  # fmt: skip
    x, y = normal(2, 16, 4, 5), normal(1, 16, 1, 1)
    x[0, 0, 0, :2] = y[0, 0, 0, 0]  # eq is true for some elements
    d = dnn.binary(alg, md(x, "nhwc"), md(y, "nhwc"), md(x, "nhwc"))
    close(result(d, x.shape, "nhwc", src=to_stored(x, "nhwc"), src1=y), f(x.astype(np.float64), y).astype(np.float64))


@pytest.mark.parametrize("alg", ["max", "min", "sum", "mul", "mean", "norm_sum"])
def test_reduction(alg):
    x = normal(2, 5, 6, 7)
    f = {"max": np.max, "min": np.min, "sum": np.sum, "mul": np.prod, "mean": np.mean}.get(alg)
    want = f(x.astype(np.float64), axis=(2, 3), keepdims=True) if f else np.sqrt((x.astype(np.float64) ** 2).sum((2, 3), keepdims=True))
    d = dnn.reduction(alg, md(x), dnn.describe(want.shape, "f32"), p=2.0)
    close(result(d, want.shape, src=x), want)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax(axis, log):
    x = normal(3, 40, 7) * 5
    e = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    want = e / e.sum(axis, keepdims=True)
    close(result(dnn.softmax(md(x), md(x), axis, log=log), x.shape, src=x), np.log(want) if log else want, 5e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_layer_normalization(affine):
    x, scale, shift = normal(4, 6, 96) * 3 + 1, normal(96), normal(96)
    mean, var = x.mean(-1, keepdims=True, dtype=np.float64), x.astype(np.float64).var(-1, keepdims=True)
    want = (x - mean) / np.sqrt(var + 1e-5)
    arrays = {"scale": scale, "shift": shift} if affine else {}
    d = dnn.layer_normalization(md(x), md(x), 1e-5, scale=affine, shift=affine)
    close(result(d, x.shape, src=x, **arrays), want * scale + shift if affine else want, 5e-6)


def test_resampling_nearest_and_linear():
    x = normal(1, 16, 4, 5)
    up = dnn.describe((1, 16, 8, 10), "f32", "nhwc")
    want = x.repeat(2, 2).repeat(2, 3)
    close(result(dnn.resampling("nearest", md(x, "nhwc"), up), want.shape, "nhwc", src=to_stored(x, "nhwc")), want)
    at = np.clip((np.arange(8) + 0.5) / 2 - 0.5, 0, 3)
    low, t = np.floor(at).astype(int), (at - np.floor(at)).reshape(-1, 1)
    rows = x[:, :, low] * (1 - t) + x[:, :, np.minimum(low + 1, 3)] * t
    out = dnn.describe((1, 16, 8, 5), "f32", "nhwc")
    close(result(dnn.resampling("linear", md(x, "nhwc"), out), rows.shape, "nhwc", src=to_stored(x, "nhwc")), rows)


@pytest.mark.parametrize("fmt", ["linear", "nhwc", "nChw16c"])
def test_concat(fmt):
    parts = [normal(1, c, 3, 3) for c in (16, 32, 16)]
    want = np.concatenate(parts, 1)
    d = dnn.concat([md(p, fmt) for p in parts], md(want, fmt), 1)
    got = result(d, want.shape, fmt, **{f"multi{i}": to_stored(p, fmt) for i, p in enumerate(parts)})
    np.testing.assert_array_equal(got, want)


def test_sum_of_several():
    a, b, c = normal(4, 9), normal(4, 9), normal(4, 9)
    d = dnn.sum_of([md(a)] * 3, [1.0, 2.0, -1.0], md(a))
    close(result(d, a.shape, multi0=a, multi1=b, multi2=c), a.astype(np.float64) + 2 * b.astype(np.float64) - c)


def test_prelu():
    x, w = normal(2, 8, 3, 3), normal(1, 8, 1, 1)
    close(result(dnn.prelu(md(x), md(w), md(x)), x.shape, src=x, weights=w), np.where(x > 0, x, x * w))


@pytest.mark.parametrize("source", ["linear", "nhwc", "nChw16c", "nChw8c"])
@pytest.mark.parametrize("target", ["linear", "nhwc", "nChw16c", "nChw8c"])
def test_reorder_is_whets_own_formats(source, target):
    x = normal(2, 21, 3, 5)
    raw = dnn.run(dnn.reorder(md(x, source), md(x, target)), src=to_stored(x, source))
    np.testing.assert_array_equal(raw.view(np.float32), to_stored(x, target).reshape(-1))


def test_reorder_to_bf16_rounds_to_nearest_even():
    x = normal(64, 64)
    raw = dnn.run(dnn.reorder(md(x), dnn.describe(x.shape, "bf16")), src=x)
    np.testing.assert_array_equal(raw.view(ml_dtypes.bfloat16).reshape(x.shape), x.astype(ml_dtypes.bfloat16))


def test_a_call_can_be_bound_again_and_run_through_its_step():
    x, out1, out2 = normal(4, 4), dnn.allocate_aligned(64), dnn.allocate_aligned(64)
    call = dnn.eltwise("abs", md(x), md(x)).primitive().call({"src": x.ctypes.data, "dst": out1.ctypes.data})
    call()
    call.bind("dst", out2.ctypes.data)
    x *= 2
    function, *words = call.step
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(function)
    assert run(*words) == 0
    np.testing.assert_array_equal(out1.view(np.float32).reshape(4, 4), np.abs(x) / 2)
    np.testing.assert_array_equal(out2.view(np.float32).reshape(4, 4), np.abs(x))


def test_missing_implementations_are_reported():
    x = dnn.describe((1, 8, 4, 4), "f32", "nhwc")
    with pytest.raises(dnn.Unimplemented):
        dnn.eltwise("relu", x, dnn.describe((1, 8, 4, 4), "i8", "nhwc"))
    with pytest.raises(dnn.Unimplemented, match="no implementation 'jit:none'"):
        dnn.eltwise("relu", x, x).select("jit:none")
    with pytest.raises(BackendError, match="no activation 'selu'"):
        dnn.eltwise("selu", x, x)
    with pytest.raises(BackendError, match="invalid arguments"):
        dnn.softmax(x, x, 9)
    with pytest.raises(BackendError, match="no f64 tensor"):
        dnn.describe((2,), "f64")


def resident():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_nothing_leaks():
    x = normal(1, 32, 8, 8)
    w = normal(32, 32, 3, 3)

    def once():  # oneDNN 3.2 itself leaks 33 kB per brgconv primitive with a post-op; hence tactics share primitives
        first, layout = make_conv(x, w, None, x.shape, "nhwc", (1, 1), (1, 1), (1, 1, 1, 1), 1, dnn.Attributes((dnn.Eltwise("relu"),)))
        assert len(list(first.implementations())) > 1
        one = next(d for d in first.implementations() if "brg" not in d.name)
        dnn.pack(w, layout, one.md("weights"))
        call = one.primitive().call({"src": x.ctypes.data})
        call.bind("dst", x.ctypes.data)

    for _ in range(30):
        once()
    gc.collect()
    before = resident()
    for _ in range(250):
        once()
    gc.collect()
    assert resident() - before < 2000, "kB grown in 250 builds"


def child(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})  # fmt: skip
    return done.stdout + done.stderr


LOAD = "from whet.tactics.cpu.onednn._api import get_library_version\nfrom whet.errors import BackendError\n"
TRY = LOAD + "try:\n    print(get_library_version())\nexcept BackendError as e:\n    print('BackendError:', e)\n"


def test_the_library_is_named_or_refused():
    assert re.match(r"onednn 3\.\d+\.\d+ \w* (omp|iomp|tbb|seq) isa=0x", dnn.get_library_version())
    assert "is not a file" in child(TRY, WHET_ONEDNN="/nowhere/libdnnl.so.3")
    assert dnn.get_library_version() in child(TRY, WHET_ONEDNN=dnn.load_library().path)
    assert "BackendError: oneDNN cannot be loaded from" in child(TRY, WHET_ONEDNN=__file__)


@pytest.mark.parametrize(("runtime", "major", "words"), [(512, 3, "'sycl'"), (8, 3, "'threadpool'"), (2, 2, "version 3")])
def test_a_wrong_build_is_refused(runtime, major, words):
    module = sys.modules["whet.tactics.cpu.onednn._api.library"]
    version = module.Version(major, 2, 0, b"abc", runtime, 0)

    class Answers:
        def __call__(self):
            return ctypes.pointer(version)

    library = module.Library.__new__(module.Library)
    library.path, library.lib = "other.so", types.SimpleNamespace(dnnl_version=Answers(), dnnl_get_effective_cpu_isa=lambda: 1)
    with pytest.raises(BackendError, match=words):
        library.check_version()


def test_missing_libgomp_names_the_package():
    code = (
        "from whet.backends.cpu import threads\nfrom whet.errors import BackendError\nthreads.LIBRARY = 'libgomp-missing.so.1'\n"
        "try:\n    threads.load_gomp()\nexcept BackendError as e:\n    print(e)\n"
    )
    text = child(code)
    assert "apt-get install libgomp1" in text
    assert "dnf install libgomp" in text
