"""Compiled loops along an axis: sums so far, extremes, sorted entries, scattered updates, joined rows, integer reductions, one-hot vectors."""

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
from whet.tactics.cpu.generic._lines_ir import BLOCK, count_line_items

pytestmark = [JIT, pytest.mark.parametrize("threads", [1, 2])]

SHAPES = [((5,), 0), ((3, 17), 1), ((3, 40), 0), ((2, 7, 70), 1), ((300, 5), -1), ((1, 33, 1), 1)]
NAN = np.array([[1, np.nan, 3, np.nan], [np.nan, 2, 2, 1], [0.0, -0.0, np.inf, -np.inf], [-np.inf, np.nan, np.nan, 7]], np.float32)


def make_layer(op, spec, attrs, *others):
    """A layer of one input with few different values, so that many are equal."""
    _, layer, arrays = sample_layer(op, Sample([spec, *others], attrs))
    arrays[0] = (np.random.default_rng(1).integers(-9, 9, arrays[0].shape) / 2).astype(arrays[0].dtype)
    return layer, arrays


def text(dtype, shape):
    return f"{dtype}[{','.join(map(str, shape))}]"


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "i8"])
@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
def test_running_sums(op, dtype, case, threads, monkeypatch):
    shape, axis = case
    for exclusive, reverse in ((0, 0), (1, 0), (0, 1), (1, 1)):
        layer, arrays = make_layer(op, text(dtype, shape), {"exclusive": exclusive, "reverse": reverse}, np.array(axis))
        require_exact("cpu/running", layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "i8"])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_the_first_or_last_of_equal_extremes(op, dtype, case, threads, monkeypatch):
    shape, axis = case
    for last in (0, 1):
        layer, arrays = make_layer(op, text(dtype, shape), {"axis": axis, "select_last_index": last, "keepdims": last})
        require_exact("cpu/arg_extreme", layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_a_nan_is_the_extreme(op, axis, threads, monkeypatch):
    """In lines of neighbours that fill vectors too."""
    for x in (NAN, np.tile(NAN, (4, 10)), np.ascontiguousarray(np.tile(NAN, (4, 10)).T)):
        for last in (0, 1):
            layer, _ = make_layer(op, text("f32", x.shape), {"axis": axis, "select_last_index": last})
            require_exact("cpu/arg_extreme", layer, [x], threads, monkeypatch)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "i8"])
