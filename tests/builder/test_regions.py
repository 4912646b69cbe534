"""If, Loop and Scan that capture outer values: they build, run, are saved and loaded, and match ONNX Runtime."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from support import datasets
from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.builder.candidates.regions import lift_captures
from whet.engine import read_engine, write_engine
from whet.engine.check import check_plan
from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx
from whet.network import verify
from whet.ops import run_network
from whet.runtime import Runtime, bind

QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=1)
F, N, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, a):
    return numpy_helper.from_array(np.asarray(a), name)


def model(nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


def branches():
    """y = c ? relu(a + w) : (a - x), a = 2 x; the branches capture a and x; the first contains a nested If."""
    inner = [
        helper.make_graph([helper.make_node("Relu", ["s"], ["r"])], "p", [], [value("r", F, 2, 3)]),
        helper.make_graph([helper.make_node("Mul", ["s", "x"], ["m"])], "q", [], [value("m", F, 2, 3)]),
    ]
    then = [
        helper.make_node("Add", ["a", "w"], ["s"]),
        helper.make_node("If", ["d"], ["t"], then_branch=inner[0], else_branch=inner[1]),
    ]
    one = helper.make_graph(then, "then", [], [value("t", F, 2, 3)])
    two = helper.make_graph([helper.make_node("Sub", ["a", "x"], ["e"])], "else", [], [value("e", F, 2, 3)])
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["a"]),
        helper.make_node("If", ["c"], ["b"], then_branch=one, else_branch=two),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    inputs = [value("x", F, 2, 3), value("c", B), value("d", B)]
    return model(nodes, inputs, [value("y", F, 2, 3)], [weight("two", np.float32(2)), weight("w", np.ones((2, 3), np.float32))])


def loop(known: bool):
    """v = v * 0.5 + a in every iteration, until the sum falls below 1 or M iterations; a is captured; with `known`, v is collected."""
    body = [
        helper.make_node("Mul", ["v", "half"], ["h"]),
        helper.make_node("Add", ["h", "a"], ["n"]),
        helper.make_node("ReduceSum", ["n"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "one"], ["go"]),
    ]
    outs = [value("go", B), value("n", F, 2, 3)]
    if known:
        body = [*body[:2], helper.make_node("Identity", ["c"], ["go"]), helper.make_node("Neg", ["n"], ["k"])]
        outs.append(value("k", F, 2, 3))
    graph = helper.make_graph(body, "body", [value("i", N), value("c", B), value("v", F, 2, 3)], outs)
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["a"]),
        helper.make_node("Loop", ["M", "" if known else "go_in", "x"], ["y", "z"] if known else ["y"], body=graph),
    ]
    outputs = [value("y", F, 2, 3), *([value("z", F, 4, 2, 3)] if known else [])]
    fed = [value("x", F, 2, 3), *([] if known else [value("M", N), value("go_in", B)])]
    constants = [weight("half", np.float32(0.5)), weight("one", np.float32(1))]
    return model(nodes, fed, outputs, [*constants, *([weight("M", np.array(4))] if known else [])])


def scan():
    """A running sum over rows, scaled by a captured value."""
    body = [helper.make_node("Mul", ["row", "a"], ["m"]), helper.make_node("Add", ["s", "m"], ["n"]), helper.make_node("Relu", ["n"], ["k"])]
    graph = helper.make_graph(body, "body", [value("s", F, 3), value("row", F, 3)], [value("n", F, 3), value("k", F, 3)])
    nodes = [
        helper.make_node("Neg", ["g"], ["a"]),
        helper.make_node("Scan", ["s0", "x"], ["y", "z"], body=graph, num_scan_inputs=1, scan_input_directions=[1]),
    ]
    fed = [value("s0", F, 3), value("x", F, 5, 3), value("g", F, 3)]
    return model(nodes, fed, [value("y", F, 3), value("z", F, 5, 3)])


def growing():
    """Carries a list that grows by a row per iteration: unrolled, because the trip count is known."""
    body = [helper.make_node("Mul", ["v", "half"], ["h"]), helper.make_node("Concat", ["h", "x"], ["n"], axis=0)]
    body.append(helper.make_node("Identity", ["c"], ["go"]))
    graph = helper.make_graph(body, "body", [value("i", N), value("c", B), value("v", F, None, 3)], [value("go", B), value("n", F, None, 3)])
    nodes = [helper.make_node("Loop", ["M", "", "x"], ["y"], body=graph)]
    return model(nodes, [value("x", F, 2, 3)], [value("y", F, None, 3)], [weight("half", np.float32(0.5)), weight("M", np.array(3))])


FEEDS = {"c": np.array(True), "d": np.array(False), "M": np.array(7), "go_in": np.array(True)}
CASES = {"if": branches, "loop of unknown length": lambda: loop(False), "loop": lambda: loop(True), "scan": scan, "growing loop": growing}


def feeds_of(m, seed=0):
    rng, found = np.random.default_rng(seed), {}
    for info in m.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        found[info.name] = FEEDS[info.name] if info.name in FEEDS else rng.standard_normal(shape).astype(np.float32)
    return found


def runtime(m, feeds):
    return onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def run(plan, feeds):
    bound = bind(plan, get_backend("cpu"))
    bound.feed(feeds)
    bound.run()
    return list(bound.fetch().values())


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_regions_build_and_match_onnx_runtime(name, level, tmp_path):
    m = CASES[name]()
    plan = build(network_from_onnx(m), dataclasses.replace(QUICK, optimization_level=level))
    check_plan(plan)
    write_engine(plan, tmp_path / "e.engine")
    again = read_engine(tmp_path / "e.engine")
    for flags in ({}, {"c": np.array(False)}, {"d": np.array(True), "M": np.array(0), "go_in": np.array(False)}):
        feeds = {k: flags.get(k, v) for k, v in feeds_of(m).items()}
        want = runtime(m, feeds)
        for p in (plan, again):
            for a, b in zip(run(p, feeds), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_captured_values_become_inputs_and_the_source_network_is_unchanged():
    m = branches()
    net = network_from_onnx(m)
    made = net.clone("lowered")
    assert lift_captures(made) == 2
    assert lift_captures(made) == 0
    verify(made)
    outer = next(x for x in made.layers if x.op == "If")
    assert [t.name for t in outer.inputs] == ["c", "a", "d", "x"]
    assert not [t for r in outer.regions.values() for t in r.captures() if not t.is_constant]
    feeds = feeds_of(m)
    for a, b in zip(run_network(made, feeds).values(), run_network(net, feeds).values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_lock_covers_a_network_with_regions(tmp_path):
    plan = build(network_from_onnx(scan()), QUICK)
    save_lock(plan, tmp_path / "lock.json")
    assert plan_digest(build(network_from_onnx(scan()), dataclasses.replace(QUICK, lock=str(tmp_path / "lock.json")))) == plan_digest(plan)


def test_a_loop_that_collects_a_number_of_rows_known_only_at_run_time():
    m = loop(True)
    del m.graph.initializer[-1]
    m.graph.input.append(value("M", N))
    engine = Runtime().load(build(network_from_onnx(m), QUICK))
    assert any("(Loop) has a size that depends on the data" in note for note in engine.plan.report.notes)
    for count in (3, 1, 0):
        feeds = feeds_of(m) | {"M": np.array(count)}
        for a, b in zip(engine.run(feeds).values(), runtime(m, feeds), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_branches_of_other_sizes():
    """As detectors export `boxes[keep] if any else boxes[:0]`."""
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "then", [], [value("r", F, 2, 3)])
    other = helper.make_graph([helper.make_node("Slice", ["x", "zero", "zero"], ["s"])], "else", [], [value("s", F, 0, 3)])
    nodes = [
        helper.make_node("If", ["c"], ["b"], name="if", then_branch=then, else_branch=other),
        helper.make_node("Neg", ["b"], ["y"]),
        helper.make_node("Abs", ["x"], ["z"]),
    ]
    outputs = [helper.make_tensor_value_info("y", F, ["k", 3]), value("z", F, 2, 3)]
    graph = helper.make_graph(nodes, "g", [value("x", F, 2, 3), value("c", B)], outputs, [weight("zero", np.array([0]))])
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    engine = Runtime().load(build(network_from_onnx(m), QUICK))
    assert str(engine.outputs["y"]) == "f32[size_of_if_0_0,3]"
    for taken in (True, False):
        feeds = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32), "c": np.array(taken)}
        for a, b in zip(engine.run(feeds).values(), runtime(m, feeds), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b)


def test_unsupported_regions_are_reported():
    m = growing()
    del m.graph.initializer[-1]
    m.graph.input.append(value("M", N))
    with pytest.raises(UnsupportedError, match="change shape between iterations; a loop is unrolled for 1 to 64 iterations"):
        network_from_onnx(m)


@pytest.mark.data
def test_silero_matches_onnx_runtime():
    if datasets.root() is None:
        pytest.skip("the shared data folder is not here")
    path = datasets.path_of("audio/silero_vad_16k_op15.onnx")
    net = network_from_onnx(path, shapes={"input": (1, 576), "state": (2, 1, 128)})
    plan = build(net, dataclasses.replace(QUICK, optimization_level=1))
    feeds = {"input": (np.random.default_rng(0).standard_normal((1, 576)) * 0.1).astype(np.float32)}
    feeds |= {"state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)}
    for a, b in zip(run(plan, feeds), onnxruntime.InferenceSession(str(path)).run(None, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
