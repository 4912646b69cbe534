"""Expand, Slice and Transpose by one copy with strides: types, negative steps, constants, threads, and what it leaves to others."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.network import parse_network
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = JIT

CASES = [
    ("Expand", "f32", (3, 1, 5), {"shape": (2, 3, 4, 5)}),
    ("Expand", "i64", (1, 1), {"shape": (7, 1)}),
    ("Expand", "bool", (4, 1, 1, 3), {"shape": (4, 2, 6, 3)}),
    ("Expand", "f32", (40, 1, 100), {"shape": (40, 30, 100)}),
    ("Slice", "i64", (2, 9, 5), {"starts": (1,), "ends": (8,), "axes": (1,), "steps": (3,)}),
    ("Slice", "i64", (9, 6), {"starts": (-1, 4), "ends": (-100, 1), "axes": (0, 1), "steps": (-2, -1)}),
    ("Slice", "f16", (4, 5, 33), {"starts": (1, 0), "ends": (3, 17), "axes": (0, 2)}),
    ("Slice", "bool", (3, 8), {"starts": (2,), "ends": (7,), "axes": (1,)}),
    ("Transpose", "i64", (2, 3, 4, 5), {"perm": (0, 3, 1, 2)}),
    ("Transpose", "f64", (5, 7), {}),
]


def require_exact(name, layer, arrays, threads, monkeypatch):
    """The only signature of the tactic `name` gives the reference's values exactly."""
    machine, tactic = CpuBackend(threads=threads), get_tactic(name)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (want,) = run_layer(layer, arrays)
    (signature,) = tactic.signatures(layer, machine)
    assert tactic.refuses(layer, signature, machine) is None
    _, (got,), _ = compute(layer, arrays, tactic, signature, ())
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def test_copies_are_the_references(case, threads, constant, monkeypatch):
    op, dtype, shape, attrs = case
    _, layer, arrays = sample_layer(op, Sample([f"{'const ' * constant}{dtype}[{','.join(map(str, shape))}]"], attrs))
    require_exact("cpu/strided_read", layer, arrays, threads, monkeypatch)


def test_what_it_leaves_to_others():
    machine, tactic = CpuBackend(threads=1), get_tactic("cpu/strided_read")
    net = parse_network("in %x: f32[2,9]\nin %l: i64[2,1,2,1,2,1,2,1,2]\n%a = Slice(%x, starts=(1,), ends=(4,), axes=(1,))\n%b = Transpose(%x)\n"
                        "%c = Expand(%l, shape=(2, 3, 2, 3, 2, 3, 2, 3, 2))\nout %a\nout %b\nout %c\n")  # fmt: skip
    a, b, c = net.layers
    assert tactic.why_not(a) == tactic.why_not(b) == "oneDNN moves f32"
    assert tactic.refuses(c, tactic.signatures(c, machine)[0], machine) == "more than 4 axes remain after adjacent ones are merged"
