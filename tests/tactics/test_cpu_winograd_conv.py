"""Winograd convolutions: transforms, all forms of the kernel for all sizes and formats, epilogues, error bounds, special values, refusals."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_cpu_direct_conv import FOLLOWING, followed, text
from test_onednn_tactics import CPU, Listed, compute, place

from whet.backends.cpu import CpuBackend
from whet.network import compute_stored_shape, from_stored
from whet.ops import run_regions, sample_layer
from whet.tactics import Args, get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.conv import winograd_conv
from whet.tactics.cpu.conv._winograd_ir import Form, emit_winograd_ir
from whet.tactics.cpu.conv._winograd_transform import PAIRS, compute_matrices, count_tile_inputs, transform_weights
from whet.tactics.cpu.onednn import _api as dnn

NAME = "cpu/winograd_conv"
FORMS = [(("m", m), ("tiles", n), ("strips", s), ("split", split)) for m in PAIRS for n, s in ((5, 1), (40, 3)) for split in (0, 1)]
RAW_FORMS = [(("m", m), ("tiles", n), ("strips", 1), ("split", split), ("raw", 1)) for m in PAIRS for n, split in ((5, 0), (40, 1), (5, 2), (40, 2))]
MATRIX_FORMS = [(("m", m), ("tiles", n), ("strips", s), ("split", 3)) for m in PAIRS for n, s in ((5, 1), (40, 2), (400, 9))]
FORMS += [(("m", 2), ("tiles", 5), ("strips", 2), ("split", 2)), *RAW_FORMS, *MATRIX_FORMS]
#: About half of the forms, with each pair of values of `m`, `strips` and `split`.
SOME_FORMS = [f for f in FORMS if (list(PAIRS).index(dict(f)["m"]) + (dict(f)["strips"] > 1) + dict(f)["split"]) % 2 == 0]


def check(layer, arrays, threads, monkeypatch, forms=FORMS, bound=3e-6):
    """Every signature in every form against float64, with all threads."""
    with np.errstate(all="ignore"):
        (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    monkeypatch.setattr("test_onednn_tactics.CPU", CpuBackend(threads=threads))
    monkeypatch.setattr(winograd_conv.WinogradKernel, "serial_work", 0)
    tactic = get_tactic(NAME)
    assert tactic.why_not(layer) is None
    for signature in tactic.signatures(layer, CPU):
        assert tactic.refuses(layer, signature, CPU) is None
        assert tactic.configs(layer, signature, CPU)
        for config in forms:
            _, got, _ = compute(layer, arrays, tactic, signature, config)
            assert np.abs(got[0] - want).max() <= bound * np.abs(want).max(), (signature, config)


def convolution(shape, channels, pads=(1, 1, 1, 1), steps=("Relu",)):
    return sample_layer("Fused", followed(steps, text(*shape), text(channels, shape[1], 3, 3), pads=pads))[1:]


@pytest.mark.parametrize("m", PAIRS)
def test_transforms_give_the_convolution(m):
    """In float64 the error is only rounding: A ((G w) * (B x)) is the filter, and the weights' transform is G w G^T."""
    rng = np.random.default_rng(m)
    a, b, g = compute_matrices(m)
    w, x = rng.standard_normal((3, 3)), rng.standard_normal((count_tile_inputs(m), count_tile_inputs(m)))
    got = a @ ((g @ w @ g.T) * (b @ x @ b.T)) @ a.T
    want = [[(w * x[i : i + 3, j : j + 3]).sum() for j in range(m)] for i in range(m)]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    u = transform_weights(np.float32(w)[None, None], m)
    np.testing.assert_allclose(u[:, 0, 0].reshape(count_tile_inputs(m), count_tile_inputs(m)), g @ np.float32(w) @ g.T, rtol=1e-6, atol=1e-7)


@JIT
@pytest.mark.parametrize(("shape", "channels", "pads"), [
    ((1, 16, 12, 12), 32, (1, 1, 1, 1)), ((2, 19, 9, 17), 21, (1, 1, 1, 1)), ((3, 8, 5, 7), 70, (0, 2, 1, 0)), ((1, 3, 20, 6), 24, (1, 1, 1, 1)),
    ((1, 33, 3, 3), 5, (0, 0, 0, 0)), ((2, 1, 4, 31), 1, (2, 2, 2, 2)), ((1, 40, 1, 1), 17, (1, 1, 1, 1)), ((1, 17, 8, 8), 64, (0, 0, 0, 0)),
])  # fmt: skip
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_images_of_all_sizes(shape, channels, pads, threads, monkeypatch):
    """Tiles that extend past every border, partly filled vectors of input and output channels, tiles of several samples in one block."""
    check(*convolution(shape, channels, pads), threads, monkeypatch, FORMS if threads > 1 else SOME_FORMS)


