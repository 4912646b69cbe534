"""oneDNN's tactics: every signature and config of every sample against the op's reference, fused epilogues, packing, rebinding."""

from dataclasses import replace
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest

import whet.composites  # noqa: F401  (its samples)
from whet.backends.cpu import CpuBackend
from whet.builder.verify.sum_errors import bound_sum_effect
from whet.network import Network, compute_stored_shape, from_stored, parse_type, static_shape, to_stored
from whet.network.formats import has_same_bytes
from whet.network.types import BF16, F16, F32
from whet.ops import OPS, run_layer, run_regions
from whet.tactics import Args, get_root_layer, get_tactic, list_tactics
from whet.tactics._fused import get_source_index
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Recipe
from whet.tactics.cpu.onednn._nonfinite import spreads_nonfinite

CPU = CpuBackend()
TACTICS = [t for t in list_tactics("cpu") if not t.fallback]  # all discovered tactics; fallbacks run the reference itself


class Listed:
    """A stream that records the calls."""

    def __init__(self):
        self.calls = []

    def record(self, call):
        self.calls.append(call)


def cast(array, dtype):
    """As NumPy converts; values beyond the range become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype.numpy)


def place(array, operand):
    """A 64-byte aligned copy of `array` as stored in `operand`."""
    stored = to_stored(cast(array, operand.dtype), operand.format)
    buffer = dnn.allocate_aligned(stored.nbytes)
    buffer[:] = stored.reshape(-1).view(np.uint8)
    return buffer


def reference(layer, arrays):
    with np.errstate(all="ignore"):
        return run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)


def declared_reference(layer, arrays, declares):
    """The reference with the deviations that oneDNN's kernels declare (whet.tactics.cpu.onednn._nonfinite)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, f in declares.items():
            patch.setitem(OPS, name, replace(OPS[name], reference=partial(f, OPS[name].reference)))
        return reference(layer, arrays)


def nowhere(own, layer, *arrays):
    """A product's reference in which NaN has spread to all elements."""
    return np.full_like(own(layer, *arrays), np.nan)


def in_reached_tiles(layer, arrays, tile):
    """Results of a 3x3 Winograd convolution in tiles with NaN or infinity among their inputs."""
    head, x = get_root_layer(layer), arrays[get_source_index(layer)]
    top, left = (int(p) for p in (head.attrs.get("pads") or (0, 0))[:2])
    n, _, rows, columns = static_shape(layer.outputs[0].shape)
    odd = ~np.isfinite(x).all(axis=1)
    reached = np.zeros((n, 1, rows, columns), bool)
    for i in range(0, rows, tile):
        for j in range(0, columns, tile):
            down, across = (slice(max(at - pad, 0), max(at - pad + tile + 2, 0)) for at, pad in ((i, top), (j, left)))
            reached[:, 0, i : i + tile, j : j + tile] = odd[:, down, across].any(axis=(1, 2))[:, None, None]
    return reached


