"""Attention kernels in f32 and by AMX tiles: all forms and sizes, several threads, hidden rows, NaN, other addresses."""

import numpy as np
import pytest
from test_onednn_tactics import Listed, compute, place

from whet.backends.cpu import CpuBackend
from whet.composites.attention import make_attention_sample
from whet.ops import run_regions, sample_layer
from whet.tactics import Args, get_tactic
from whet.tactics._attention import match_attention
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.attention._attention_kernel import AttentionKernel
from whet.tactics.cpu.onednn import _api as dnn

NAMES = ("cpu/attention", "cpu/amx_attention")
pytestmark = pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))

FORMS = {
    "one query, one head": make_attention_sample(1, 1, 1, 16, 16, scale="", mask=()),
    "two images, a mask each": make_attention_sample(2, 3, 24, 48, 64, mask=(2, 1, 1, 48)),
    "heads within rows, a mask of rows": make_attention_sample(1, 2, 33, 32, 64, layout="rows", scale="Mul", mask=(1, 1, 33, 32)),
    "stacked, a constant mask of heads": make_attention_sample(4, 3, 48, 48, 32, layout="stacked", mask=(1, 3, 48, 48), constant=True),
    "a mask of keys": make_attention_sample(2, 4, 40, 80, 32, layout="rows", mask=(80,)),
    "a mask of queries": make_attention_sample(1, 2, 7, 40, 48, layout="rows", mask=(1, 1, 7, 1)),
    "any number of keys": make_attention_sample(2, 3, 24, 50, 64, layout="rows", mask=(2, 1, 1, 50)),
    "fewer keys than lanes": make_attention_sample(2, 3, 24, 7, 64, layout="rows"),
    "one key": make_attention_sample(2, 2, 5, 1, 32, layout="rows"),
    "a guard for hidden rows": make_attention_sample(2, 3, 24, 37, 64, layout="rows", guard="hidden"),
    "a guard for rows of NaN": make_attention_sample(2, 3, 24, 37, 64, layout="rows", guard="nan"),
    "heads that share k and v": make_attention_sample(2, 6, 20, 48, 64, layout="rows", group=3, mask=(2, 1, 1, 48)),
    "a mask per window": make_attention_sample(6, 2, 16, 16, 32, layout="stacked", mask=(3, 2, 16, 16), constant=True, repeats=2),
    "several groups of tiles": make_attention_sample(1, 8, 256, 512, 16, layout="rows", mask=(1, 1, 1, 512)),
    "one query": make_attention_sample(2, 2, 1, 50, 64, layout="rows", mask=(2, 1, 1, 50)),
    "few queries": make_attention_sample(1, 4, 3, 40, 24, layout="rows", group=2, causal=-np.inf),
    "few queries, keys as columns": make_attention_sample(1, 2, 3, 33, 22),
    "one tile of queries": make_attention_sample(1, 2, 7, 40, 48, layout="rows", value_size=52),
    "one query of many keys": make_attention_sample(1, 1, 1, 5000, 16, layout="rows"),
    "keys after each query are hidden": make_attention_sample(1, 2, 100, 300, 32, layout="rows", causal=-np.inf),
    "square and causal": make_attention_sample(1, 2, 130, 130, 40, layout="rows", causal=-np.inf, cap=3.0),
    "two elements": make_attention_sample(1, 1, 5, 6, 2, layout="rows"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_layers_on_all_threads(monkeypatch):
    monkeypatch.setattr(AttentionKernel, "serial_work", 0)


def get_usable_tactic(name):
    tactic = get_tactic(name)
    if reason := tactic.unavailable():
        pytest.skip(reason)
    return tactic


def run(name, layer, arrays, monkeypatch, threads=2):
    """(kernel, result, inputs as they were rounded) of the only signature and config."""
    tactic, machine = get_usable_tactic(name), CpuBackend(threads=threads)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    assert tactic.why_not(layer) is None
    (signature,) = tactic.signatures(layer, machine)
    assert tactic.refuses(layer, signature, machine) is None
    kernel, (got,), fed = compute(layer, arrays, tactic, signature, ())
    return kernel, got, fed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_all_forms(name, form, monkeypatch):
    """Within the stated error of float64: q, k and v are rounded for tiles, f32 masks are not."""
    _, layer, arrays = sample_layer("Fused", FORMS[form])
    heads = match_attention(layer)
    for threads in (1, 3):
        kernel, got, fed = run(name, layer, arrays, monkeypatch, threads)
        rounded = {v.place for v in (heads.q, heads.k, heads.v)}
        (want,) = run_regions(layer, [f if i in rounded else a for i, (f, a) in enumerate(zip(fed, arrays, strict=True))], widen=True)
        assert np.abs(got - want).max() <= kernel.rtol * np.abs(want).max(), (kernel.implementation, threads)


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_minus_infinity_and_nan(name, monkeypatch):
    """Masked keys contribute nothing; a row without any key left, or with NaN or plus infinity among its scores, is NaN."""
    _, layer, arrays = sample_layer("Fused", make_attention_sample(1, 2, 8, 32, 16, mask=(1, 1, 8, 32), scale=""))
    mask = arrays[-1]
    mask[...] = 0
    mask[..., 0, 5:] = -np.inf
    mask[..., 1, :] = -np.inf
    mask[..., 2, 3] = np.nan
    mask[..., 3, 4] = np.inf
    mask[..., 4, 1:] = -200.0
    kernel, got, fed = run(name, layer, arrays, monkeypatch)
    with np.errstate(all="ignore"):
        (want,) = run_regions(layer, fed)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want[:, :, 1:4]).all()
    np.testing.assert_allclose(got, want, rtol=kernel.rtol, atol=kernel.rtol / 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 20])
