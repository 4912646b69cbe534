"""Classes of models that exporters write and that once could not be built: each is built, saved, loaded and run."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, read_engine
from whet.errors import FrontendError
from whet.frontends import check_onnx, network_from_onnx
from whet.ops import run_network
from whet.passes import lower
from whet.runtime import Runtime

F = TensorProto.FLOAT


def model(nodes, inputs, outputs, weights=(), opset=17):
    """A ModelProto; inputs and outputs are (name, element type, shape), weights (name, array)."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def config(**options):
    return BuildConfig(**{"optimization_level": 1, "avg_timing": 1, "timing_cache": "", "threads": 1, **options})


def run_saved(net, feeds, **options):
    """Outputs of the engine after it was written and read again."""
    plan = read_engine(engine_bytes(build(net, config(**options))))
    with Runtime().load(plan).create_context() as context:
        return context.run(feeds)


def onnxruntime_outputs(proto, feeds):
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def test_a_layer_called_like_an_output():
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], name="first", perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["a", "w"], ["b"], name="y"),
        helper.make_node("Transpose", ["b"], ["y"], name="last", perm=[0, 2, 3, 1]),
    ]
    w = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("f4")
    proto = model(nodes, [("x", F, [1, 8, 8, 3])], [("y", F, [1, 6, 6, 4])], [("w", w)])
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 8, 8, 3)).astype("f4")}
    got = run_saved(network_from_onnx(proto), feeds)
    np.testing.assert_allclose(got["y"], onnxruntime_outputs(proto, feeds)["y"], rtol=1e-4, atol=1e-5)


