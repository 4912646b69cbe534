"""oneDNN's tactics: every signature and config of every sample against the op's reference, fused epilogues, packing, re-pointing."""

import numpy as np
import pytest

from whet.backends.cpu import CpuBackend
from whet.network import Network, from_stored, parse_type, static_shape, stored_shape, to_stored
from whet.network.types import BF16, F32
from whet.ops import OPS, run_layer, run_regions, sample_layer
from whet.tactics import Args, get_tactic, tactics_of
from whet.tactics.cpu import _onednn as dnn
from whet.tactics.cpu._kernel import Recipe
from whet.tactics.cpu.onednn_view import same_bytes

CPU = CpuBackend()
TACTICS = [t for t in tactics_of("cpu") if t.name.startswith("cpu/onednn_")]


class Listed:
    """A stream that keeps the calls."""

    def __init__(self):
        self.calls = []

    def record(self, call):
        self.calls.append(call)


def place(array, operand):
    """A 64-byte aligned copy of `array` as stored in `operand`."""
    stored = to_stored(array.astype(operand.dtype.numpy), operand.format)
    buffer = dnn.aligned(stored.nbytes)
    buffer[:] = stored.reshape(-1).view(np.uint8)
    return buffer


def reference(layer, arrays):
    with np.errstate(all="ignore"):
        return run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)


def compute(layer, arrays, tactic, signature, config):
    """Runs one kernel; (kernel, outputs as logical arrays, the inputs as they were fed)."""
    kernel = tactic.plan(layer, signature, config, CPU)
    buffers, fed = [], []
    narrow = signature.outputs[0].dtype
    for t, o, a, n in zip(layer.inputs, signature.inputs, arrays, kernel.inputs, strict=True):
        if t is None or o is None:
            buffers.append(None)
            # bf16 kernels multiply weights rounded to bf16; vectors (bias, scale) stay f32
            fed.append(a.astype(narrow.numpy).astype(a.dtype) if narrow == BF16 and a is not None and np.squeeze(a).ndim > 1 else a)
            assert n == 0
            continue
        buffers.append(place(a, o))
        fed.append(a.astype(o.dtype.numpy).astype(a.dtype))
        assert buffers[-1].nbytes == n
    outputs = [dnn.aligned(n) for n in kernel.outputs]
    for out in outputs:
        out[:] = 0xAB  # not zero: padding must be written too
    for i, o in signature.inplace:
        outputs[o] = buffers[i]
    packed = [p.make() for p in kernel.packed]
    for p, made in zip(kernel.packed, packed, strict=True):
        assert made.nbytes == p.nbytes
        assert made.dtype == np.uint8
    scratch = dnn.aligned(kernel.scratch)
    before = [None if b is None else b.copy() for b in buffers]
    stream = Listed()
    kernel.enqueue(
        Args(
            tuple(0 if b is None else b.ctypes.data for b in buffers),
            tuple(b.ctypes.data for b in outputs),
            tuple(p.ctypes.data for p in packed),
            scratch.ctypes.data if kernel.scratch else 0,
        ),
        stream,
    )
    for call in stream.calls:
        call.run()
    shared = {i for i, _ in signature.inplace}
    for i, (was, now) in enumerate(zip(before, buffers, strict=True)):
        assert i in shared or was is None or np.array_equal(was, now), "inputs are left alone"
    got = []
    for t, o, b in zip(layer.outputs, signature.outputs, outputs, strict=True):
        shape = static_shape(t.shape)
        stored = b.view(o.dtype.numpy).reshape(stored_shape(o.format, shape))
        got.append(np.array(from_stored(stored, o.format, shape)).astype(t.dtype.numpy))
        if o.format.startswith("nChw"):  # padding channels are zero, as every reader relies on
            assert np.array_equal(to_stored(got[-1].astype(o.dtype.numpy), o.format), stored, equal_nan=True)
    return kernel, got, fed


def judge(got, want, rtol, where):
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert got.shape == want.shape, where
    odd = ~np.isfinite(want)
    assert np.array_equal(np.isnan(got), np.isnan(want)), where
    assert np.array_equal(got[odd & ~np.isnan(want)], want[odd & ~np.isnan(want)]), where
    got, want = got[~odd], want[~odd]
    if want.size:
        scale = max(np.abs(want).max(), 1e-30)
        assert np.abs(got - want).max() / scale <= rtol, where
        assert np.linalg.norm((got - want) / scale) <= rtol * max(np.linalg.norm(want / scale), 1e-30), where


