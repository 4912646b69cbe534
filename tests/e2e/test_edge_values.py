"""Engines in cases for which library kernels deviate from ONNX: rows of only infinity, 4-bit elements."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from whet.builder import BuildConfig, build
from whet.frontends import network_from_onnx
from whet.runtime import Runtime

CONFIG = BuildConfig(timing_cache="", optimization_level=1, threads=1)


def outputs(nodes, feeds, result):
    """The output `result` of the engine of a graph of `nodes`, for arrays by name."""
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info(result, TensorProto.UNDEFINED, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with Runtime().load(build(network_from_onnx(model), CONFIG)).create_context() as context:
        return context.run(feeds)[result]


@pytest.mark.parametrize(("op", "value"), [("ReduceMax", -np.inf), ("ReduceMin", np.inf)])
@pytest.mark.parametrize("shape", [(4, 64), (2, 16, 8, 8)])
def test_the_largest_of_a_row_of_infinities_is_infinite(op, value, shape):
    """As for a mask over a whole row of attention, which is recognized by comparing this maximum with -inf."""
    axes = helper.make_node("Constant", [], ["axes"], value_ints=range(len(shape) // 2, len(shape)))
    x = np.full(shape, value, np.float32)
    x[0] = 1
    got = outputs([axes, helper.make_node(op, ["x", "axes"], ["y"], keepdims=0)], {"x": x}, "y")
    np.testing.assert_array_equal(got[1:], value)
    np.testing.assert_array_equal(got[0], 1)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_elements_of_four_bits_at_run_time(kind):
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=kind), helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT)]
    x = np.array([[1, 2, 7, 0, 3]], np.float32)  # an odd number of elements
    np.testing.assert_array_equal(outputs(nodes, {"x": x}, "y"), x)
