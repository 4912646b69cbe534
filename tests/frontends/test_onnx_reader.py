"""The ONNX reader: names, symbols, weights, constants, functions, subgraphs, external data."""

from math import erfc

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.errors import FrontendError, ShapeError
from whet.frontends import network_from_onnx
from whet.frontends._onnx_load import external_files
from whet.network import verify
from whet.ops import run_network

RNG = np.random.default_rng(0)


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes, inputs, outputs, weights=None, opset=17, functions=(), **options):
    made = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, made)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10, **options)


def against_ort(m, feeds, **how):
    """Reads `m`, verifies it and compares its outputs with ONNX Runtime's; returns the network."""
    net = verify(network_from_onnx(m, **how))
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    want = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    got = run_network(net, feeds)
    assert list(got) == list(want)
    for name, a in want.items():
        np.testing.assert_allclose(got[name], a, rtol=1e-4, atol=1e-5)
        assert got[name].dtype == a.dtype
    return net


def conv_model(**options):
    w, b = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32), RNG.standard_normal(4).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], name="/conv/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"], name="/relu/Relu"),
    ]
    return model(nodes, [value("x", ["batch", 3, 8, 8])], [value("y", ["batch", 4, 8, 8])], {"conv.weight": w, "conv.bias": b}, **options)


def test_names_and_provenance_are_kept():
    net = against_ort(conv_model(), {"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)})
    assert [t.name for t in net.inputs] == ["x"]
    assert str(net.inputs[0].type) == "f32[batch,3,8,8]"
    assert [layer.name for layer in net.layers] == ["/conv/Conv", "/relu/Relu"]
    assert [layer.sources for layer in net.layers] == [("/conv/Conv",), ("/relu/Relu",)]
    assert net.layers[0].output.name == "c"
    assert str(net.constants["conv.weight"].weight.origin) == "conv.weight"
    assert net.metadata["opset"] == "17"


def test_missing_node_names_are_formed_from_op_and_index():
    m = conv_model()
    for n in m.graph.node:
        n.name = ""
    assert [layer.name for layer in network_from_onnx(m).layers] == ["conv_0", "relu_1"]


def test_a_node_may_have_the_name_of_an_output():
    m = conv_model()
    m.graph.node[0].name = "y"
    net = network_from_onnx(m)
    assert [t.name for t in net.outputs] == ["y"]
    verify(net)


def test_weights_listed_as_inputs_are_weights():
    m = conv_model()
    m.graph.input.extend([value("conv.weight", [4, 3, 3, 3]), value("conv.bias", [4])])
    net = network_from_onnx(m)
    assert [t.name for t in net.inputs] == ["x"]
    assert "conv.weight" in net.constants


def test_nodes_out_of_order_are_sorted():
    m = conv_model()
    nodes = list(m.graph.node)[::-1]
    del m.graph.node[:]
    m.graph.node.extend(nodes)
    assert [layer.op for layer in network_from_onnx(m).layers] == ["Conv", "Relu"]


@pytest.mark.parametrize(
    ("dims", "symbols"),
    [
        (["N", 3, "H", "W"], "f32[N,3,H,W]"),
        (["batch-size", 3, "unk 1", "for"], "f32[batch_size,3,unk_1,d_for]"),
        ([None, 3, None, None], "f32[N,3,H,W]"),
        ([None, None], "f32[N,x_1]"),
        ([-1, 3], "f32[N,3]"),
        (["s", "2*s"], "f32[s,2*s]"),
        (["2*q", 3], "f32[d_2_q,3]"),
        (["N", 3, "?", "?"], "f32[N,3,H,W]"),
        (["?", "?"], "f32[N,x_1]"),
    ],
)
def test_dims_become_symbols(dims, symbols):
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", dims)], [value("y", None)])
    assert str(network_from_onnx(m).inputs[0].type) == symbols


def test_shapes_pin_and_rename_symbols():
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    m = model(nodes, [value("a", ["N", 3]), value("b", ["N", 3])], [value("y", None)])
    assert [str(t.type) for t in network_from_onnx(m, shapes={"a": (4, 3)}).inputs] == ["f32[4,3]", "f32[4,3]"]
    assert [str(t.type) for t in network_from_onnx(m, shapes={"a": ("images", None)}).inputs] == ["f32[images,3]"] * 2
    for shapes, text in [
        ({"a": (4, 5)}, "axis 1: the model fixes 3"),
        ({"a": (4, 3), "b": (5, 3)}, "one name has one size"),
        ({"c": (4, 3)}, "no input 'c'"),
        ({"a": (4,)}, "rank 2"),
        ({"a": ("no name", 3)}, "no name for a dimension"),
        ({"a": (2.5, 3)}, "a size is a number"),
    ]:
        with pytest.raises(FrontendError, match=text):
            network_from_onnx(m, shapes=shapes)


def test_an_input_without_a_rank_needs_a_shape():
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", None)], [value("y", None)])
    with pytest.raises(FrontendError, match=r"input 'x' has no shape.*shapes="):
        network_from_onnx(m)
    assert str(network_from_onnx(m, shapes={"x": ("N", 3)}).inputs[0].type) == "f32[N,3]"


def test_one_symbol_has_one_size_when_run():
    m = model([helper.make_node("Add", ["a", "b"], ["y"])], [value("a", ["N"]), value("b", ["N"])], [value("y", None)])
    with pytest.raises(ShapeError, match="N is 2 elsewhere, 3 here"):
        run_network(network_from_onnx(m), {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    "attrs",
    [
        {"value": numpy_helper.from_array(np.array([2.0, 3.0], np.float32))},
        {"value_floats": [2.0, 3.0]},
        {"value_float": 2.0},
    ],
)
def test_constant_nodes_become_constants(attrs):
    nodes = [helper.make_node("Constant", [], ["k"], **attrs), helper.make_node("Mul", ["x", "k"], ["y"])]
    net = against_ort(model(nodes, [value("x", ["N", 2])], [value("y", ["N", 2])]), {"x": np.ones((3, 2), np.float32)})
    assert [layer.op for layer in net.layers] == ["Mul"]
    assert "k" in net.constants


def test_small_constants_are_folded_and_keep_their_origin():
    nodes = [helper.make_node("Mul", ["a", "b"], ["ab"]), helper.make_node("Add", ["x", "ab"], ["y"])]
    weights = {"a": np.array([2, 3], np.float32), "b": np.array([5], np.float32)}
    net = against_ort(model(nodes, [value("x", ["N", 2])], [value("y", ["N", 2])], weights), {"x": np.ones((3, 2), np.float32)})
    assert [layer.op for layer in net.layers] == ["Add"]
    assert str(net.constants["ab"].weight.origin) == "Mul(a, b)"


def test_large_constants_stay_layers():
    nodes = [helper.make_node("Mul", ["a", "b"], ["ab"]), helper.make_node("Add", ["x", "ab"], ["y"])]
    weights = {"a": np.ones(5000, np.float32), "b": np.array([5], np.float32)}
    net = network_from_onnx(model(nodes, [value("x", ["N", 5000])], [value("y", None)], weights))
    assert [layer.op for layer in net.layers] == ["Mul", "Add"]


def test_an_input_or_a_weight_as_output():
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2]), value("x", [2])])
    assert list(run_network(network_from_onnx(m), {"x": np.ones(2, np.float32)})) == ["y", "x"]