def check(layer, arrays):
    """Every tactic, signature and config that takes the layer; how many there were."""
    count = 0
    for tactic in TACTICS:
        if tactic.why_not(layer) is not None:
            continue
        for signature in tactic.signatures(layer, CPU):
            if tactic.refuses(layer, signature, CPU) is not None:
                continue
            configs = tactic.configs(layer, signature, CPU)
            assert configs, f"{tactic.name} takes {signature} but has no config"
            for config in configs:
                kernel, got, fed = compute(layer, arrays, tactic, signature, config)
                with np.errstate(all="ignore"):
                    want = reference(layer, fed)
                for g, w in zip(got, want, strict=True):
                    judge(g, w, kernel.rtol, f"{tactic.name} {signature} {config} {kernel.implementation}")
                count += 1
    return count


SAMPLES = [(n, i) for n in sorted(OPS) for i, _ in enumerate(OPS[n].samples) if any(n in t.ops for t in TACTICS)]


def tamed(a):
    """The same array without what oneDNN's tactics do not promise (`finite_only`): NaN, infinities, denormals, overflow."""
    if a is None or a.dtype.kind != "f" or a.ndim == 0:
        return a
    a = np.nan_to_num(a, nan=0.5, posinf=30, neginf=-30).clip(-30, 30)
    return np.where(np.abs(a) < 1e-30, 0, a).astype(a.dtype)


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_samples(name, index):
    _, layer, arrays = sample_layer(name, OPS[name].samples[index])
    assert all(t.finite_only for t in TACTICS)
    check(layer, [a if t is None or t.is_constant else tamed(a) for t, a in zip(layer.inputs, arrays, strict=True)])


def test_every_tactic_computes_some_sample():
    missing = {t.name: set(t.ops) & set(OPS) for t in TACTICS if t.name != "cpu/onednn_reformat"}
    for name, op in OPS.items():
        for sample in op.samples:
            _, layer, _ = sample_layer(name, sample)
            for t in TACTICS:
                if t.name in missing and t.why_not(layer) is None:
                    usable = [s for s in t.signatures(layer, CPU) if t.refuses(layer, s, CPU) is None]
                    if usable:
                        missing.pop(t.name)
    assert not {n for n, ops in missing.items() if ops}


def fused(hint, inputs, build):
    """A Fused layer: `inputs` are ("f32[...]", constant?) or arrays; `build(body, *tensors)` returns the result."""
    rng = np.random.default_rng(3)
    body, net, outer, arrays = Network("body", "lowered"), Network("net", "lowered"), [], []
    inner = []
    for i, spec in enumerate(inputs):
        text, constant = spec if isinstance(spec, tuple) else (spec, False)
        if isinstance(text, np.ndarray | np.generic):
            a, constant = np.asarray(text), True
        else:
            a = rng.standard_normal(static_shape(parse_type(text).shape)).astype(np.float32)
        arrays.append(a)
        type_ = net.constant(a).type
        outer.append(net.constant(a, f"c{i}") if constant else net.add_input(f"x{i}", type_))
        inner.append(body.add_input(f"i{i}", type_))
    body.mark_output(build(body, *inner))
    layer = net.add_layer("Fused", outer, {"hint": hint}, regions={"body": body})
    return layer, arrays


X, W, B, Z = "f32[1,16,8,8]", ("f32[32,16,3,3]", True), ("f32[32]", True), "f32[1,32,8,8]"
PADS = {"pads": (1, 1, 1, 1)}


def silu(g, x):
    return g.add("Mul", x, g.add("Sigmoid", x))


