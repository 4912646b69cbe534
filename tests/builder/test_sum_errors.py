"""Bounds of float8 products with an activation: they hold for simulated tensor cores, and an error of twice the bound is found."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from support.float8_sum import add_float8_products
from whet.builder.batching.batch_items import BatchAxes, BatchItems
from whet.builder.verify.differences import compare_output
from whet.builder.verify.error_bounds import compare_layer
from whet.builder.verify.sum_errors import bound_sum_effect, count_products, find_float8_product
from whet.composites.quantized import make_quantized_sample
from whet.network import DTYPES
from whet.ops import BatchAxis, sample_layer
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


def test_integers_have_no_effect_of_sums():
    data = [("i8[4,16]", 0.5, None, 1), (np.ones((8, 16), np.int8), np.ones(8, np.float32), None, 0), "f32[8]"]
    _net, integers, _ = sample_layer("Fused", make_quantized_sample("Gemm", data, lambda body, v: body.add("Gemm", *v, transB=1), None))
    assert find_float8_product(integers) is None
    assert bound_sum_effect(integers, SimpleNamespace(tactic="cuda/any", changes=()), []) == 0.0


def test_float_results_that_saturate_are_judged_by_the_effect_of_their_sums():
    """The error of tanh is that of sums six times as large as its results: the declared bound alone would refuse a correct kernel."""
    layer, arrays, sums = make_layer(3072, 6.0, "tanh")
    choice = choose(layer, ("tanh", 0.0, 0.0), "f16")
    exact, got = np.tanh(make_exact(arrays, 6.0, 3072, 0.0)), np.tanh(sums).astype(np.float16)
    assert compare_output(got.astype(np.float32), exact, DTYPES["f32"])[0] > choice.rtol
    assert compare_layer(layer, choice, arrays, [got.astype(np.float32)]).failure is None


OPERANDS = {  # x of the products, from normal values
    "normal": lambda x, rng: x,
    "outlier channels": lambda x, rng: x * np.where(rng.permutation(x.shape[1]) < 3, 20.0, 1.0),
    "a large first channel": lambda x, rng: x * np.where(np.arange(x.shape[1]) == 0, 30.0, 1.0),
    "relu": lambda x, rng: np.maximum(x, 0),
    "gelu": lambda x, rng: FUNCTIONS["gelu_tanh"](x, 0, 0),
    "shifted": lambda x, rng: x + 1,
    "heavy tails": lambda x, rng: np.sign(x) * np.exp(1.5 * np.abs(x)),
    "nearly constant": lambda x, rng: 1 + 0.05 * x,
    "every exponent": lambda x, rng: x * np.exp2(rng.uniform(-10, 7, x.shape)),
    "positive": lambda x, rng: np.abs(x),
}


def make_product(name, products, m=24, n=40):
    """A Gemm of the operands `name` with a scale per column: (layer, arrays, sums as tensor cores add them, exact sums)."""
    rng = np.random.default_rng(products)
    x, w = OPERANDS[name](rng.standard_normal((m, products)), rng), rng.standard_normal((n, products))
    w = np.abs(w) + 0.1 if name == "positive" else w
    x, w = (448 * a / np.abs(a).max() for a in (x, w))
    x, w = x.astype(E4M3), w.astype(E4M3)
    scale = (rng.uniform(0.5, 2, n) / 448).astype(np.float32)
    data = [(x, 1.0, None, 1), (w, scale, None, 0), np.zeros(n, np.float32)]
    _net, layer, arrays = sample_layer("Fused", make_quantized_sample("Gemm", data, lambda body, v: body.add("Gemm", *v, transB=1), None))
    arrays = [x if a is not None and a.shape == x.shape else a for a in arrays]
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    return layer, arrays, add_float8_products(x, w) * np.float64(scale), exact * np.float64(scale)


def compare(layer, arrays, sums):
    return compare_layer(layer, choose(layer, ("clip", -INFINITY, INFINITY), "f32"), arrays, [sums.astype(np.float32)])


@pytest.mark.parametrize("products", [64, 768, 4608])
@pytest.mark.parametrize("name", OPERANDS)
def test_truncated_sums_of_any_magnitudes_are_within_two_thirds_of_the_bound(name, products):
    """Regression: sums of products of one sign, or of operands with a few large channels, lose more than 2e-3 of the largest sum."""
    layer, arrays, sums, exact = make_product(name, products)
    assert compare(layer, arrays, sums).failure is None
    more = compare(layer, arrays, exact + 1.5 * (sums - exact))
    assert more.failure is None, str(more.failure)


@pytest.mark.parametrize("name", OPERANDS)
def test_wrong_float8_kernels_are_refused(name):
    layer, arrays, sums, exact = make_product(name, 768)
    x, w = (a.astype(np.float64) for a in arrays if a is not None and a.dtype == E4M3)
    scale = next(a for a in arrays if a is not None and a.shape == (len(w),) and a.any() and a.dtype == np.float32)
    wrong = {
        "the last 32 products are missing": sums - x[:, -32:] @ w[:, -32:].T * scale,
        "the scale of the next column": sums / scale * np.roll(scale, 1),
        "one scale is too large by a tenth": sums * np.where(np.arange(len(w)) == np.abs(exact).max(axis=0).argmax(), 1.1, 1.0),
        "two rows are swapped": sums[[1, 0, *range(2, len(sums))]],
        "one result is missing": np.where(np.abs(exact) == np.abs(exact).max(), 0.0, sums),
    }
    for what, values in wrong.items():
        assert compare(layer, arrays, values).failure is not None, what


def test_the_bound_of_truncation_is_of_the_size_of_the_error():
    """Sums of products of one sign lose most: at least a third of what is allowed."""
    layer, arrays, sums, exact = make_product("positive", 4608)
    allowed = bound_sum_effect(layer, choose(layer, ("clip", -INFINITY, INFINITY), "f32"), arrays) + bound_float8_sum(4608)
    assert np.abs(sums - exact).max() / np.abs(exact).max() > allowed / 3


def test_the_effect_on_selected_items_of_a_batch_is_that_of_a_batch_of_these():
    rng, effects = np.random.default_rng(5), []
    x = (rng.standard_normal((4, 16, 6, 6)) * 60).astype(E4M3)
    weights = ((rng.standard_normal((8, 16, 3, 3)) + 2) * 30).astype(E4M3), np.full(8, 1e-3, np.float32), None, 0
    for items, batch in ((None, x[[0, 3]]), (BatchItems(4, (0, 3)), x)):
        data = [(batch, 1.0, None, 1), weights, np.zeros(8, np.float32)]
        _net, layer, arrays = sample_layer("Fused", make_quantized_sample("Conv", data, lambda body, v: body.add("Conv", *v, pads=(1,) * 4), None))
        arrays = [x[[0, 3]] if a is not None and a.shape == batch.shape else a for a in arrays]
        axes = BatchAxes({t.name: BatchAxis(0) for t in layer.inputs if t is not None and t.shape == batch.shape}, {}, frozenset())
        effects.append(bound_sum_effect(layer, choose(layer, ("clip", -INFINITY, INFINITY), "f32"), arrays, items, axes))
    assert effects[0] == pytest.approx(effects[1], rel=1e-9)
    assert effects[0] > 0
