"""Engines of networks with sizes that depend on the data: NonMaxSuppression, NonZero, Compress, Unique, and what follows them."""

import dataclasses
import re

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import whet
from whet.builder import BuildConfig, build, retune, save_lock
from whet.cli.exec import command as exec_command
from whet.engine import engine_bytes, engine_digest, read_engine, write_engine
from whet.errors import ContextError, EngineError, LockError
from whet.frontends import network_from_onnx
from whet.runtime import Runtime

FAST = BuildConfig(threads=1, optimization_level=0)
RNG = np.random.default_rng(3)


def model(nodes, inputs, outputs, weights):
    """An ONNX model; shapes of the outputs are left to it. inputs: name -> shape; outputs: name -> element type."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def node(op, inputs, *outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs, **attrs)


def detector(batch=1):
    """A head with boxes and two classes of scores, its NMS, and [n, 5] = the selected boxes with zeros; the scores are an output, too."""
    nodes = [
        node("Conv", "x w", "f", kernel_shape=[1, 1], name="head"),
        node("Reshape", "f flat", "rows"),
        node("Transpose", "rows", "columns", perm=[0, 2, 1]),
        node("Slice", "columns c0 c4 last", "boxes"),
        node("Slice", "rows c4 c6 middle", "logits"),
        node("Sigmoid", "logits", "scores"),
        node("NonMaxSuppression", "boxes scores most iou least", "selected", name="nms"),
        node("Gather", "selected pair", "indices", axis=1),
        node("GatherND", "boxes indices", "picked"),
        node("Shape", "picked", "size"),
        node("Slice", "size c0 c1", "count"),
        node("ConstantOfShape", "count", "zeros"),
        node("Unsqueeze", "zeros middle", "column"),
        node("Concat", "picked column", "found", axis=1),
    ]
    weights = {
        "w": np.random.default_rng(0).standard_normal((6, 3, 1, 1)).astype(np.float32),
        "flat": [0, 6, -1], "c0": [0], "c1": [1], "c4": [4], "c6": [6], "last": [2], "middle": [1],
        "most": [20], "iou": np.float32([0.3]), "least": np.float32([0.6]), "pair": [0, 2],
    }  # fmt: skip
    return model(nodes, {"x": [batch, 3, 8, 8]}, {"found": TensorProto.FLOAT, "scores": TensorProto.FLOAT}, weights)


def same_as_onnx_runtime(proto, engine, feed):
    want = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    got = engine.run(feed)
    assert list(got) == [o.name for o in want.get_outputs()]
    for a, b in zip(got.values(), want.run(None, feed), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return got


@pytest.fixture(scope="module")
def plan():
    return build(network_from_onnx(detector()), FAST)


def test_a_detector_with_its_nms_gives_as_many_boxes_as_it_finds(plan):
    engine = Runtime().load(engine_bytes(plan))
    sizes = {
        same_as_onnx_runtime(detector(), engine, {"x": scale * RNG.standard_normal((1, 3, 8, 8)).astype(np.float32)})["found"].shape[0]
        for scale in (0, 1, 1, 2)
    }
    assert 0 in sizes
    assert len(sizes) > 2


def test_only_what_depends_on_the_sizes_runs_on_the_host(plan):
    ops = [x.op for x in plan.tail.network.layers]
    assert ops[0] == "NonMaxSuppression"
    assert not {"Conv", "Sigmoid", "Reshape", "Transpose"} & set(ops)
    assert not {"NonMaxSuppression", "GatherND"} & {x.op for x in plan.network.layers}
    (note,) = [n for n in plan.report.notes if "depends on the data" in n]
    assert "'nms' (NonMaxSuppression)" in note
    assert f"({len(ops)} in all)" in note


def test_shapes_are_known_up_to_the_data(plan):
    engine = Runtime().load(plan)
    assert [str(t) for t in engine.outputs.values()] == ["f32[size_of_nms,5]", "f32[1,2,64]"]
    context = engine.create_context()
    assert context.output_shapes() == {"found": (-1, 5), "scores": (1, 2, 64)}
    x = RNG.standard_normal((1, 3, 8, 8)).astype(np.float32)
    context.bind("x", x)
    context.execute()
    for a, b in zip(context.fetch().values(), engine.run({"x": x}).values(), strict=True):
        np.testing.assert_array_equal(a, b)
    for call in (lambda: context.bind("scores", np.empty((1, 2, 64), np.float32)), lambda: context.output_array("found"), context.enqueue):
        with pytest.raises(ContextError, match="depend on the data"):
            call()


def test_dynamic_batch():
    proto = detector("N")
    plan = build(network_from_onnx(proto), dataclasses.replace(FAST, profiles=(({"x": (1, 3, 8, 8)}, {"x": (2, 3, 8, 8)}, {"x": (3, 3, 8, 8)}),)))
    engine = Runtime().load(plan)
    for n in (1, 3):
        got = same_as_onnx_runtime(proto, engine, {"x": RNG.standard_normal((n, 3, 8, 8)).astype(np.float32)})
        assert got["scores"].shape[0] == n


def test_indices_masks_and_distinct_values():
    nodes = [
        node("Relu", "x", "y"),
        node("NonZero", "y", "indices"),
        node("Transpose", "indices", "rows", perm=[1, 0]),
        node("GatherND", "y rows", "values"),
        node("Greater", "values half", "mask"),
        node("Compress", "values mask", "large"),
        node("Round", "large", "rounded"),
        node("Unique", "rounded", "distinct", "", "", "counts"),
        node("ReduceSum", "y", "total", keepdims=0),
    ]
    outputs = {"distinct": TensorProto.FLOAT, "total": TensorProto.FLOAT, "counts": TensorProto.INT64}
    proto = model(nodes, {"x": [4, 5]}, outputs, {"half": np.float32(0.5)})
    engine = Runtime().load(engine_bytes(build(network_from_onnx(proto), FAST)))
    for scale in (3, 0.1, 0):
        same_as_onnx_runtime(proto, engine, {"x": scale * RNG.standard_normal((4, 5)).astype(np.float32)})


def test_everything_may_run_on_the_host():
    proto = model([node("NonZero", "x", "indices")], {"x": [3, 4]}, {"indices": TensorProto.INT64}, {})
    engine = whet.build(network_from_onnx(proto), threads=1, optimization_level=0)
    same_as_onnx_runtime(proto, engine, {"x": np.maximum(RNG.standard_normal((3, 4)), 0).astype(np.float32)})


def test_a_heavy_layer_after_them_is_named():
    nodes = [
        node("NonZero", "x", "indices"),
        node("Cast", "indices", "floats", to=TensorProto.FLOAT),
        node("MatMul", "w floats", "y", name="product"),
    ]
    proto = model(nodes, {"x": [3, 4]}, {"y": TensorProto.FLOAT}, {"w": np.ones((5, 2), np.float32)})
    plan = build(network_from_onnx(proto), FAST)
    (note,) = [n for n in plan.report.notes if "depends on the data" in n]
    assert "MatMul among them run unfused, with kernels that are not timed." in note
    same_as_onnx_runtime(proto, Runtime().load(plan), {"x": np.eye(3, 4, dtype=np.float32)})


@pytest.mark.parametrize("count", [0, 7, 40])
def test_convolutions_after_them_have_kernels_for_each_size(count):
    """Crops [n, 16, 28, 28] selected by positive scores, two convolutions, and a product of the means."""
    nodes = [
        node("NonZero", "scores", "indices"),
        node("Transpose", "indices", "rows", perm=[1, 0]),
        node("GatherND", "x rows", "crops"),
        node("Conv", "crops w", "a", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b w", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "c", "y"),
    ]
    weights = {"w": np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)}
    proto = model(nodes, {"x": [40, 16, 28, 28], "scores": [40]}, {"y": TensorProto.FLOAT}, weights)
    engine = whet.build(network_from_onnx(proto), threads=2, optimization_level=0)
    for n in (count, 3, count):
        scores = np.where(np.arange(40) < n, 1, 0).astype(np.float32)
        same_as_onnx_runtime(proto, engine, {"x": RNG.standard_normal((40, 16, 28, 28)).astype(np.float32), "scores": scores})


def test_files_and_retunes_keep_them(plan):
    again = read_engine(engine_bytes(plan))
    assert engine_digest(again) == engine_digest(plan)
    assert again.tail.outputs == ("found", "scores")
    retuned = retune(plan, threads=1)
    x = RNG.standard_normal((1, 3, 8, 8)).astype(np.float32)
    for a, b in zip(Runtime().load(retuned).run({"x": x}).values(), Runtime().load(plan).run({"x": x}).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_files_that_do_not_fit_together_are_refused(plan):
    tail = plan.tail
    lost = dataclasses.replace(plan, tail=dataclasses.replace(tail, outputs=("found", "nothing")))
    with pytest.raises(EngineError, match="its outputs found, nothing are not outputs"):
        engine_bytes(lost)
    other = tail.network.clone()
    other.inputs[0].name = "elsewhere"
    with pytest.raises(EngineError, match=r"read 'elsewhere' as .*, the engine's network gives no such value"):
        engine_bytes(dataclasses.replace(plan, tail=dataclasses.replace(tail, network=other)))


def test_commands_and_benchmarks_take_such_engines(plan, tmp_path):
    write_engine(plan, tmp_path / "d.engine")
    done = CliRunner().invoke(exec_command, [f"--loadEngine={tmp_path / 'd.engine'}", "--duration=0", "--iterations=1", "--warmUp=0", "--dumpOutput"])
    assert done.exit_code == 0, done.output
    assert re.search(r"found: \(\d+x5\)", done.output)
    assert Runtime().load(plan).benchmark(seconds=0.01).latency_ms > 0


def test_one_mask_that_selects_from_two_tensors_has_one_size():
    """torch.cat([x[keep, None], y[keep, None]], 1), exported with a NonZero for each."""
    nodes = [
        node("Neg", "x", "y"),
        node("Greater", "x half", "keep"),
        *(node("NonZero", "keep", f"indices_{k}", name=f"nonzero_{k}") for k in "xy"),
        *(node("Transpose", f"indices_{k}", f"rows_{k}", perm=[1, 0]) for k in "xy"),
        *(node("GatherND", f"{k} rows_{k}", f"kept_{k}") for k in "xy"),
        *(node("Unsqueeze", f"kept_{k} one", f"column_{k}") for k in "xy"),
        node("Concat", "column_x column_y", "both", axis=1),
    ]
    proto = model(nodes, {"x": [30]}, {"both": TensorProto.FLOAT}, {"half": np.float32(0.5), "one": [1]})
    plan = build(network_from_onnx(proto), FAST)
    assert [x.op for x in plan.tail.network.layers].count("NonZero") == 1
    engine = Runtime().load(plan)
    assert str(engine.outputs["both"]) == "f32[size_of_nonzero_x,2]"
    same_as_onnx_runtime(proto, engine, {"x": RNG.standard_normal(30).astype(np.float32)})


def test_a_lock_covers_the_layers_on_the_host(plan, tmp_path):
    save_lock(plan, tmp_path / "lock.json")
    locked = dataclasses.replace(FAST, lock=str(tmp_path / "lock.json"))
    assert engine_digest(build(network_from_onnx(detector()), locked)) == engine_digest(plan)
    other = detector()
    next(w for w in other.graph.initializer if w.name == "most").CopyFrom(numpy_helper.from_array(np.array([7]), "most"))
    with pytest.raises(LockError, match="the layers that run on the host"):
        build(network_from_onnx(other), locked)