FUSED = {
    "conv_add_relu": ("Conv", [X, W, B, Z], lambda g, x, w, b, z: g.add("Relu", g.add("Add", g.add("Conv", x, w, b, **PADS), z))),
    "conv_relu_add": ("Conv", [X, W, B, Z], lambda g, x, w, b, z: g.add("Add", z, g.add("Relu", g.add("Conv", x, w, b, **PADS)))),
    "conv_silu": ("Conv", [X, W, B], lambda g, x, w, b: silu(g, g.add("Conv", x, w, b, **PADS))),
    "conv_clip": (
        "Conv", [X, W, B, np.float32(0), np.float32(0.5)], lambda g, x, w, b, lo, hi: g.add("Clip", g.add("Conv", x, w, b, **PADS), lo, hi),
    ),
    "conv_clip_below": ("Conv", [X, W, B, np.float32(0.1)], lambda g, x, w, b, lo: g.add("Clip", g.add("Conv", x, w, b, **PADS), lo)),
    "conv_prelu": ("Conv", [X, W, B, ("f32[32,1,1]", True)], lambda g, x, w, b, s: g.add("PRelu", g.add("Conv", x, w, b, **PADS), s)),
    "conv_hardswish": ("Conv", [X, W, B], lambda g, x, w, b: g.add("HardSwish", g.add("Conv", x, w, b, **PADS))),
    "conv_scale": ("Conv", [X, W, B, ("f32[1,32,1,1]", True)], lambda g, x, w, b, s: g.add("Mul", g.add("Conv", x, w, b, **PADS), s)),
    "conv_times_two": ("Conv", [X, W, B, np.float32(2)], lambda g, x, w, b, s: g.add("Mul", s, g.add("Conv", x, w, b, **PADS))),
    "conv_gate": ("Conv", [X, W, B, "f32[1,32,1,1]"], lambda g, x, w, b, s: g.add("Mul", g.add("Conv", x, w, b, **PADS), s)),
    "conv_odd_channels": (
        "Conv", ["f32[2,17,5,5]", ("f32[19,17,3,3]", True), ("f32[19]", True), "f32[2,19,5,5]"],
        lambda g, x, w, b, z: g.add("Relu", g.add("Add", g.add("Conv", x, w, b, **PADS), z)),
    ),
    "first_conv_relu": (
        "Conv", ["f32[1,3,32,32]", ("f32[16,3,7,7]", True), ("f32[16]", True)],
        lambda g, x, w, b: g.add("Relu", g.add("Conv", x, w, b, strides=(2, 2), pads=(3, 3, 3, 3))),
    ),
    "residual_is_the_input": (
        "Conv", ["f32[1,16,8,8]", ("f32[16,16,3,3]", True)], lambda g, x, w: g.add("Add", g.add("Conv", x, w, **PADS), x),
    ),
    "add_relu": ("Add", [Z, Z], lambda g, a, b: g.add("Relu", g.add("Add", a, b))),
}  # fmt: skip
if "Gemm" in OPS:
    FUSED["gemm_relu"] = (
        "Gemm", ["f32[4,24]", ("f32[10,24]", True), ("f32[10]", True)], lambda g, x, w, b: g.add("Relu", g.add("Gemm", x, w, b, transB=1)),
    )  # fmt: skip
    FUSED["matmul_bias_gelu_add"] = (
        "MatMul", ["f32[2,5,24]", ("f32[24,48]", True), ("f32[48]", True), "f32[2,5,48]"],
        lambda g, x, w, b, z: g.add("Add", g.add("Gelu", g.add("Add", g.add("MatMul", x, w), b)), z),
    )  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    layer, arrays = fused(*FUSED[name])
    assert check(layer, arrays) >= 2


def test_a_residual_is_summed_in_place():
    layer, arrays = fused(*FUSED["conv_add_relu"])
    tactic = get_tactic("cpu/onednn_conv")
    signatures = [s for s in tactic.signatures(layer, CPU) if tactic.refuses(layer, s, CPU) is None]
    assert {s.inplace for s in signatures} == {((3, 0),), ()}
    assert any(s.inplace and s.outputs[0].format.startswith("nChw") for s in signatures)
    assert any("brgconv" in dict(c)["impl"] for s in signatures for c in tactic.configs(layer, s, CPU)) or not dnn.has_isa("avx512_core")
    _, got, _ = compute(layer, arrays, tactic, signatures[0], ())
    judge(got[0], reference(layer, arrays)[0], 1e-5, "the default config")


