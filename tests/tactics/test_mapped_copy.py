"""Layers that move elements, by one copy with tables of indices: ops, types, formats, constants, threads, and what it leaves to others."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.network import parse_network
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic
from whet.tactics.cpu.generic.mapped_copy import merge_terms

pytestmark = JIT

CASES = [
    ("Expand", "f32", (3, 1, 5), {"shape": (2, 3, 4, 5)}),
    ("Expand", "i64", (1, 1), {"shape": (7, 1)}),
    ("Expand", "i64", (), {"shape": (7, 3)}),
    ("Expand", "bool", (4, 1, 1, 3), {"shape": (4, 2, 6, 3)}),
    ("Expand", "f32", (40, 1, 100), {"shape": (40, 30, 100)}),
    ("Expand", "i64", (2, 1, 2, 1, 2, 1, 2, 1, 2), {"shape": (2, 3, 2, 3, 2, 3, 2, 3, 2)}),
    ("Slice", "i64", (2, 9, 5), {"starts": (1,), "ends": (8,), "axes": (1,), "steps": (3,)}),
    ("Slice", "i64", (9, 6), {"starts": (-1, 4), "ends": (-100, 1), "axes": (0, 1), "steps": (-2, -1)}),
    ("Slice", "i64", (40, 6), {"starts": (-1, 4), "ends": (-100, 1), "axes": (0, 1), "steps": (-2, -1)}),
    ("Slice", "f16", (4, 5, 33), {"starts": (1, 0), "ends": (3, 17), "axes": (0, 2)}),
    ("Slice", "bool", (3, 8), {"starts": (2,), "ends": (7,), "axes": (1,)}),
    ("Transpose", "i64", (2, 3, 4, 5), {"perm": (0, 3, 1, 2)}),
    ("Transpose", "i64", (3, 100, 4), {"perm": (0, 2, 1)}),
    ("Transpose", "i64", (4, 100), {"perm": (1, 0)}),
    ("Transpose", "f64", (5, 7), {}),
    ("DepthToSpace", "f32", (2, 12, 3, 40), {"blocksize": 2, "mode": "DCR"}),
    ("DepthToSpace", "f32", (2, 12, 3, 40), {"blocksize": 2, "mode": "CRD"}),
    ("DepthToSpace", "u8", (1, 48, 5, 70), {"blocksize": 4, "mode": "CRD"}),
    ("DepthToSpace", "f32", (1, 36, 2, 7), {"blocksize": 3, "mode": "DCR"}),
    ("SpaceToDepth", "f32", (2, 3, 6, 40), {"blocksize": 2, "mode": "DCR"}),
    ("SpaceToDepth", "i64", (2, 3, 6, 9), {"blocksize": 3, "mode": "CRD"}),
    ("Tile", "f32", (2, 3, 4), {"repeats": (1, 2, 3)}),
    ("Tile", "bool", (1, 5, 1), {"repeats": (3, 1, 4)}),
    ("Pad", "f32", (2, 3, 8, 9), {"pads": (0, 0, 2, 1, 0, 0, 1, 3), "mode": "constant"}),
    ("Pad", "f32", (2, 3, 8, 9), {"pads": (0, 0, 2, 1, 0, 0, 1, 3), "mode": "reflect"}),
    ("Pad", "i64", (3, 8), {"pads": (2, 1, 0, 4), "mode": "edge"}),
    ("Pad", "f16", (3, 8), {"pads": (2, 1, 0, 4), "mode": "wrap"}),
    ("Pad", "f32", (1, 8, 32), {"pads": (0, 1, 0, 0, -1, 0), "mode": "constant"}),
    ("Pad", "f32", (3, 50), {"pads": (-1, 3, 2, -7), "mode": "constant"}),
    ("Pad", "f32", (4, 50, 3), {"pads": (1, 0, 0, 2, 0, -1), "mode": "constant"}),
    ("Pad", "bool", (400, 5), {"pads": (70, 0, 3, 60), "mode": "constant"}),
]


def require_exact(name, layer, arrays, threads, monkeypatch):
    """Every signature of the tactic `name` gives the reference's values exactly."""
    machine, tactic = CpuBackend(threads=threads), get_tactic(name)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    want = run_layer(layer, arrays)
    signatures = tactic.signatures(layer, machine)
    assert signatures
    monkeypatch.setattr(type(tactic.plan(layer, signatures[0], (), machine)), "serial_work", 0)
    for signature in signatures:
        assert tactic.refuses(layer, signature, machine) is None
        _, got, _ = compute(layer, arrays, tactic, signature, ())
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def test_copies_are_the_references(case, threads, constant, monkeypatch):
    op, dtype, shape, attrs = case
    _, layer, arrays = sample_layer(op, Sample([f"{'const ' * constant}{dtype}[{','.join(map(str, shape))}]"], attrs))
    require_exact("cpu/mapped_copy", layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("value", [np.array(7, np.int64), np.array([-2], np.int64), "i64[]"], ids=["scalar", "vector", "computed"])
def test_pad_with_a_value(value, monkeypatch):
    _, layer, arrays = sample_layer("Pad", Sample(["i64[3,40]", None, value], {"pads": (1, 2, 0, 3)}))
    require_exact("cpu/mapped_copy", layer, arrays, 2, monkeypatch)


def test_images_are_moved_in_channels_last_too():
    tactic, machine = get_tactic("cpu/mapped_copy"), CpuBackend(threads=1)
    _, layer, _ = sample_layer("DepthToSpace", Sample(["f32[1,8,4,4]"], {"blocksize": 2}))
    assert [s.outputs[0].format for s in tactic.signatures(layer, machine)] == ["linear", "nhwc"]
    _, layer, _ = sample_layer("DepthToSpace", Sample(["const f32[1,8,4,4]"], {"blocksize": 2}))
    assert [s.outputs[0].format for s in tactic.signatures(layer, machine)] == ["linear"]


def test_neighbouring_axes_are_merged():
    first, second, step = np.arange(3) * 20, np.arange(5) * 4, np.arange(2)
    assert [t.tolist() for t in merge_terms([first, np.array([7]), second, step])] == [list(range(7, 67, 4)), [0, 1]]
    assert [t.tolist() for t in merge_terms([np.array([3]), np.array([4])])] == [[7]]


def test_what_it_leaves_to_others():
    tactic = get_tactic("cpu/mapped_copy")
    net = parse_network("in %x: f32[2,9]\n%a = Slice(%x, starts=(1,), ends=(4,), axes=(1,))\n%b = Transpose(%x)\nout %a\nout %b\n")
    a, b = net.layers
    assert tactic.why_not(a) == tactic.why_not(b) == "oneDNN moves f32"