@pytest.mark.parametrize("largest", [0, 1])
def test_sorted_entries(largest, dtype, case, threads, monkeypatch):
    """One, some and all of them; equal ones in the order of their indices."""
    shape, axis = case
    for k in {1, 2, shape[axis] // 2 + 1, shape[axis]}:
        if k <= shape[axis]:
            layer, arrays = make_layer("TopK", text(dtype, shape), {"axis": axis, "largest": largest}, np.array([k]))
            require_exact("cpu/top_k", layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("largest", [0, 1])
def test_sorted_extreme_values(largest, threads, monkeypatch):
    for x in (NAN, np.float32([[3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0, np.inf, -np.inf]])):
        layer, _ = make_layer("TopK", text("f32", x.shape), {"largest": largest}, np.array([x.shape[1]]))
        require_exact("cpu/top_k", layer, [x, np.array([x.shape[1]])], threads, monkeypatch)
        layer, _ = make_layer("TopK", text("f64", x.shape), {"largest": largest}, np.array([x.shape[1]]))
        require_exact("cpu/top_k", layer, [x.astype(np.float64), np.array([x.shape[1]])], threads, monkeypatch)
    x = np.array([[2**40, 2**40 + 1, -(2**62), 2**62, 5]])
    layer, _ = make_layer("TopK", text("i64", x.shape), {"largest": largest}, np.array([4]))
    require_exact("cpu/top_k", layer, [x, np.array([4])], threads, monkeypatch)
    x = np.random.default_rng(0).standard_normal((2, 3000)).astype(np.float32)
    layer, _ = make_layer("TopK", text("f32", x.shape), {"largest": largest}, np.array([700]))
    require_exact("cpu/top_k", layer, [x, np.array([700])], threads, monkeypatch)


SCATTERS = [  # op, shape of the data, of the indices, entries that they may name, attributes
    ("ScatterND", (5, 7), (4, 2), (5, 7), {}),
    ("ScatterND", (5, 70), (9, 1), (5,), {}),
    ("ScatterND", (3, 4, 5, 2), (2, 3, 3), (3, 4, 5), {}),
    ("ScatterElements", (9, 5), (6, 4), 9, {"axis": 0}),
    ("ScatterElements", (3, 9, 4), (2, 20, 3), 9, {"axis": 1}),
    ("ScatterElements", (40,), (100,), 40, {"axis": -1}),
    ("ScatterElements", (2, 3, 2, 9), (2, 2, 1, 30), 9, {"axis": 3}),
]


def make_scatter(case, dtype, reduction, indices=np.int64):
    op, shape, at, entries, attrs = case
    rng = np.random.default_rng(2)
    sizes = np.array(entries)
    places = rng.integers(-sizes, sizes, at).astype(indices)
    updates = (*at[:-1], *shape[at[-1] :]) if op == "ScatterND" else at
    kind = "i32" if indices == np.int32 else "i64"
    sample = Sample([text(dtype, shape), text(kind, at), text(dtype, updates)], {**attrs, "reduction": reduction})
    _, layer, arrays = sample_layer(op, sample)
    for i in (0, 2):
        arrays[i] = (rng.integers(-9, 9, arrays[i].shape) / 2).astype(arrays[i].dtype)
    return layer, [arrays[0], places, arrays[2]]


@pytest.mark.parametrize("case", SCATTERS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_updates_in_order(case, reduction, threads, monkeypatch):
    """The last of several updates of an element counts; halves are added exactly. In place and into a copy."""
    for dtype, indices in (("f32", np.int32), ("i64", np.int64), ("i8", np.int64)):
        layer, arrays = make_scatter(case, dtype, reduction, indices)
        if reduction != "mul" or dtype != "f32":
            require_exact("cpu/scatter", layer, arrays, threads, monkeypatch)
    assert len(get_tactic("cpu/scatter").signatures(layer, CpuBackend(threads=1))) == 2


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_a_nan_stays_in_extremes(reduction, op, threads, monkeypatch):
    at = "4,1" if op == "ScatterND" else "4,4"
    _, layer, arrays = sample_layer(op, Sample(["f32[4,4]", f"i64[{at}]", "f32[4,4]"], {"reduction": reduction}))
    places = np.broadcast_to(np.arange(4)[:, None], arrays[1].shape).copy()
    for x, updates in ((NAN, np.ones_like(NAN)), (np.ones_like(NAN), NAN)):
        require_exact("cpu/scatter", layer, [x, places, updates], threads, monkeypatch)


def test_other_types_are_only_moved(threads, monkeypatch):
    layer, arrays = make_scatter(SCATTERS[0], "bool", "none")
    require_exact("cpu/scatter", layer, arrays, threads, monkeypatch)
    layer, arrays = make_scatter(SCATTERS[0], "f16", "add")
    assert get_tactic("cpu/scatter").why_not(layer) == "combines f32, f64, i8, i16, i32, i64"


@pytest.mark.parametrize(("op", "at"), [("ScatterND", "2,1"), ("ScatterElements", "2,4")])
def test_an_index_out_of_range_stops_the_run(op, at, threads):
    updates = "2,4"
    net = parse_network(f"in %x: f32[3,4]\nin %at: i64[{at}]\nin %u: f32[{updates}]\n%y = {op}(%x, %at, %u) named put\nout %y\n")
    engine = whet.build(net, optimization_level=0, timing_cache="", threads=threads)
    assert {c.tactic for c in engine.plan.choices.values() if "numpy" in c.tactic} == set()
    x, u = np.zeros((3, 4), np.float32), np.ones((2, 4), np.float32)
    good = np.zeros([int(n) for n in at.split(",")], np.int64)
    want = np.array(engine(x, good, u))
    for bad in (3, -4):
        wrong = good.copy()
        wrong[-1, -1] = bad
        with pytest.raises(BackendError, match=rf"{op} 'put': an index is outside of %x: f32\[3,4\].*%at"):
            engine(x, wrong, u)
    np.testing.assert_array_equal(engine(x, good, u), want)


@pytest.mark.parametrize("dtype", ["i64", "bool", "f16", "f64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_joined_and_split_rows(axis, dtype, threads, monkeypatch):
    shapes = [[3, 4, 70], [3, 4, 70], [3, 4, 70]]
    for k, n in enumerate((1, 5, 33)):
        shapes[k][axis] = n
    parts = [text(dtype, shape) for shape in shapes]
    _, layer, arrays = sample_layer("Concat", Sample([parts[0], f"const {parts[1]}", parts[2]], {"axis": axis}))
    require_exact("cpu/rows", layer, arrays, threads, monkeypatch)
    whole = [3, 4, 70]
    whole[axis] = 39
    _, layer, arrays = sample_layer("Split", Sample([text(dtype, whole)], {"axis": axis, "split": (1, 5, 33)}))
    require_exact("cpu/rows", layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("dtype", ["i64", "i32", "i8"])
def test_integer_reductions(op, dtype, threads, monkeypatch):
    for shape, axes in (((4, 5), (1,)), ((4, 5), (0,)), ((3, 4, 5, 70), (1, 2)), ((3, 5), (0, 1))):
        layer, arrays = make_layer(op, text(dtype, shape), {"axes": axes, "keepdims": len(shape) % 2})
        require_exact("cpu/integer_reduce", layer, arrays, threads, monkeypatch)
    layer, _ = make_layer(op, text(dtype, (2, 3, 4)), {"axes": (0, 2)})
    assert get_tactic("cpu/integer_reduce").why_not(layer) == "the reduced axes are not adjacent"


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_one_hot_vectors(axis, dtype, threads, monkeypatch):
    """Indices out of range give no element."""
    for kind, index in (("i64", np.int64), ("i32", np.int32)):
        _, layer, arrays = sample_layer("OneHot", Sample([f"{kind}[3,70]", np.array(40), np.array([0, 1], dtype)], {"axis": axis}))
        arrays[0] = np.random.default_rng(0).integers(-50, 50, (3, 70)).astype(index)
        require_exact("cpu/one_hot", layer, arrays, threads, monkeypatch)


def test_neighbouring_lines_are_shared_in_blocks(threads):
    assert count_line_items(3, 1) == (3, 1)
    assert count_line_items(3, BLOCK + threads) == (6, 2)
