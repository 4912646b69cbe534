"""Refusals of the ONNX reader: the error names the node, the reason and a remedy; the texts are compared."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.frontends._onnx_load import load_model
from whet.frontends.onnx import read_model


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model(*nodes, inputs=None, outputs=None, weights=(), opset=17, domains=()):
    inputs = inputs if inputs is not None else [value("x", ["N", 3])]
    outputs = outputs if outputs is not None else [value("y", None)]
    graph = helper.make_graph(list(nodes), "g", inputs, outputs, list(weights))
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)], ir_version=10
    )


def node(op, inputs=("x",), outputs=("y",), **options):
    return helper.make_node(op, list(inputs), list(outputs), **options)


def raw(name, dims, data, kind=TensorProto.FLOAT):
    return TensorProto(name=name, dims=dims, data_type=kind, raw_data=data)


def duplicated_weight():
    m = model(node("Add", ["x", "w"]), weights=[numpy_helper.from_array(np.ones(3, np.float32), "w")])
    m.graph.initializer.append(m.graph.initializer[0])
    return m


def sparse(indices=(0,), shape=(3,), kind=TensorProto.INT64, dims=None):
    """A model with a weight of one value in coordinate format."""
    m = model(node("Add", ["x", "w"]))
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    where = helper.make_tensor("i", kind, dims or [len(indices)], indices)
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, shape))
    return m


def no_graph():
    return onnx.ModelProto(ir_version=8)


def twice_the_same_attribute():
    m = model(node("LeakyRelu", name="act", alpha=0.5))
    m.graph.node[0].attribute.append(m.graph.node[0].attribute[0])
    return m


def doubling(depth):
    """Functions of which each calls the next twice: 2^depth nodes in a few lines."""

    def calls(i):
        op, domain = (f"F{i}", "my") if i < depth else ("Relu", "")
        return [node(op, ["a"], ["c"], domain=domain), node(op, ["c"], ["b"], domain=domain)]

    m = model(node("F0", domain="my"), domains=["my"])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    m.functions.extend(helper.make_function("my", f"F{i}", ["a"], ["b"], calls(i + 1), imports) for i in range(depth))
    return m


W = numpy_helper.from_array(np.ones(3, np.float32), "w")
REFUSED = {
    "functions that double": (doubling(30), FrontendError, "more than 2,000 nodes"),
    "text as input": (model(node("Equal", ["x", "x"]), inputs=[value("x", [1], TensorProto.STRING)]), UnsupportedError, "'x' holds strings"),
    "shape that is too large": (model(node("Relu"), inputs=[value("x", [2**62, 2**62])]), FrontendError, "'x' has the shape .*which is too large"),
    "cycle": (
        model(node("Add", ["x", "b"], ["a"], name="one"), node("Relu", ["a"], ["b"], name="two"), outputs=[value("b", None)]),
        FrontendError,
        r"form a cycle: one, two\. .*export it again",
    ),
    "reads itself": (model(node("Add", ["x", "y"], ["y"], name="self")), FrontendError, "cycle: self"),
    "missing value": (model(node("Relu", ["ghost"], name="r")), FrontendError, r"node 'r' \(Relu\) reads 'ghost', which is undefined"),
    "missing output": (model(node("Relu", outputs=["z"])), FrontendError, "output 'y' has no producer"),
    "made twice": (model(node("Relu", name="a"), node("Tanh", name="b")), FrontendError, "'y' is defined twice: by node 'a' and by node 'b'"),
    "makes an input": (
        model(node("Relu", outputs=["x"], name="r"), outputs=[value("x", None)]),
        FrontendError,
        "'r'.*produces 'x', which is an input",
    ),
    "makes a weight": (
        model(node("Relu", outputs=["w"], name="r"), outputs=[value("w", None)], weights=[W]),
        FrontendError,
        "an input or a weight",
    ),
    "weight twice": (duplicated_weight(), FrontendError, "'w' appears twice in the model"),
    "input twice": (model(node("Relu"), inputs=[value("x", [2]), value("x", [2])]), FrontendError, "two inputs are called 'x'"),
    "output twice": (model(node("Relu"), outputs=[value("y", None)] * 2), FrontendError, "two outputs have one name"),
    "no outputs": (model(node("Relu"), outputs=[]), FrontendError, "no outputs"),
    "sparse weight outside its shape": (sparse([3]), FrontendError, r"'w' is stored sparse with indices outside of its shape \[3\]"),
    "sparse weight with a negative index": (sparse([-1]), FrontendError, "indices outside"),
    "sparse weight with an index outside an axis": (sparse([0, 3], (2, 3), dims=[1, 2]), FrontendError, "indices outside"),
    "sparse weight with two indices of one value": (sparse([0, 1]), FrontendError, r"values of shape \[1\] and int64 indices of shape \[2\]"),
    "sparse weight with 32-bit indices": (sparse(kind=TensorProto.INT32), FrontendError, "int32 indices"),
    "sparse weight of no shape": (sparse(shape=()), FrontendError, r"the shape \[\]"),
    "sparse weight that is too large": (sparse(shape=(2**30, 2**30)), FrontendError, "the shape .1073741824"),
    "no graph": (no_graph(), FrontendError, "holds no graph"),
    "old opset": (model(node("Frob", name="f"), opset=5), FrontendError, r"opset 5, and onnx.s version converter cannot.*opset 13 or newer"),
    "future opset": (model(node("Relu"), opset=999), FrontendError, "opset 999.*Upgrade"),
    "strings": (
        model(node("Identity"), inputs=[value("x", [2], TensorProto.COMPLEX64)]),
        UnsupportedError,
        "input 'x' has the element type COMPLEX64",
    ),
    "sequence input": (
        model(node("Identity"), inputs=[helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]),
        UnsupportedError,
        "'x' is a sequence, not a tensor",
    ),
    "unknown op": (model(node("Frobnicate", name="f")), UnsupportedError, r"node 'f' \(Frobnicate\): ONNX has no op of this name"),
    "misspelt op": (model(node("Sigmoidd", name="s")), UnsupportedError, "Did you mean 'Sigmoid'"),
    "op without reader": (model(node("RandomNormalLike", name="n")), UnsupportedError, r"node 'n' \(RandomNormalLike\): .*random numbers"),
    "sequence op": (
        model(node("SplitToSequence", outputs=["s"], name="s"), node("ConcatFromSequence", ["s"], axis=0)),
        UnsupportedError,
        r"node .s. .*the length of its sequence, the size of axis 0 of f32\[N,3\]",
    ),
    "sequence to another op": (
        model(node("SequenceConstruct", outputs=["s"]), node("Relu", ["s"], name="r")),
        UnsupportedError,
        r"node .r. .*its input .s. is a sequence or an absent value",
    ),
    "sequence declared as tensor": (model(node("SequenceConstruct", name="s")), FrontendError, "declared as a tensor, but computed as a sequence"),
    "microsoft": (
        model(node("QOrderedAttention", domain="com.microsoft", name="m"), domains=["com.microsoft"]),
        UnsupportedError,
        r"node 'm' \(com.microsoft.QOrderedAttention\): ONNX Runtime's own op.*graph optimization level",
    ),
    "foreign domain": (model(node("Thing", domain="acme", name="t"), domains=["acme"]), UnsupportedError, "'acme' is not ONNX's own"),
    "no opset of the domain": (
        helper.make_model(model(node("Relu")).graph, opset_imports=[helper.make_opsetid("acme", 1)]),
        FrontendError,
        "names no opset",
    ),
    "too few inputs": (model(node("Add", ["x"], name="a")), FrontendError, r"node 'a' \(Add, opset 17\) has 1 inputs, the op takes 2"),
    "too many inputs": (model(node("Relu", ["x", "x"], name="r")), FrontendError, "has 2 inputs, the op takes 1"),
    "missing attribute": (model(node("Concat", ["x", "x"], name="c")), FrontendError, "needs the attribute axis"),
    "attribute of another kind": (model(node("LeakyRelu", name="l", alpha="big")), FrontendError, "attribute alpha is of the kind"),
    "attribute twice": (twice_the_same_attribute(), FrontendError, r"attribute alpha is given twice"),
    "shapes that do not fit": (
        model(node("Add", ["x", "w"], name="a"), inputs=[value("x", [2, 4])], weights=[W]),
        FrontendError,
        r"node 'a' .*do not broadcast",
    ),
    "types that do not fit": (
        model(node("Add", ["x", "i"], name="a"), inputs=[value("x", [3]), value("i", [3], TensorProto.INT64)]),
        FrontendError,
        "node 'a' .*one type",
    ),
    "declared otherwise": (
        model(node("Relu"), outputs=[value("y", [3], TensorProto.INT64)]),
        FrontendError,
        "declared as i64, but computed as f32",
    ),
    "weight cut off": (
        model(node("Add", ["x", "w"], name="a"), weights=[raw("w", [3], bytes(11))]),
        FrontendError,
        "'w' has 11 bytes, its type .* needs 12",
    ),
    "weight of negative size": (model(node("Add", ["x", "w"]), weights=[raw("w", [-3], bytes(12))]), FrontendError, "cannot be negative"),
    "weight without values": (
        model(node("Add", ["x", "w"]), weights=[TensorProto(name="w", dims=[3], data_type=1, float_data=[1, 2])]),
        FrontendError,
        "'w' cannot be read",
    ),
    "weight of another type": (
        model(node("Add", ["x", "w"]), inputs=[value("x", [3]), value("w", [3], TensorProto.INT32)], weights=[W]),
        FrontendError,
        "listed as an input of another element type",
    ),
    "weight of no type": (model(node("Add", ["x", "w"]), weights=[raw("w", [3], bytes(12), 77)]), UnsupportedError, "element type code 77"),
    "string weight": (
        model(node("Identity", ["w"]), weights=[helper.make_tensor("w", TensorProto.STRING, [1], ["a"])]),
        UnsupportedError,
        "holds strings",
    ),
    "sparse constant": (
        model(node("Constant", [], ["y"], name="k", sparse_value=sparse([7]).graph.sparse_initializer[0])),
        FrontendError,
        "node 'k'.*sparse_value is stored sparse with indices outside",
    ),
    "constant of nothing": (model(node("Constant", [], ["y"], name="k")), FrontendError, r"node 'k' \(Constant\) needs one value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    m, kind, text = REFUSED[case]
    for source in (m, m.SerializeToString()):
        with pytest.raises(kind, match=text):
            read_model(*load_model(source), None, most_nodes=2000)


def test_invalid_files(tmp_path):
    def refused(data, text):
        path = tmp_path / "m.onnx"
        path.write_bytes(data)
        with pytest.raises(FrontendError, match=text):
            network_from_onnx(path)

    whole = model(node("Relu")).SerializeToString()
    refused(b"", "is empty")
    refused(b"not a model at all, just some text", "not an ONNX model")
    refused(whole[:-5], "truncated|has no producer|no outputs|no graph")
    refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull")
    with pytest.raises(FrontendError, match=r"cannot read .*gone\.onnx: No such file"):
        network_from_onnx(tmp_path / "gone.onnx")
    with pytest.raises(FrontendError, match="is a folder"):
        network_from_onnx(tmp_path)
    with pytest.raises(FrontendError, match="cannot read"):
        network_from_onnx("a\0b.onnx")
