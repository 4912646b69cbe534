"""Elements of 2, 4 and 8 bits (INT2, UINT2, FLOAT4E2M1, the FNUZ floats of AMD): models, engines and written ONNX files keep them exactly."""

import numpy as np
import pytest
from onnx import TensorProto, defs, helper, numpy_helper

from whet.builder import BuildConfig, build
from whet.engine import read_engine, write_engine
from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.network import DTYPES
from whet.ops import run_network
from whet.runtime import Runtime

TYPES = {"INT2": "i2", "UINT2": "u2", "FLOAT4E2M1": "f4e2m1", "FLOAT8E4M3FNUZ": "f8e4m3fnuz", "FLOAT8E5M2FNUZ": "f8e5m2fnuz"}


def model(name):
    """x -> QuantizeLinear -> DequantizeLinear + a dequantized weight of 2 x 7 elements, and Cast(x)."""
    code, dtype = getattr(TensorProto, name), DTYPES[TYPES[name]]
    values = np.array([[-2, -1, 0, 1, 1, 0, -1], [1, 1, 0, -2, 0, -1, 0]])
    weight = (values if dtype.kind != "uint" else values + 2).astype(dtype.numpy)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["v"]),
        helper.make_node("Add", ["d", "v"], ["y"]),
        helper.make_node("Cast", ["x"], ["c"], to=code),
    ]
    weights = [numpy_helper.from_array(np.array(0.5, np.float32), "s"), numpy_helper.from_array(np.zeros((), dtype.numpy), "z"),
               numpy_helper.from_array(weight, "w")]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 7]), helper.make_tensor_value_info("c", code, [2, 7])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)]), weight


@pytest.mark.skipif(defs.onnx_opset_version() < 25, reason="this version of onnx has no 2-bit types")
@pytest.mark.parametrize("name", TYPES)
def test_a_small_type_survives_every_form(name, tmp_path):
    onnx_model, weight = model(name)
    net = network_from_onnx(onnx_model)
    dtype = DTYPES[TYPES[name]]
    assert net.outputs[1].dtype == dtype
    x = np.array([[-9, -1, -0.5, 0, 0.4, 0.5, 1], [9, 1.5, -1.5, 0.25, 0.75, -0.25, 2]], np.float32)
    low, high = {"i2": (-2, 1), "u2": (0, 3), "f4e2m1": (-6, 6), "f8e4m3fnuz": (-240, 240), "f8e5m2fnuz": (-57344, 57344)}[dtype.name]
    steps = np.clip(x / 0.5, low, high)
    steps = np.rint(steps) if not dtype.is_float else steps.astype(dtype.numpy).astype(np.float32)
    want = run_network(net, {"x": x})
    np.testing.assert_array_equal(want["y"], (steps + weight.astype(np.float32)) * 0.5)
    assert want["c"].dtype == dtype.numpy

    with pytest.raises(UnsupportedError, match=r"not available in opset 18; write opset (19|23|25) or newer"):
        save_onnx(net, tmp_path / "again.onnx", 18)
    save_onnx(net, tmp_path / "again.onnx", 25)
    again = run_network(network_from_onnx(str(tmp_path / "again.onnx")), {"x": x})
    plan = build(net, BuildConfig(optimization_level=1, avg_timing=1, timing_cache=""))
    write_engine(plan, tmp_path / "net.engine")
    with Runtime().load(read_engine(tmp_path / "net.engine")).create_context() as context:
        computed = context.run({"x": x})
    for got in (again, computed):
        for key, value in want.items():
            np.testing.assert_array_equal(got[key].astype(np.float32), value.astype(np.float32))