def compute(layer, arrays, tactic, signature, config):
    """Runs one kernel; returns (kernel, outputs as logical arrays, the inputs as they were fed)."""
    kernel = tactic.plan(layer, signature, config, CPU)
    buffers, fed = [], []
    narrow = signature.outputs[0].dtype
    for t, o, a, n in zip(layer.inputs, signature.inputs, arrays, kernel.inputs, strict=True):
        if t is None or o is None:
            buffers.append(None)
            # kernels in 16 bits multiply rounded weights; vectors (bias, scale) stay f32
            fed.append(cast(a, narrow).astype(a.dtype) if narrow in (BF16, F16) and a is not None and np.squeeze(a).ndim > 1 else a)
            assert n == 0
            continue
        buffers.append(place(a, o))
        fed.append(cast(a, o.dtype).astype(a.dtype))
        assert buffers[-1].nbytes == n
    outputs = [dnn.allocate_aligned(n) for n in kernel.outputs]
    for out in outputs:
        out[:] = 0xAB  # non-zero: padding must be written too
    for k, (i, o) in enumerate(signature.inplace):
        if kernel.inputs[i] == kernel.outputs[o]:
            outputs[o] = buffers[i]
        elif kernel.inputs[i] > kernel.outputs[o]:  # an output is part of the input
            outputs[o] = buffers[i][kernel.shifts[k] :][: kernel.outputs[o]]
        else:
            part = outputs[o][kernel.shifts[k] :][: kernel.inputs[i]]
            part[:] = buffers[i]
            buffers[i] = part
    packed = [p.make() for p in kernel.packed]
    for p, made in zip(kernel.packed, packed, strict=True):
        assert made.nbytes == p.nbytes
        assert made.dtype == np.uint8
    scratch = dnn.allocate_aligned(kernel.scratch)
    scratch[:] = 0xFF  # NaN: scratch memory has the values of other layers
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
        assert i in shared or was is None or np.array_equal(was, now), "inputs are not modified"
    got = []
    for t, o, b in zip(layer.outputs, signature.outputs, outputs, strict=True):
        shape = static_shape(t.shape)
        stored = b.view(o.dtype.numpy).reshape(compute_stored_shape(o.format, shape))
        got.append(np.array(from_stored(stored, o.format, shape)).astype(t.dtype.numpy))
        # padding channels are zero, which every reader relies on (0 * inf is NaN: only in pixels with non-finite values)
        if o.format.startswith("nChw"):
            differs = ~same(to_stored(cast(got[-1], o.dtype), o.format).astype(np.float64), stored.astype(np.float64))
            assert not (differs & np.isfinite(got[-1].astype(np.float64)).all(axis=1)[:, None, ..., None]).any()
    return kernel, got, fed


TINY = np.finfo(np.float32).tiny


def judge(got, want, rtol, where, alternatives=(), reach=0.0, least=TINY):
    """Every element of `got` equals that of `want`, or that of one of `others` (a kernel's declared results for NaN).

    `reach`: magnitude of the accumulated terms; the error of a sum near zero is relative to it. Differences below `least` do not count.
    """
    if want.dtype.itemsize == 1 and want.dtype.kind in "iu":  # a requantization tie may differ by one
        off = np.abs(got.astype(np.int16) - want.astype(np.int16))
        assert off.max(initial=0) <= 1, where
        assert np.count_nonzero(off) <= max(1, 0.01 * off.size), f"{where}: {np.count_nonzero(off)} of {off.size} integers differ"
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        compare(got, want, rtol, where, alternatives, reach, least)


def compare(got, want, rtol, where, alternatives, reach, least):
    """`judge` for floating point, in float64."""
    assert got.shape == want.shape, where
    for other in (o.astype(np.float64) for o in alternatives):
        usual = np.abs(other[np.isfinite(other) & (np.abs(other) < 1e30)]).max(initial=reach)
        want = np.where((same(got, other) | (np.abs(got - other) <= rtol * usual)) & ~same(got, want), other, want)
    odd = ~np.isfinite(want)
    wrong = (odd & ~same(got, want)) | (~odd & ~np.isfinite(got))
    assert not wrong.any(), f"{where}: {got[wrong][:5]} where {want[wrong][:5]} belongs, at {np.argwhere(wrong)[:5].tolist()}"
    huge = np.abs(want) > 1e30
    for part in (~odd & huge, ~odd & ~huge):  # separately, otherwise one value near overflow would hide errors of the others
        g, w = got[part], want[part]
        if w.size:
            off = np.abs(g - w)
            off[off < least] = 0  # bf16 instructions flush denormals to zero
            scale = max(np.abs(w).max(), reach, np.finfo(np.float32).tiny)
            assert off.max() / scale <= rtol, f"{where}: off by {off.max()} of {scale}"
            assert np.linalg.norm(off / scale) <= rtol * max(np.linalg.norm(w / scale), 1), where


class KnownReferences:
    """`declared_reference` of a layer by inputs and table: most signatures and configs of its kernels have the same ones."""

    def __init__(self, layer):
        self.layer, self.known = layer, {}

    def __call__(self, arrays, declares):
        inputs = tuple(None if a is None else (a.dtype.str, a.shape, a.tobytes()) for a in arrays)
        key = inputs, frozenset(declares.items())
        if key not in self.known:
            self.known[key] = declared_reference(self.layer, arrays, declares)
        return self.known[key]


