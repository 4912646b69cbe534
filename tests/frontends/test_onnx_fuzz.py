"""Damaged and hostile ONNX files raise whet's own errors and nothing else, within seconds."""

import random
import time

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from whet.errors import WhetError
from whet.frontends import check_onnx, network_from_onnx, onnx_from_network

FILES = 1000
LONGEST = 5.0  # seconds of this process for one file

OTHER_OPS = sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def seeds():
    """Small models that together contain every part of the format that the reader reads."""
    rng = np.random.default_rng(0)

    def arr(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def make_model(nodes, inputs, outputs, weights, opset=17, functions=()):
        made = [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()]
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
        graph = helper.make_graph(nodes, "g", inputs, outputs, made)
        return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))

    net = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2], dilations=[1, 1], group=1, auto_pad="NOTSET"),
        helper.make_node("BatchNormalization", ["c", "s", "b", "b", "s"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "b"], ["y"], transB=1, alpha=1.0),
    ]
    weights = {"w": arr(4, 3, 3, 3), "b": arr(4), "s": np.abs(arr(4)), "g": arr(4, 16)}
    yield make_model(net, [value("x", ["N", 3, 8, 8])], [value("y", ["N", 4])], weights)
    shapes = [
        helper.make_node("Shape", ["x"], ["sh"]),
        helper.make_node("Constant", [], ["zero"], value=numpy_helper.from_array(np.array(0))),
        helper.make_node("Gather", ["sh", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["nn"]),
        helper.make_node("Concat", ["nn", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["q"]),
        helper.make_node("Slice", ["q", "from", "to", "axes"], ["sl"]),
        helper.make_node("Transpose", ["sl"], ["y"], perm=[1, 0]),
        helper.make_node("Pad", ["y", "pads"], ["z"]),
    ]
    ints = {"axes": [0], "rest": [-1], "from": [0], "to": [1], "pads": [1, 1, 0, 0]}
    yield make_model(shapes, [value("x", ["N", 3, 4])], [value("z", None)], {k: np.array(v, np.int64) for k, v in ints.items()})
    then = helper.make_graph([helper.make_node("Add", ["x", "w"], ["t"])], "t", [], [value("t", ["N", 2])])
    other = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["e"])], "e", [], [value("e", ["N", 2])])
    body = [helper.make_node("Mul", ["a", "a"], ["m"]), helper.make_node("LeakyRelu", ["m"], ["b"])]
    body[1].attribute.append(AttributeProto(name="alpha", ref_attr_name="slope", type=AttributeProto.FLOAT))
    f = helper.make_function("my", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)], attributes=["slope"])
    nodes = [
        helper.make_node("If", ["go"], ["i"], then_branch=then, else_branch=other),
        helper.make_node("F", ["i"], ["y"], domain="my", slope=0.5),
        helper.make_node("Celu", ["y"], ["z"]),
    ]
    yield make_model(nodes, [value("x", ["N", 2]), value("go", [], TensorProto.BOOL)], [value("z", ["N", 2])], {"w": arr(2)}, functions=[f])


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, removed, repeated, inserted or overwritten with values that often break readers."""
    b = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(b)) if b else 0
        match rng.randrange(6):
            case 0:
                b[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del b[at:]
            case 2:
                del b[at : at + rng.randrange(1, 9)]
            case 3:
                b[at:at] = b[(k := rng.randrange(len(b)) if b else 0) : k + rng.randrange(1, 64)]
            case 4:
                b[at : at + 9] = rng.choice((b"\xff" * 9 + b"\x01", b"\x00" * 9, b"\x80" * 9, b"\xff\xff\xff\xff\x7f"))
            case _:
                b[at : at + 1] = bytes([b[at] ^ (1 << rng.randrange(8))]) if b else b""
    return bytes(b)


def restructured(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Valid protobuf with invalid models: values, attributes, types and shapes exchanged."""
    m = onnx.ModelProto()
    m.CopyFrom(model)
    odd = [-(2**63), -1, 0, 1, 3, 2**31, 2**63 - 1]
    for _ in range(rng.choice((1, 2, 3))):
        node = rng.choice(list(m.graph.node))
        names = [v for n in m.graph.node for v in (*n.input, *n.output)] + ["", "ghost"]
        weight = rng.choice(list(m.graph.initializer))
        match rng.randrange(9):
            case 0:
                if node.input:
                    node.input[rng.randrange(len(node.input))] = rng.choice(names)
            case 1:
                node.output[rng.randrange(len(node.output))] = rng.choice(names)
            case 2:
                node.op_type = rng.choice(OTHER_OPS)
            case 3:
                for a in node.attribute:
                    a.i, a.f = rng.choice(odd), rng.choice([0.0, float("nan"), float("inf"), -1.0])
                    a.ints[:] = [rng.choice(odd) for _ in a.ints]
            case 4:
                if node.attribute:
                    del node.attribute[rng.randrange(len(node.attribute))]
            case 5:
                weight.dims[:] = [rng.choice(odd) for _ in range(rng.randrange(5))]
            case 6:
                weight.data_type = rng.randrange(30)
            case 7:
                dims = m.graph.input[0].type.tensor_type.shape.dim
                if dims:
                    dims[rng.randrange(len(dims))].dim_value = rng.choice(odd)
            case _:
                if len(weight.raw_data) % 8 == 0 and weight.data_type == TensorProto.INT64:
                    weight.raw_data = np.array([rng.choice(odd) for _ in range(len(weight.raw_data) // 8)]).tobytes()
    return m


def ours(error):
    assert str(error), "an error without a text"


def checked(source):
    """Checks that the model gives a report or one of whet's errors."""
    try:
        str(check_onnx(source, infer_types=False))  # a process per file would use up the time
    except WhetError as e:
        ours(e)


def test_only_whets_own_errors():
    rng = random.Random(20240601)
    models = list(seeds())
    blobs = [m.SerializeToString() for m in models]
    tried = read = written = 0
    for _ in range(FILES):
        which = rng.randrange(len(models))
        source = scrambled(blobs[which], rng) if rng.random() < 0.5 else restructured(models[which], rng)
        start = time.process_time()
        tried += 1
        if rng.random() < 0.2:
            checked(source)
        try:
            net = network_from_onnx(source)
            read += 1
            onnx_from_network(net)
            written += 1
        except WhetError as e:
            ours(e)
        took = time.process_time() - start
        assert took < LONGEST, f"file {tried} took {took:.1f} s"
    print(f"\n{tried} files, {read} read, {written} written again")
    assert 0 < written <= read < tried