@JIT
def test_random_geometries(monkeypatch):
    rng = np.random.default_rng(7)
    for _ in range(12):
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 50)), *(int(n) for n in rng.integers(2, 24, 2)))
        pads = tuple(int(n) for n in rng.integers(1, 3, 4))
        config = (("m", int(rng.choice(list(PAIRS)))), ("tiles", int(rng.integers(1, 30))), ("strips", int(rng.integers(1, 5))))
        forms = [(*config, ("split", split)) for split in (0, 1, 3)]
        forms.append((*config[:2], ("strips", 1), ("split", int(rng.integers(0, 3))), ("raw", 1)))
        check(*convolution(shape, int(rng.integers(1, 80)), pads), int(rng.integers(1, 4)), monkeypatch, forms)


@JIT
@pytest.mark.parametrize("steps", FOLLOWING)
@pytest.mark.parametrize("channels", [pytest.param(24, marks=pytest.mark.slow), 21])
def test_epilogues(steps, channels, monkeypatch):
    """SiLU, ReLU, a residual (possibly the input image, and in place), both or nothing, with and without a tail of channels."""
    layer, arrays = convolution((2, channels, 9, 10), channels, steps=steps)
    inplace = sum(len(s.inplace) for s in get_tactic(NAME).signatures(layer, CPU))
    assert inplace == (2 if "Add" in steps else 0)
    check(layer, arrays, 2, monkeypatch, SOME_FORMS)


@JIT
@pytest.mark.parametrize("m", PAIRS)
@pytest.mark.parametrize("raw", [0, 1])
@pytest.mark.parametrize(("channels", "size"), [(64, 16), (512, 8)])
def test_the_error_is_far_below_the_stated_bound(m, channels, size, raw):
    """A quarter of the bound for random values, and half of it where a constant image nearly cancels."""
    layer, arrays = convolution((1, channels, size, size), 32, steps=())
    tactic = get_tactic(NAME)
    signature, config = tactic.signatures(layer, CPU)[0], (("m", m), ("tiles", 12), ("strips", 1), ("split", 0), ("raw", raw))
    for kind, share in (("random", 0.25), ("constant", 0.5)):
        if kind == "constant":
            arrays[0] = np.full_like(arrays[0], 1.7)
        (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
        kernel, got, _ = compute(layer, arrays, tactic, signature, config)
        assert np.abs(got[0] - want).max() <= share * kernel.rtol * np.abs(want).max()
        assert np.linalg.norm(got[0] - want) <= share * kernel.rtol * np.linalg.norm(want)


@JIT
@pytest.mark.parametrize("config", FORMS)
@pytest.mark.parametrize("channels", [16, 13])
def test_nan_and_infinity_reach_their_windows_and_nothing_outside_their_tiles(config, channels):
    """NaN stays NaN through ReLU; results of tiles without special values are unchanged, padding and channel tails included."""
    layer, arrays = convolution((1, channels, 17, 16), 21)
    tactic, m = get_tactic(NAME), dict(config)["m"]
    x, y = 6, 9
    clean = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[0], config)[1][0]
    for value in (np.nan, np.inf):
        arrays[0][0, channels - 1, y, x] = value
        with np.errstate(all="ignore"):
            (want,) = run_regions(layer, arrays)
        for signature in tactic.signatures(layer, CPU):
            _, (got,), _ = compute(layer, arrays, tactic, signature, config)
            touched = np.zeros(got.shape, bool)
            for i, j in np.ndindex(got.shape[2:]):
                top, left = i // m * m - 1, j // m * m - 1
                touched[0, :, i, j] = top <= y < top + count_tile_inputs(m) and left <= x < left + count_tile_inputs(m)
            np.testing.assert_array_equal(got[~touched], clean[~touched])
            assert not np.isnan(want[~touched]).any()
            if np.isnan(value):
                assert np.isnan(want[touched]).any()
                assert np.isnan(got[np.isnan(want)]).all()