@pytest.mark.parametrize("fmt", ["linear", "nhwc", "nChw16c", "nChw8c"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reformat(fmt, dtype):
    net = Network("net", "lowered")
    x = net.add_input("x", parse_type("f32[2,21,3,5]"))
    a = np.random.default_rng(1).standard_normal((2, 21, 3, 5)).astype(np.float32)
    for source in ("linear", "nhwc", "nChw16c"):
        attrs = {"source_format": source, "source_dtype": "f32", "format": fmt, "dtype": dtype.name}
        layer = net.add_layer("Reformat", [x], attrs)
        tactic = get_tactic("cpu/onednn_reformat")
        (signature,) = tactic.signatures(layer, CPU)
        kernel, (got,), _ = compute(layer, [a], tactic, signature, ())
        want = a.astype(dtype.numpy).astype(np.float32)
        np.testing.assert_array_equal(got, want)
        assert kernel.packed == ()


FORMATS = ("linear", "nhwc", "nChw8c", "nChw16c")


@pytest.mark.parametrize("shape", [(2, 32, 1, 1), (2, 16, 3, 2), (1, 8, 2, 2), (3, 1, 4, 4), (1, 17, 1, 1), (2, 21, 3, 5)])
def test_formats_with_the_same_bytes_are_told(shape):
    a = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    for one in FORMATS:
        for other in FORMATS:
            x, y = to_stored(a, one).reshape(-1), to_stored(a, other).reshape(-1)
            assert same_bytes(one, other, shape) == np.array_equal(x, y)


def test_a_view_records_nothing_in_place_and_one_copy_else():
    net = Network("net", "lowered")
    layer = net.add_layer("Flatten", [net.add_input("x", parse_type("f32[2,32,1,1]"))])
    tactic = get_tactic("cpu/onednn_view")
    counts = {}
    for signature in tactic.signatures(layer, CPU):
        stream = Listed()
        tactic.plan(layer, signature, (), CPU).enqueue(Args((64,), (128,), (), 0), stream)
        counts.setdefault((signature.inputs[0].format, bool(signature.inplace)), len(stream.calls))
    assert counts[("nhwc", True)] == counts[("linear", True)] == 0
    assert counts[("nhwc", False)] == counts[("linear", False)] == 1


def test_outputs_and_inputs_can_be_pointed_elsewhere():
    net = Network("net", "lowered")
    x = net.add_input("x", parse_type("f32[1,16,4,4]"))
    layer = net.add_layer("Relu", [x])
    tactic = get_tactic("cpu/onednn_eltwise")
    signature = tactic.signatures(layer, CPU)[0]
    kernel = tactic.plan(layer, signature, (), CPU)
    first, second, out = dnn.aligned(1024), dnn.aligned(1024), dnn.aligned(1024)
    second.view(np.float32)[:] = np.linspace(-1, 1, 256, dtype=np.float32)
    stream = Listed()
    kernel.enqueue(Args((first.ctypes.data,), (first.ctypes.data,), (), 0), stream)
    call = stream.calls[0]
    call.point("input", 0, second.ctypes.data)
    call.point("output", 0, out.ctypes.data)
    call.run()
    np.testing.assert_array_equal(out.view(np.float32), np.maximum(second.view(np.float32), 0))
    assert not first.any()


def test_equal_weights_have_equal_keys_and_others_not():
    tactic, keys = get_tactic("cpu/onednn_conv"), []
    for seed in (1, 1, 2):
        w = np.random.default_rng(seed).standard_normal((16, 16, 3, 3)).astype(np.float32)
        layer, _ = fused("Conv", ["f32[1,16,8,8]", w], lambda g, x, w: g.add("Relu", g.add("Conv", x, w, **PADS)))
        signature = next(s for s in tactic.signatures(layer, CPU) if s.outputs[0].format == "nhwc" and s.outputs[0].dtype == F32)
        keys.append([p.key for p in tactic.plan(layer, signature, (), CPU).packed])
    assert keys[0] == keys[1] != keys[2]


def test_refusals_say_why():
    conv = get_tactic("cpu/onednn_conv")
    layer, _ = fused("Conv", ["f32[1,16,8,8]", "f32[16,16,3,3]"], lambda g, x, w: g.add("Conv", x, w, **PADS))
    assert "computed at run time" in conv.why_not(layer)
    layer, _ = fused("Conv", [X, W, B, Z], lambda g, x, w, b, z: g.add("Div", z, g.add("Conv", x, w, b, **PADS)))
    assert "second operand" in conv.refuses(layer, conv.signatures(layer, CPU)[0], CPU)


def test_plain_loops_are_taken_for_small_work_only():
    x, w = dnn.describe((1, 8, 8, 8), "f32"), dnn.describe((8, 8, 3, 3), "f32", "any")
    first = dnn.convolution(x, w, None, x, (1, 1), (1, 1), ((1, 1), (1, 1)), dnn.Attributes((dnn.Binary("add", x),)))
    tactic = get_tactic("cpu/onednn_conv")
    assert tactic._usable(Recipe(first, {}, work=1e3)) == ["ref:any"]
    with pytest.raises(dnn.Unimplemented, match="plain loops"):
        tactic._usable(Recipe(first, {}, work=1e9))