def test_functions_of_the_model_are_inlined():
    body = [
        helper.make_node("Mul", ["a", "a"], ["t"], name="square"),
        helper.make_node("Add", ["t", "b"], ["c"], name="sum"),
        helper.make_node("LeakyRelu", ["c"], ["out"], name="act"),
    ]
    body[2].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    f = helper.make_function("my", "SquareAdd", ["a", "b"], ["out"], body, [helper.make_opsetid("", 17)], attributes=["slope"])
    outer = helper.make_function(
        "my",
        "Twice",
        ["p"],
        ["q"],
        [
            helper.make_node("SquareAdd", ["p", "p"], ["m"], domain="my", name="inner", slope=0.5),
            helper.make_node("SquareAdd", ["m", "p"], ["q"], domain="my", name="inner2", slope=0.25),
        ],
        [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)],
    )
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="my", name="call")]
    m = model(nodes, [value("x", ["N"])], [value("y", ["N"])], functions=[f])
    m.functions.append(outer)
    net = against_ort(m, {"x": np.array([-3, -0.5, 2], np.float32)})
    assert [layer.name for layer in net.layers] == [f"call/{i}/{o}" for i in ("inner", "inner2") for o in ("square", "sum", "act")]
    assert [layer.attrs["alpha"] for layer in net.layers if layer.op == "LeakyRelu"] == [0.5, 0.25]


def test_a_function_that_calls_itself_is_refused():
    f = helper.make_function(
        "my", "Loop", ["a"], ["b"], [helper.make_node("Loop", ["a"], ["b"], domain="my")], [helper.make_opsetid("my", 1)]
    )
    m = model([helper.make_node("Loop", ["x"], ["y"], domain="my")], [value("x", [2])], [value("y", [2])], functions=[f])
    with pytest.raises(FrontendError, match="deep, perhaps recursively"):
        network_from_onnx(m)