def accepted(layer, arrays, tactic, kernel, dtype, known):
    """The reference's outputs, and for each the other results that a kernel declares."""
    want, others = known(arrays, {}), []
    for table in tactic.declares(layer, kernel.implementation):
        others.append(known(arrays, table))
        if tile := getattr(kernel, "tile", 0):
            others += [[np.where(in_reached_tiles(layer, arrays, tile), np.nan, w)] for w in others[-1]]
        if spreads_nonfinite(layer, dtype) and any(a is not None and a.dtype.kind == "f" and not (np.abs(a) < 1e30).all() for a in arrays):
            others.append(known(arrays, {**table, get_root_layer(layer).op: nowhere}))
            others.append([np.full_like(w, np.nan) for w in want])
            # products near overflow are not rounded before accumulation, so that infinities may not meet
            others += [[np.where(np.isnan(w), np.copysign(np.inf, sign), w) for w in want] for sign in (1, -1)]
    others = [other for other in others if other is not want]  # an empty table declares nothing
    if dtype == "f16" and get_root_layer(layer).op in ("Conv", "Gemm", "MatMul") and any(reaches_overflow(a) for a in arrays):
        others += [[np.full_like(w, value) for w in want] for value in (np.nan, np.inf, -np.inf)]
    if dtype in _LARGEST:
        want, others = [ends(w, dtype) for w in want], [[ends(o, dtype) for o in other] for other in others]
    return want, list(zip(*others, strict=True)) or [()] * len(want)


def bound_effect(layer, tactic, signature, fed):
    """What verification adds to a tactic's bound for the error of its sums, which an activation with limits makes larger than its results."""
    if not tactic.sum_error:
        return 0.0
    stored = tuple(None if o is None else (o.format, o.dtype.name) for o in signature.inputs)
    return bound_sum_effect(layer, SimpleNamespace(tactic=tactic.name, inputs=stored), fed)


_LARGEST = {"bf16": 3.38e38, "f16": 65500}
_SPACING = {"f16": 2.0**-24}  # of denormals


def ends(a, dtype):
    """The largest values of a 16-bit type as infinity: some kernels round them to it."""
    return np.where(np.abs(a) > _LARGEST[dtype], np.copysign(np.inf, a), a).astype(a.dtype) if a.dtype == np.float32 else a


def reaches_overflow(a):
    """True if a sum of a few products of these values and others may exceed the range of f16, in which short sums are."""
    return a is not None and a.dtype.kind == "f" and not (np.abs(a) < 1e3).all()


