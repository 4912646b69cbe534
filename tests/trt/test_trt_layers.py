"""The layers of `INetworkDefinition.add_*`: their values in NumPy and ONNX Runtime, their properties, and the refused ones."""

import numpy as np
import pytest

import whet.trt as trt
from whet.frontends import onnx_from_network

R = np.random.default_rng(0)
X = R.standard_normal((2, 4, 6, 6)).astype(np.float32)
M = R.standard_normal((3, 5)).astype(np.float32)
W = R.standard_normal((8, 2, 3, 3)).astype(np.float32)
B = R.standard_normal(8).astype(np.float32)
A, U, E, P, S = trt.ActivationType, trt.UnaryOperation, trt.ElementWiseOperation, trt.PoolingType, trt.SampleMode


def with_options(layer, **options):
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


def conv(x, w, bias, stride=1, pad=0, groups=1):
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    c, k = x.shape[1] // groups, w.shape[0] // groups
    parts = [np.einsum("nchwij,kcij->nkhw", windows[:, g * c : (g + 1) * c], w[g * k : (g + 1) * k]) for g in range(groups)]
    return np.concatenate(parts, 1) + bias.reshape(1, -1, 1, 1)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def pooled(x, f, size=2, stride=2):
    return f(np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))[:, :, ::stride, ::stride], (4, 5))


def const(net, a):
    return net.add_constant(np.shape(a), np.asarray(a)).get_output(0)


def set_second(layer, index, tensor):
    layer.set_input(index, tensor)
    return layer


