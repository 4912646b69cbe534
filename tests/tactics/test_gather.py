"""Gather, GatherElements and GatherND by a compiled kernel: computed and constant indices, threads, indices out of range."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_mapped_copy import require_exact

import whet
from whet.backends.cpu import CpuBackend
from whet.errors import BackendError
from whet.network import parse_network
from whet.ops import sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = JIT

RNG = np.random.default_rng(0)
CASES = [  # op, type and shape of the data, shape of the indices, entries that they may name, attributes
    ("Gather", "f32", (9, 5), (2, 3), 9, {}),
    ("Gather", "i64", (3, 9, 4), (7,), 9, {"axis": 1}),
    ("Gather", "u8", (3, 40), (), 40, {"axis": -1}),
    ("Gather", "f16", (300, 130), (40, 9), 300, {}),
    ("GatherElements", "f32", (3, 9, 4), (3, 5, 4), 9, {"axis": 1}),
    ("GatherElements", "bool", (6, 4), (11, 4), 6, {}),
    ("GatherElements", "f32", (60, 500), (60, 500), 500, {"axis": 1}),
    ("GatherND", "f32", (5, 5, 3), (2, 4, 2), 5, {}),
    ("GatherND", "i32", (2, 5, 5, 3), (2, 4, 2), 5, {"batch_dims": 1}),
    ("GatherND", "f32", (2, 3, 7, 2), (2, 3, 1), 7, {"batch_dims": 2}),
    ("GatherND", "f32", (4, 4, 4, 4), (6, 4), 4, {}),
]


def make_layer(op, dtype, shape, at, entries, attrs, constant):
    """The layer and its arrays; `constant`: the index of the constant operand, or None."""
    index = RNG.integers(-entries, entries, at).astype(np.int32 if dtype == "f32" and constant is None else np.int64)
    kind, text = ("i32" if index.dtype == np.int32 else "i64"), ",".join(map(str, shape))
    places = index if constant == 1 else f"{kind}[{','.join(map(str, at))}]"
    _, layer, arrays = sample_layer(op, Sample([f"{'const ' * (constant == 0)}{dtype}[{text}]", places], attrs))
    return layer, [arrays[0], index]


@pytest.mark.parametrize("constant", [None, 0, 1], ids=["computed", "table", "places"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def test_rows_are_the_references(case, threads, constant, monkeypatch):
    layer, arrays = make_layer(*case, constant)
    require_exact("cpu/gather", layer, arrays, threads, monkeypatch)


def test_indices_that_cover_a_part_of_the_data_are_left_to_numpy():
    layer, _ = make_layer("GatherElements", "f32", (3, 9, 4), (2, 5, 4), 9, {"axis": 1}, None)
    machine, tactic = CpuBackend(threads=1), get_tactic("cpu/gather")
    assert tactic.refuses(layer, tactic.signatures(layer, machine)[0], machine) == "the indices cover a part of the data"


@pytest.mark.parametrize("rows", [3, 5000])
def test_an_index_out_of_range_stops_the_run_and_names_the_layer(rows):
    """Once; the next run with good indices is right again."""
    net = parse_network(f"in %ids: i64[{rows}]\nconst %table: f32[10,16] = seed(1)\n%e = Gather(%table, %ids) named words\n%y = Relu(%e)\nout %y\n")
    engine = whet.build(net, optimization_level=0, timing_cache="", threads=2)
    assert {c.tactic for c in engine.plan.choices.values() if "numpy" in c.tactic} == set()
    ids = RNG.integers(-10, 10, rows)
    want = engine(ids).copy()
    for bad in (10, -11, 2**40):
        wrong = ids.copy()
        wrong[-1] = bad
        with pytest.raises(BackendError, match=r"Gather 'words': an index is outside of the 10 entries of %table: f32\[10,16\].*token ids"):
            engine(wrong)
        np.testing.assert_array_equal(engine(ids), want)
