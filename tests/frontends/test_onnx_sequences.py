"""Sequences of tensors and optional values in ONNX models: against ONNX Runtime, and refusals."""

import numpy as np
import onnx
import pytest

import whet
from whet import Profile
from whet.builder import BuildConfig, build
from whet.errors import UnsupportedError
from whet.frontends import check_onnx, network_from_onnx
from whet.ops import run_network
from whet.runtime import Runtime

ort = pytest.importorskip("onnxruntime")
_rng = np.random.default_rng(29)
HEAD = '<ir_version: 8, opset_import: ["" : 18]> g '
FEEDS = {"x": _rng.standard_normal((4, 6)).astype(np.float32), "at": np.array(-2)}
#: graphs in ONNX's text form
GRAPHS = {
    "construct, insert, erase, at": """(float[N,6] x) => (float[N,6] y) {
        n = Neg (x) e = Exp (x) one = Constant <value_int = 1> ()
        s = SequenceConstruct (x, n) t = SequenceInsert (s, e, one) u = SequenceErase (t) last = Constant <value_int = -1> ()
        y = SequenceAt (u, last) }""",
    "empty, insert, concat": """(float[N,6] x) => (float[M,6] y) {
        s = SequenceEmpty () n = Neg (x) t = SequenceInsert (s, x) u = SequenceInsert (t, n)
        y = ConcatFromSequence <axis = 0> (u) }""",
    "stack": """(float[N,6] x) => (float[A,B,C] y) {
        n = Neg (x) s = SequenceConstruct (x, n) y = ConcatFromSequence <axis = 1, new_axis = 1> (s) }""",
    "chunks of 4": """(float[N,6] x) => (float[N,D] y) {
        k = Constant <value_int = 4> () s = SplitToSequence <axis = 1> (x, k) one = Constant <value_int = 1> () y = SequenceAt (s, one) }""",
    "sizes": """(float[N,6] x) => (float[N,D] y) {
        k = Constant <value_ints = [1, 5]> () s = SplitToSequence <axis = 1> (x, k) z = Constant <value_int = 0> () y = SequenceAt (s, z) }""",
    "unbind": """(float[N,6] x) => (float[N] y, int64 n) {
        s = SplitToSequence <axis = 1, keepdims = 0> (x) n = SequenceLength (s) i = Constant <value_int = 3> () y = SequenceAt (s, i) }""",
    "position at run time": """(float[N,6] x, int64 at) => (float[N] y) {
        s = SplitToSequence <axis = 1, keepdims = 0> (x) y = SequenceAt (s, at) }""",
    "loop that appends": """(float[N,6] x) => (float[M,6] y) {
        s = SequenceEmpty () count = Constant <value_int = 3> () go = Constant <value = bool {1}> ()
        t = Loop (count, go, s) <body = b (int64 i, bool c, seq(float[N,6]) a) => (bool d, seq(float[N,6]) z) {
            d = Identity (c) f = Cast <to = 1> (i) m = Mul (x, f) z = SequenceInsert (a, m) }>
        y = ConcatFromSequence <axis = 0> (t) }""",
    "while loop that appends": """(float[N,6] x) => (float[M,6] y) {
        s = SequenceEmpty () zero = Constant <value_int = 0> () n = Constant <value_int = 3> () go = Less (zero, n)
        t, j = Loop (, go, s, zero) <body = b (int64 i, bool c, seq(float[N,6]) a, int64 k) => (bool d, seq(float[N,6]) z, int64 l) {
            one = Constant <value_int = 1> () f = Cast <to = 1> (k) m = Mul (x, f) z = SequenceInsert (a, m) l = Add (k, one) d = Less (l, n) }>
        y = ConcatFromSequence <axis = 0> (t) }""",
    "branches": """(float[N,6] x) => (float[N,6] y) {
        r = ReduceSum <keepdims = 0> (x) zero = Constant <value_float = 0.0> () c = Greater (r, zero)
        s = If (c) <then_branch = t () => (seq(float[N,6]) a) { p = Exp (x) q = Neg (x) a = SequenceConstruct (p, q) },
                    else_branch = e () => (seq(float[N,6]) b) { v = Abs (x) w = Neg (v) b = SequenceConstruct (v, w) }>
        y = ConcatFromSequence <axis = 0> (s) }""",
    "map": """(float[N,6] x) => (float[M,6] y) {
        n = Neg (x) s = SequenceConstruct (x, n)
        t = SequenceMap (s, x) <body = b (float[N,6] a, float[N,6] k) => (float[N,6] z) { z = Mul (a, k) }>
        y = ConcatFromSequence <axis = 0> (t) }""",
}