CASES = {
    "conv": (lambda n, x, m: with_options(n.add_convolution_nd(x, 8, (3, 3), W, B), num_groups=2, stride_nd=(2, 2), padding_nd=(1, 1)),
             lambda: conv(X, W, B, 2, 1, 2)),
    "conv with a kernel as input": (
        lambda n, x, m: set_second(n.add_convolution_nd(x, 8, (1, 1), trt.Weights(), B), 1, const(n, W[:, :1, :1, :1].repeat(4, 1))),
        lambda: conv(X, W[:, :1, :1, :1].repeat(4, 1), B),
    ),
    "same padding": (lambda n, x, m: with_options(n.add_convolution_nd(x, 8, (3, 3), trt.Weights(W.repeat(2, 1).ravel()), B),
                                                  padding_mode=trt.PaddingMode.SAME_UPPER), lambda: conv(X, W.repeat(2, 1), B, 1, 1)),
    "deconv": (lambda n, x, m: n.add_deconvolution_nd(x, 3, (1, 1), W[:4, :1, :1, :1].repeat(3, 1)),
               lambda: np.einsum("nchw,ck->nkhw", X, W[:4, :1, 0, 0].repeat(3, 1))),
    "max pool": (lambda n, x, m: with_options(n.add_pooling_nd(x, P.MAX, (2, 2)), stride_nd=(2, 2)), lambda: pooled(X, np.max)),
    "max pool rounded up": (lambda n, x, m: with_options(n.add_pooling_nd(x, P.MAX, (3, 3)), stride_nd=(2, 2),
                                                         padding_mode=trt.PaddingMode.EXPLICIT_ROUND_UP),
                            lambda: pooled(np.pad(X, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=-np.inf), np.max, 3)),
    "average pool": (lambda n, x, m: with_options(n.add_pooling_nd(x, P.AVERAGE, (2, 2)), stride_nd=(2, 2)), lambda: pooled(X, np.mean)),
    "blended pool": (lambda n, x, m: with_options(n.add_pooling_nd(x, P.MAX_AVERAGE_BLEND, (2, 2)), stride_nd=(2, 2), blend_factor=0.25),
                     lambda: 0.75 * pooled(X, np.max) + 0.25 * pooled(X, np.mean)),
    "lrn": (lambda n, x, m: n.add_lrn(x, 1, 0.5, 0.75, 2.0), lambda: X / (2 + 0.5 * X**2) ** 0.75),
    "scale uniform": (lambda n, x, m: n.add_scale(x, trt.ScaleMode.UNIFORM, np.float32([1]), np.float32([2]), np.float32([2])),
                      lambda: (2 * X + 1) ** 2),
    "scale channel": (lambda n, x, m: n.add_scale(x, trt.ScaleMode.CHANNEL, B[:4], B[4:]), lambda: X * B[4:, None, None] + B[:4, None, None]),
    "softmax": (lambda n, x, m: with_options(n.add_softmax(x), axes=1 << 3), lambda: softmax(X)),
    "softmax default axis": (lambda n, x, m: n.add_softmax(x), lambda: softmax(X, 1)),
    "concat": (lambda n, x, m: with_options(n.add_concatenation([m, m]), axis=1), lambda: np.concatenate([M, M], 1)),
    "leaky": (lambda n, x, m: with_options(n.add_activation(x, A.LEAKY_RELU), alpha=0.3), lambda: np.where(X < 0, 0.3 * X, X)),
    "clip": (lambda n, x, m: with_options(n.add_activation(x, A.CLIP), alpha=-0.5, beta=0.5), lambda: X.clip(-0.5, 0.5)),
    "scaled tanh": (lambda n, x, m: with_options(n.add_activation(x, A.SCALED_TANH), alpha=2.0, beta=0.5), lambda: 2 * np.tanh(0.5 * X)),
    "hard sigmoid": (lambda n, x, m: with_options(n.add_activation(x, A.HARD_SIGMOID), alpha=0.3, beta=0.4), lambda: (0.3 * X + 0.4).clip(0, 1)),
    "softplus": (lambda n, x, m: with_options(n.add_activation(x, A.SOFTPLUS), alpha=2.0, beta=0.5), lambda: 2 * np.log1p(np.exp(0.5 * X))),
    "floor div": (lambda n, x, m: n.add_elementwise(m, const(n, np.float32([[0.3]])), E.FLOOR_DIV), lambda: np.floor(M / np.float32(0.3))),
    "integer floor div": (lambda n, x, m: n.add_elementwise(const(n, np.int32([[-7, 7]])), const(n, np.int32([[2, 2]])), E.FLOOR_DIV),
                          lambda: np.int32([[-4, 3]])),
    "greater": (lambda n, x, m: n.add_cast(n.add_elementwise(m, const(n, np.float32([[0]])), E.GREATER).get_output(0), trt.float32),
                lambda: (M > 0).astype(np.float32)),
    "round": (lambda n, x, m: n.add_unary(m, U.ROUND), lambda: np.round(M)),
    "recip": (lambda n, x, m: n.add_unary(m, U.RECIP), lambda: 1 / M),
    "padding": (lambda n, x, m: n.add_padding_nd(x, (1, -1), (0, 2)), lambda: np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)))[..., 1:]),
    "shuffle": (lambda n, x, m: with_options(n.add_shuffle(x), first_transpose=(0, 2, 3, 1), reshape_dims=(0, -1, 4), second_transpose=(2, 0, 1)),
                lambda: X.transpose(0, 2, 3, 1).reshape(2, -1, 4).transpose(2, 0, 1)),
    "shuffle to a computed shape": (lambda n, x, m: set_second(n.add_shuffle(m), 1, const(n, np.int64([5, 3]))), lambda: M.reshape(5, 3)),
    "squeeze": (lambda n, x, m: n.add_squeeze(n.add_unsqueeze(m, const(n, np.int64([1]))).get_output(0), const(n, np.int64([1]))), lambda: M),
    "slice": (lambda n, x, m: n.add_slice(m, (2, 0), (2, 3), (-1, 2)), lambda: M[2:0:-1, ::2]),
    "slice that reads zeros": (lambda n, x, m: with_options(n.add_slice(m, (-1, 1), (4, 6), (1, 1)), mode=S.FILL),
                               lambda: np.pad(M, ((1, 0), (0, 2)))[:, 1:]),
    "slice with computed bounds": (lambda n, x, m: set_second(n.add_slice(m, (0, 0), (2, 2), (1, 1)), 2, const(n, np.int64([3, 4]))),
                                   lambda: M[:3, :4]),
    "reduce": (lambda n, x, m: n.add_reduce(x, trt.ReduceOperation.AVG, 0b1100, False), lambda: X.mean((2, 3))),
    "gather": (lambda n, x, m: n.add_gather(m, const(n, np.int32([2, 0])), 0), lambda: M[[2, 0]]),
    "gather per batch item": (lambda n, x, m: with_options(n.add_gather(m, const(n, np.int32([[1], [0], [4]])), 1), num_elementwise_dims=1),
                              lambda: np.take_along_axis(M, np.array([[1], [0], [4]]), 1)),
    "gather nd": (lambda n, x, m: n.add_gather_v2(m, const(n, np.int32([[1, 2], [0, 0]])), trt.GatherMode.ND), lambda: M[[1, 0], [2, 0]]),
    "scatter": (lambda n, x, m: n.add_scatter(m, const(n, np.int32([[1]])), const(n, M[:1]), trt.ScatterMode.ND),
                lambda: np.stack([M[0], M[0], M[2]])),
    "transposed product": (lambda n, x, m: n.add_matrix_multiply(m, trt.MatrixOperation.TRANSPOSE, m, trt.MatrixOperation.NONE), lambda: M.T @ M),
    "product with a vector": (lambda n, x, m: n.add_matrix_multiply(m, trt.MatrixOperation.NONE, const(n, M[0]), trt.MatrixOperation.VECTOR),
                              lambda: M @ M[0]),
    "prelu": (lambda n, x, m: n.add_parametric_relu(m, const(n, np.float32([[0.1]]))), lambda: np.where(M < 0, 0.1 * M, M)),
    "resize": (lambda n, x, m: with_options(n.add_resize(x), scales=(1, 1, 2, 2)), lambda: X.repeat(2, 2).repeat(2, 3)),
    "linear resize": (lambda n, x, m: with_options(n.add_resize(x), shape=(2, 4, 6, 11), resize_mode=trt.InterpolationMode.LINEAR,
                                                   coordinate_transformation=trt.ResizeCoordinateTransformation.ALIGN_CORNERS),
                      lambda: np.stack([X[..., i // 2] if i % 2 == 0 else (X[..., i // 2] + X[..., i // 2 + 1]) / 2 for i in range(11)], -1)),
    "select": (lambda n, x, m: n.add_select(n.add_elementwise(m, const(n, np.float32([[0]])), E.LESS).get_output(0), const(n, np.float32([[9]])), m),
               lambda: np.where(M < 0, np.float32(9), M)),
    "fill": (lambda n, x, m: with_options(n.add_fill((5,), trt.FillOperation.LINSPACE, trt.float32), alpha=1.0, beta=0.5),
             lambda: (1 + 0.5 * np.arange(5)).astype(np.float32)),
    "quantize": (lambda n, x, m: n.add_dequantize(n.add_quantize(m, const(n, np.float32(0.1))).get_output(0), const(n, np.float32(0.1))),
                 lambda: (np.round(M / np.float32(0.1)).clip(-128, 127) * np.float32(0.1)).astype(np.float32)),
    "einsum": (lambda n, x, m: n.add_einsum([m, m], "ij,kj->ik"), lambda: M @ M.T),
    "one hot": (lambda n, x, m: n.add_one_hot(const(n, np.int32([2, 0])), const(n, np.float32([0, 1])), const(n, np.int32(4)), -1),
                lambda: np.eye(4, dtype=np.float32)[[2, 0]]),
    "grid sample": (lambda n, x, m: with_options(n.add_grid_sample(x, const(n, np.zeros((2, 1, 1, 2), np.float32))), align_corners=True),
                    lambda: X[:, :, 2:4, 2:4].mean((2, 3), keepdims=True)),
    "reverse": (lambda n, x, m: with_options(n.add_reverse_sequence(m, const(n, np.int32([2, 5, 1]))), batch_axis=0, sequence_axis=1),
                lambda: np.stack([M[0, [1, 0, 2, 3, 4]], M[1, ::-1], M[2]])),
    "layer norm": (lambda n, x, m: n.add_normalization(m, const(n, B[None, :5]), const(n, B[None, 3:]), 0b10),
                   lambda: (M - M.mean(1, keepdims=True)) / np.sqrt(M.var(1, keepdims=True) + 1e-5) * B[:5] + B[3:]),
    "cumulative": (lambda n, x, m: n.add_cumulative(m, const(n, np.int32(1)), trt.CumulativeOperation.SUM, False, True),
                   lambda: M[:, ::-1].cumsum(1)[:, ::-1]),
    "ragged softmax": (lambda n, x, m: n.add_ragged_softmax(m, const(n, np.int32([[2], [5], [1]]))),
                       lambda: np.stack([np.pad(softmax(M[i, :k]), (0, 5 - k)) for i, k in enumerate((2, 5, 1))])),
    "attention": (lambda n, x, m: n.add_attention(x, x, x, trt.AttentionNormalizationOp.SOFTMAX, True),
                  lambda: softmax(np.where(np.tril(np.ones((6, 6), bool)), X @ X.swapaxes(2, 3), -np.inf)) @ X),
}  # fmt: skip


@pytest.fixture(scope="module")
def network_outputs():
    """All layers in one network: the network's outputs from an engine, and from ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    net = builder.create_network(1 << trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    x, m = net.add_input("x", trt.float32, X.shape), net.add_input("m", trt.float32, M.shape)
    names = {}
    for case, (add, _) in CASES.items():
        t = add(net, x, m).get_output(0)
        if (t.tensor.maker.op == "Identity" and t.tensor.maker.inputs[0].is_constant) or t.dtype == trt.int32:
            t = net.add_elementwise(t, t, E.MAX).get_output(0)
        t.name = case.replace(" ", "_")
        net.mark_output(t)
        names[case] = t.name
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    config.set_flag(trt.BuilderFlag.DISABLE_TIMING_CACHE)
    engine = builder.build_engine_with_config(net, config)
    context = engine.create_execution_context()
    outputs = {n: np.zeros(context.get_tensor_shape(n), trt.nptype(engine.get_tensor_dtype(n))) for n in names.values()}
    for name, a in ({"x": X, "m": M} | outputs).items():
        assert context.set_tensor_address(name, a.ctypes.data)
    assert context.execute_async_v3(0)
    session = ort.InferenceSession(onnx_from_network(net.whet).SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": X, "m": M}), strict=True))
    return names, outputs, theirs


@pytest.mark.parametrize("case", CASES)
def test_layers_have_tensorrts_meaning(network_outputs, case):
    names, ours, theirs = network_outputs
    expected = CASES[case][1]()
    assert ours[names[case]].shape == expected.shape
    np.testing.assert_allclose(ours[names[case]], expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(ours[names[case]], theirs[names[case]], rtol=2e-4, atol=2e-5)


def test_properties_change_layers_in_place():
    net = trt.Builder(trt.Logger()).create_network()
    x = net.add_input("x", trt.float32, (1, 4, 9, 9))
    layer = net.add_convolution_nd(x, 8, (3, 3), W.repeat(2, 1), B)
    y = layer.get_output(0)
    pool = net.add_pooling_nd(y, P.MAX, (2, 2))
    assert y.shape == (1, 8, 7, 7)
    layer.stride_nd = (2, 2)
    layer.padding_nd = (1, 1)
    assert y.shape == (1, 8, 5, 5)
    assert pool.get_output(0).shape == (1, 8, 2, 2)
    assert layer.padding_nd == layer.pre_padding == (1, 1)
    x.shape = (-1, 4, 9, 9)
    assert pool.get_output(0).shape == (-1, 8, 2, 2)
    assert [(v.type.name, type(v)) for v in net] == [("CONVOLUTION", trt.ILayer), ("POOLING", trt.ILayer)]
    assert pool.type == P.MAX
    layer.name, layer.metadata, layer.precision = "stem", "first", trt.float16
    assert (net[0].name, net[0].metadata, net[0].precision_is_set, net[0].precision) == ("stem", "first", True, trt.float16)
    layer.reset_precision()
    assert net[0].precision == trt.float32
    layer.set_output_type(0, trt.float16)
    assert net[0].output_type_is_set(0)


def test_invalid_layers_fail_the_build_with_the_reason():
    class Errors(trt.ILogger):
        messages = ()

        def log(self, severity, msg):
            self.messages = (*self.messages, msg)

    logger = Errors()
    builder = trt.Builder(logger)
    net = builder.create_network()
    x = net.add_input("x", trt.float32, (2, 3))
    layer = net.add_shuffle(x)
    layer.reshape_dims = (4, 4)
    net.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    assert builder.build_serialized_network(net, config) is None
    assert "shuffle_0" in logger.messages[-1]
    layer.reshape_dims = (3, 2)
    assert layer.get_output(0).shape == (3, 2)
    net.check()


@pytest.mark.parametrize("name", ["add_loop", "add_nms", "add_non_zero", "add_plugin_v2", "add_dynamic_quantize", "add_moe", "add_dist_collective"])
def test_refused_layers_say_why(name):
    with pytest.raises(trt.NotServedError, match=rf"INetworkDefinition\.{name}: "):
        getattr(trt.INetworkDefinition(), name)


def test_conditionals_select_between_computed_branches():
    builder = trt.Builder(trt.Logger())
    net = builder.create_network()
    x = net.add_input("x", trt.float32, (3,))
    c = net.add_input("c", trt.bool, (1,))
    branch = net.add_if_conditional()
    branch.set_condition(c)
    inside = branch.add_input(x).get_output(0)
    y = branch.add_output(net.add_unary(inside, U.NEG).get_output(0), inside).get_output(0)
    net.mark_output(y)
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    context = builder.build_engine_with_config(net, config).create_execution_context()
    a, flag, out = np.float32([1, 2, 3]), np.array([True]), np.zeros(3, np.float32)
    assert context.execute_v2([a.ctypes.data, flag.ctypes.data, out.ctypes.data])
    np.testing.assert_array_equal(out, -a)
