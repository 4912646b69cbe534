"""Rules of calibration and scaling against definitions written out plainly, on small cases."""

import numpy as np
import pytest

from whet.network import parse_network
from whet.precision.calibrate import crop_middle, list_candidate_ranges
from whet.precision.histogram import Histogram
from whet.precision.insert import compute_float8_weight_scales, quantize, round_to_e4m3, round_weights_to_float8
from whet.precision.methods import LIMITS
from whet.precision.quantization_sites import SiteFinder, is_never_negative
from whet.precision.ranges import Range, Ranges
from whet.precision.scaling import find_sites
from whet.precision.steps import StepReport
from whet.precision.tables import LARGEST, find_code


def layer_of(text: str):
    return parse_network("network n source\n" + text).layers[-1]


def divergence_of(fine: np.ndarray, n: int) -> float:
    """Kullback-Leibler divergence of the first n of 2,048 bins, the rest in the last one, from 128 levels that share them."""
    p = list(fine[:n])
    p[-1] += sum(fine[n:])
    q = [0.0] * n
    for level in range(128):
        members = range(-(-level * n // 128), -(-(level + 1) * n // 128))  # where floor(128 i / n) is the level
        filled = [i for i in members if p[i] > 0]
        for i in filled:
            q[i] = sum(fine[j] for j in members) / len(filled)
    total_p, total_q = sum(p), sum(q)
    q = [v / total_q for v in q]
    lost = any(p[i] > 0 and q[i] == 0 for i in range(n))
    return sum(p[i] / total_p * np.log(p[i] / total_p / (1e-9 if lost and q[i] == 0 else q[i])) for i in range(n) if p[i] > 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_entropy_selects_the_least_divergence(seed):
    rng = np.random.default_rng(seed)
    a = np.abs(np.concatenate([rng.standard_normal(4000), rng.exponential(3, 60)]))
    h = Histogram()
    h.add(a)
    middles, _, counts = h.magnitudes()
    fine = np.zeros(2048)
    for m, c in zip(middles, counts, strict=True):
        fine[min(int(m * 2048 / h.largest), 2047)] += c
    fine[0] = fine[1]
    chosen = round(LIMITS["entropy"](h) / h.largest * 2048)
    others = [n for n in (128, 256, 384, 512, 768, 1024, 1536, 2048, chosen - 16, chosen + 16) if 128 <= n <= 2048]
    assert divergence_of(fine, chosen) <= min(divergence_of(fine, n) for n in others) + 1e-12


def test_candidates_that_nearly_agree_are_listed_once():
    h = Histogram()
    h.add(np.linspace(-1, 1, 1001).astype("f4"))

    def count(*limits):
        names = ("minmax", "mse", "entropy")[: len(limits)]
        return len(list_candidate_ranges(h, {n: lambda _, v=v: v for n, v in zip(names, limits, strict=True)}, zero_points=False))

    assert [count(1.0), count(1.0, 1.0), count(1.0, 0.995), count(1.0, 0.98), count(1.0, 0.98, 0.6)] == [1, 1, 1, 2, 3]
    skewed = Histogram()
    skewed.add(np.linspace(-0.2, 1, 1001).astype("f4"))
    pair = list_candidate_ranges(skewed, {"minmax": lambda h: h.largest}, zero_points=True)
    assert [(round(r.low, 2), round(r.high, 2)) for r in pair] == [(-1.0, 1.0), (-0.2, 1.0)]  # the same upper end, another lower one


CONV = "in %x: f32[1,2,{0},{0}]\nconst %w: f32[4,2,{1},{1}] = seed(1)\n%y = Conv(%x, %w, dilations=({2}, {2}))\nout %y"
PRODUCT = "in %x: f32[{0}]\nconst %w: f32[{1}] = seed(1)\n%y = {2}\nout %y"


@pytest.mark.parametrize(
    ("size", "kernel", "dilation", "crop", "first", "size_kept"),
    [(41, 3, 1, 20, 10, 20), (40, 3, 1, 20, 10, 20), (9, 3, 1, 20, 0, 9), (60, 9, 2, 20, 13, 34), (61, 3, 1, 7, 27, 7), (61, 5, 1, 7, 25, 10)],
)
def test_a_convolution_is_judged_at_the_centre(size, kernel, dilation, crop, first, size_kept):
    x = np.arange(2.0 * size * size).reshape(1, 2, size, size)
    got = crop_middle(x, layer_of(CONV.format(size, kernel, dilation)), crop)
    np.testing.assert_array_equal(got, x[:, :, first : first + size_kept, first : first + size_kept])


def test_a_product_is_judged_on_its_first_rows():
    gemm = layer_of(PRODUCT.format("200,8", "8,4", "Gemm(%x, %w)"))
    turned = layer_of(PRODUCT.format("8,200", "8,4", "Gemm(%x, %w, transA=1)"))
    product = layer_of(PRODUCT.format("2,30,30,8", "8,4", "MatMul(%x, %w)"))
    rows = np.arange(1600.0).reshape(200, 8)
    np.testing.assert_array_equal(crop_middle(rows, gemm), rows[:64])
    assert crop_middle(rows.T, turned) is not None
    np.testing.assert_array_equal(crop_middle(rows.T, turned), rows.T)
    np.testing.assert_array_equal(crop_middle(rows.reshape(2, 100, 8), product), rows.reshape(2, 100, 8)[:, :64])
    np.testing.assert_array_equal(crop_middle(rows[:, 0], product), rows[:, 0])
    image = np.arange(2.0 * 30 * 30 * 8).reshape(2, 30, 30, 8)
    np.testing.assert_array_equal(crop_middle(image, product, 20), image[:, :20, :20])


def test_the_float8_scale_of_a_filter_has_the_least_error():
    layer = layer_of("in %x: f32[1,8]\nconst %w: f32[8,5] = seed(3)\n%y = Gemm(%x, %w)\nout %y")
    w = np.random.default_rng(0).standard_normal((8, 5)).astype("f4") * np.array([1e-3, 0.1, 1, 7, 300], "f4")
    w[:, 4] = 0
    scales = compute_float8_weight_scales(layer, w)
    for k in range(4):
        tried = [np.float32(np.abs(w[:, k]).max() / 448) * np.float32(2 ** (i / 8)) for i in range(8)]
        errors = [float(np.sum((round_to_e4m3(w[:, k] / s) * s - w[:, k]) ** 2)) for s in tried]
        assert scales[k] == pytest.approx(tried[int(np.argmin(errors))], rel=1e-6)
    assert scales[4] > 0


POSITIVE = ["Relu(%x)", "Sigmoid(%x)", "Abs(%x)", "Exp(%x)", "Softmax(%x)", "Clip(%x, %zero, %six)", "Clip(%x, %six)"]
POSITIVE += ["MaxPool(%r, kernel_shape=(2, 2))"]
POSITIVE += ["Add(%r, %r)", "Mul(%r, %r)", "Concat(%r, %r, axis=1)", "AveragePool(%r, kernel_shape=(2, 2))", "Transpose(%r, perm=(0, 1, 3, 2))"]
SIGNED = ["Add(%r, %x)", "Mul(%r, %x)", "Concat(%r, %x, axis=1)", "Clip(%x, %minus, %six)", "Clip(%x)", "Tanh(%x)", "LeakyRelu(%r)", "Sub(%r, %r)"]
SIGNED += ["AveragePool(%x, kernel_shape=(2, 2))", "MaxPool(%x, kernel_shape=(2, 2))", "Clip(%x, %x0)"]
SIGNED += ["BatchNormalization(%r, %one, %one, %one, %one)"]


@pytest.mark.parametrize(("text", "positive"), [*((t, True) for t in POSITIVE), *((t, False) for t in SIGNED)])
def test_operations_without_negative_results(text, positive):
    head = "in %x: f32[1,3,4,4]\nin %x0: f32[]\nconst %zero: f32[] = [0.0]\nconst %six: f32[] = [6.0]\nconst %minus: f32[] = [-1.0]\n"
    head += "const %one: f32[3] = [1.0, 1.0, 1.0]\n%r = Relu(%x)\n"
    layer = layer_of(f"{head}%y = {text}\nout %y\n")
    assert layer.op == text.split("(")[0]
    assert is_never_negative(layer.outputs[0]) == positive
    assert not is_never_negative(layer.inputs[0]) or "%r" in text


def test_scale_passes_a_clip_only_from_zero_to_a_constant():
    def refusal(clip, more=""):
        net = parse_network(f"""
            network n source
            in %x: f32[1,3,6,6]
            const %w: f32[4,3,3,3] = seed(1)
            const %v: f32[5,4,1,1] = seed(2)
            const %zero: f32[] = [0.0]
            const %one: f32[] = [1.0]
            const %six: f32[] = [6.0]
            %m = ReduceMax(%x, keepdims=0)
            %a = Conv(%x, %w)
            %b = {clip}
            {more}
            %y = Conv(%{"c" if more else "b"}, %v)
            out %y
            """)
        found, refused = find_sites(net)
        name = "c" if more else "b"
        return found[name].limit if name in found else refused[name]

    assert refusal("Clip(%a, %zero, %six)") == 6.0
    for other in ("Clip(%a, %one, %six)", "Clip(%a, %zero)", "Clip(%a, %zero, %m)", "Clip(%a, %m, %six)", "Clip(%a)"):
        assert "clips elsewhere than at 0 and a constant" in str(refusal(other)), other
    assert "clipped twice" in str(refusal("Clip(%a, %zero, %six)", "%c = Clip(%b, %zero, %one)"))


@pytest.mark.parametrize(("shape", "moves"), [("8", True), ("1,8", True), ("1,1,8", True), ("1", False), ("5,1", False), ("5,8", False)])
def test_scale_passes_the_addition_of_a_vector_along_the_last_axis(shape, moves):
    net = parse_network(f"""
        network n source
        in %x: f32[2,5,6]
        const %w: f32[6,8] = seed(1)
        const %v: f32[8,3] = seed(2)
        const %b: f32[{shape}] = seed(3)
        %a = MatMul(%x, %w)
        %s = Add(%a, %b)
        %y = MatMul(%s, %v)
        out %y
        """)
    found, _ = find_sites(net)
    assert ("s" in found) == moves
    assert not moves or [(x.op, i, axis) for x, i, axis in found["s"].divided] == [("Add", 1, -1), ("MatMul", 1, 1)]


def test_attempts_are_counted_by_method():
    kept = {"smooth 0.5": True, "smooth 0.75": False, "equalize": True, "bias": False}
    tried = [(method, "tensor", 1.0, 0.5 if k else 2.0, k) for method, k in kept.items()]
    assert StepReport(tried).text() == "kept of those tried: smooth 1 of 2, equalize 1 of 1, bias 0 of 1"
    assert StepReport().text() == "kept of those tried: nothing"


@pytest.mark.parametrize(("kind", "highest"), [("Silu", 6.0), ("Gelu", 1.5), ("Mish", 3.0)])
def test_a_table_s_encoding_is_better_than_others(kind, highest):
    """Judged by simulation: inputs of a normal distribution up to 3.5 standard deviations, encoded, decoded and put into the function."""
    from whet.precision.tables import FUNCTIONS

    f = FUNCTIONS[kind]
    top = highest
    for _ in range(80):
        top += highest - float(f(np.array(top)))
    x = np.random.default_rng(0).standard_normal(2000) * top / LARGEST
    x = x[np.abs(x) <= top]

    def error(squeeze, step, zero):
        q = np.clip(np.rint(np.where(x < 0, squeeze * x, x) / step) + zero, 0, 255) - zero
        return float(np.mean((f(np.where(q < 0, q / squeeze, q) * step) - f(x)) ** 2))

    best = find_code(kind, highest)
    mine = error(best.squeeze, float(best.scale), best.zero)
    others = []
    for squeeze in (1.0, 0.75, 0.5, 0.375, 0.25, 0.125):
        for cut in (*(c for c in (2.0, 3.0, 4.0, 5.0, 6.0, 8.0) if c < top), *(p * top for p in (0.6, 0.8, 1.0))):
            step = (top + squeeze * cut) / 255
            others.append(error(squeeze, step, round(squeeze * cut / step)))
    assert mine < 1.15 * min(others)


def test_a_range_of_unequal_ends_has_255_steps():
    assert Range(-0.25, 3.0).scale == np.float32(3.25 / 255)
    assert Range(-1.0, 1.0).scale == np.float32(1 / 127)


@pytest.mark.parametrize(("activation", "takes"), [
    ("Relu(%c)", True), ("Clip(%c, %low, %high)", True), ("LeakyRelu(%c)", True), ("PRelu(%c, %slope)", True), ("Exp(%c)", False),
    ("Relu(%x)", False),
])  # fmt: skip
def test_a_sum_takes_the_result_of_a_convolution_and_its_activation(activation, takes):
    net = parse_network(f"""network n source
in %x: f32[1,4,3,3]
const %w: f32[4,4,1,1] = seed(1)
const %low: f32[] = [0.0]
const %high: f32[] = [6.0]
const %slope: f32[4,1,1] = [0.5,0.25,0.5,0.25]
%c = Conv(%x, %w)
%a = {activation}
%y = Add(%a, %x)
out %y
""")
    finder = SiteFinder(net, lambda layer: False, frozenset())
    (a,) = (t for t in net.tensors() if t.name == "a")
    assert finder.takes_sum(a) == takes


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_product_with_the_words_of_a_large_vocabulary_is_quantized(kind):
    net = parse_network("network n source\nin %x: f32[2,4]\nconst %w: f32[4,151936] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    made = quantize(net, Ranges({"x": Range(-4.0, 4.0)}), kind=kind)
    assert sorted(layer.op for layer in made.layers) == ["DequantizeLinear", "DequantizeLinear", "MatMul", "QuantizeLinear"]


def test_weights_of_any_size_may_be_rounded_adaptively():
    """Regression: rounded weights of more than 65,536 elements were refused as a literal that is too large."""
    net = parse_network("network n source\nin %x: f32[2,600]\nconst %w: f32[600,600] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    layer = net.layers[0]
    rounded = round_weights_to_float8(layer, np.asarray(layer.needs(1).array(), np.float32))
    made = quantize(net, Ranges({"x": Range(-4.0, 4.0)}, rounded={layer.name: rounded}), kind="fp8")
    stored = next(x for x in made.layers if x.op == "DequantizeLinear" and x.needs(0).is_constant)
    scales = np.asarray(stored.needs(1).array(), np.float32)
    assert np.array_equal(stored.needs(0).array().astype(np.float32) * scales, rounded)
