"""Quantized networks under all passes: every weighted layer computes in integers, results stay bit-exact, Q/DQ disappears."""

import numpy as np
import pytest

from whet.network import F8E4M3, F32, I8, U8, Network, parse_type
from whet.ops import run_network
from whet.passes import PASSES, lower


def quantizer(net, scale, zero):
    """Q and DQ with one scale: x -> dequantized x, as in exported models. Without a zero point: of e4m3."""
    scales = [net.constant(np.float32(scale), "s"), *([] if zero is None else [net.constant(zero, "z")])]
    to_float8 = {"output_dtype": F8E4M3} if zero is None else {}

    def fake(t):
        return net.add("DequantizeLinear", net.add("QuantizeLinear", t, *scales, **to_float8), *scales)

    return fake


def weights(net, rng, *shape, axis=0):
    """i8 weights with per-output-channel scales, dequantized."""
    w = net.constant(rng.integers(-127, 128, shape).astype(np.int8), "w")
    s = net.constant(rng.uniform(0.001, 0.01, shape[axis]).astype(np.float32), "ws")
    return net.add("DequantizeLinear", w, s, net.constant(np.zeros(shape[axis], np.int8), "wz"), axis=axis)


def residual_network(skip_quantized=True):
    """A stem, a pool, a residual block with batch norms, a Concat and a classifier, all quantized as by QAT tools."""
    rng = np.random.default_rng(0)
    net = Network("qat")
    unsigned, signed = quantizer(net, 0.03, np.uint8(0)), quantizer(net, 0.04, np.int8(0))

    def norm(t, n):
        p = [net.constant(rng.uniform(0.5, 1.5, n).astype(np.float32), k) for k in ("g", "b", "m", "v")]
        return net.add("BatchNormalization", t, *p)

    x = net.add_input("x", parse_type("f32[N,3,16,16]"))
    t = net.add("Relu", norm(net.add("Conv", signed(x), weights(net, rng, 16, 3, 3, 3), pads=(1,) * 4), 16))
    t = unsigned(net.add("MaxPool", t, kernel_shape=(2, 2), strides=(2, 2)))
    y = unsigned(net.add("Relu", norm(net.add("Conv", t, weights(net, rng, 16, 16, 3, 3), pads=(1,) * 4), 16)))
    y = norm(net.add("Conv", y, weights(net, rng, 16, 16, 3, 3), pads=(1,) * 4), 16)
    skip = net.add("DequantizeLinear", t.maker.inputs[0], *t.maker.inputs[1:]) if skip_quantized else net.add("Tanh", t)
    y = unsigned(net.add("Relu", net.add("Add", y, skip)))
    a = net.add("Relu", net.add("Conv", y, weights(net, rng, 8, 16, 1, 1)))
    b = net.add("Relu", net.add("Conv", y, weights(net, rng, 8, 16, 3, 3), pads=(1,) * 4))
    y = unsigned(net.add("Concat", a, b, axis=1))
    y = signed(net.add("GlobalAveragePool", y))
    y = net.add("Gemm", net.add("Flatten", y), weights(net, rng, 16, 10, axis=1), net.constant(np.ones(10, np.float32), "bias"))
    net.mark_output(y, "y")
    return net


def feeds(n=3):
    return {"x": np.random.default_rng(5).standard_normal((n, 3, 16, 16)).astype(np.float32)}


@pytest.mark.parametrize("skip_quantized", [True, False])
def test_results_are_preserved(skip_quantized):
    net = residual_network(skip_quantized)
    after, _ = lower(net, check=True)
    want, got = run_network(net, feeds(), widen=True)["y"], run_network(after, feeds(), widen=True)["y"]
    # Folding batch norms changes rounded values by 1e-7: an integer at a tie may become the adjacent one.
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_every_weighted_layer_computes_in_integers():
    after, log = lower(residual_network(), check=True)
    kinds = [x.composite or x.op for x in after.layers]
    assert kinds == ["QuantizeLinear", "Conv", "MaxPool", "Conv", "Conv", "Conv", "Conv", "Concat", "GlobalAveragePool", "Flatten", "Gemm"]
    for layer in after.layers:
        if layer.composite in ("Conv", "Gemm"):
            assert {layer.inputs[0].dtype, layer.inputs[3].dtype} <= {I8, U8}, layer
    assert not [reason for (name, _), reason in log.skipped.items() if name in ("fuse_quantized", "fuse_dequantized")]


