"""Small models of typical uses of onnxsim and onnxslim, in ONNX's text form: our own, one per pattern of their tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper, parser

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'

# name -> (graph, weights by name and shape, nodes that remain). Kept: x + 0.0, which turns -0.0 into 0.0; two Slices of one axis, as the tools do.
MODELS: dict[str, tuple[str, Mapping[str, tuple[int, ...]], int]] = {
    "reshape_by_computed_shape": (
        """g (float[2,3,4,5] x) => (float[2,3,20] y) {
            s = Shape(x)  zero = Constant <value_int = 0> ()  a = Gather(s, zero)  one = Constant <value_int = 1> ()  b = Gather(s, one)
            two = Constant <value_int = 2> ()  c = Gather(s, two)  three = Constant <value_int = 3> ()  d = Gather(s, three)  e = Mul(c, d)
            k = Constant <value_ints = [0]> ()  a1 = Unsqueeze(a, k)  b1 = Unsqueeze(b, k)  e1 = Unsqueeze(e, k)
            t = Concat <axis = 0> (a1, b1, e1)  y = Reshape(x, t)
        }""", {}, 1,
    ),
    "reshape_of_dynamic_batch": (
        """g (float[N,3,4] x) => (float[N,12] y) {
            s = Shape(x)  zero = Constant <value_int = 0> ()  a = Gather(s, zero)  k = Constant <value_ints = [0]> ()  a1 = Unsqueeze(a, k)
            m = Constant <value_ints = [-1]> ()  t = Concat <axis = 0> (a1, m)  y = Reshape(x, t)
        }""", {}, 1,
    ),
    "expand_by_computed_shape": (
        """g (float[2,1,4] x, float[2,3,4] z) => (float[2,3,4] y) { s = Shape(z)  e = Expand(x, s)  y = Add(e, z) }""", {}, 1,
    ),
    "constant_subgraph": (
        """g (float[2,3] x) => (float[2,3] y) {
            a = Add(w, v)  b = Mul(a, w)  c = Transpose <perm = [1,0]> (b)  y = MatMul(x, c)
        }""", {"w": (3, 3), "v": (3, 3)}, 1,
    ),
    "identity_and_dropout": (
        """g (float[2,3] x) => (float[2,3] y) {
            a = Identity(x)  r = Constant <value_float = 0.5> ()  b, mask = Dropout(a, r)  c = Relu(b)  y = Identity(c)
        }""", {}, 1,
    ),
    "unused_node": ("g (float[2,3] x) => (float[2,3] y) { a = Exp(x)  b = Sqrt(a)  y = Relu(x) }", {}, 1),
    "cast_to_same_type": ("g (float[2,3] x) => (float[2,3] y) { a = Cast <to = 1> (x)  y = Relu(a) }", {}, 1),
    "equal_nodes": ("g (float[2,3] x) => (float[2,3] y) { a = Sigmoid(x)  b = Sigmoid(x)  y = Mul(a, b) }", {}, 2),
    "equal_chains": (
        """g (float[2,3] x) => (float[2,3] y) { a = Exp(x)  b = Exp(x)  c = Tanh(a)  d = Tanh(b)  y = Mul(c, d) }""", {}, 3,
    ),
    "conv_batch_norm": (
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            c = Conv <pads = [1,1,1,1]> (x, w)  y = BatchNormalization(c, scale, bias, mean, var)
        }""", {"w": (4, 3, 3, 3), "scale": (4,), "bias": (4,), "mean": (4,), "var": (4,)}, 1,
    ),
    "conv_add": ("g (float[1,3,8,8] x) => (float[1,4,6,6] y) { c = Conv(x, w)  y = Add(c, b) }", {"w": (4, 3, 3, 3), "b": (1, 4, 1, 1)}, 1),
    "conv_mul": (
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y) { c = Conv(x, w, b)  y = Mul(c, s) }", {"w": (4, 3, 3, 3), "b": (4,), "s": (1, 4, 1, 1)}, 1,
    ),
    "pad_conv": (
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            p = Constant <value_ints = [0,0,1,1,0,0,1,1]> ()  a = Pad(x, p)  y = Conv(a, w)
        }""", {"w": (4, 3, 3, 3)}, 1,
    ),
    "linear_3d": (
        "g (float[2,5,8] x) => (float[2,5,4] y) { m = MatMul(x, w)  y = Add(m, b) }", {"w": (8, 4), "b": (4,)}, 2,
    ),
    "linear_2d": ("g (float[2,8] x) => (float[2,4] y) { m = MatMul(x, w)  y = Add(m, b) }", {"w": (8, 4), "b": (4,)}, 1),
    "gelu": (
        """g (float[2,8] x) => (float[2,8] y) {
            r = Constant <value_float = 1.4142135> ()  one = Constant <value_float = 1.0> ()  half = Constant <value_float = 0.5> ()
            a = Div(x, r)  b = Erf(a)  c = Add(b, one)  d = Mul(x, c)  y = Mul(d, half)
        }""", {}, 1,
    ),
    "layer_norm": (
        """g (float[2,8] x) => (float[2,8] y) {
            two = Constant <value_float = 2.0> ()  eps = Constant <value_float = 0.00001> ()
            m = ReduceMean <axes = [-1]> (x)  d = Sub(x, m)  q = Pow(d, two)  v = ReduceMean <axes = [-1]> (q)  e = Add(v, eps)  s = Sqrt(e)
            n = Div(d, s)  t = Mul(n, scale)  y = Add(t, bias)
        }""", {"scale": (8,), "bias": (8,)}, 1,
    ),
    "reshape_reshape": (
        """g (float[2,3,4] x) => (float[4,6] y) {
            a = Constant <value_ints = [6,4]> ()  b = Constant <value_ints = [4,6]> ()  r = Reshape(x, a)  y = Reshape(r, b)
        }""", {}, 1,
    ),
    "reshape_to_same_shape": (
        "g (float[2,3] x) => (float[2,3] y) { a = Constant <value_ints = [2,3]> ()  r = Reshape(x, a)  y = Relu(r) }", {}, 1,
    ),
    "slice_slice": (
        """g (float[10,10] x) => (float[5,10] y) {
            s = Constant <value_ints = [1]> ()  e = Constant <value_ints = [9]> ()  k = Constant <value_ints = [0]> ()
            a = Slice(x, s, e, k)  z = Constant <value_ints = [2]> ()  f = Constant <value_ints = [7]> ()  y = Slice(a, z, f, k)
        }""", {}, 2,
    ),
    "unsqueeze_unsqueeze": (
        """g (float[3,4] x) => (float[3,4,1,1] y) { k = Constant <value_ints = [-1]> ()  a = Unsqueeze(x, k)  y = Unsqueeze(a, k) }""", {}, 1,
    ),
    "unsqueeze_squeeze": (
        "g (float[3,4] x) => (float[3,4] y) { k = Constant <value_ints = [0]> ()  a = Unsqueeze(x, k)  b = Squeeze(a, k)  y = Relu(b) }", {}, 1,
    ),
    "concat_of_one": ("g (float[1,3] x) => (float[1,3] y) { a = Concat <axis = 1> (x)  b = Concat <axis = 1> (a)  y = Relu(b) }", {}, 1),
    "concat_concat": (
        """g (float[2,3] x, float[2,4] z, float[2,5] v) => (float[2,12] y) { a = Concat <axis = 1> (x, z)  y = Concat <axis = 1> (a, v) }""", {}, 1,
    ),
    "transpose_transpose": (
        "g (float[2,3,4] x) => (float[3,4,2] y) { a = Transpose <perm = [1,0,2]> (x)  y = Transpose <perm = [0,2,1]> (a) }", {}, 1,
    ),
    "transpose_back": (
        """g (float[2,3,4] x) => (float[2,3,4] y) {
            a = Transpose <perm = [1,0,2]> (x)  b = Transpose <perm = [1,0,2]> (a)  y = Relu(b)
        }""", {}, 1,
    ),
    "transpose_of_ones": ("g (float[1,1,4] x) => (float[4,1,1] y) { y = Transpose <perm = [2,0,1]> (x) }", {}, 1),
    "reduce_unsqueeze": (
        """g (float[2,3,4] x) => (float[2,1,4] y) {
            k = Constant <value_ints = [1]> ()  a = ReduceSum <keepdims = 0> (x, k)  y = Unsqueeze(a, k)
        }""", {}, 1,
    ),
    "times_one": (
        """g (float[2,3] x) => (float[2,3] y) {
            z = Constant <value_float = 0.0> ()  o = Constant <value_float = 1.0> ()  a = Sub(x, z)  b = Mul(a, o)  c = Div(b, o)  y = Relu(c)
        }""", {}, 1,
    ),
    "add_zero": ("g (float[2,3] x) => (float[2,3] y) { z = Constant <value_float = 0.0> ()  a = Add(x, z)  y = Relu(a) }", {}, 2),
    "static_if": (
        """g (float[2,3] x) => (float[2,3] y) {
            t = Constant <value = bool {1}> ()
            a = If (t) <then_branch = th () => (float[2,3] p) { p = Relu(x) }, else_branch = el () => (float[2,3] q) { q = Exp(x) }>
            y = Sigmoid(a)
        }""", {}, 2,
    ),
    "resize_by_computed_size": (
        """g (float[1,3,4,4] x) => (float[1,3,8,8] y) {
            s = Shape(x)  b = Constant <value_ints = [0]> ()  e = Constant <value_ints = [2]> ()  h = Slice(s, b, e)
            o = Constant <value_ints = [8,8]> ()  t = Concat <axis = 0> (h, o)  y = Resize <mode = "nearest"> (x, , , t)
        }""", {}, 1,
    ),
}  # fmt: skip


def model_of(name: str) -> onnx.ModelProto:
    """The model, with seeded weights; variances are positive."""
    graph, weights, _ = MODELS[name]
    model = parser.parse_model(HEAD + graph)
    rng = np.random.default_rng(0)
    for n, shape in weights.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(np.abs(array) + 0.5 if n == "var" else array, n))
    return model
