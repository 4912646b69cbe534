"""Quotients and remainders of integers in the elementwise kernel: signs, and the divisors that trap in the CPU's instruction."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import CPU, compute

from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = JIT


@pytest.mark.parametrize("dtype", ["i64", "i32", "i8"])
@pytest.mark.parametrize(("op", "attrs"), [("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1})])
def test_every_pair_of_signs_zero_and_the_lowest_number(op, attrs, dtype):
    lowest = np.iinfo(f"int{dtype[1:]}").min
    values = np.array([lowest, lowest + 1, -7, -1, 0, 1, 3, 8, -lowest - 1], f"int{dtype[1:]}")
    a, b = (x.reshape(-1).copy() for x in np.meshgrid(values, values))
    _, layer, _ = sample_layer(op, Sample([f"{dtype}[81]", f"{dtype}[81]"], attrs))
    tactic = get_tactic("cpu/elementwise")
    for signature in tactic.signatures(layer, CPU):
        _, (got,), _ = compute(layer, [a, b], tactic, signature, ())
        with np.errstate(all="ignore"):
            (want,) = run_layer(layer, [a, b])
        np.testing.assert_array_equal(got, want)
