"""Softmax and LogSoftmax by whet's CPU kernels along any axis: lengths that fill no vector, in place, numbers that are not finite."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import CPU, compute

from whet.backends.cpu import CpuBackend
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = JIT


def check(op, x, axis, threads=1):
    """Both tactics together take each format once, and agree with the op in float64."""
    _, layer, _ = sample_layer(op, Sample([f"f32[{','.join(map(str, x.shape))}]"], {"axis": axis}))
    with np.errstate(all="ignore"):
        (want,) = run_layer(layer, [x.astype(np.float64)])
    formats = []
    for name in ("cpu/softmax_rows", "cpu/softmax_columns"):
        tactic = get_tactic(name)
        for signature in tactic.signatures(layer, CPU):
            assert tactic.refuses(layer, signature, CPU) is None
            _, (got,), _ = compute(layer, [x.copy()], tactic, signature, ())
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            finite = np.isfinite(want)
            np.testing.assert_array_equal(got[~finite], want[~finite].astype(np.float32))
            np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5, atol=2e-6 * np.abs(want[finite]).max(initial=1e-30))
            formats.append((signature.inputs[0].format, bool(signature.inplace)))
    assert len(formats) == len(set(formats)) >= 2


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("shape", "axis"), [
    ((5,), 0), ((1, 1), 1), ((3, 10), -1), ((2, 3, 16), 2), ((7, 1000), 1), ((2, 33, 5), 1), ((2, 40, 3, 4), 1), ((2, 3, 4, 35), 3),
    ((1, 9, 6, 5), 2),
])  # fmt: skip
def test_all_axes(op, shape, axis, monkeypatch):
    monkeypatch.setattr("test_onednn_tactics.CPU", CpuBackend(threads=2))
    check(op, (np.random.default_rng(1).standard_normal(shape) * 8).astype(np.float32), axis)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_that_are_not_finite(op, axis):
    """NaN and infinities in a row or column leave the others unchanged; large numbers do not overflow."""
    x = np.random.default_rng(2).standard_normal((21, 37)).astype(np.float32)
    x[2, 36], x[5, 0], x[9, 9], x[:, 30], x[12] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
    x[15], x[16, 3], x[17] = 1e38, 1e38, -1e38
    check(op, x, axis)
