"""Detector heads by whet's CPU kernel: convolutions and decoding in one launch, for all sizes, threads and batches; refusals; networks."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, Listed, place

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig, build
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.lowering import lower_network
from whet.builder.precision.permissions import Permissions
from whet.builder.select.unfused_time import list_chains
from whet.composites.head_convs import make_head_convs_sample
from whet.network import Network, compute_stored_shape, from_stored, parse_network, parse_type, static_shape
from whet.ops import run_network, run_regions, sample_layer
from whet.runtime import Runtime
from whet.tactics import Args, get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics._moves_indices import Refused
from whet.tactics._moves_runs import Run, runs
from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import why_no_registers
from whet.tactics.cpu.conv import detector_heads as heads_tactic
from whet.tactics.cpu.onednn import _api as dnn

OWN = pytest.mark.skipif(bool(why := jit.why_unavailable() or why_no_registers()), reason=str(why))
TACTIC = get_tactic("cpu/detector_heads")


def launched(kernel, layer, signature, arrays, moved=False):
    """The outputs of a planned kernel; with `moved`, images and result are bound to other buffers after the launch was recorded."""
    stored = [None if o is None else place(a, o) for a, o in zip(arrays, signature.inputs, strict=True)]
    before = [None if b is None else b.copy() for b in stored]
    target, scratch = dnn.allocate_aligned(kernel.outputs[0]), dnn.allocate_aligned(kernel.scratch + 64)
    target[:], scratch[:] = 0xAB, 0xCD
    first = [None if b is None else dnn.allocate_aligned(b.nbytes) for b in stored] if moved else stored
    elsewhere = dnn.allocate_aligned(kernel.outputs[0]) if moved else target
    packed, stream = [p.make() for p in kernel.packed], Listed()
    assert [p.nbytes for p in packed] == [p.nbytes for p in kernel.packed]
    at = tuple(0 if b is None else b.ctypes.data for b in first)
    kernel.enqueue(Args(at, (elsewhere.ctypes.data,), tuple(p.ctypes.data for p in packed), scratch.ctypes.data), stream)
    for call in stream.calls:
        if moved:
            for i, b in enumerate(stored):
                if b is not None:
                    call.set_address("input", i, b.ctypes.data)
            call.set_address("output", 0, target.ctypes.data)
        call.run()
    assert all(b is None or np.array_equal(b, was) for b, was in zip(stored, before, strict=True)), "inputs are not modified"
    assert (scratch[kernel.scratch :] == 0xCD).all(), "scratch memory stays within the plan"
    shape, form = static_shape(layer.outputs[0].shape), signature.outputs[0].format
    return np.array(from_stored(target.view(np.float32).reshape(compute_stored_shape(form, shape)), form, shape))


def judged(sample, threads, small, layer=None, arrays=None):
    """Compares each configuration in each format with the reference; returns their number."""
    if layer is None:
        _, layer, arrays = sample_layer("Fused", sample)
    machine, count = CpuBackend(threads=threads), 0
    with np.errstate(all="ignore"):
        (want,) = run_regions(layer, [np.asarray(a, np.float64) if a.dtype == np.float32 else a for a in arrays])
    scale = np.abs(want[np.isfinite(want)]).max()
    for signature in TACTIC.signatures(layer, machine):
        assert TACTIC.refuses(layer, signature, machine) is None
        for config in TACTIC.configs(layer, signature, machine):
            kernel = TACTIC.plan(layer, signature, config, machine)
            assert small or kernel.threads == min(threads, kernel.items)
            np.testing.assert_allclose(launched(kernel, layer, signature, arrays), want, rtol=2e-6, atol=2e-6 * scale)
            count += 1
    return count


@OWN
@pytest.mark.parametrize("sample", [
    make_head_convs_sample(1, 3, 80, (64, 20, 20), (20, 10, 10), (36, 5, 5), padding=1), make_head_convs_sample(2, 3, 2, (8, 4, 6), (16, 2, 3)),
    make_head_convs_sample(3, 1, 1, (12, 7, 5), bias=False), make_head_convs_sample(2, 2, 11, (16, 9, 9), (32, 5, 3), (4, 5, 1), (8, 1, 6)),
    make_head_convs_sample(3, 5, 22, (52, 13, 11), padding=9),
    make_head_convs_sample(1, 16, 6, (20, 5, 7)), make_head_convs_sample(1, 1, 43, (16, 1, 97), (304, 3, 3)),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_heads_of_all_sizes(sample, threads, monkeypatch):
    """Tiles that do and do not divide an image, images smaller than a tile, partly filled channel blocks, several batch items, one to four levels."""
    monkeypatch.setattr(heads_tactic.HeadsKernel, "serial_work", 0)
    assert judged(sample, threads, False) >= 2
    CPU.activate()


@OWN
def test_random_heads():
    """Every planned head is correct."""
    rng = np.random.default_rng(7)
    for _ in range(12):
        levels = [(4 * int(rng.integers(1, 20)), int(rng.integers(1, 24)), int(rng.integers(5, 24))) for _ in range(rng.integers(1, 4))]
        images, anchors, classes = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 60))
        sample = make_head_convs_sample(images, anchors, classes, *levels, padding=int(rng.integers(0, 5)))
        assert judged(sample, int(rng.integers(1, 4)), True) >= 2
    CPU.activate()


@OWN
def test_nan_and_infinity_reach_only_their_rows():
    _, layer, arrays = sample_layer("Fused", make_head_convs_sample(2, 2, 11, (16, 9, 9), (32, 5, 3)))
    arrays[0][0, 1, 0, 0], arrays[0][1, 2, 8, 8], arrays[0][0, 3, 4, 4], arrays[3][1, 0, 2, 1] = np.nan, np.inf, -np.inf, np.nan
    with np.errstate(all="ignore"):
        assert judged(None, 2, True, layer, arrays) >= 2


@OWN
def test_users_own_buffers():
    _, layer, arrays = sample_layer("Fused", make_head_convs_sample(2, 3, 2, (8, 4, 6), (16, 2, 3)))
    (signature,) = TACTIC.signatures(layer, CPU)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, CPU)[0], CPU)
    (want,) = run_regions(layer, arrays)
    np.testing.assert_allclose(launched(kernel, layer, signature, arrays, moved=True), want, rtol=1e-5, atol=1e-5)


@OWN
def test_its_parts_are_a_chain_for_comparison():
    """Convolutions with blocked output formats, followed by the data movement."""
    _, layer, arrays = sample_layer("Fused", make_head_convs_sample(2, 3, 2, (8, 4, 6), (16, 5, 5), padding=11))
    permissions = Permissions.of(BuildConfig())
    best = list_candidates(layer, [TACTIC], CPU, permissions).options[0]
    chains = list_chains(layer, best, {TACTIC.name}, list_enabled_tactics("cpu", ()), permissions, CPU)
    assert isinstance(chains, list), chains
    (want,) = run_regions(layer, arrays)
    for chain in chains:
        assert chain.kernel.implementation.count("conv") == 2
        assert "cpu/moves" in chain.kernel.implementation
        np.testing.assert_allclose(launched(chain.kernel, layer, chain.signature, arrays), want, rtol=1e-5, atol=1e-5)


def moved_rows(images, anchors, each, h, w, inner):
    """A head with rows (pixel, anchor), or (anchor, pixel) if `inner` is false, as a layer of data movement."""
    net, body = Network("net", "lowered"), Network("body", "lowered")
    x = net.add_input("x", parse_type(f"f32[{images},{anchors * each},{h},{w}]"))
    own = body.add_input("x", x.type)
    cut = body.add("Reshape", own, body.constant(np.array([images, anchors, each, h * w]), "cut"))
    turned = body.add("Transpose", cut, perm=(0, 3, 1, 2) if inner else (0, 1, 3, 2))
    body.mark_output(body.add("Sigmoid", body.add("Reshape", turned, body.constant(np.array([images, anchors * h * w, each]), "rows"))))
    return net.add_layer("Fused", [x], {"composite": "Moves"}, regions={"body": body})


def list_runs(layer, pitch):
    return runs(Moves(layer, {0: "nhwc"}, "linear", pitches={0: pitch}), [pitch])


@pytest.mark.parametrize("pitch", [12, 16, 28])
def test_runs_of_rows(pitch):
    """The rows of an anchor are contiguous within a batch item; if anchors are innermost, all rows are contiguous."""
    rows = [(0, 0, 15), (15, 0, 15), (30, 0, 30), (60, 15, 15), (75, 15, 15)]
    assert list_runs(moved_rows(2, 3, 4, 3, 5, False), pitch) == [Run(0, row, pixel, count, 1) for row, pixel, count in rows]
    assert list_runs(moved_rows(2, 3, 4, 3, 5, True), pitch) == [Run(0, 0, 0, 30, 3)]


def test_rows_of_several_pixels_have_no_runs():
    body, net = Network("body", "lowered"), Network("net", "lowered")
    x = net.add_input("x", parse_type("f32[1,4,3,3]"))
    y = net.add_input("y", parse_type("f32[1,4,3,3]"))
    a, b = (body.add("Transpose", body.add_input(t.name, t.type), perm=(0, 2, 3, 1)) for t in (x, y))
    body.mark_output(body.add("Mul", a, b))
    layer = net.add_layer("Fused", [x, y], {"composite": "Moves"}, regions={"body": body})
    with pytest.raises(Refused, match="several pixels"):
        runs(Moves(layer, {0: "nhwc", 1: "nhwc"}, "linear", pitches={0: 4, 1: 4}), [4, 4])


HEAD = """
in %x: f32[{n},16,{h},7]
const %w: f32[18,16,1,1] = seed(1)
const %s: i64[5] = [0, {anchors}]
const %r: i64[3] = [0, {rows}]
const %k: f32[] = [2.0]
const %n: i64[2] = [2, 4]
%c = Conv(%x, %w)
%a = Reshape(%c, %s)
%t = Transpose(%a, perm=(0,{perm}))
%b = Sigmoid(%t)
%p, %q = Split(%b, %n, axis=4)
%m = Mul(%p, %k)
%j = Concat(%m, %q, axis=4)
%y = Reshape(%j, %r)
out %y
"""


def network(n="N", h=9, perm="1,3,4,2", anchors="3, 6, 9, 7", rows="189, 6"):
    return parse_network(HEAD.format(n=n, h=h, perm=perm, anchors=anchors, rows=rows))


@OWN
@pytest.mark.parametrize("perm", ["1,3,4,2", "3,4,1,2"])
@pytest.mark.parametrize("samples", ["together", "parallel"])
def test_a_network_runs_its_head_in_one_launch_at_any_batch(samples, perm, monkeypatch):
    """Anchor-major and pixel-major rows; the fused launch is selected regardless of measured times."""
    net = network(perm=perm)
    monkeypatch.setattr("whet.builder.select.unfused_time.UnfusedTime.wins", False)
    shapes = tuple({"x": (n, 16, 9, 7)} for n in (1, 2, 5))
    plan = build(net, BuildConfig(profiles=(shapes,), timing_cache="", threads=2, samples=samples, optimization_level=2))
    assert "cpu/detector_heads" in {c.tactic for c in plan.choices.values()}
    context = Runtime().load(plan).create_context()
    for n in (1, 2, 3, 5):
        x = np.random.default_rng(n).standard_normal((n, 16, 9, 7)).astype(np.float32)
        (want,) = run_network(net, {"x": x}).values()
        (got,) = context.run({"x": x}).values()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def composites(net, **config):
    return {x.composite for x in lower_network(net, BuildConfig(**config))[0].layers}


@OWN
def test_heads_without_a_kernel_stay_unfused():
    assert composites(network()) == composites(network(n=1)) == {"HeadConvs"}
    assert "Moves" in composites(network(h="H", anchors="3, 6, -1, 7", rows="-1, 6"))
    assert "Moves" in composites(network(), backend="cuda")


@OWN
def test_heads_stay_unfused_if_16_bit_floats_are_computed(monkeypatch):
    assert composites(network(), precisions=("bf16",)) == ({"Moves", ""} if jit.has("avx512_bf16") else {"HeadConvs"})
    monkeypatch.setattr(jit, "has", lambda feature: True)
    assert "Moves" in composites(network(), precisions=("bf16",))
    assert composites(network()) == {"HeadConvs"}


@OWN
def test_refusals_give_reasons():
    def layer(*levels):
        return sample_layer("Fused", make_head_convs_sample(1, 1, 1, *levels))[1]

    assert "multiples of 4" in TACTIC.why_not(layer((18, 6, 6)))
    few = layer((16, 1, 3))
    assert "fewer pixels" in TACTIC.keeps_unfused(few, ())
    (signature,) = TACTIC.signatures(few, CPU)
    assert "fewer pixels" in TACTIC.refuses(few, signature, CPU)
    with pytest.raises(PlanRefused, match="does not fit"):
        TACTIC.plan(few, signature, (("blocks", 2), ("pixels", 6), ("tile", 24)), CPU)
    assert TACTIC.keeps_unfused(layer((16, 5, 5)), ()) is None


@OWN
def test_without_the_registers_there_is_no_such_layer(monkeypatch):
    monkeypatch.setattr(jit, "has", lambda feature: False)
    _, layer, _ = sample_layer("Fused", make_head_convs_sample(1, 1, 1, (16, 5, 5)))
    assert "registers" in TACTIC.why_not(layer)
    assert "registers" in TACTIC.keeps_unfused(layer, ())
