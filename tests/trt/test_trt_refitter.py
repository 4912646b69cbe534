"""trt.Refitter and trt.OnnxParserRefitter: new weights in an engine, which its contexts use from their next run on."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import whet.trt as trt


def model(seed, op="Relu"):
    rng = np.random.default_rng(seed)
    weights = {"w1": rng.standard_normal((6, 4)), "b": rng.standard_normal(6), "w2": rng.standard_normal((3, 6))}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b"], ["h"], transB=1),
        helper.make_node(op, ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2"], ["y"], transB=1),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, d]) for n, d in (("x", 4), ("y", 3)))
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets, ir_version=9)
    return made.SerializeToString(), {n: a.astype(np.float32) for n, a in weights.items()}


def computed(weights, x):
    return np.maximum(x @ weights["w1"].T + weights["b"], 0) @ weights["w2"].T


class Messages(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.errors = []

    def log(self, severity, msg):
        if severity <= trt.ILogger.ERROR:
            self.errors.append(msg)


@pytest.fixture
def refitted():
    """(engine, its refitter, run(): the outputs of a context made before any refit, the logger)."""
    logger = Messages()
    builder = trt.Builder(logger)
    network, config = builder.create_network(), builder.create_builder_config()
    config.builder_optimization_level = 0
    config.set_flag(trt.BuilderFlag.REFIT)
    assert trt.OnnxParser(network, logger).parse(model(0)[0])
    engine = builder.build_engine_with_config(network, config)
    context, x, y = engine.create_execution_context(), feed(), np.zeros((2, 3), np.float32)

    def run():
        assert context.execute_v2([x.ctypes.data, y.ctypes.data])
        return y.copy()

    return engine, trt.Refitter(engine, logger), run, logger


def feed():
    return np.random.default_rng(5).standard_normal((2, 4)).astype(np.float32)


def test_named_weights_reach_existing_contexts(refitted):
    engine, refitter, run, _ = refitted
    assert engine.refittable
    assert set(refitter.get_all_weights()) == {"w1", "b", "w2"}
    weights = model(0)[1]
    np.testing.assert_allclose(run(), computed(weights, feed()), rtol=1e-4, atol=1e-5)
    weights["w2"] = np.ones((3, 6), np.float32)
    assert refitter.set_named_weights("w2", trt.Weights(weights["w2"].reshape(-1)))  # TensorRT's weights are flat
    assert refitter.get_missing_weights() == []
    np.testing.assert_allclose(refitter.get_named_weights("w2").numpy(), weights["w2"])
    assert refitter.refit_cuda_engine()
    np.testing.assert_allclose(run(), computed(weights, feed()), rtol=1e-4, atol=1e-5)


def test_weights_that_do_not_fit_are_refused_with_a_message(refitted):
    _, refitter, _, logger = refitted
    assert not refitter.set_named_weights("w3", np.ones(3, np.float32))
    assert not refitter.set_named_weights("w2", np.ones(17, np.float32))
    assert not refitter.unset_named_weights("w2")
    assert "no refittable weight 'w3'" in logger.errors[0]
    assert "f32[3,6]" in logger.errors[1]
    with pytest.raises(trt.NotServedError, match="set_named_weights"):
        refitter.set_weights("layer", trt.WeightsRole.KERNEL, np.ones(3))


def test_an_onnx_model_of_the_same_structure_refits_all_weights(refitted):
    _, refitter, run, logger = refitted
    source, weights = model(1)
    parser = trt.OnnxParserRefitter(refitter, logger)
    assert parser.refit_from_bytes(source)
    assert refitter.refit_cuda_engine()
    np.testing.assert_allclose(run(), computed(weights, feed()), rtol=1e-4, atol=1e-5)


def test_an_onnx_model_of_another_structure_is_refused_and_the_engine_unchanged(refitted):
    _, refitter, run, logger = refitted
    before = run()
    parser = trt.OnnxParserRefitter(refitter, logger)
    assert parser.refit_from_bytes(model(1, op="Sigmoid")[0])  # weights fit, outputs do not
    assert not refitter.refit_cuda_engine()
    assert "does not compute what the model does" in logger.errors[-1]
    np.testing.assert_array_equal(run(), before)
    other = onnx.load_from_string(model(1)[0])
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "renamed"
    assert not parser.refit_from_bytes(other.SerializeToString())
    assert "no weight 'w1'" in parser.get_error(0).desc()
