"""ONNX Runtime's fused ops (com.microsoft), which its optimizer and exporters write: each against ONNX Runtime on random inputs, and refusals."""

import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import whet
from whet.builder import BuildConfig, build
from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.runtime import Runtime

ort = pytest.importorskip("onnxruntime")
_rng = np.random.default_rng(29)


def f(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


def i32(*values):
    return np.array(values, np.int32)


X, W, BIAS = f(2, 4, 7, 6), f(8, 4, 3, 3), f(8)
SEQ, QKV, QKV_BIAS = f(2, 5, 8), f(8, 24), f(24)
KEPT = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
EXPERIMENTAL = {"ImageScaler", "Crop", "Affine", "ParametricSoftplus", "ScaledTanh", "Scale"}  # of the first releases, up to opset 9
OWN_DOMAIN = {"SimplifiedLayerNormalization", "DequantizeLinear", *EXPERIMENTAL}  # ONNX's; ONNX Runtime writes the first one there
IDS = i32(*range(10)).reshape(2, 5)
A8, B8 = _rng.integers(0, 256, (3, 16)).astype(np.uint8), _rng.integers(-60, 61, (16, 5)).astype(np.int8)
F = np.float32
W8 = _rng.integers(-60, 61, (8, 24)).astype(np.int8)
NBITS = _rng.integers(0, 256, (6, 3, 8)).astype(np.uint8)  # N = 6, K = 40 in blocks of 16
TABLE = _rng.integers(0, 256, (10, 16)).astype(np.uint8)  # ten rows of 16 bytes: 32 values of 4 bits
TABLE4, U4 = _rng.integers(0, 8, (10, 32)).astype(ml_dtypes.int4), ml_dtypes.uint4
#: op and variant -> (inputs, the fed ones, attributes, the number of outputs compared)
CASES = {
    "FusedConv": ([X, W, BIAS], {"activation": "Relu", "pads": (1, 1, 1, 1)}),
    "FusedConv sum": ([X, W, BIAS, f(2, 8, 7, 6)], {"activation": "Relu", "pads": (1, 1, 1, 1)}),
    "FusedConv leaky": ([X, W], {"activation": "LeakyRelu", "activation_params": (0.2,), "strides": (2, 2)}),
    "FusedConv clip": ([X, W, BIAS], {"activation": "Clip", "activation_params": (-1.0, 2.0)}),
    "FusedConv hard sigmoid": ([X, W, BIAS], {"activation": "HardSigmoid", "activation_params": (0.1, 0.4)}),
    "FusedGemm": ([f(3, 6), f(5, 6), f(5)], {"activation": "Relu", "transB": 1, "alpha": 0.5}),
    "FusedGemm leaky": ([f(3, 6), f(6, 5), f(5)], {"activation": "LeakyRelu", "activation_alpha": 0.3}),
    "FusedMatMul": ([f(2, 3, 6), f(2, 5, 6)], {"transB": 1, "alpha": 0.25}),
    "FusedMatMul A": ([f(2, 6, 3), f(2, 6, 5)], {"transA": 1}),
    "FusedMatMul batch A": ([f(3, 2, 6), f(2, 6, 5)], {"transBatchA": 1}),
    "FusedMatMul batches": ([f(6, 2, 3), f(6, 2, 5)], {"transBatchA": 1, "transA": 1, "transBatchB": 1, "alpha": 2.0}),
    "Gelu": ([f(3, 7)], {}),
    "BiasGelu": ([f(2, 3, 7), f(7)], {}),
    "FastGelu": ([f(3, 7)], {}),
    "FastGelu bias": ([f(3, 7), f(7)], {}),
    "QuickGelu": ([f(3, 7)], {"alpha": 1.5}),
    "SkipLayerNormalization": ([SEQ, f(2, 5, 8), f(8), f(8), f(8)], {"epsilon": 1e-5}),
    "SkipLayerNormalization plain": ([SEQ, f(2, 5, 8), f(8)], {}),
    "SkipLayerNormalization sum": ([SEQ, f(2, 5, 8), f(8), f(8)], {"outputs": ["y", "", "", "sum"]}),
    "SkipSimplifiedLayerNormalization": ([SEQ, f(2, 5, 8), f(8), f(8)], {"outputs": ["y", "", "", "sum"]}),
    "EmbedLayerNormalization": ([IDS, IDS % 2, f(10, 8), f(7, 8), f(2, 8), f(8), f(8), KEPT], {"outputs": ["y", "count"]}),
    "EmbedLayerNormalization no segments": ([IDS, None, f(10, 8), f(7, 8), None, f(8), f(8)], {"outputs": ["y", "count"], "epsilon": 1e-3}),
    "EmbedLayerNormalization positions": (
        [IDS, None, f(10, 8), f(7, 8), None, f(8), f(8), KEPT, IDS[::-1] % 7], {"outputs": ["y", "count", "sum"]},
    ),
    "Attention": ([SEQ, QKV, QKV_BIAS], {"num_heads": 2}),
    "Attention keys": ([SEQ, QKV, QKV_BIAS, KEPT], {"num_heads": 2}),
    "Attention lengths": ([SEQ, QKV, QKV_BIAS, i32(3, 5)], {"num_heads": 2}),
    "Attention rows": ([SEQ, QKV, QKV_BIAS, (_rng.random((2, 5, 5)) < 0.6).astype(np.int32)], {"num_heads": 4}),
    "Attention causal": ([SEQ, QKV, QKV_BIAS], {"num_heads": 2, "unidirectional": 1, "scale": 0.3}),
    "Attention bias": ([SEQ, QKV, QKV_BIAS, None, None, f(2, 2, 5, 5)], {"num_heads": 2}),
    "Attention sizes": ([SEQ, f(8, 28), f(28)], {"num_heads": 2, "qkv_hidden_sizes": (8, 8, 12)}),
    "MultiHeadAttention": ([SEQ, f(2, 6, 8), f(2, 6, 8)], {"num_heads": 2}),
    "MultiHeadAttention bias": ([SEQ, f(2, 6, 8), f(2, 6, 8), QKV_BIAS, np.pad(KEPT, ((0, 0), (0, 1)))], {"num_heads": 2}),
    "MultiHeadAttention heads": ([SEQ, f(2, 2, 6, 4), f(2, 2, 6, 4), None, None, f(2, 2, 5, 6)], {"num_heads": 2, "scale": 0.7}),
    "MatMulIntegerToFloat": ([A8, B8, F(0.02), f(5), np.uint8(7), np.zeros(5, np.int8), f(5)], {}),
    "MatMulIntegerToFloat plain": ([A8, B8, F(0.02), F(0.1)], {}),
    "DynamicQuantizeMatMul": ([f(3, 16), B8, F(0.02), np.int8(4), f(5)], {}),
    "DynamicQuantizeMatMul by columns": ([f(3, 16) + 5, B8, np.abs(f(5)), np.zeros(5, np.int8)], {}),
    "MatMulNBits": ([f(3, 40), NBITS, np.abs(f(18))], {"K": 40, "N": 6, "bits": 4, "block_size": 16}),
    "MatMulNBits zeros": ([f(3, 40), NBITS, f(18), _rng.integers(0, 256, 12).astype(np.uint8)], {"K": 40, "N": 6, "bits": 4, "block_size": 16}),
    "MatMulNBits bias": ([f(2, 3, 40), NBITS, f(18), None, None, f(6)], {"K": 40, "N": 6, "bits": 4, "block_size": 16}),
    "GatherBlockQuantized": ([TABLE, IDS, f(10, 2)], {"block_size": 16, "quantize_axis": 1}),
    "GatherBlockQuantized zeros": ([TABLE, IDS, f(10, 2), _rng.integers(0, 256, (10, 1)).astype(np.uint8)], {"block_size": 16, "quantize_axis": 1}),
    "GatherBlockQuantized 8 bits": ([TABLE, IDS, f(10, 1)], {"block_size": 16, "quantize_axis": 1, "bits": 8}),
    "GatherBlockQuantized int4": ([TABLE4, IDS, f(10, 2)], {"block_size": 16, "quantize_axis": 1}),
    "GatherBlockQuantized uint4": (
        [TABLE4.astype(np.int8).astype(U4), IDS, f(1, 32), np.arange(32).reshape(1, 32).astype(U4)], {"block_size": 16, "quantize_axis": 0},
    ),
    "QAttention": ([A8[:2, :8].reshape(1, 2, 8), W8, QKV_BIAS, F(0.02), F(0.01), None, np.uint8(3), np.int8(0)], {"num_heads": 2}),
    "QAttention columns": (
        [A8.reshape(2, 3, 8), W8, QKV_BIAS, F(0.02), np.abs(f(24)) * F(0.02), KEPT[:, 1:4].copy(), np.uint8(128), np.zeros(24, np.int8)],
        {"num_heads": 2},
    ),
    "QAttention causal": ([A8.reshape(2, 3, 8), W8, QKV_BIAS, F(0.02), F(0.01)], {"num_heads": 4, "unidirectional": 1}),
    "RotaryEmbedding": ([SEQ, (IDS % 7).astype(np.int64), f(7, 2), f(7, 2)], {"num_heads": 2}),
    "RotaryEmbedding interleaved": ([SEQ, (IDS % 7).astype(np.int64), f(7, 4), f(7, 4)], {"interleaved": 1}),
    "RotaryEmbedding offset": ([f(2, 3, 5, 4), np.array([2]), f(9, 2), f(9, 2)], {}),
    "RotaryEmbedding part": ([SEQ, (IDS % 7).astype(np.int64), f(7, 1), f(7, 1)], {"num_heads": 2, "rotary_embedding_dim": 2}),
    "SimplifiedLayerNormalization": ([SEQ, f(8)], {"epsilon": 1e-6}),
    "ImageScaler": ([f(2, 3, 4, 5)], {"scale": 0.5, "bias": (0.1, -0.2, 3.0)}),
    "Crop": ([f(2, 3, 8, 9)], {"border": (1, 2, 3, 1)}),
    "Crop scale": ([f(2, 3, 8, 9)], {"border": (1, 2, 0, 0), "scale": (4, 5)}),
    "Affine": ([f(3, 7)], {"alpha": 0.5, "beta": 2.0}),
    "ParametricSoftplus": ([f(3, 7)], {"alpha": 0.5, "beta": 2.0}),
    "ScaledTanh": ([f(3, 7)], {"alpha": 1.7, "beta": 0.6}),
    "Scale": ([f(3, 7)], {"scale": 0.25}),
    "DequantizeLinear of a bias": ([i32(-700), F([0.01]), np.array(0, np.int32)], {"axis": 1}),
}  # fmt: skip
FED = {"MatMulNBits": (0,), "GatherBlockQuantized": (1,), "DynamicQuantizeLSTM": (0, 5)}  # the other inputs are weights


def model_of(case):
    return make_model(case.split()[0], *CASES[case])


def make_model(op, arrays, attrs):
    """A model of one node, and values of its inputs."""
    attrs = dict(attrs)
    outputs, feedable = attrs.pop("outputs", ["y"]), attrs.pop("fed", FED.get(op, range(len(arrays))))
    arrays = [None if a is None else np.asarray(a) for a in arrays]
    names = ["" if a is None else f"v{i}" for i, a in enumerate(arrays)]
    fed = [i for i, a in enumerate(arrays) if a is not None and i in feedable]
    node = helper.make_node(op, names, outputs, name="n", domain="" if op in OWN_DOMAIN else "com.microsoft", **attrs)
    inputs = [helper.make_tensor_value_info(names[i], helper.np_dtype_to_tensor_dtype(arrays[i].dtype), arrays[i].shape) for i in fed]
    kinds = {"count": TensorProto.INT32}
    results = [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None) for n in outputs if n]
    kept = [numpy_helper.from_array(a, names[i]) for i, a in enumerate(arrays) if a is not None and i not in fed]
    graph = helper.make_graph([node], "g", inputs, results, kept)
    opsets = [helper.make_opsetid("", 9 if op in EXPERIMENTAL else 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {names[i]: arrays[i] for i in fed}


@pytest.mark.parametrize("case", CASES)
def test_an_op_equals_onnx_runtime(case):
    model, feeds = model_of(case)
    wants = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    got = run_network(network_from_onnx(model), feeds)
    for g, want in zip(got.values(), wants, strict=True):
        assert (g.dtype, g.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(g, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["FusedConv sum", "Attention keys", "SkipLayerNormalization", "DynamicQuantizeMatMul", "MatMulNBits zeros"])
def test_an_engine_equals_the_reference(case):
    model, feeds = model_of(case)
    net = network_from_onnx(model)
    plan = build(net, BuildConfig(optimization_level=1, avg_timing=1, timing_cache=""))
    with Runtime().load(plan).create_context() as context:
        got = context.run(feeds)
    for key, want in run_network(net, feeds).items():
        np.testing.assert_allclose(got[key], want, rtol=1e-4, atol=1e-4)


def test_lengths_of_sequences_mask_a_number_of_keys_that_is_a_symbol():
    """As ONNX Runtime's optimizer for transformers writes BERT with dynamic axes."""
    model, feeds = model_of("Attention lengths")
    batch, keys = model.graph.input[0].type.tensor_type.shape.dim[:2]
    batch.dim_param, keys.dim_param = "batch", "keys"
    for info in model.graph.input[1:]:
        if info.type.tensor_type.elem_type == TensorProto.INT32:
            info.type.tensor_type.shape.dim[0].dim_param = "batch"
    wants = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    (got,) = run_network(network_from_onnx(model), feeds).values()
    np.testing.assert_allclose(got, wants[0], rtol=1e-4, atol=1e-5)


def test_a_model_saved_by_the_optimizer_is_read(tmp_path):
    """Level extended fuses; level all also brings convolutions into a layout of ONNX Runtime's own."""
    whet.zoo.save("lenet5", tmp_path / "lenet5.onnx", num_classes=10, batch=1)
    feeds = {"input": f(1, 1, 32, 32)}
    for level in ("EXTENDED", "ALL"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(tmp_path / f"{level}.onnx")
        options.log_severity_level = 3
        (want,) = ort.InferenceSession(str(tmp_path / "lenet5.onnx"), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    (got,) = run_network(network_from_onnx(tmp_path / "EXTENDED.onnx"), feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if any(n.domain == "com.microsoft.nchwc" for n in onnx.load(tmp_path / "ALL.onnx").graph.node):
        with pytest.raises(UnsupportedError, match=r"layout for one CPU.*level 'extended'"):
            network_from_onnx(tmp_path / "ALL.onnx")


def test_weights_of_8_bits_and_an_order_of_blocks():
    """ONNX Runtime's CPU kernels do not take all of these; the definition is the reference."""
    a, b, scales = f(3, 8), _rng.integers(0, 256, (2, 2, 4)).astype(np.uint8), np.abs(f(4))
    order = i32(1, 0, 1, 0, 0, 1, 1, 0)
    CASES["MatMulNBits order"] = [a, b, scales, None, order], {"K": 8, "N": 2, "bits": 8, "block_size": 4}
    try:
        model, feeds = model_of("MatMulNBits order")
    finally:
        del CASES["MatMulNBits order"]
    (got,) = run_network(network_from_onnx(model), feeds).values()
    weight = (b.reshape(2, 8).astype(np.float64) - 128) * scales.reshape(2, 2)[:, order]
    np.testing.assert_allclose(got, a @ weight.T, rtol=1e-4)


@pytest.mark.parametrize("columns", [False, True], ids=["scale", "scales of columns"])
def test_a_dynamic_lstm_has_dequantized_weights(columns):
    """ONNX Runtime rounds x and h to 8 bits, too: the same weights in its LSTM are the exact reference, its own op one within that rounding."""
    weights = [_rng.integers(0, 256, (2, rows, 20)).astype(np.uint8) for rows in (3, 5)]
    scales = [np.full((2, 20) if columns else 2, 0.004, F) * (1 + _rng.random((2, 20) if columns else 2)).astype(F) for _ in weights]
    zeros = [np.full(s.shape, 120, np.uint8) for s in scales]
    bias, state = f(2, 40), f(2, 2, 5)
    quantized = [f(6, 2, 3), *weights, bias, None, state, None, None, scales[0], zeros[0], scales[1], zeros[1]]
    attrs = {"hidden_size": 5, "direction": "bidirectional", "outputs": ["y", "h", "c"]}
    CASES["DynamicQuantizeLSTM"] = quantized, attrs
    dense = [
        ((w.astype(F) - z.reshape(2, 1, -1)) * s.reshape(2, 1, -1)).transpose(0, 2, 1) for w, s, z in zip(weights, scales, zeros, strict=True)
    ]
    CASES["LSTM"] = [quantized[0], *dense, bias, None, state], attrs
    try:
        model, feeds = model_of("DynamicQuantizeLSTM")
        exact, dense_feeds = model_of("LSTM")
    finally:
        del CASES["DynamicQuantizeLSTM"], CASES["LSTM"]
    exact.graph.node[0].domain = ""
    got = run_network(network_from_onnx(model), feeds)
    wants = ort.InferenceSession(exact.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, dense_feeds)
    rounded = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    for g, want, other in zip(got.values(), wants, rounded, strict=True):
        np.testing.assert_allclose(g, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(g, other, atol=0.03)


def run_node(op, arrays, **attrs):
    """The reference's outputs of one node that ONNX Runtime's CPU provider lacks."""
    model, feeds = make_model(op, arrays, attrs)
    return list(run_network(network_from_onnx(model), feeds).values())


def normalize_groups(x, scale, bias, groups, swish):
    """x [N, H, W, C] by the definition in docs/ContribOperators.md, in float64."""
    n, h, w, c = x.shape
    parts = x.astype(np.float64).reshape(n, h * w, groups, c // groups)
    normal = (parts - parts.mean((1, 3), keepdims=True)) / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-5)
    y = normal.reshape(x.shape) * scale + bias
    return y / (1 + np.exp(-y)) if swish else y


@pytest.mark.parametrize("swish", [0, 1])
def test_group_norms_of_diffusion_models(swish):
    x, scale, bias = f(2, 3, 4, 8), f(8), f(8)
    (got,) = run_node("GroupNorm", [x, scale, bias], groups=4, activation=swish)
    np.testing.assert_allclose(got, normalize_groups(x, scale, bias, 4, swish), rtol=1e-5, atol=1e-5)
    (got,) = run_node("GroupNorm", [x.transpose(0, 3, 1, 2).copy(), scale, bias], groups=4, activation=swish, channels_last=0)
    np.testing.assert_allclose(got.transpose(0, 2, 3, 1), normalize_groups(x, scale, bias, 4, swish), rtol=1e-5, atol=1e-5)
    for skip, extra in ((f(2, 3, 4, 8), None), (f(2, 1, 1, 8), f(8)), (f(2, 8), f(8))):
        total = x + (skip if skip.ndim == 4 else skip[:, None, None]) + (0 if extra is None else extra)
        got, added = run_node("SkipGroupNorm", [x, scale, bias, skip, extra], groups=4, activation=swish, outputs=["y", "sum"])
        np.testing.assert_allclose(added, total, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got, normalize_groups(total, scale, bias, 4, swish), rtol=1e-5, atol=1e-5)


def test_other_ops_of_diffusion_models():
    x, bias, skip = f(2, 5, 12), f(12), f(2, 5, 12)
    (got,) = run_node("BiasAdd", [x, bias, skip])
    np.testing.assert_allclose(got, x + bias + skip, rtol=1e-6, atol=1e-6)
    (got,) = run_node("BiasSplitGelu", [x, bias])
    a, b = np.split(x + bias, 2, -1)
    np.testing.assert_allclose(got, a * b * (1 + np.vectorize(math.erf)(b / math.sqrt(2))) / 2, rtol=1e-5, atol=1e-6)
    image, weights, offset = f(1, 6, 5, 4), f(8, 3, 3, 2), f(8)
    (got,) = run_node("NhwcConv", [image, weights, offset], group=2, pads=(1, 1, 1, 1), strides=(2, 1), auto_pad="NOTSET")
    first = [t.transpose(0, 3, 1, 2) for t in (image, weights)]
    model, feeds = make_model("FusedConv", [*first, offset], {"group": 2, "pads": (1, 1, 1, 1), "strides": (2, 1)})
    (want,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), want, rtol=1e-5, atol=1e-5)


def test_packed_attention():
    """Against ONNX Runtime with the parts as inputs of their own."""
    q, k, v = f(2, 5, 2, 4), f(2, 5, 2, 4), f(2, 5, 2, 4)
    model, feeds = make_model("MultiHeadAttention", [t.reshape(2, 5, 8) for t in (q, k, v)], {"num_heads": 2})
    (want,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    (got,) = run_node("MultiHeadAttention", [np.stack((q, k, v), 3)], num_heads=2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    (got,) = run_node("MultiHeadAttention", [q.reshape(2, 5, 8), np.stack((k, v), 3)], num_heads=2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


REFUSED = {
    "computed table": ("GatherBlockQuantized", [TABLE, IDS, f(10, 2)], {"block_size": 16, "fed": (0, 1)}, r"its table is computed"),
    "computed weights": (
        "DynamicQuantizeLSTM", [f(6, 2, 3), W8[None, :3, :20], W8[None, :5, :20], f(1, 40), None, None, None, None, F([1]), None, F([1]), None],
        {"hidden_size": 5, "fed": (0, 1)}, r"scales or zero points are computed",
    ),
    "past": ("Attention", [SEQ, QKV, QKV_BIAS, None, f(2, 2, 2, 3, 4)], {"num_heads": 2}, r"keeps keys and values of former tokens"),
    "rotary": ("Attention", [SEQ, QKV, QKV_BIAS], {"num_heads": 2, "do_rotary": 1}, r"do_rotary=1"),
    "packed": ("MultiHeadAttention", [f(2, 5, 2, 3, 4), None, None, QKV_BIAS], {"num_heads": 2}, r"packed ones have five axes, and no bias"),
    "channels": (
        "SkipGroupNorm", [f(2, 8, 3, 3), f(8), f(8), f(2, 8, 3, 3)], {"groups": 2, "activation": 0, "channels_last": 0}, r"channels are not last",
    ),
    "mask": ("Attention", [SEQ, QKV, QKV_BIAS, i32(3, 5, 0, 0)], {"num_heads": 2}, r"only one length per sequence"),
    "rotary scale": ("RotaryEmbedding", [SEQ, IDS % 7, f(7, 2), f(7, 2)], {"num_heads": 2, "scale": 2.0}, r"packed batches or a scale"),
    "integer past": (
        "QAttention", [A8.reshape(2, 3, 8), W8, QKV_BIAS, F(1), F(1), None, None, None, f(2, 2, 2, 3, 4)], {"num_heads": 2}, r"keeps keys and values",
    ),
    "activation": ("FusedConv", [X, W], {"activation": "Frob"}, r"its activation 'Frob' is unknown"),
    "biases": ("ImageScaler", [f(2, 3, 4, 5)], {"bias": (1.0, 2.0)}, r"one bias per channel.* with 2 biases"),
    "border": ("Crop", [f(2, 3, 4, 5)], {"border": (1, 2)}, r"a border of four sizes"),
    "bits": ("MatMulNBits", [f(3, 40), NBITS, f(18)], {"K": 40, "N": 6, "bits": 3, "block_size": 16}, r"weights have 3 bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_node_and_the_reason(case):
    op, arrays, attrs, message = REFUSED[case]
    model, _ = make_model(op, arrays, attrs)
    named = op if op in OWN_DOMAIN else f"com.microsoft.{op}"
    with pytest.raises(UnsupportedError, match=rf"node 'n' \({named}\): .*{message}"):
        network_from_onnx(model)