def model_of(text):
    return onnx.parser.parse_model(HEAD + text)


@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_equals_onnx_runtime(case):
    model = model_of(GRAPHS[case])
    feeds = {i.name: FEEDS[i.name] for i in model.graph.input}
    wants = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    for got, want in zip(run_network(network_from_onnx(model), feeds).values(), wants, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-6)


#: while loops with a count that is not known, whose body slices at the counter, as PyTorch's exporter writes EmbeddingBag
APPENDING = """(float[B,6] x, int64 first, int64 count) => (float[M,D] y, int64 n, float[6] last, float[A,C,E] z) {{
    s = SequenceEmpty () begin = Constant <value_int = {begin}> () limit = {limit} go = {go}
    t, j = Loop (, go, s, begin) <body = b (int64 i, bool c, seq(float[1,6]) a, int64 k) => (bool d, seq(float[1,6]) w, int64 l) {{
        one = Constant <value_int = 1> () minus = Constant <value_ints = [-1]> () at = Reshape (k, minus) end = Add (at, one)
        row = Slice (x, at, end) e = Exp (row) w = SequenceInsert (a, e) l = Add (one, k) d = {condition} }}>
    y = ConcatFromSequence <axis = {axis}> (t) n = SequenceLength (t)
    p = Constant <value_int = -1> () r = SequenceAt (t, p) axes = Constant <value_ints = [0]> () last = Squeeze (r, axes)
    z = ConcatFromSequence <axis = 1, new_axis = 1> (t) }}"""
SIZE = "Size (column) col0 = Constant <value_int = 0> () column = Gather <axis = 1> (x, col0)"
LOOPS = {
    "rows": (f"{SIZE}", "Less (begin, limit)", "Less (l, limit)", 0, 0),
    "count": ("Identity (count)", "Less (begin, limit)", "Greater (limit, l)", 0, 1),
    "from 1": ("Identity (count)", "Greater (limit, begin)", "Less (l, limit)", 1, 0),
    "at least once": ("Identity (first)", "Constant <value = bool {1}> ()", "Less (l, limit)", 0, 0),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_while_loop_that_appends_computed_times(case):
    limit, go, condition, begin, axis = LOOPS[case]
    model = model_of(APPENDING.format(limit=limit, go=go, condition=condition, begin=begin, axis=axis))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert check_onnx(model).supported
    shapes = {"x": Profile(min=(3, 6), opt=(70, 6), max=(80, 6))}
    with whet.build(model, shapes=shapes, optimization_level=0, timing_cache="") as engine:
        for rows, count in ((70, 66), (4, 3)):
            feeds = {"x": _rng.standard_normal((rows, 6)).astype(np.float32), "first": np.array(0), "count": np.array(count)}
            got = engine({k: v for k, v in feeds.items() if k in engine.inputs})
            for name, want in zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True):
                assert got[name].shape == want.shape
                np.testing.assert_allclose(got[name], want, rtol=1e-6)


