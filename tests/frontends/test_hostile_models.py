"""Valid ONNX files with values meant to exhaust or crash the builder: each is refused at once with an error that names the node and the value."""

import math

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, read_engine
from whet.errors import BuildError, FrontendError, MemoryLimitError, NetworkError, UnsupportedError, WhetError
from whet.frontends import network_from_onnx
from whet.network import BOOL, F32, I64, Network, TensorType
from whet.ops import run_network
from whet.passes import lower
from whet.tactics import get_tactic

HUGE = 2**31


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def node(op, inputs=("x",), outputs=("y",), **options):
    return helper.make_node(op, list(inputs), list(outputs), name="n", **options)


def model(*nodes, inputs=(("x", [1, 3, 8, 8]),), weights=None, opset=17):
    arrays = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", [value(*i) for i in inputs], [value("y", None)], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def quantized(scale, op="QuantizeLinear"):
    kind = TensorProto.FLOAT if op == "QuantizeLinear" else TensorProto.INT8
    return model(node(op, ["x", "s", "z"]), inputs=[("x", [2, 3], kind)], weights={"s": np.float32(scale), "z": np.int8(0)})


def loop(count, **weights):
    body = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["a", "a"], ["b"])]
    inner = helper.make_graph(
        body, "b", [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("a", [2])],
        [value("c2", [], TensorProto.BOOL), value("b", [2])],
    )  # fmt: skip
    return model(node("Loop", [count, "", "x"], body=inner), inputs=[("x", [2])], weights=weights)


def scan(length):
    body = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["u"])]
    inner = helper.make_graph(body, "b", [value("s", []), value("e", [])], [value("t", []), value("u", [])])
    weights = {"zero": np.float32(0)}
    return model(node("Scan", ["zero", "x"], ["y", "all"], body=inner, num_scan_inputs=1), inputs=[("x", [length])], weights=weights)