def test_an_op_that_onnx_defines_by_others_is_expanded():
    """AffineGrid has no reader of its own; ONNX defines it by thirty nodes."""
    from whet.frontends._onnx_graph import get_onnx_readers

    assert "AffineGrid" not in get_onnx_readers()
    nodes = [helper.make_node("AffineGrid", ["theta", "size"], ["y"], name="grid")]
    size = {"size": np.array([2, 3, 4, 5], np.int64)}
    m = model(nodes, [value("theta", [2, 2, 3])], [value("y", None)], size, opset=20)
    net = against_ort(m, {"theta": RNG.standard_normal((2, 2, 3)).astype(np.float32)})
    assert net.layers
    assert all(s.startswith("grid/") for layer in net.layers for s in layer.sources)


def if_model():
    then = helper.make_graph([helper.make_node("Add", ["x", "w"], ["t"], name="then_add")], "t", [], [value("t", ["N", 2])])
    inner_w = numpy_helper.from_array(np.array([10.0, 20.0], np.float32), "w2")
    other = helper.make_graph([helper.make_node("Mul", ["h", "w2"], ["e"], name="else_mul")], "e", [], [value("e", ["N", 2])], [inner_w])
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], name="relu"),
        helper.make_node("If", ["go"], ["y"], name="if", then_branch=then, else_branch=other),
    ]
    inputs = [value("x", ["N", 2]), value("go", [], TensorProto.BOOL)]
    return model(nodes, inputs, [value("y", ["N", 2])], {"w": np.array([1, 2], np.float32)})


@pytest.mark.parametrize("go", [True, False])
def test_subgraphs_are_regions_that_capture(go):
    net = against_ort(if_model(), {"x": np.array([[-1, 2]], np.float32), "go": np.array(go)})
    branch = net.layers[-1]
    assert branch.op == "If"
    assert sorted(t.name for r in branch.regions.values() for t in r.captures()) == ["h", "w", "x"]


def test_pads_as_pytorch_writes_them():
    """torch.nn.functional.pad: constants through ConstantOfShape, Concat, Reshape, Slice, Transpose, Reshape, Cast."""
    nodes = [
        helper.make_node("ConstantOfShape", ["four"], ["zeros"], value=numpy_helper.from_array(np.array([0], np.int64))),
        helper.make_node("Concat", ["pads", "zeros"], ["all"], axis=0),
        helper.make_node("Reshape", ["all", "rows"], ["pairs"]),
        helper.make_node("Slice", ["pairs", "start", "end", "axis", "step"], ["flipped"]),
        helper.make_node("Transpose", ["flipped"], ["t"], perm=[1, 0]),
        helper.make_node("Reshape", ["t", "flat"], ["f"]),
        helper.make_node("Cast", ["f"], ["p"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "p", "zero"], ["y"], mode="constant"),
    ]
    weights = {
        "four": np.array([4], np.int64),
        "pads": np.array([1, 2, 3, 4], np.int64),
        "rows": np.array([-1, 2], np.int64),
        "start": np.array([-1], np.int64),
        "end": np.array([np.iinfo(np.int64).min + 1], np.int64),
        "axis": np.array([0], np.int64),
        "step": np.array([-1], np.int64),
        "flat": np.array([-1], np.int64),
        "zero": np.array(0, np.float32),
    }
    m = model(nodes, [value("x", ["N", 3, 4, 4])], [value("y", None)], weights)
    net = against_ort(m, {"x": RNG.standard_normal((2, 3, 4, 4)).astype(np.float32)})
    assert [layer.op for layer in net.layers] == ["Pad"]