def test_a_float_skip_branch_still_gives_an_integer_convolution():
    after, _ = lower(residual_network(skip_quantized=False), check=True)
    (adding,) = [x for x in after.layers if x.op == "Fused" and any(y.op == "Add" for y in x.regions["body"].layers)]
    assert adding.outputs[0].dtype == U8
    assert any(t is not None and t.name.startswith("tanh") for t in adding.inputs)


def test_weights_with_zero_points_compute_in_floats_with_a_reason():
    net = Network("asymmetric")
    rng = np.random.default_rng(1)
    x = net.add_input("x", parse_type("f32[2,8]"))
    w = net.constant(rng.integers(0, 255, (8, 4)).astype(np.uint8), "w")
    scale, zero = net.constant(np.float32(0.01), "ws"), net.constant(np.uint8(128), "wz")
    t = quantizer(net, 0.03, np.int8(0))(x)
    net.mark_output(net.add("MatMul", t, net.add("DequantizeLinear", w, scale, zero)), "y")
    after, log = lower(net, check=True)
    assert [x.op for x in after.layers] == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    assert after.layers[-1].inputs[1].is_constant
    assert any(name == "fuse_dequantized" and "not quantized" in why for (name, _), why in log.skipped.items())


def random_quantized(seed):
    """Convolutions, products, sums, pools and data movement with Q/DQ of few scales between some; nothing that rounds when folded."""
    rng = np.random.default_rng([seed, 9])
    net = Network("random")
    fakes = [quantizer(net, *p) for p in ((0.03, np.uint8(0)), (0.05, np.int8(0)), (0.05, np.uint8(30)), (0.05, np.int8(0)))]
    values = [net.add_input("x", parse_type("f32[2,4,8,8]"))]
    for _ in range(16):
        t = values[int(rng.integers(max(0, len(values) - 3), len(values)))]
        image = t.type.rank == 4 and t.shape[2] > 1
        kind = int(rng.integers(11))
        if kind <= 2:
            t = fakes[int(rng.integers(len(fakes)))](t)
        elif kind == 3 and image:
            c = int(t.shape[1])
            t = net.add("Conv", t, weights(net, rng, c, c, 3, 3), pads=(1,) * 4)
            if seed % 4 == 1:
                t = fakes[1](net.add("Conv", fakes[0](t), weights(net, rng, c, c, 1, 1)))
            elif seed % 4 == 3:  # the end of a block with a projection
                read = fakes[0](t)
                first, last = (net.add("Conv", read, weights(net, rng, c, c, 1, 1)) for _ in range(2))
                t = fakes[0](net.add("Relu", net.add("Add", fakes[1](first), last)))
        elif kind == 4:
            t = net.add("Relu", t)
        elif kind == 5:
            same = [v for v in values if v.type == t.type and v is not t]
            t = net.add("Add", t, same[-1]) if same else net.add("Relu", t)
        elif kind == 6 and image:
            t = net.add("MaxPool", t, kernel_shape=(2, 2)) if rng.random() < 0.7 else net.add("AveragePool", t, kernel_shape=(2, 2))
        elif kind == 7 and image:
            t = net.add("Concat", t, fakes[1](net.add("Relu", t)), axis=1)
        elif kind == 8 and image and t.shape[1] % 2 == 0:
            a, b = net.add("Split", t, axis=1, num_outputs=2)
            one, other = fakes[1], fakes[int(rng.integers(1, 4))]
            t = net.add("Concat", one(a), other(b), axis=1)
        elif kind == 9 and image and t.shape[2] <= 8:
            if rng.random() < 0.5:
                t = net.add("Pad", t, net.constant(np.array([0, 0, 1, 0, 0, 0, 1, 1]), "pads"))
            else:
                twice = net.constant(np.array([1, 1, 2, 1], np.float32), "scales")
                t = net.add("Resize", t, None, twice, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
        elif image:
            t = net.add("Transpose", t, perm=(0, 1, 3, 2))
        values.append(t)
    flat = fakes[1](net.add("Flatten", values[-1]))
    made = net.add("Gemm", flat, weights(net, rng, int(flat.shape[1]), 5, axis=1))
    net.mark_output(fakes[0](made), "y")
    if values[9] is not values[0]:
        net.mark_output(net.add("Exp", values[9]), "z")
    return net


def test_random_quantized_networks_keep_their_results():
    fired = set()
    for seed in range(60):
        net = random_quantized(seed)
        x = {"x": np.random.default_rng(seed).standard_normal((2, 4, 8, 8)).astype(np.float32)}
        refuses = (lambda layer: None) if seed % 2 else None  # every second machine has tactics for all composites
        after, log = lower(net, switches=["all"], refuses=refuses, check=True)
        fired |= {name for name, n in log.counts().items() if n}
        want, got = run_network(net, x, widen=True), run_network(after, x, widen=True)
        for name, a in want.items():
            # weights that compute in floats in the end are rounded to f32 once
            np.testing.assert_allclose(got[name], a, rtol=1e-5, err_msg=f"seed {seed}")
    bare = {"quantize_weights", "fold_quantized_batch_norm", "dequantize_constants"}  # covered by their golden files and above
    bare |= {"transpose_before_quantize", "fuse_quantized_result"}  # of transformers: below
    assert fired >= {p for p in PASSES if "quantize" in p} - bare


def quantized_block(float8, residual):
    """A transformer's attention with Q/DQ around its products; with `residual` the norm's result is added to the block's."""
    rng = np.random.default_rng(3)
    net = Network("block")
    fake = quantizer(net, 0.01, None) if float8 else quantizer(net, 0.03, np.int8(0))
    x = net.add_input("x", parse_type("f32[2,6,16]"))
    gain, shift = (net.constant(rng.standard_normal(16).astype(np.float32), n) for n in ("gain", "shift"))
    normed = net.add("LayerNormalization", x, gain, shift)
    read, sizes = fake(normed), net.constant(np.array([2, 6, 4, 4]), "sizes")

    def project(t, perm=None):
        if float8:
            scale = net.constant(rng.uniform(0.5, 2, 16).astype(np.float32) / 100)
            w = net.constant((rng.standard_normal((16, 16)) * 30).astype(F8E4M3.numpy))
            y = net.add("MatMul", t, net.add("DequantizeLinear", w, scale, axis=1))
        else:
            y = net.add("MatMul", t, weights(net, rng, 16, 16, axis=1))
        y = net.add("Add", y, net.constant(rng.standard_normal(16).astype(np.float32)))
        return y if perm is None else net.add("Transpose", net.add("Reshape", y, sizes), perm=perm)

    q, k, v = (project(read, perm) for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)))
    mixed = net.add("MatMul", net.add("Softmax", net.add("MatMul", q, k), axis=-1), v)
    rows = net.add("Reshape", net.add("Transpose", mixed, perm=(0, 2, 1, 3)), net.constant(np.array([2, 6, 16]), "rows"))
    net.mark_output(net.add("Add", project(fake(rows)), normed if residual else x), "y")
    return net


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_a_quantized_attention_is_one_product_and_stores_8_bits(float8, residual):
    net = quantized_block(float8, residual)
    after, log = lower(net, refuses=lambda layer: None, check=True)
    assert [x.composite or x.op for x in after.layers] == ["QuantizedResult", "MatMul", "QuantizedResult", "Reshape", "MatMul"]
    assert log.counts()["merge_projections"] == log.counts()["transpose_before_quantize"] == 1
    kind = F8E4M3 if float8 else I8
    assert [t.dtype for x in after.layers[:3] for t in x.outputs] == [*[F32] * residual, kind, F32, kind]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)}
    want, got = (run_network(n, feeds, widen=True)["y"] for n in (net, after))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