W = {"w": np.ones((4, 3, 3, 3), np.float32)}
ONE = {"o": np.ones(1, np.int64)}
BLOCK, BLOCK_SCALES = {"axis": 1, "block_size": 2**30}, {"s": np.ones((1, 1, 8, 8), np.float32)}
SIZE = {"one": np.ones(1, np.float32), "s": np.array([2**41], np.int64)}
REFUSED = {
    "scale 0": (quantized(0.0), FrontendError, "scale %s has a value of 0; scales must be finite and positive"),
    "scale without a reciprocal": (quantized(1e-45), FrontendError, "scales must be finite and positive"),
    "scale nan": (quantized(math.nan), FrontendError, "value of nan"),
    "scale inf": (quantized(math.inf), FrontendError, "value of inf"),
    "scale negative": (quantized(-0.5), FrontendError, "value of -0.5"),
    "dequantize nan": (quantized(math.nan, "DequantizeLinear"), FrontendError, "value of nan; scales must be finite"),
    "dequantize inf": (quantized(-math.inf, "DequantizeLinear"), FrontendError, "value of -inf"),
    "loop": (loop("m", m=np.int64(2**62)), UnsupportedError, "'n' runs its body 4611686018427387904 times"),
    "loop without an end": (loop(""), UnsupportedError, "'n' has no iteration count, and its body never changes the condition"),
    "scan": (scan(2**30), UnsupportedError, "'n' runs its body 1073741824 times"),
    "expand": (model(node("Expand", ["one", "s"]), weights=SIZE), UnsupportedError, "more than 2\\^40 elements"),
    "tile": (model(node("Tile", ["one", "s"]), weights=SIZE), UnsupportedError, "more than 2\\^40 elements"),
    "constant of shape": (model(node("ConstantOfShape", ["s"]), weights=SIZE), UnsupportedError, "more than 2\\^40 elements"),
    "resize": (
        model(node("Resize", ["x", "", "s"]), weights={"s": np.array([1, 1, 1e12, 1e12], np.float32)}), UnsupportedError, "more than 2\\^40 elements"
    ),
    "max pool": (model(node("MaxPool", kernel_shape=[HUGE, 1])), UnsupportedError, "attribute kernel_shape is .*the largest value is 2147483647"),
    "max pool steps": (model(node("MaxPool", kernel_shape=[2**16] * 2, pads=[2**16 - 1] * 4)), UnsupportedError, "65536 x 65536 has 4294967296"),
    "average pool": (model(node("AveragePool", kernel_shape=[2, 2], pads=[HUGE] * 4)), UnsupportedError, "padding makes .* elements of 192"),
    "strides": (model(node("MaxPool", kernel_shape=[2, 2], strides=[HUGE] * 2)), UnsupportedError, "attribute strides"),
    "conv padding": (model(node("Conv", ["x", "w"], pads=[2**30] * 4, strides=[2**30] * 2), weights=W), UnsupportedError, "padding makes"),
    "conv dilation": (model(node("Conv", ["x", "w"], dilations=[HUGE] * 2, pads=[HUGE] * 4), weights=W), UnsupportedError, "attribute dilations"),
    "transposed": (
        model(node("ConvTranspose", ["x", "w"], output_shape=[2**30] * 2), weights={"w": np.ones((3, 4, 3, 3), np.float32)}), UnsupportedError,
        "more than 2\\^40 elements",
    ),
    "transposed and cropped": (
        model(node("ConvTranspose", ["x", "w"], strides=[2**20] * 2, pads=[3 * 2**20] * 4), weights={"w": np.ones((3, 4, 3, 3), np.float32)}),
        UnsupportedError, "padding makes",
    ),
    "samples of a box": (
        model(node("RoiAlign", ["x", "r", "b"], sampling_ratio=2**20), weights={"r": np.ones((1, 4), np.float32), "b": np.zeros(1, np.int64)}),
        FrontendError, "sampling_ratio is 1048576",
    ),
    "sizes that never broadcast": (
        model(node("Shape", ["x"], ["n"]), node("Add", ["n", "o"], ["m"]), node("Expand", ["x", "m"]), inputs=[("x", ["N"])], weights=ONE),
        FrontendError, r"shapes \['N'\] and \['N\+1'\] do not broadcast",
    ),
    "input": (model(node("Relu"), inputs=[("x", [2**41])]), FrontendError, "'x' has the shape .*too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_read(case):
    made, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text) as e:
        network_from_onnx(made)
    assert "node 'n'" in str(e.value) or "'x'" in str(e.value)


@pytest.mark.parametrize(
    "model_proto",
    [
        quantized(0.0, "DequantizeLinear"),  # all weights of a channel are zero
        loop("m", m=np.int64(100)),
        model(node("LRN", size=2**30)),
        model(node("QuantizeLinear", ["x", "s"], ["q"], **BLOCK), node("DequantizeLinear", ["q", "s"], **BLOCK), weights=BLOCK_SCALES, opset=21),
        model(node("MaxPool", kernel_shape=[2, 2], strides=[2**30, 2**30])),
    ],
    ids=["scale", "loop", "LRN", "blocks", "stride"],
)
def test_large_values_without_large_results_compute(model_proto):
    net = network_from_onnx(model_proto)
    x = {t.name: np.ones(t.shape, t.dtype.numpy) for t in net.inputs}
    assert all(np.isfinite(a).all() for a in run_network(net, x).values())


def test_wide_lrn_equals_the_sum_over_all_channels():
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)
    (y,) = run_network(network_from_onnx(model(node("LRN", size=101, alpha=1.0))), {"x": x}).values()
    np.testing.assert_allclose(y, x / (1 + np.square(x).sum(1, keepdims=True) / 101) ** 0.75, rtol=1e-6)


def test_a_loop_that_does_not_end_at_run_time_is_stopped(monkeypatch):
    monkeypatch.setattr("whet.ops._interpret.MAX_REGION_STEPS", 1000)
    net, body = Network("n"), Network("body")
    x, count = net.add_input("x", TensorType(F32, (2,))), net.add_input("count", TensorType(I64, ()))
    body.add_input("i", TensorType(I64, ()))
    goes_on, a = body.add_input("c", TensorType(BOOL, ())), body.add_input("a", TensorType(F32, (2,)))
    body.mark_output(body.add("Identity", goes_on))
    body.mark_output(body.add("Neg", a))
    net.mark_output(net.add("Loop", count, None, x, name="l", regions={"body": body}))
    feed = {"x": np.ones(2, np.float32), "count": np.array(7)}
    assert next(iter(run_network(net, feed).values())).tolist() == [-1, -1]
    with pytest.raises(NetworkError, match="Loop 'l' ran 1000 layers of its body and did not end"):
        run_network(net, {**feed, "count": np.array(2**62)})