def same(a, b):
    """Elementwise equality; NaN equals NaN."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def check(layer, arrays, tactics=TACTICS):
    """Checks every tactic, signature and config that accepts the layer; returns their number."""
    count, known = 0, KnownReferences(layer)
    sizes = [np.abs(a.astype(np.float64)) for a in arrays if a is not None and a.dtype.kind == "f"]
    reach = max((s[(s > 1e3) & (s < 1e30)].max(initial=0) for s in sizes), default=0.0)  # the extremes' 1e4, which cancel in sums
    if layer.op == "Fused" and any(x.op == "Clip" for x in layer.regions["body"].layers):  # the bound holds for the kernel's accumulators
        unclipped = [np.abs(w) for w in declared_reference(layer, arrays, {"Clip": lambda own, layer, x, *bounds: x}) if w.dtype.kind == "f"]
        reach = max([reach, *(w[w < 1e30].max(initial=0) for w in unclipped)])
    for tactic in tactics:
        if tactic.why_not(layer) is not None:
            continue
        for signature in tactic.signatures(layer, CPU):
            if tactic.refuses(layer, signature, CPU) is not None:
                continue
            configs = tactic.configs(layer, signature, CPU)
            assert configs, f"{tactic.name} takes {signature} but has no config"
            for config in configs:
                kernel, got, fed = compute(layer, arrays, tactic, signature, config)
                want, others = accepted(layer, fed, tactic, kernel, signature.outputs[0].dtype.name, known)
                got = [ends(g, signature.outputs[0].dtype.name) if signature.outputs[0].dtype.name in _LARGEST else g for g in got]
                where = f"{tactic.name} {signature} {config} {kernel.implementation}"
                least = _SPACING.get(signature.outputs[0].dtype.name, TINY)
                for g, w, o in zip(got, want, others, strict=True):
                    judge(g, w, kernel.rtol + bound_effect(layer, tactic, signature, fed), where, o, reach, least)
                count += 1
    return count


SAMPLES = [(n, i) for n in sorted(OPS) for i, _ in enumerate(OPS[n].samples) if n == "Fused" or any(n in t.ops for t in TACTICS)]


def fused(composite, inputs, build):
    """A Fused layer: `inputs` are ("f32[...]" or another type, constant?) or arrays; `build(body, *tensors)` returns the result."""
    rng = np.random.default_rng(3)
    body, net, outer, arrays = Network("body", "lowered"), Network("net", "lowered"), [], []
    inner = []
    for i, spec in enumerate(inputs):
        text, constant = spec if isinstance(spec, tuple) else (spec, False)
        if isinstance(text, np.ndarray | np.generic):
            a, constant = np.asarray(text), True
        else:
            type_ = parse_type(text)
            a = rng.standard_normal(static_shape(type_.shape)).astype(type_.dtype.numpy)
        arrays.append(a)
        type_ = net.constant(a).type
        outer.append(net.constant(a, f"c{i}") if constant else net.add_input(f"x{i}", type_))
        inner.append(body.add_input(f"i{i}", type_))
    body.mark_output(build(body, *inner))
    layer = net.add_layer("Fused", outer, {"composite": composite}, regions={"body": body})
    return layer, arrays


LAYERS = {  # layers for oneDNN that the ops' samples do not cover: op, inputs, attributes
    "gemm_alpha_beta": ("Gemm", ["f32[5,4]", ("f32[5,7]", True), ("f32[4,7]", True)], {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    "gemm_alpha_row": ("Gemm", ["f32[4,5]", ("f32[7,5]", True), ("f32[7]", True)], {"transB": 1, "alpha": 0.5, "beta": 3.0}),
    "matmul_batch_constant": ("MatMul", ["f32[3,4,5]", ("f32[3,5,6]", True)], {}),
    "small_minus_large": ("Sub", ["f32[16,1,1]", "f32[2,16,3,4]"], {}),
    "small_plus_large": ("Add", ["f32[1,16,1,1]", "f32[2,16,3,4]"], {}),
    "constant_over_x": ("Div", [("f32[1,16,1,1]", True), "f32[2,16,3,4]"], {}),
    "layernorm_two_axes": ("LayerNormalization", ["f32[2,3,4,5]", ("f32[4,5]", True), ("f32[4,5]", True)], {"axis": 2}),
    "pool_include_pad": ("AveragePool", ["f32[1,16,8,8]"], {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
    "pool_uneven_rest": ("MaxPool", ["f32[1,16,8,9]"], {"kernel_shape": (2, 2), "strides": (3, 3)}),
    "reduce_to_row": ("ReduceMean", ["f32[2,16,4,4]"], {"axes": (2, 3), "keepdims": 0}),
    "resize_twice": ("Resize", ["f32[1,16,4,5]"], {"sizes": (1, 16, 8, 10), "mode": "linear"}),
    "resize_nearest": (
        "Resize", ["f32[1,16,4,5]"],
        {"sizes": (1, 16, 8, 15), "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "slice_steps": ("Slice", ["f32[1,16,9,8]"], {"starts": (1, 2), "ends": (9, 8), "axes": (2, 3), "steps": (3, 2)}),
    "deconv_output_padding": (
        "ConvTranspose", ["f32[1,16,5,5]", ("f32[16,8,3,3]", True), ("f32[8]", True)],
        {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)},
    ),
    "conv3d": ("Conv", ["f32[1,16,4,5,6]", ("f32[16,16,3,3,3]", True)], {"pads": (1,) * 6}),
    "pad_channels": ("Pad", ["f32[1,16,4,4]"], {"pads": (0, 8, 0, 0, 0, 8, 0, 0)}),
    "pad_end": ("Pad", ["f32[1,16,4,4]", np.array([0, 0, 0, 0, 0, 0, 2, 0]), np.array(1.5, np.float32)], {}),
    "softmax_channels": ("Softmax", ["f32[2,16,5,6]"], {"axis": 1}),
}  # fmt: skip


def plain(op, inputs, attrs):
    """A single layer with normal random values."""
    rng, net = np.random.default_rng(4), Network("net", "lowered")
    tensors, arrays = [], []
    for i, spec in enumerate(inputs):
        text, constant = spec if isinstance(spec, tuple) else (spec, isinstance(spec, np.ndarray))
        a = text if isinstance(text, np.ndarray) else rng.standard_normal(static_shape(parse_type(text).shape)).astype(np.float32)
        arrays.append(a)
        tensors.append(net.constant(a, f"c{i}") if constant else net.add_input(f"x{i}", parse_type(text)))
    return net.add_layer(op, tensors, attrs), arrays


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layer, arrays = plain(*LAYERS[name])
    assert check(layer, arrays) >= 1, "some tactic accepts it"


REFUSED = {  # op, inputs, attributes, tactic, message
    "ceil_counts_pads": (
        "AveragePool", ["f32[1,16,9,9]"],
        {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 0, 0), "count_include_pad": 1, "ceil_mode": 1}, "pool", "ceil_mode",
    ),
    "scale_is_no_ratio": ("Resize", ["f32[1,16,5,5]"], {"mode": "linear", "scales": (1.0, 1.0, 1.5, 1.5)}, "resize", "output size"),
    "corners": (
        "Resize", ["f32[1,16,4,4]"],
        {"sizes": (1, 16, 8, 8), "mode": "linear", "coordinate_transformation_mode": "align_corners"}, "resize", "align_corners",
    ),
    "backward": ("Slice", ["f32[4,7]", np.array([5]), np.array([1]), np.array([-1]), np.array([-2])], {}, "slice", "negative step"),
    "uneven_steps": ("Slice", ["f32[2,4,3,6]"], {"starts": (0,), "ends": (3,), "axes": (2,), "steps": (2,)}, "slice", "within the last step"),
    "prelu_plane": ("PRelu", ["f32[2,16,4,4]", ("f32[16,4,4]", True)], {}, "prelu", "several axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    op, inputs, attrs, tactic_name, words = REFUSED[name]
    layer, _ = plain(op, inputs, attrs)
    tactic = get_tactic(f"cpu/onednn_{tactic_name}")
    said = [tactic.refuses(layer, s, CPU) for s in tactic.signatures(layer, CPU)]
    assert said
    assert all(words in (why or "") for why in said)


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
def test_formats_with_equal_bytes_are_recognized(shape):
    a = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    for one in FORMATS:
        for other in FORMATS:
            x, y = to_stored(a, one).reshape(-1), to_stored(a, other).reshape(-1)
            assert has_same_bytes(one, other, shape) == np.array_equal(x, y)


@pytest.mark.parametrize("shape", [(2, 32, 1, 1), (2, 16, 3, 2), (1, 8, 2, 2), (1, 2, 2, 16), (2, 21, 3, 5)])
def test_transposes_that_keep_the_bytes_are_recognized(shape):
    a = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    for perm in permutations(range(4)):
        for one, other in product(FORMATS, FORMATS):
            equal = np.array_equal(to_stored(a, one).reshape(-1), to_stored(a.transpose(perm), other).reshape(-1))
            padded = any(f in ("nChw8c", "nChw16c") and c % int(f[4:-1]) for f, c in ((one, shape[1]), (other, shape[perm[1]])))
            if not padded:
                assert has_same_bytes(one, other, shape, perm) == equal, (perm, one, other)
            elif has_same_bytes(one, other, shape, perm):
                assert equal


@pytest.mark.parametrize(("perm", "formats"), [((0, 2, 3, 1), ("nhwc", "linear")), ((0, 3, 1, 2), ("linear", "nhwc"))])
def test_a_transpose_to_and_from_channels_last_is_a_view(perm, formats):
    net = Network("net", "lowered")
    layer = net.add_layer("Transpose", [net.add_input("x", parse_type("f32[2,5,3,4]"))], {"perm": perm})
    a = np.random.default_rng(3).standard_normal((2, 5, 3, 4)).astype(np.float32)
    found = [s for s in get_tactic("cpu/view").signatures(layer, CPU) if s.outputs[0].dtype == F32]
    assert {(s.inputs[0].format, s.outputs[0].format) for s in found} == {formats}
    assert any(s.inplace for s in found)
    for s in found:
        _, (got,), _ = compute(layer, [a], get_tactic("cpu/view"), s, ())
        np.testing.assert_array_equal(got, a.transpose(perm))


def test_a_view_records_nothing_in_place_and_otherwise_one_copy():
    net = Network("net", "lowered")
    layer = net.add_layer("Flatten", [net.add_input("x", parse_type("f32[2,32,1,1]"))])
    tactic = get_tactic("cpu/view")
    counts = {}
    for signature in tactic.signatures(layer, CPU):
        stream = Listed()
        tactic.plan(layer, signature, (), CPU).enqueue(Args((64,), (128,), (), 0), stream)
        counts.setdefault((signature.inputs[0].format, bool(signature.inplace)), len(stream.calls))
    assert counts[("nhwc", True)] == counts[("linear", True)] == 0
    assert counts[("nhwc", False)] == counts[("linear", False)] == 1


def test_outputs_and_inputs_can_be_bound_to_other_buffers():
    net = Network("net", "lowered")
    x = net.add_input("x", parse_type("f32[1,16,4,4]"))
    layer = net.add_layer("Relu", [x])
    tactic = get_tactic("cpu/onednn_eltwise")
    signature = tactic.signatures(layer, CPU)[0]
    kernel = tactic.plan(layer, signature, (), CPU)
    first, second, out = dnn.allocate_aligned(1024), dnn.allocate_aligned(1024), dnn.allocate_aligned(1024)
    second.view(np.float32)[:] = np.linspace(-1, 1, 256, dtype=np.float32)
    stream = Listed()
    kernel.enqueue(Args((first.ctypes.data,), (first.ctypes.data,), (), 0), stream)
    call = stream.calls[0]
    call.set_address("input", 0, second.ctypes.data)
    call.set_address("output", 0, out.ctypes.data)
    call.run()
    np.testing.assert_array_equal(out.view(np.float32), np.maximum(second.view(np.float32), 0))
    assert not first.any()


def test_equal_weights_have_equal_keys_and_different_weights_do_not():
    tactic, keys = get_tactic("cpu/onednn_conv"), []
    for seed in (1, 1, 2):
        w = np.random.default_rng(seed).standard_normal((16, 16, 3, 3)).astype(np.float32)
        layer, _ = fused("Conv", ["f32[1,16,8,8]", w], lambda g, x, w: g.add("Relu", g.add("Conv", x, w, **PADS)))
        signature = next(s for s in tactic.signatures(layer, CPU) if s.outputs[0].format == "nhwc" and s.outputs[0].dtype == F32)
        keys.append([p.key for p in tactic.plan(layer, signature, (), CPU).packed])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("op", ["Add", "Sub", "Max"])
def test_a_small_first_operand_keeps_the_fast_kernel(op):
    layer, _ = plain(op, ["f32[1,16,1,1]", "f32[2,16,7,7]"], {})
    tactic = get_tactic("cpu/onednn_binary")
    signature = next(s for s in tactic.signatures(layer, CPU) if s.outputs[0].format == "nhwc")
    assert tactic.plan(layer, signature, (), CPU).implementation != "ref:any"


def test_groups_are_part_of_the_key():
    tactic, keys = get_tactic("cpu/onednn_conv"), set()
    for group, channels in ((1, 1), (4, 4)):
        w = np.ones((16, 1, 3, 3), np.float32)
        layer, _ = plain("Conv", [f"f32[1,{channels},8,8]", w], {"group": group})
        signature = next(s for s in tactic.signatures(layer, CPU) if s.outputs[0] == s.inputs[0])
        keys.add(tactic.plan(layer, signature, (), CPU).packed[0].key)
    assert len(keys) == 2


def test_each_thread_count_has_its_own_primitive():
    layer, _ = plain("Relu", ["f32[1,16,64,64]"], {})  # large enough for several threads
    tactic, texts = get_tactic("cpu/onednn_eltwise"), set()
    for threads in (1, 2):
        machine = CpuBackend(threads)
        texts.add(tactic.plan(layer, tactic.signatures(layer, machine)[0], (), machine).descriptor.text)
    CPU.activate()
    assert len(texts) == 2


def test_a_slice_can_be_bound_to_another_buffer():
    layer, (a,) = plain("Slice", ["f32[4,8]"], {"starts": (2,), "ends": (6,), "axes": (1,)})
    tactic = get_tactic("cpu/onednn_slice")
    kernel = tactic.plan(layer, tactic.signatures(layer, CPU)[0], (), CPU)
    first, second, out = dnn.allocate_aligned(128), dnn.allocate_aligned(128), dnn.allocate_aligned(64)
    second.view(np.float32)[:] = a.reshape(-1)
    stream = Listed()
    kernel.enqueue(Args((first.ctypes.data,), (out.ctypes.data,), (), 0), stream)
    stream.calls[0].set_address("input", 0, second.ctypes.data)
    stream.calls[0].run()
    np.testing.assert_array_equal(out.view(np.float32).reshape(4, 4), a[:, 2:6])


def test_refusals_say_why():
    conv = get_tactic("cpu/onednn_conv")
    layer, _ = fused("Conv", ["f32[1,16,8,8]", "f32[16,16,3,3]"], lambda g, x, w: g.add("Conv", x, w, **PADS))
    assert "computed at run time" in conv.why_not(layer)
    layer, _ = fused("Conv", [X, W, B, Z], lambda g, x, w, b, z: g.add("Div", z, g.add("Conv", x, w, b, **PADS)))
    assert "second operand" in conv.refuses(layer, conv.signatures(layer, CPU)[0], CPU)


def test_plain_loops_are_selected_only_for_small_work():
    x, w = dnn.describe((1, 8, 8, 8), "f32"), dnn.describe((8, 8, 3, 3), "f32", "any")
    first = dnn.convolution(x, w, None, x, (1, 1), (1, 1), ((1, 1), (1, 1)), dnn.Attributes((dnn.Binary("add", x),)))
    tactic = get_tactic("cpu/onednn_conv")
    assert tactic.list_usable(Recipe(first, {}, work=1e3)) == ["ref:any"]
    with pytest.raises(dnn.Unimplemented, match="scalar loops"):
        tactic.list_usable(Recipe(first, {}, work=1e9))


@pytest.mark.parametrize("divisor", [0.0, 1e-40, 3.4e38, 4.0, np.inf])
def test_a_product_is_divided_as_a_post_op_only_by_what_has_a_reciprocal(divisor):
    conv = get_tactic("cpu/onednn_conv")
    layer, arrays = fused("Conv", [X, W, B, np.array(divisor, np.float32)], lambda g, x, w, b, z: g.add("Div", g.add("Conv", x, w, b, **PADS), z))
    reasons = {conv.refuses(layer, s, CPU) for s in conv.signatures(layer, CPU)}
    if divisor in (4.0, np.inf):
        assert None in reasons
    else:
        assert f"the reciprocal of the divisor {np.float32(divisor):g} is no normal f32 value" in reasons
        assert None not in reasons
    if divisor != 1e-40:  # quotients that do not overflow are the rounding errors of the sums
        with np.errstate(all="ignore"):
            check(layer, arrays)
