"""Writing ONNX: a network that is read, written and read again computes the same, is valid, and runs in ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx, onnx_from_network, save_onnx
from whet.network import DTYPES, F16, Network, parse_type, verify
from whet.ops import run_network

RNG = np.random.default_rng(1)


def in_ort(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def small():
    """x -> Conv -> Relu, with a dynamic batch."""
    net = Network("small")
    x = net.add_input("x", parse_type("f32[N,3,8,8]"))
    w, b = (
        net.constant(RNG.standard_normal((4, 3, 3, 3)).astype(np.float32), "conv.weight"),
        net.constant(np.ones(4, np.float32), "conv.bias"),
    )
    c = net.add("Conv", x, w, b, pads=(1, 1, 1, 1), name="/conv/Conv", outputs=["c"], sources=("/conv/Conv",))
    net.mark_output(net.add("Relu", c, name="/relu/Relu", outputs=["y"], sources=("/relu/Relu",)), "y")
    return net


X = RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)


def test_names_symbols_and_values_survive():
    net = small()
    net.metadata = {"prop.classes": "a,b"}
    model = onnx_from_network(net)
    assert [n.name for n in model.graph.node] == ["/conv/Conv", "/relu/Relu"]
    assert [n.output[0] for n in model.graph.node] == ["c", "y"]
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == ["N", 3, 8, 8]
    assert [t.name for t in model.graph.initializer] == ["conv.weight", "conv.bias"]
    assert all(t.raw_data for t in model.graph.initializer)
    assert model.opset_import[0].version == 21
    assert (model.metadata_props[0].key, model.metadata_props[0].value) == ("classes", "a,b")
    want = run_network(net, {"x": X})["y"]
    np.testing.assert_allclose(in_ort(model, {"x": X})[0], want, rtol=1e-4, atol=1e-5)
    again = network_from_onnx(model)
    assert str(again).splitlines()[1:-1] == str(net).splitlines()[1:-1]
    np.testing.assert_array_equal(run_network(again, {"x": X})["y"], want)


def test_a_fused_layer_is_written_unfused():
    net = Network("lowered", "lowered")
    x = net.add_input("x", parse_type("f32[2,3,8,8]"))
    z = net.add_input("z", parse_type("f32[2,4,8,8]"))
    w = net.constant(RNG.standard_normal((4, 3, 3, 3)).astype(np.float32), "w")
    body = Network("body", "lowered")
    bx, bw, bz = (body.add_input(n, t.type) for n, t in (("x", x), ("w", w), ("z", z)))
    body.mark_output(body.add("Relu", body.add("Add", body.add("Conv", bx, bw, pads=(1, 1, 1, 1)), bz)))
    f = net.add("Fused", x, w, z, composite="Conv", regions={"body": body}, name="fused")
    net.mark_output(net.add("Sigmoid", f), "y")
    model = onnx_from_network(net)
    assert [n.op_type for n in model.graph.node] == ["Conv", "Add", "Relu", "Sigmoid"]
    feeds = {"x": X, "z": RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)}
    want = run_network(net, feeds)["y"]
    np.testing.assert_allclose(in_ort(model, feeds)[0], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(run_network(network_from_onnx(model), feeds)["y"], want)


def test_a_fused_body_whose_output_is_its_input():
    net = Network("lowered", "lowered")
    x = net.add_input("x", parse_type("f32[3]"))
    body = Network("body", "lowered")
    b = body.add_input("x", x.type)
    body.outputs = [body.add("Relu", b), b]
    y, same = net.add("Fused", x, composite="Relu", regions={"body": body})
    net.mark_output(y, "y")
    net.mark_output(same, "same")
    feeds = {"x": np.array([-1, 0, 1], np.float32)}
    got = in_ort(onnx_from_network(net), feeds)
    np.testing.assert_array_equal(got[0], [0, 0, 1])
    np.testing.assert_array_equal(got[1], feeds["x"])


def test_an_output_that_is_a_constant_keeps_its_name():
    """Folding can produce one: users still fetch it by its name."""
    net = Network("constant")
    x = net.add_input("x", parse_type("f32[3]"))
    k = net.constant(np.array([1, 2], np.float32), "anchors")
    net.mark_output(net.add("Relu", x, outputs=["y"]), "y")
    net.mark_output(k)
    model = onnx_from_network(net)
    assert [o.name for o in model.graph.output] == ["y", "anchors"]
    np.testing.assert_array_equal(in_ort(model, {"x": np.ones(3, np.float32)})[1], [1, 2])
    assert [t.name for t in network_from_onnx(model).outputs] == ["y", "anchors"]


@pytest.mark.parametrize("go", [True, False])
def test_regions_become_subgraphs(go):
    net = Network("branches")
    x, cond = net.add_input("x", parse_type("f32[N,2]")), net.add_input("go", parse_type("bool[]"))
    h = net.add("Relu", x, name="h")
    regions = {}
    for key, op in (("then_branch", "Add"), ("else_branch", "Mul")):
        r = Network(key)
        r.mark_output(r.add(op, h, r.constant(np.array([3, 5], np.float32), "k"), name="same_name"))
        regions[key] = r
    net.mark_output(net.add("If", cond, regions=regions, name="if"), "y")
    verify(net)
    feeds = {"x": np.array([[-1, 2]], np.float32), "go": np.array(go)}
    want = run_network(net, feeds)["y"]
    model = onnx_from_network(net)
    np.testing.assert_allclose(in_ort(model, feeds)[0], want)
    np.testing.assert_array_equal(run_network(network_from_onnx(model), feeds)["y"], want)


def test_one_weight_read_twice_is_stored_once_and_outputs_may_repeat():
    net = Network("shared")
    x = net.add_input("x", parse_type("f32[2]"))
    w = net.constant(np.array([1, 2], np.float32), "w")
    y = net.add("Add", net.add("Mul", x, w), w)
    net.mark_output(y, "y")
    net.mark_output(x, "x_again")
    net.mark_output(w, "w_out")
    model = onnx_from_network(net)
    assert [t.name for t in model.graph.initializer] == ["w"]
    got = in_ort(model, {"x": np.array([5, 7], np.float32)})
    np.testing.assert_array_equal(got[0], [6, 16])
    np.testing.assert_array_equal(got[1], [5, 7])
    np.testing.assert_array_equal(got[2], [1, 2])


def test_types_become_codes():
    net = Network("cast")
    net.mark_output(net.add("Cast", net.add_input("x", parse_type("f32[N]")), to=F16), "y")
    model = onnx_from_network(net)
    assert {a.name: a.i for a in model.graph.node[0].attribute}["to"] == TensorProto.FLOAT16
    assert network_from_onnx(model).layers[0].attrs["to"] is F16


def test_opsets_that_cannot_be_written():
    for opset in (12, 1000):
        with pytest.raises(FrontendError, match="whet writes opsets 13 to"):
            onnx_from_network(small(), opset)
    net = Network("new")
    net.mark_output(net.add("Gelu", net.add_input("x", parse_type("f32[2]"))), "y")
    assert onnx_from_network(net, 20).graph.node[0].op_type == "Gelu"
    with pytest.raises(UnsupportedError, match="Gelu 'gelu' is not an op of ONNX opset 19"):
        onnx_from_network(net, 19)


def test_saving(tmp_path, monkeypatch):
    net = small()
    path = save_onnx(net, tmp_path / "m.onnx")
    assert path.read_bytes() == onnx_from_network(net).SerializeToString()
    monkeypatch.setattr("whet.frontends.onnx_writer.LARGEST_MESSAGE", 100)
    wide = Network("wide")  # onnx keeps tensors below 1 KB inside the model file
    wide.mark_output(
        wide.add("Add", wide.add_input("x", parse_type("f32[1000]")), wide.constant(np.arange(1000, dtype=np.float32), "w")), "y"
    )
    for _ in range(2):  # the second save replaces the data file
        save_onnx(wide, tmp_path / "wide.onnx")
        assert (tmp_path / "wide.onnx.data").stat().st_size == 4000
    np.testing.assert_array_equal(network_from_onnx(tmp_path / "wide.onnx").constants["w"].array(), np.arange(1000, dtype=np.float32))
    with pytest.raises(FrontendError, match="cannot write"):
        save_onnx(net, tmp_path / "none" / "m.onnx")


def test_scalars_and_empty_arrays_keep_their_shape():
    m = helper.make_model(
        helper.make_graph(
            [helper.make_node("Add", ["x", "s"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, [2])],
            [helper.make_tensor_value_info("y", 1, [2])],
            [numpy_helper.from_array(np.array(2, np.float32), "s")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    again = onnx_from_network(network_from_onnx(m))
    assert list(again.graph.initializer[0].dims) == []


def test_symbolic_sizes_become_nodes():
    """A lowered network has Reshape's target as an attribute of dimensions; in ONNX it is computed from the inputs' shapes."""
    net = Network("symbolic")
    x = net.add_input("x", parse_type("f32[N,6,H]"))
    n, h = (d for d in x.shape if not isinstance(d, int))
    flat = net.add("Reshape", x, shape=(n * 3, h * 2))
    net.mark_output(net.add("Slice", flat, starts=(0,), ends=((n + 1) // 2,), axes=(0,)), "y")
    model = onnx_from_network(net)
    for shape in ((1, 6, 4), (4, 6, 3)):
        feeds = {"x": RNG.standard_normal(shape).astype(np.float32)}
        want = feeds["x"].reshape(shape[0] * 3, shape[2] * 2)[: (shape[0] + 1) // 2]
        np.testing.assert_array_equal(run_network(net, feeds)["y"], want)
        np.testing.assert_array_equal(in_ort(model, feeds)[0], want)
        np.testing.assert_array_equal(run_network(network_from_onnx(model), feeds)["y"], want)


def _opset(dtype):
    """The first opset with the type, at least 21; skips the test if this version of onnx has no such opset."""
    opset = {"f4e2m1": 23, "i2": 25, "u2": 25}.get(dtype.name, 21)
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"this version of onnx has no {dtype}")
    return opset


@pytest.mark.parametrize("dtype", [t for t in DTYPES.values() if t.name != "string"], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
def test_every_type_keeps_its_values(dtype, shape):
    values = RNG.integers(0, 2, shape) if dtype.kind in ("bool", "uint") else RNG.integers(*((-2, 2) if dtype.bits == 2 else (-3, 4)), shape)
    a = np.asarray(values).astype(dtype.numpy)
    net = Network("types")
    net.mark_output(net.add("Identity", net.add_input("x", parse_type("f32[2]"))), "y")
    net.mark_output(net.constant(a, "w"), "w_out")
    got = network_from_onnx(onnx_from_network(net, _opset(dtype)))
    w = next(t for t in got.constants.values())
    assert w.array().dtype == a.dtype
    np.testing.assert_array_equal(w.array().astype(np.float64), a.astype(np.float64))
    assert w.shape == shape


CODES = {
    "f32": "FLOAT",
    "f64": "DOUBLE",
    "f16": "FLOAT16",
    "bf16": "BFLOAT16",
    "f8e4m3": "FLOAT8E4M3FN",
    "f8e5m2": "FLOAT8E5M2",
    "f8e4m3fnuz": "FLOAT8E4M3FNUZ",
    "f8e5m2fnuz": "FLOAT8E5M2FNUZ",
    "f4e2m1": "FLOAT4E2M1",
    "bool": "BOOL",
}


@pytest.mark.parametrize("dtype", [t for t in DTYPES.values() if t.name != "string"], ids=str)
def test_every_type_is_read_from_typed_fields_too(dtype):
    """make_tensor without raw=True stores values in float_data, int32_data and so on."""
    opset = _opset(dtype)
    code = TensorProto.DataType.Value(CODES.get(dtype.name, dtype.name.upper().replace("I", "INT").replace("U", "UINT")))
    values = [0, 1, 1] if dtype.kind in ("bool", "uint") else [-2, 0, 1 if dtype.bits == 2 else 3]
    t = helper.make_tensor("w", code, [3], values)
    assert not t.HasField("raw_data")
    outputs = [helper.make_tensor_value_info("y", code, [3])]
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], outputs, [t])
    net = network_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10))
    got = run_network(net, {})["y"]
    assert got.dtype == dtype.numpy
    np.testing.assert_array_equal(got.astype(np.float64), np.array(values, np.float64))