def external(tmp_path):
    """A model with its weights in a separate weights.bin, and its path."""
    m, path = conv_model(), tmp_path / "m.onnx"
    onnx.save(m, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return onnx.load(path, load_external_data=False), path


def test_external_data(tmp_path):
    m, path = external(tmp_path)
    want = network_from_onnx(path)
    assert np.array_equal(want.constants["conv.weight"].array(), onnx.numpy_helper.to_array(m.graph.initializer[0], str(tmp_path)))
    assert len(network_from_onnx(path.read_bytes(), folder=tmp_path).layers) == 2
    with pytest.raises(FrontendError, match=r"came from memory. Give the model's path"):
        network_from_onnx(path.read_bytes())


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"location": "../outside.bin"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": "link.bin"}, "outside the model's folder"),
        ({"location": ""}, "outside the model's folder"),
        ({"location": "gone.bin"}, "which does not exist"),
        ({"location": "."}, "which is not a file"),
        ({"location": "weights.bin", "offset": "100000"}, "Copy the data file again"),
        ({"location": "weights.bin", "offset": "-8"}, "do not belong together"),
        ({"location": "weights.bin", "length": "16"}, "do not belong together"),
        ({"location": "weights.bin", "offset": "many"}, "is damaged"),
        ({"location": "a\0b"}, "is damaged"),
    ],
)
def test_external_data_is_confined_and_its_size_checked(tmp_path, entry, text):
    (tmp_path / "outside.bin").write_bytes(bytes(10000))
    home = tmp_path / "home"
    home.mkdir()
    m, path = external(home)
    (home / "link.bin").symlink_to(tmp_path / "outside.bin")
    t = m.graph.initializer[0]
    del t.external_data[:]
    for k, v in entry.items():
        t.external_data.add(key=k, value=v)
    path.write_bytes(m.SerializeToString())
    with pytest.raises(FrontendError, match=text):
        network_from_onnx(path)


def test_metadata_of_the_model():
    m = conv_model(producer_name="maker", producer_version="1.2")
    m.metadata_props.add(key="classes", value="cat,dog")
    meta = network_from_onnx(m).metadata
    assert (meta["producer_name"], meta["producer_version"], meta["prop.classes"]) == ("maker", "1.2", "cat,dog")


def test_opset_seven_and_eight_read_as_nine():
    for opset in (7, 8, 9):
        m = conv_model(opset=opset)
        assert len(network_from_onnx(m).layers) == 2


def make_sparse(name, values, indices, shape):
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.array(values, np.float32), name), numpy_helper.from_array(np.array(indices), f"{name}_i"), shape
    )


@pytest.mark.parametrize("indices", [[2, 5, 7], [[0, 2], [1, 1], [1, 3]]], ids=["flat", "rows"])
def test_sparse_weights_are_read_dense(indices):
    m = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [2, 3])], [value("y", [2, 4])])
    m.graph.sparse_initializer.append(make_sparse("w", [1.5, 2.5, -3], indices, [3, 4]))
    net = against_ort(m, {"x": RNG.standard_normal((2, 3)).astype(np.float32)})
    assert net.constants["w"].array()[1].tolist() == [0, 2.5, 0, -3]


def test_a_sparse_constant_and_a_sparse_weight_of_a_branch_are_read():
    then = helper.make_graph([helper.make_node("Mul", ["s", "b"], ["t"])], "then", [], [value("t", [4])])
    then.sparse_initializer.append(make_sparse("b", [3.0], [1], [4]))
    other = helper.make_graph([helper.make_node("Neg", ["s"], ["e"])], "else", [], [value("e", [4])])
    nodes = [
        helper.make_node("Constant", [], ["k"], sparse_value=make_sparse("", [2.0], [3], [4])),
        helper.make_node("Add", ["x", "k"], ["s"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    net = network_from_onnx(model(nodes, [value("x", [4]), value("c", [], TensorProto.BOOL)], [value("y", [4])]))
    x = np.array([1, 2, 3, 4], np.float32)
    assert run_network(net, {"x": x, "c": np.array(True)})["y"].tolist() == [0, 6, 0, 0]
    assert run_network(net, {"x": x, "c": np.array(False)})["y"].tolist() == [-1, -2, -3, -6]


def test_external_values_of_a_sparse_weight_belong_to_the_model(tmp_path):
    sparse = make_sparse("w", [1.0, 2.0], [0, 2], [3])
    (tmp_path / "w.bin").write_bytes(sparse.values.raw_data)
    sparse.values.ClearField("raw_data")
    sparse.values.data_location = TensorProto.EXTERNAL
    sparse.values.external_data.add(key="location", value="w.bin")
    m = model([helper.make_node("Add", ["x", "w"], ["y"])], [value("x", [3])], [value("y", [3])])
    m.graph.sparse_initializer.append(sparse)
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    assert external_files(tmp_path / "m.onnx") == [tmp_path / "w.bin"]
    assert network_from_onnx(tmp_path / "m.onnx").constants["w"].array().tolist() == [1, 0, 2]


def test_tensorflows_erfc_is_read():
    """tf2onnx leaves this op of TensorFlow in ONNX's domain, for the exact GELU of Keras 3."""
    m = model([helper.make_node("Erfc", ["x"], ["y"])], [value("x", [7])], [value("y", [7])])
    x = np.linspace(-3, 3, 7).astype(np.float32)
    np.testing.assert_allclose(run_network(network_from_onnx(m), {"x": x})["y"], [erfc(v) for v in x], rtol=1e-5, atol=1e-7)