@JIT
@pytest.mark.parametrize(("split", "raw", "launches"), [(0, 0, 1), (1, 0, 2), (3, 0, 6), (0, 1, 1), (2, 1, 2)])
def test_users_own_buffers(split, raw, launches):
    """Image, residual and result are bound to other buffers after the launches were recorded."""
    layer, arrays = convolution((1, 16, 5, 12), 16, steps=("Relu", "Add"))
    tactic = get_tactic(NAME)
    signature = tactic.signatures(layer, CPU)[-1]
    kernel = tactic.plan(layer, signature, (("m", 4), ("tiles", 4), ("strips", 1), ("split", split), ("raw", raw)), CPU)
    packed, stream, scratch = [p.make() for p in kernel.packed], Listed(), dnn.allocate_aligned(kernel.scratch)
    nowhere = [dnn.allocate_aligned(max(n, 64)) for n in (*kernel.inputs, *kernel.outputs)]
    *at, result = [b.ctypes.data for b in nowhere]
    kernel.enqueue(Args(tuple(at), (result,), tuple(p.ctypes.data for p in packed), scratch.ctypes.data), stream)
    out, buffers = dnn.allocate_aligned(kernel.outputs[0]), {i: place(arrays[i], o) for i, o in enumerate(signature.inputs) if o is not None}
    assert len(stream.calls) == launches
    for call in stream.calls:
        for i, b in buffers.items():
            call.set_address("input", i, b.ctypes.data)
        call.set_address("output", 0, out.ctypes.data)
        call.run()
    (want,) = run_regions(layer, arrays)
    format = signature.outputs[0].format
    got = from_stored(out.view(np.float32).reshape(compute_stored_shape(format, want.shape)), format, want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@JIT
@pytest.mark.parametrize(("lanes", "rows"), [(16, 14), (8, 6)])
def test_vectors_of_other_cpus(lanes, rows, monkeypatch):
    """The kernel for 16 floats per vector gives the same results where LLVM splits its vectors, and that for 8 where larger ones fit."""
    monkeypatch.setattr(winograd_conv, "count_lanes", lambda: lanes)
    monkeypatch.setattr(winograd_conv, "get_row_limit", lambda: rows)
    config = ("m", 4), ("tiles", 14)
    forms = [(*config, ("strips", 2), ("split", s)) for s in (0, 1, 3)] + [(*config, ("strips", 1), ("split", s), ("raw", 1)) for s in (0, 2)]
    check(*convolution((1, 35, 9, 11), 50), 2, monkeypatch, forms)


@JIT
def test_code_depends_on_the_form_and_not_on_sizes():
    """Layers of other sizes share the compiled code."""
    form = Form(2, 8, (5, 6), (0, 0), ("Relu",), False, False)
    assert emit_winograd_ir(form) is emit_winograd_ir(Form(2, 8, (5, 6), (0, 0), ("Relu",), False, False))
    assert jit.load_function(emit_winograd_ir(form), "winograd")


@JIT
def test_configs_leave_out_forms_that_cannot_win():
    """F(2, 3) multiplies more where tiles fit the image; all weights of few channels fit L2; weights of many channels are read once, and raw."""
    tactic = get_tactic(NAME)

    def configs(shape, channels):
        layer = convolution(shape, channels)[0]
        return [dict(c) for c in tactic.configs(layer, tactic.signatures(layer, CPU)[0], CPU)]

    assert {(c["m"], c["split"]) for c in configs((1, 64, 56, 56), 64)} == {(4, 0)}
    assert {c["split"] for c in configs((1, 512, 7, 7), 512) if "raw" not in c} == {0, 1, 3}
    assert {c["m"] for c in configs((1, 512, 7, 7), 512) if c["split"] == 3} == {2}, "F(4, 3) has fewer tiles than are multiplied at once"
    for shape in ((1, 512, 7, 7), (8, 512, 7, 7)):
        assert configs(shape, 512)[0]["split"] == 3, "a build times only the first configs of a layer with many options"
    assert not any(c["split"] == 3 for c in configs((8, 128, 28, 28), 128))
    assert {c["m"] for c in configs((1, 512, 7, 7), 512) if "raw" in c} == {2, 4}
    assert "raw" in configs((1, 512, 7, 7), 512)[1], "a build times only the first configs of a layer with many options"
    assert not any("raw" in c for c in configs((1, 64, 56, 56), 64))
    assert {c["m"] for c in configs((1, 256, 14, 14), 256)} == {2, 4}


@pytest.mark.parametrize(("strips", "m", "threads", "expected"), [(16, 4, 1, 16), (16, 4, 2, 16), (16, 4, 16, 6), (2, 2, 3, 1), (3, 2, 1000, 1)])
def test_items_of_matrices_are_divided_nearly_evenly(strips, m, threads, expected):
    """All strips of a matrix are one item where few threads divide the matrices evenly."""
    chosen = winograd_conv.choose_matrix_strips(strips, m, threads)
    assert chosen == expected
    items = count_tile_inputs(m) ** 2 * -(-strips // chosen)
    assert chosen == 1 or -(-items // threads) * threads <= 1.1 * items


@JIT
@pytest.mark.parametrize(("change", "why"), [
    ({"strides": (2, 2)}, "no strides"), ({"dilations": (2, 2)}, "no dilations"), ({"pads": (3, 1, 1, 1)}, "pads smaller"),
    ({"w": text(32, 16, 3, 5)}, "3x3"), ({"w": text(32, 1, 3, 3), "group": 16}, "one group"),
])  # fmt: skip
def test_convolutions_that_are_refused(change, why):
    arguments = {"x": text(1, 16, 9, 9), "w": text(32, 16, 3, 3), "pads": (1, 1, 1, 1), **change}
    layer = sample_layer("Fused", followed((), arguments.pop("x"), arguments.pop("w"), **arguments))[1]
    assert why in get_tactic(NAME).why_not(layer)


@JIT
@pytest.mark.parametrize("change", [{"m": 3}, {"tiles": 0}, {"strips": 0}, {"split": 4}, {"raw": 2}, {"raw": 1, "strips": 2}, {"raw": 1, "split": 3}])
def test_configs_of_no_form_are_refused(change):
    layer, _ = convolution((1, 16, 9, 9), 16)
    tactic = get_tactic(NAME)
    config = {"m": 4, "tiles": 12, "strips": 1, "split": 0, **change}
    with pytest.raises(PlanRefused, match="no form of the kernel"):
        tactic.plan(layer, tactic.signatures(layer, CPU)[0], tuple(config.items()), CPU)