def test_a_loop_that_appends_many_known_times_keeps_its_body():
    """More iterations than are unrolled."""
    text = APPENDING.format(limit="Constant <value_int = 70> ()", go="Less (begin, limit)", condition="Less (l, limit)", begin=0, axis=0)
    net = network_from_onnx(model_of(text), shapes={"x": (75, 6)})
    x = _rng.standard_normal((75, 6)).astype(np.float32)
    got = run_network(net, {"x": x, "first": np.array(0), "count": np.array(0)})
    assert [layer.op for layer in net.layers].count("Loop") == 1
    np.testing.assert_allclose(got["y"], np.exp(x[:70]), rtol=1e-6)
    np.testing.assert_array_equal(got["n"], 70)


def test_an_engine_holds_no_sequences():
    model = model_of(GRAPHS["loop that appends"])
    net = network_from_onnx(model, shapes={"x": (4, 6)})
    with Runtime().load(build(net, BuildConfig(optimization_level=0, timing_cache=""))).create_context() as context:
        got = context.run({"x": FEEDS["x"]})
    np.testing.assert_allclose(got["y"], np.concatenate([FEEDS["x"] * i for i in range(3)]), rtol=1e-6)


def test_a_sequence_output_becomes_numbered_outputs():
    model = model_of("(float[4,6] x) => (seq(float[4,3]) y) { k = Constant <value_int = 3> () y = SplitToSequence <axis = 1> (x, k) }")
    got = run_network(network_from_onnx(model), {"x": FEEDS["x"]})
    assert list(got) == ["y_0", "y_1"]
    np.testing.assert_array_equal(np.concatenate([*got.values()], 1), FEEDS["x"])


def test_optional_values():
    text = """(float[4,6] x) => (float[4,6] y, bool some, bool none) {
        o = Optional (x) y = OptionalGetElement (o) some = OptionalHasElement (o) none = OptionalHasElement () }"""
    got = run_network(network_from_onnx(model_of(text)), {"x": FEEDS["x"]})
    np.testing.assert_array_equal(got["y"], FEEDS["x"])
    assert (bool(got["some"]), bool(got["none"])) == (True, False)


REFUSED = {
    "position outside": ("s = SequenceConstruct (x) k = Constant <value_int = 1> () y = SequenceAt (s, k)", "its position is 1 in a sequence of 1"),
    "two types": ("i = Cast <to = 7> (x) s = SequenceConstruct (x, i) y = ConcatFromSequence <axis = 0> (s)", "have one type, not f32, i64"),
    "nothing to concatenate": ("s = SequenceEmpty () y = ConcatFromSequence <axis = 0> (s)", "its sequence is empty"),
    "nothing to erase": ("s = SequenceEmpty () t = SequenceErase (s) y = ConcatFromSequence <axis = 0> (t)", "its sequence is empty"),
    "a tensor": ("y = ConcatFromSequence <axis = 0> (x)", "its input is not a sequence"),
    "dynamic length": ("s = SplitToSequence <axis = 0> (x) y = ConcatFromSequence <axis = 1> (s)", "length of its sequence, the size of axis 0"),
    "many": ("k = Constant <value_ints = [2048]> () l = Expand (x, k) s = SplitToSequence <axis = -1> (l) y = ConcatFromSequence <axis = 0> (s)",
             "2048 tensors; the most are 1024"),
    "other shapes": (
        "k = Constant <value_ints = [1, 5]> () s = SplitToSequence <axis = 1> (x, k) i = ArgMax (x) j = ReduceMax (i) y = SequenceAt (s, j)",
        "a sequence of tensors of one shape",
    ),
    "written at run time": (
        "s = SequenceConstruct (x) i = ArgMax <axis = 1> (x) j = ReduceMax (i) t = SequenceInsert (s, x, j) y = ConcatFromSequence <axis = 0> (t)",
        "its position is computed at run time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_reason(case):
    body, message = REFUSED[case]
    rows, columns = ("1", "1") if case == "many" else ("N", "6")
    with pytest.raises(UnsupportedError, match=message):
        network_from_onnx(model_of(f"(float[{rows},{columns}] x) => (float[A,B] y) {{ {body} }}"))