def test_a_constant_sliced_by_a_symbolic_length():
    """Position ids of CLIP's text model: position_ids[:, :S], then a lookup in the table of positions."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"], axis=0),
        helper.make_node("Unsqueeze", ["length", "zero"], ["end"]),
        helper.make_node("Slice", ["ids", "zero", "end", "axes"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["embedded"]),
        helper.make_node("Add", ["x", "embedded"], ["y"]),
    ]
    table = np.random.default_rng(0).standard_normal((16, 8)).astype("f4")
    weights = [
        ("ids", np.arange(16)[None]),
        ("table", table),
        ("one", np.array(1)),
        ("zero", np.array([0])),
        ("axes", np.array([1])),
    ]
    proto = model(nodes, [("x", F, ["N", "S", 8])], [("y", F, ["N", "S", 8])], weights)
    assert check_onnx(proto.SerializeToString()).supported
    net = network_from_onnx(proto)
    shapes = tuple({"x": (1, s, 8)} for s in (2, 5, 16))
    plan = read_engine(engine_bytes(build(net, config(profiles=(shapes,)))))
    with Runtime().load(plan).create_context() as context:
        for length in (2, 7, 16):
            x = np.random.default_rng(length).standard_normal((1, length, 8)).astype("f4")
            np.testing.assert_allclose(context.run({"x": x})["y"], x + table[None, :length], rtol=1e-6)


def float16_classifier():
    """Convolutions, a residual, a pool, an attention-like product and a Softmax, all in FP16."""
    rng = np.random.default_rng(2)
    w1, w2, w3 = (rng.standard_normal(s).astype("f2") * np.float16(0.2) for s in ((16, 3, 3, 3), (16, 16, 3, 3), (16, 10)))
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["logits"], name="y"),
        helper.make_node("Cast", ["logits"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["wide"], ["scores"]),
        helper.make_node("Cast", ["scores"], ["y"], to=TensorProto.FLOAT16),
    ]
    half = TensorProto.FLOAT16
    return model(nodes, [("x", half, ["N", 3, 24, 24])], [("y", half, ["N", 10]), ("logits", half, ["N", 10])], [("w1", w1), ("w2", w2), ("w3", w3)])


def test_float16_models_compute_in_float32_on_a_cpu_without_float16():
    proto = float16_classifier()
    net = network_from_onnx(proto)
    plan = build(net, config(profiles=(({"x": (1, 3, 24, 24)},) * 3,)))
    for layer in plan.network.layers:
        timed = {c.tactic for c in plan.report.candidates[layer.name] if c.ms is not None}
        assert layer.op == "Cast" or timed - {"cpu/numpy_reference"}, f"'{layer.name}' can only run on the reference loops"
        assert layer.op in ("Cast", "Reformat") or all(t.dtype.name != "f16" for t in layer.outputs)
    assert any("compute in f32" in note for note in plan.report.notes)
    x = np.random.default_rng(3).standard_normal((1, 3, 24, 24)).astype("f2")
    with Runtime().load(read_engine(engine_bytes(plan))).create_context() as context:
        got = context.run({"x": x})
    truth = run_network(net, {"x": x}, widen=True)
    for name, a in got.items():
        assert a.dtype == np.float16
        np.testing.assert_allclose(a.astype("f8"), np.asarray(truth[name], "f8"), rtol=2e-3, atol=2e-3)


def test_weights_made_by_constant_of_shape():
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"], value=numpy_helper.from_array(np.array([0.02], "f4"))),
        helper.make_node("ConstantOfShape", ["bias_shape"], ["ones"], value=numpy_helper.from_array(np.array([1], "f4"))),
        helper.make_node("Mul", ["w", "factor"], ["weights"]),
        helper.make_node("Conv", ["x", "weights", "ones"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = [("shape", np.array([64, 64, 3, 3])), ("bias_shape", np.array([64])), ("factor", np.float32(0.5).reshape(1))]
    proto = model(nodes, [("x", F, [1, 64, 8, 8])], [("y", F, [1, 64, 8, 8])], weights)
    net = network_from_onnx(proto)
    lowered, _ = lower(net)
    assert [layer.op for layer in lowered.layers] == ["Conv"]
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 64, 8, 8)).astype("f4")}
    np.testing.assert_allclose(run_saved(net, feeds)["y"], onnxruntime_outputs(proto, feeds)["y"], rtol=1e-4, atol=1e-4)


def test_large_constants_that_are_no_weights_stay_layers():
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    proto = model(nodes, [("x", F, [256, 256])], [("y", F, [256, 256])], [("shape", np.array([256, 256]))])
    assert "ConstantOfShape" in [layer.op for layer in lower(network_from_onnx(proto))[0].layers]


def test_batch_normalization_of_a_weight_in_training_mode():
    """Weight standardization of NFNets: batch_norm(weight[None], training=True), reshaped and convolved."""
    rng = np.random.default_rng(4)
    w = rng.standard_normal((1, 12, 27)).astype("f4")
    nodes = [
        helper.make_node("BatchNormalization", ["w", "gain", "zero", "zero", "one"], ["n", "", ""], epsilon=1e-6, momentum=1.0, training_mode=1),
        helper.make_node("Reshape", ["n", "shape"], ["standard"]),
        helper.make_node("Conv", ["x", "standard"], ["y"]),
    ]
    gain = rng.standard_normal(12).astype("f4")
    weights = [("w", w), ("gain", gain), ("zero", np.zeros(12, "f4")), ("one", np.ones(12, "f4")), ("shape", np.array([12, 3, 3, 3]))]
    proto = model(nodes, [("x", F, [1, 3, 9, 9])], [("y", F, [1, 12, 7, 7])], weights)
    net = network_from_onnx(proto)
    assert [layer.op for layer in lower(net)[0].layers] == ["Conv"]
    x = rng.standard_normal((1, 3, 9, 9)).astype("f4")
    standard = (w - w.mean((0, 2), keepdims=True)) / np.sqrt(w.var((0, 2), keepdims=True) + 1e-6) * gain[:, None]
    other = model(
        [helper.make_node("Conv", ["x", "w"], ["y"])], [("x", F, [1, 3, 9, 9])], [("y", F, [1, 12, 7, 7])], [("w", standard.reshape(12, 3, 3, 3))]
    )
    np.testing.assert_allclose(run_saved(net, {"x": x})["y"], onnxruntime_outputs(other, {"x": x})["y"], rtol=1e-4, atol=1e-4)


def silero(size):
    """If(rate == 16000) of two convolutions whose windows have 512 and 256 samples; `rate` is an input, as in Silero's detector."""

    def branch(name, count):
        reshaped = helper.make_node("Reshape", ["x", f"shape_{name}"], [f"r_{name}"], name=f"reshape_{name}")
        total = helper.make_node("ReduceSum", [f"r_{name}", f"axes_{name}"], [f"y_{name}"], keepdims=0)
        constants = [numpy_helper.from_array(np.array([1, 8, count // 8]), f"shape_{name}"), numpy_helper.from_array(np.array([2]), f"axes_{name}")]
        return helper.make_graph([reshaped, total], name, [], [helper.make_tensor_value_info(f"y_{name}", F, [1, 8])], constants)

    nodes = [
        helper.make_node("Equal", ["rate", "wanted"], ["is_16k"]),
        helper.make_node("If", ["is_16k"], ["y"], name="by_rate", then_branch=branch("a", 512), else_branch=branch("b", 256)),
    ]
    return model(nodes, [("x", F, [1, size]), ("rate", TensorProto.INT64, [])], [("y", F, [1, 8])], [("wanted", np.array(16000))])


@pytest.mark.parametrize(("size", "rate", "branch"), [(512, 16000, "then_branch"), (256, 8000, "else_branch")])
def test_a_branch_that_does_not_fit_the_shapes_is_left_out(size, rate, branch):
    proto = silero(size)
    assert check_onnx(proto.SerializeToString()).supported
    net = network_from_onnx(proto)
    plan = build(net, config())
    assert any(f"only its {branch} fits the shapes" in note for note in plan.report.notes)
    x = np.random.default_rng(0).standard_normal((1, size)).astype("f4")
    with Runtime().load(plan).create_context() as context:
        got = context.run({"x": x, "rate": np.array(rate)})
    np.testing.assert_allclose(got["y"], x.reshape(8, -1).sum(1)[None], rtol=1e-4, atol=1e-5)


def test_a_model_whose_branches_both_do_not_fit_is_refused():
    with pytest.raises(FrontendError, match="reshape_a"):
        network_from_onnx(silero(300))
    report = check_onnx(silero(300).SerializeToString())
    assert not report.supported
    assert "of 5 nodes (with those of functions and subgraphs) cannot be read" in str(report)


def gated_block():
    """RegNetY's squeeze and excitation: a Sigmoid of a product of the means scales the channels."""
    rng = np.random.default_rng(6)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("ReduceMean", ["b"], ["mean"], axes=[2, 3]),
        helper.make_node("Conv", ["mean", "w2", "b2"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w3", "b3"], ["e"]),
        helper.make_node("Sigmoid", ["e"], ["gate"]),
        helper.make_node("Mul", ["b", "gate"], ["y"]),
    ]
    weights = [(n, (s * rng.standard_normal(shape)).astype("f4")) for n, s, shape in (
        ("w1", 0.1, (16, 16, 3, 3)), ("w2", 0.02, (4, 16, 1, 1)), ("b2", 1, (4,)), ("w3", 0.1, (16, 4, 1, 1)), ("b3", 1, (16,)),
    )]  # fmt: skip
    return model(nodes, [("x", F, [1, 16, 12, 12])], [("y", F, [1, 16, 12, 12])], weights)


def selective_block():
    """SKNet's attention over two branches: their stack is scaled by a Softmax of a product of the means, and summed."""
    rng = np.random.default_rng(7)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "w2"], ["b"], pads=[2, 2, 2, 2], dilations=[2, 2]),
        helper.make_node("Unsqueeze", ["a", "one"], ["a5"]),
        helper.make_node("Unsqueeze", ["b", "one"], ["b5"]),
        helper.make_node("Concat", ["a5", "b5"], ["stack"], axis=1),
        helper.make_node("ReduceSum", ["stack", "one"], ["sum"], keepdims=0),
        helper.make_node("ReduceMean", ["sum"], ["mean"], axes=[2, 3]),
        helper.make_node("Conv", ["mean", "w3", "b3"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w4"], ["e"]),
        helper.make_node("Reshape", ["e", "shape"], ["f"]),
        helper.make_node("Softmax", ["f"], ["share"], axis=1),
        helper.make_node("Mul", ["stack", "share"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled", "one"], ["y"], keepdims=0),
    ]
    weights = [(n, (s * rng.standard_normal(shape)).astype("f4")) for n, s, shape in (
        ("w1", 0.1, (16, 16, 3, 3)), ("w2", 0.1, (16, 16, 3, 3)), ("w3", 0.1, (8, 16, 1, 1)), ("b3", 1, (8,)), ("w4", 0.1, (32, 8, 1, 1)),
    )]  # fmt: skip
    weights += [("one", np.array([1])), ("shape", np.array([1, 2, 16, 1, 1]))]
    return model(nodes, [("x", F, [1, 16, 12, 12])], [("y", F, [1, 16, 12, 12])], weights)


@pytest.mark.parametrize("block", [gated_block, selective_block])
@pytest.mark.parametrize("scale", [1, 300])
def test_attention_of_channels_is_as_accurate_as_float32(block, scale):
    net = network_from_onnx(block())
    feeds = {"x": (scale * np.random.default_rng(8).standard_normal((1, 16, 12, 12))).astype("f4")}
    truth = np.asarray(run_network(net, feeds, widen=True)["y"], "f8")
    assert truth.std() > 0.05 * scale
    single = np.asarray(run_network(net, feeds)["y"], "f8")
    limit = max(8 * np.abs(single - truth).max(), 16 * np.finfo("f4").eps * np.abs(truth).max())
    assert np.abs(run_saved(net, feeds, optimization_level=0)["y"] - truth).max() <= limit


def check_on_the_host(proto, feeds):
    """Its sizes depend on data, so that part of it runs on the host: the outputs are ONNX Runtime's, for each of `feeds`."""
    plan = read_engine(engine_bytes(build(network_from_onnx(proto), config())))
    assert plan.tail is not None
    with Runtime().load(plan).create_context() as context:
        for given in feeds:
            got, want = context.run(given), onnxruntime_outputs(proto, given)
            assert list(got) == list(want)
            for name, a in want.items():
                assert got[name].shape == a.shape
                np.testing.assert_allclose(got[name], a, rtol=1e-5, atol=1e-6)


def test_an_alignment_whose_length_is_computed():
    """VITS: durations are computed, their sum is the length of Range; the path is a comparison with sums of durations."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], pads=[1, 1]),
        helper.make_node("Conv", ["h", "v"], ["logits"]),
        helper.make_node("Exp", ["logits"], ["e"]),
        helper.make_node("Ceil", ["e"], ["durations"]),
        helper.make_node("ReduceSum", ["durations"], ["total"], keepdims=0),
        helper.make_node("Range", ["zero", "total", "one"], ["times"]),
        helper.make_node("CumSum", ["durations", "axis"], ["ends"]),
        helper.make_node("Transpose", ["ends"], ["columns"], perm=[0, 2, 1]),
        helper.make_node("Less", ["times", "columns"], ["before"]),
        helper.make_node("Cast", ["before"], ["path"], to=F),
        helper.make_node("MatMul", ["h", "path"], ["z"]),
        helper.make_node("ConvTranspose", ["z", "u"], ["y"], strides=[2]),
    ]
    weights = [(n, rng.standard_normal(s).astype("f4") * 0.5) for n, s in (("w", (8, 8, 3)), ("v", (1, 8, 1)), ("u", (8, 4, 4)))]
    weights += [("zero", np.float32(0)), ("one", np.float32(1)), ("axis", np.array(2))]
    proto = model(nodes, [("x", F, [1, 8, 6])], [("y", F, [1, 4, "T"])], weights)
    check_on_the_host(proto, [{"x": rng.standard_normal((1, 8, 6)).astype("f4")} for _ in range(3)])


def test_rows_repeated_as_often_as_computed():
    """FastSpeech's length regulator, as the older exporter of PyTorch writes it: Expand to a computed shape."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceMax", ["n"], ["most"], keepdims=1),
        helper.make_node("Concat", ["most", "six", "eight"], ["shape"], axis=0),
        helper.make_node("Expand", ["h", "shape"], ["rows"]),
        helper.make_node("Reshape", ["rows", "flat"], ["y"]),
    ]
    weights = [("w", rng.standard_normal((8, 8)).astype("f4")), ("six", np.array([6])), ("eight", np.array([8])), ("flat", np.array([-1, 8]))]
    proto = model(nodes, [("x", F, [1, 6, 8]), ("n", TensorProto.INT64, [3])], [("y", F, ["T", 8])], weights, opset=18)
    x = rng.standard_normal((1, 6, 8)).astype("f4")
    check_on_the_host(proto, [{"x": x, "n": np.array(n)} for n in ([1, 2, 3], [4, 1, 1], [1, 1, 1])])


@pytest.mark.parametrize("count", ["three", "given"])
def test_bags_between_offsets(count):
    """EmbeddingBag, as the older exporter of PyTorch writes it: a Loop over bags slices the indices at offsets that are inputs."""
    rng = np.random.default_rng(2)
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["starts", "i"], ["first"], axis=0),
            helper.make_node("Gather", ["ends", "i"], ["last"], axis=0),
            helper.make_node("Unsqueeze", ["first", "zero"], ["a"]),
            helper.make_node("Unsqueeze", ["last", "zero"], ["b"]),
            helper.make_node("Slice", ["indices", "a", "b", "zero"], ["own"]),
            helper.make_node("Gather", ["table", "own"], ["rows"], axis=0),
            helper.make_node("ReduceSum", ["rows", "zero"], ["bag"], keepdims=0),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "bag",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("bag", F, [4])],
    )
    nodes = [
        helper.make_node("Slice", ["offsets", "one", "many", "zero"], ["tail"]),
        helper.make_node("Concat", ["tail", "ten"], ["ends"], axis=0),
        helper.make_node("Identity", ["offsets"], ["starts"]),
        helper.make_node("Loop", [count, "true"], ["bags"], body=body),
        helper.make_node("MatMul", ["bags", "w"], ["y"]),
    ]
    weights = [("table", rng.standard_normal((20, 4)).astype("f4")), ("w", rng.standard_normal((4, 2)).astype("f4")), ("zero", np.array([0]))]
    weights += [("one", np.array([1])), ("many", np.array([2**40])), ("ten", np.array([10])), ("three", np.array(3)), ("true", np.array(True))]
    inputs = [("indices", TensorProto.INT64, [10]), ("offsets", TensorProto.INT64, [3]), ("given", TensorProto.INT64, [])]
    proto = model(nodes, inputs if count == "given" else inputs[:2], [("y", F, ["B", 2])], weights)
    feeds = [{"indices": rng.integers(0, 20, 10), "offsets": np.array(o)} for o in ([0, 3, 7], [0, 1, 2], [0, 0, 9])]
    check_on_the_host(proto, [{**f, "given": np.array(3)} for f in feeds] if count == "given" else feeds)


def test_a_loop_that_slices_at_its_index_is_unrolled():
    """Its kernels run in the engine: no size depends on the data."""
    body = helper.make_graph(
        [
            helper.make_node("Unsqueeze", ["i", "zero"], ["a"]),
            helper.make_node("Add", ["a", "one"], ["b"]),
            helper.make_node("Slice", ["x", "a", "b", "zero"], ["row"]),
            helper.make_node("MatMul", ["row", "w"], ["product"]),
            helper.make_node("Add", ["sum", "product"], ["more"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", F, [1, 2]),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("more", F, [1, 2])],
    )
    rng = np.random.default_rng(4)
    weights = [("w", rng.standard_normal((4, 2)).astype("f4")), ("zero", np.array([0])), ("one", np.array([1])), ("three", np.array(3))]
    weights += [("true", np.array(True)), ("start", np.zeros((1, 2), "f4"))]
    nodes = [helper.make_node("Loop", ["three", "true", "start"], ["y"], body=body)]
    proto = model(nodes, [("x", F, [3, 4])], [("y", F, [1, 2])], weights)
    plan = build(network_from_onnx(proto), config())
    assert plan.tail is None
    x = rng.standard_normal((3, 4)).astype("f4")
    with Runtime().load(plan).create_context() as context:
        np.testing.assert_allclose(context.run({"x": x})["y"], onnxruntime_outputs(proto, {"x": x})["y"], rtol=1e-5, atol=1e-6)


def test_a_mask_gathered_at_indices_of_the_batch():
    """transformers' padding mask by the older exporter: entries of the flat mask at n * length + position. Verified at the largest batch, too."""
    length = 6
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"], axis=0),
        helper.make_node("Range", ["zero", "n", "one"], ["rows"]),
        helper.make_node("Mul", ["rows", "length"], ["starts"]),
        helper.make_node("Unsqueeze", ["starts", "last"], ["column"]),
        helper.make_node("Add", ["column", "positions"], ["at"]),
        helper.make_node("Reshape", ["x", "flat"], ["entries"]),
        helper.make_node("Gather", ["entries", "at"], ["kept"], axis=0),
        helper.make_node("Unsqueeze", ["kept", "last"], ["columns"]),
        helper.make_node("Mul", ["columns", "w"], ["y"]),
    ]
    weights = [("zero", np.array(0)), ("one", np.array(1)), ("length", np.array(length)), ("last", np.array([-1])), ("flat", np.array([-1]))]
    weights += [("positions", np.arange(length)), ("w", np.random.default_rng(0).standard_normal(4).astype("f4"))]
    net = network_from_onnx(model(nodes, [("x", F, ["N", length])], [("y", F, ["N", length, 4])], weights))
    shapes = tuple({"x": (n, length)} for n in (1, 2, 5))
    plan = read_engine(engine_bytes(build(net, config(profiles=(shapes,)))))
    with Runtime().load(plan).create_context() as context:
        for n in (1, 2, 5):
            x = np.random.default_rng(n).standard_normal((n, length)).astype("f4")
            np.testing.assert_allclose(context.run({"x": x})["y"], run_network(net, {"x": x})["y"], rtol=1e-6)
