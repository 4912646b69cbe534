"""Bounds of float8 products with an activation: they hold for simulated tensor cores, and an error of twice the bound is found."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from support.float8_sum import add_float8_products
from whet.builder.verify.differences import compare_output
from whet.builder.verify.error_bounds import compare_layer
from whet.builder.verify.sum_errors import bound_sum_effect, count_products, find_float8_product
from whet.composites.quantized import make_quantized_sample
from whet.network import DTYPES
from whet.ops import sample_layer
from whet.tactics._error_bounds import FUNCTIONS, TANH_APPROX, bound_float8_sum, bound_result, compute_gain

E4M3 = ml_dtypes.float8_e4m3fn
INFINITY = float("inf")
ACTIVATIONS = {
    "none": (("clip", -INFINITY, INFINITY), None),
    "relu": (("clip", 0.0, INFINITY), ("Relu", {})),
    "relu6": (("clip", 0.0, 6.0), ("Clip", {})),
    "gelu": (("gelu", 0.0, 0.0), ("Gelu", {})),
    "gelu_tanh": (("gelu_tanh", 0.0, 0.0), ("Gelu", {"approximate": "tanh"})),
    "hardswish": (("hardswish", 0.0, 0.0), ("HardSwish", {})),
    "sigmoid": (("sigmoid", 0.0, 0.0), ("Sigmoid", {})),
    "tanh": (("tanh", 0.0, 0.0), ("Tanh", {})),
    "leaky_relu": (("leaky_relu", 0.1, 0.0), ("LeakyRelu", {"alpha": 0.1})),
    "hardsigmoid": (("hardsigmoid", 0.2, 0.5), ("HardSigmoid", {"alpha": 0.2, "beta": 0.5})),
    "elu": (("elu", 1.0, 0.0), ("Elu", {"alpha": 1.0})),
    "mish": (("mish", 0.0, 0.0), ("Mish", {})),
    "silu": (("silu", 0.0, 0.0), ("Swish", {})),
}


def make_layer(products, spread, activation, bias=0.0, m=24, n=40):
    """A Gemm of e4m3 operands whose sums have the standard deviation `spread`: (layer, arrays, sums as tensor cores add them)."""
    rng = np.random.default_rng(products)
    x = (rng.standard_normal((m, products)) * 60).clip(-448, 448).astype(E4M3)
    w = (rng.standard_normal((n, products)) * 100).clip(-448, 448).astype(E4M3)
    scale = np.float32(spread / (60 * 100 * np.sqrt(products)))
    op = ACTIVATIONS[activation][1]

    def build(body, v):
        y = body.add("Gemm", *v, transB=1)
        if activation == "relu6":
            return body.add("Clip", y, *(body.constant(np.float32(limit)) for limit in (0, 6)))
        return y if op is None else body.add(op[0], y, **op[1])

    b = np.full(n, bias, np.float32)
    _net, layer, arrays = sample_layer("Fused", make_quantized_sample("Gemm", [(x, 1.0, None, 1), (w, np.full(n, scale), None, 0), b], build, None))
    arrays = [x if a is not None and a.shape == x.shape else a for a in arrays]
    return layer, arrays, add_float8_products(x, w) * np.float64(scale) + bias


def choose(layer, activation, stored, approximation=0.0):
    """The choice of a kernel with the bound that a tactic declares."""
    products = count_products(find_float8_product(layer))
    rtol = bound_result(bound_float8_sum(products), activation, stored, approximation)
    operand = ("linear", stored)
    return SimpleNamespace(tactic="cuda/qgemm", implementation="", rtol=rtol, inputs=(operand,) * len(layer.inputs), outputs=(operand,), config=())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("products", "spread", "bias"), [(768, 1.0, 0.0), (768, 6.0, 0.5), (3072, 0.3, -0.4), (3072, 2.0, -3.0)])
def test_simulated_sums_are_within_the_bound_and_twice_the_bound_is_not(name, products, spread, bias):
    layer, arrays, sums = make_layer(products, spread, name, bias)
    kind, *parameters = ACTIVATIONS[name][0]
    for stored in ("f16", "bf16", "f32"):
        choice = choose(layer, ACTIVATIONS[name][0], stored)
        got = FUNCTIONS[kind](sums, *parameters).astype(DTYPES[stored].numpy).astype(np.float32)
        compared = compare_layer(layer, choice, arrays, [got])
        assert compared.failure is None, (stored, str(compared.failure))
        exact = FUNCTIONS[kind](make_exact(arrays, spread, products, bias), *parameters)
        bound = choice.rtol + bound_sum_effect(layer, choice, arrays)
        wrong = exact.astype(np.float32)
        wrong.reshape(-1)[np.abs(exact).argmax()] += 2 * bound * np.abs(exact).max()
        assert compare_layer(layer, choice, arrays, [wrong]).failure is not None, stored


def make_exact(arrays, spread, products, bias):
    """The sums in float64."""
    x, w = (a for a in arrays if a is not None and a.dtype == E4M3)
    return x.astype(np.float64) @ w.astype(np.float64).T * np.float64(np.float32(spread / (60 * 100 * np.sqrt(products)))) + bias


def test_the_bound_depends_on_the_slope_of_the_activation():
    assert compute_gain("gelu") == pytest.approx(1.2945, abs=1e-3)
    assert compute_gain("clip", 0.0, INFINITY) == 1.0
    assert compute_gain("leaky_relu", 0.1) == pytest.approx(1.0, abs=1e-9)
    plain, gelu = (bound_result(bound_float8_sum(768), kind, "f16") for kind in (("clip", 0.0, INFINITY), ("gelu", 0.0, 0.0)))
    assert gelu - plain == pytest.approx(bound_float8_sum(768) * 0.2945, rel=1e-2)
    assert bound_result(0.0, ("gelu", 0.0, 0.0), "f16", TANH_APPROX) < 2e-3  # 16-bit operands: below what their tactics declare


def test_every_activation_of_the_kernels_has_a_function_here():
    from whet.tactics.cuda._device.source import ACTIVATIONS as CODES

    assert set(FUNCTIONS) == set(CODES)


def test_integers_and_other_layers_have_no_effect_of_sums():
    layer, arrays, _ = make_layer(64, 1.0, "none")
    assert bound_sum_effect(layer, choose(layer, ("clip", -INFINITY, INFINITY), "f32"), arrays) == pytest.approx(0.0, abs=1e-9)
    data = [("i8[4,16]", 0.5, None, 1), (np.ones((8, 16), np.int8), np.ones(8, np.float32), None, 0), "f32[8]"]
    _net, integers, _ = sample_layer("Fused", make_quantized_sample("Gemm", data, lambda body, v: body.add("Gemm", *v, transB=1), None))
    assert find_float8_product(integers) is None


def test_float_results_that_saturate_are_judged_by_the_effect_of_their_sums():
    """The error of tanh is that of sums six times as large as its results: the declared bound alone would refuse a correct kernel."""
    layer, arrays, sums = make_layer(3072, 6.0, "tanh")
    choice = choose(layer, ("tanh", 0.0, 0.0), "f16")
    exact, got = np.tanh(make_exact(arrays, 6.0, 3072, 0.0)), np.tanh(sums).astype(np.float16)
    assert compare_output(got.astype(np.float32), exact, DTYPES["f32"])[0] > choice.rtol
    assert compare_layer(layer, choice, arrays, [got.astype(np.float32)]).failure is None