def test_memory_that_a_reference_cannot_get_is_a_whet_error(monkeypatch):
    def fail(*_):
        raise MemoryError("Unable to allocate 4.00 TiB")

    net = network_from_onnx(model(node("Relu"), inputs=[("x", [2, 2])]))
    monkeypatch.setattr("whet.ops._interpret.get_op", lambda name: type("Op", (), {"reference": staticmethod(fail)}))
    with pytest.raises(WhetError, match=r"Relu 'n' cannot compute with its inputs \(float32\[2, 2\]\): Unable to allocate 4.00 TiB"):
        run_network(net, {"x": np.ones((2, 2), np.float32)})


def test_a_model_at_the_limits_builds():
    assert build(network_from_onnx(model(node("LRN", size=2**30)))) is not None

def test_a_resize_to_33_million_pixels_does_not_crash():
    """oneDNN's kernel wrote outside of its index table."""
    scales = {"s": np.array([1, 1, 1, 2**25], np.float32)}
    net = network_from_onnx(model(node("Resize", ["x", "", "s"]), inputs=[("x", [1, 1, 1, 1])], weights=scales))
    (resize,) = net.layers
    tactic = get_tactic("cpu/onednn_resize")
    backend = get_backend("cpu")
    assert all("32 bits" in str(tactic.recipe(resize, s, backend)) for s in tactic.signatures(resize, backend))


def constant_bytes(net):
    return sum(t.array().nbytes for t in net.constants.values())


def test_one_folding_budget_for_the_model():
    """Weights of 64 MiB that Expand makes of a scalar, 16 MiB of results per layer otherwise: they fold up to 256 MiB in all."""
    nodes = [helper.make_node("Expand", ["one", "s"], [f"w{k}"]) for k in range(6)]
    nodes += [helper.make_node("MatMul", ["x" if k == 0 else f"y{k - 1}", f"w{k}"], [f"y{k}" if k < 5 else "y"]) for k in range(6)]
    weights = {"one": np.float32(1), "s": np.array([4096, 4096], np.int64)}
    lowered, log = lower(network_from_onnx(model(*nodes, inputs=[("x", [1, 4096])], weights=weights)))
    assert constant_bytes(lowered) <= 2**28 + 1024
    assert any("constants that passes compute would exceed 16 times the model's weights" in reason for reason in log.skipped.values())


def test_folding_has_a_budget_of_operations(monkeypatch):
    monkeypatch.setattr("whet.ops._folding.FOLDING_WORK", 2_000_000)
    monkeypatch.setattr("whet.ops._folding.FOLDING_WORK_PER_BYTE", 0)
    nodes = [helper.make_node("MatMul", ["w" if k == 0 else f"p{k - 1}", "w"], [f"p{k}"]) for k in range(5)]
    net = network_from_onnx(model(*nodes, node("MatMul", ["x", "p4"]), inputs=[("x", [1, 64])], weights={"w": np.eye(64, dtype=np.float32)}))
    lowered, log = lower(net)
    assert 2 <= len(lowered.layers) < 6
    assert any("too many operations at build time" in reason for reason in log.skipped.values())
    x = {"x": np.arange(64, dtype=np.float32)[None]}
    assert [a.tolist() for a in run_network(lowered, x).values()] == [a.tolist() for a in run_network(net, x).values()]


def per_layer(count, channels):
    """Weights that keep layers of equal weights from being merged: s0, s1, ... [channels] and k0, k1, ... []."""
    scales = {f"s{k}": np.full(channels, 1 + k, np.float32) for k in range(count)}
    return {**scales, **{f"k{k}": np.float32(2 + k) for k in range(count)}}


def test_rewritten_weights_have_a_budget(monkeypatch):
    """A weight shared by convolutions with batch norms of their own is folded into one weight for each."""
    monkeypatch.setattr("whet.ops._folding.FOLDED_BYTES", 1 << 12)
    nodes = []
    for k in range(60):
        nodes += [helper.make_node("Mul", ["x", f"k{k}"], [f"a{k}"]), helper.make_node("Conv", [f"a{k}", "w"], [f"c{k}"])]
        nodes += [helper.make_node("BatchNormalization", [f"c{k}", f"s{k}", *["o"] * 3], [f"b{k}"])]
    weights = {"w": np.ones((4, 3, 8, 8), np.float32), "o": np.ones(4, np.float32), **per_layer(60, 4)}
    net = network_from_onnx(model(*nodes, node("Sum", [f"b{k}" for k in range(60)]), weights=weights))
    with pytest.raises(MemoryLimitError, match="far more constants than the model has weights"):
        lower(net)