def test_nan_and_infinity_reach_the_results_that_read_them(name, rows, monkeypatch):
    """In a query, a key, and a value: also next to the keys and queries with which tiles are filled."""
    _, layer, arrays = sample_layer("Fused", make_attention_sample(1, 2, rows, 35, 24, layout="rows"))
    for place_of, index in ((0, (0, rows - 1, 0, 3)), (1, (0, 34, 1, 2)), (2, (0, 34, 0, 23)), (2, (0, 0, 1, 0))):
        for value in (np.nan, np.inf):
            odd = [a.copy() for a in arrays]
            odd[place_of][index] = value
            _, got, fed = run(name, layer, odd, monkeypatch)
            with np.errstate(all="ignore"):
                (want,) = run_regions(layer, fed)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
            assert np.isinf(value) or np.isnan(want).any()


@pytest.mark.parametrize("name", NAMES)
def test_operands_at_other_addresses(name, monkeypatch):
    """After rebinding, the launch reads and writes the new buffers."""
    _, layer, arrays = sample_layer("Fused", FORMS["two images, a mask each"])
    tactic, machine = get_usable_tactic(name), CpuBackend(threads=2)
    _, same, _ = run(name, layer, arrays, monkeypatch)
    (signature,) = tactic.signatures(layer, machine)
    kernel = tactic.plan(layer, signature, (), machine)
    packed = [p.make() for p in kernel.packed]
    scratch, nowhere = dnn.allocate_aligned(kernel.scratch), [dnn.allocate_aligned(max(n, 64)) for n in (*kernel.inputs, *kernel.outputs)]
    stream = Listed()
    at = [b.ctypes.data for b in nowhere]
    kernel.enqueue(Args(tuple(at[:-1]), (at[-1],), tuple(p.ctypes.data for p in packed), scratch.ctypes.data), stream)
    own = [place(a, o) if o is not None else None for a, o in zip(arrays, signature.inputs, strict=True)]
    out = dnn.allocate_aligned(kernel.outputs[0])
    for call in stream.calls:
        for i, b in enumerate(own):
            if b is not None:
                call.set_address("input", i, b.ctypes.data)
        call.set_address("output", 0, out.ctypes.data)
        call.run()
    np.testing.assert_array_equal(out.view(signature.outputs[0].dtype.numpy).reshape(same.shape).astype(np.float32), same)


def test_other_layers_are_refused():
    odd = sample_layer("Fused", make_attention_sample(1, 1, 20, 30, 21, layout="rows"))[1]
    assert get_tactic("cpu/attention").why_not(odd) is None
    assert "even number of elements" in get_tactic("cpu/amx_attention").why_not(odd)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_that_skip_hidden_keys_are_not_strict(name):
    """NaN in a hidden key makes the op's results NaN; a kernel that does not read it loses them, and --strictNumerics leaves it out."""
    tactic = get_tactic(name)
    reasons = {key: tactic.not_strict(sample_layer("Fused", FORMS[key])[1], "") for key in ("square and causal", "a mask per window")}
    assert reasons["a mask per window"] is None
    assert "may lose NaN" in reasons["square and causal"]