def test_expressions_nested_without_bound_are_stored_by_value():
    """Every constant of the chain is computed from the one before it: code that walks such an origin would exceed Python's recursion limit."""
    nodes = [helper.make_node("Add", [f"c{k}" if k else "one", "one"], [f"c{k + 1}"]) for k in range(1500)]
    net = network_from_onnx(model(*nodes, node("Mul", ["x", "c1500"]), inputs=[("x", [2])], weights={"one": np.float32(1)}))
    plan = read_engine(engine_bytes(build(net, BuildConfig(optimization_level=0))))
    assert list(run_network(plan.network, {"x": np.ones(2, np.float32)}).values())[0].tolist() == [1501, 1501]  # noqa: RUF015


def test_an_engine_with_a_negative_nan_can_be_opened():
    """The square root of a negative variance is a NaN with its sign set; the text form of small constants has no such NaN."""
    bn = {"s": np.ones(3, np.float32), "negative": np.full(3, -1, np.float32), "w": np.ones((3, 3, 1, 1), np.float32)}
    made = model(node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", "s", "s", "s", "negative"]), weights=bn)
    plan = build(network_from_onnx(made), BuildConfig(optimization_level=0))
    assert read_engine(engine_bytes(plan)).network is not None


def test_an_engine_with_weights_shared_by_many_layers_can_be_opened():
    """The reader computes folded weights again, within a budget that grows with the file."""
    nodes = []
    for k in range(60):
        nodes += [helper.make_node("Mul", ["x", f"k{k}"], [f"a{k}"]), helper.make_node("Conv", [f"a{k}", "w"], [f"c{k}"])]
        nodes += [helper.make_node("BatchNormalization", [f"c{k}", f"s{k}", *["o"] * 3], [f"b{k}"])]
    weights = {"w": np.ones((1024, 3, 8, 8), np.float32), "o": np.ones(1024, np.float32), **per_layer(60, 1024)}
    net = network_from_onnx(model(*nodes, node("Sum", [f"b{k}" for k in range(60)]), weights=weights))
    plan = build(net, BuildConfig(optimization_level=0))
    assert len(read_engine(engine_bytes(plan)).network.layers) == len(plan.network.layers)


@pytest.mark.parametrize(("model_proto", "text"), [
    (model(node("Relu"), inputs=[("x", ["N" * 300_000])]), "characters"),
    (model(node("Concat", [f"x{k}" for k in range(600)], axis=0), inputs=[(f"x{k}", [f"N{k}", 2]) for k in range(600)]), "dimension of .* char"),
], ids=["name", "sum"])  # fmt: skip
def test_a_network_that_no_engine_can_hold_is_refused_before_it_is_built(model_proto, text):
    with pytest.raises(BuildError, match=f"no engine can hold this network: .*{text}"):
        build(network_from_onnx(model_proto))


def test_nested_regions_build_and_open():
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["o0"])], "g0", [], [value("o0", None)])
    for k in range(1, 20):
        other = helper.make_graph([helper.make_node("Neg", ["x"], [f"e{k}"])], f"e{k}", [], [value(f"e{k}", None)])
        branch = helper.make_node("If", ["c"], [f"o{k}"], then_branch=inner, else_branch=other)
        inner = helper.make_graph([branch], f"g{k}", [], [value(f"o{k}", None)])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "e", [], [value("e", None)])
    made = model(node("If", ["c"], then_branch=inner, else_branch=other), inputs=[("x", [3]), ("c", [], TensorProto.BOOL)])
    plan = build(network_from_onnx(made), BuildConfig(optimization_level=0))
    assert read_engine(engine_bytes(plan)).network is not None


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("op", ["MaxPool", "Relu", "Pad"])
def test_selections_do_not_move_before_a_dequantization_that_reverses_their_order(op, scale):
    more = {"MaxPool": {"kernel_shape": [2, 2]}, "Relu": {}, "Pad": {}}[op]
    rest = ["p", "one"] if op == "Pad" else []
    weights = {"s": np.float32(scale), "p": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64), "one": np.float32(1)}
    nodes = node("DequantizeLinear", ["x", "s"], ["d"]), node(op, ["d", *rest], **more)
    made = model(*nodes, inputs=[("x", [1, 2, 4, 4], TensorProto.INT8)], weights=weights)
    net = network_from_onnx(made)
    x = {"x": np.random.default_rng(0).integers(-128, 128, (1, 2, 4, 4)).astype(np.int8)}
    np.testing.assert_array_equal(*(next(iter(run_network(n, x).values())) for n in (net, lower(net)[0])))
