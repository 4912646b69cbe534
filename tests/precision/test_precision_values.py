"""Ranges, error measures, budgets and adaptive rounding: exact values of small cases, and definitions written out plainly."""

from dataclasses import replace

import numpy as np
import pytest

from whet.errors import CalibrationError, UsageError
from whet.network import Weight, parse_network
from whet.ops import run_network
from whet.precision import Budget, Preprocessing, calibration_data, emulate_network, find_quantization_sites, read_cache, rounding, steps, write_cache
from whet.precision.calibrate import crop_middle, find_consumers, select_range
from whet.precision.compare import compare
from whet.precision.data import name_samples
from whet.precision.float8 import compute_mean_inputs, correct_biases, pack_rounding, unpack_rounding
from whet.precision.histogram import Histogram, compute_bin_centres
from whet.precision.insert import fake_quantize_weights, round_weights_to_float8
from whet.precision.measures import compute_cosine, compute_output_cosine, compute_output_snr, compute_powers, to_decibels
from whet.precision.methods import LIMITS
from whet.precision.ranges import Range, Ranges
from whet.precision.rounding import (
    BLOCK_COLUMNS,
    DAMPING,
    adapt_weights,
    as_rows,
    compute_expected_error,
    compute_moments,
    fits,
    from_rows,
    round_rows,
    sample_windows,
)
from whet.precision.scaling import find_sites, propose_scales


@pytest.mark.parametrize(
    ("low", "high", "limit", "zero_points", "want"),
    [
        (0.5, 2.0, 9.0, True, (0.0, 2.0)),  # non-negative: from 0
        (0.0, 2.0, 1.5, True, (0.0, 1.5)),
        (-1.0, 3.0, 9.0, True, (-3.0, 3.0)),  # up to three times as large: symmetric
        (-1.0, 3.1, 9.0, True, (-1.0, 3.1)),
        (-3.0, 1.0, 9.0, True, (-3.0, 3.0)),
        (-3.1, 1.0, 9.0, True, (-3.1, 1.0)),
        (-1.0, 3.1, 9.0, False, (-3.1, 3.1)),
        (-2.0, -1.0, 9.0, True, (-2.0, 2.0)),  # no positive value: symmetric
        (-2.0, 0.0, 9.0, True, (-2.0, 2.0)),
        (-0.1, 5.0, 2.0, True, (-0.1, 2.0)),  # clipped first
        (-10.0, 1.0, 2.0, True, (-2.0, 2.0)),
    ],
)
def test_the_form_of_a_range(low, high, limit, zero_points, want):
    r = Range.within(low, high, limit, "m", zero_points=zero_points)
    assert (r.low, r.high, r.method) == (*want, "m")
    assert Range.within(low, high, limit) == Range.within(low, high, limit, zero_points=True)


@pytest.mark.parametrize(
    ("r", "name", "scale", "zero", "usable"),
    [
        (Range(-254.0, 254.0), "i8", 2.0, 0, True),
        (Range(0.0, 510.0), "u8", 2.0, 0, True),
        (Range(-110.0, 400.0), "u8", 2.0, 55, True),
        (Range(0.0, 0.0), "i8", 0.0, 0, False),
        (Range(1.0, 2.0), "u8", 1 / 255, 0, False),
        (Range(-2.0, -1.0), "u8", 1 / 255, 510, False),
        (Range(-np.inf, 1.0), "u8", np.inf, 0, False),
        (Range(0.0, np.inf), "u8", np.inf, 0, False),
    ],
)
def test_scale_and_zero_point_of_a_range(r, name, scale, zero, usable):
    assert (r.dtype.name, float(r.scale), r.usable) == (name, pytest.approx(scale), usable)
    if usable:
        assert r.zero == zero
        steps = np.float32([-1e6, -3.0, -2.9, 0.0, 2.9, 3.1, 1e6])
        low, high = (-128, 127) if name == "i8" else (-zero, 255 - zero)
        np.testing.assert_array_equal(r.fake_quantize(steps), np.clip(np.float32([-1e6, -2, -1, 0, 1, 2, 1e6]), low, high) * 2)


def test_merged_ranges_have_zero_points_only_if_one_had():
    asymmetric, wide = Range(-1.0, 4.0, "mse"), Range(0.0, 10.0, "minmax")
    assert asymmetric.merge(wide) == Range(-1.0, 10.0, "mse, minmax")
    assert Range(0.0, 4.0, "a").merge(Range(-1.0, 1.0, "a")) == Range(-4.0, 4.0, "a")


def test_error_measures():
    nan, inf = np.nan, np.inf
    assert compute_powers([1, 2, nan], [1, 4, nan]) == (5.0, 4.0)
    assert compute_powers([1, 2, nan], [1, nan, 3]) == (5.0, inf)
    assert [to_decibels(*p) for p in ((100, 1), (1, 10), (1, 0), (0, 1), (0, 0), (1, inf), (1e-30, 1e30), (1e30, 1e-30))] == [
        20, -10, 200, -200, 200, -200, -200, 200,
    ]  # fmt: skip
    assert compute_cosine([3, 4], [[4, 3]]) == pytest.approx(24 / 25)
    cases = (([0, 0], [0, 0]), ([0, 0], [0, 1]), ([nan, 1], [nan, 1]), ([inf, 1], [inf, 1]), ([inf, 1], [-inf, 1]), ([1, 2], [nan, 2]))
    assert [compute_cosine(*c) for c in cases] == [1, 0, 1, 1, -1, -1]
    a, unit, other = (np.array(v, "f4") for v in ([2, 0], [0, 1], [1, 0]))
    i = np.array([1, 2])
    wants = [{"a": a, "b": unit, "i": i}, {"a": a, "b": unit, "i": i}]
    gots = [{"a": a, "b": unit, "i": i + 1}, {"a": a - 0.4, "b": other, "i": i}]
    # powers are summed over the samples: output a has signal 8 and noise 0.32, b has signal 2 and noise 2
    assert compute_output_snr(wants, gots) == pytest.approx(0)
    assert compute_output_snr([{"a": w["a"]} for w in wants], [{"a": g["a"]} for g in gots]) == pytest.approx(10 * np.log10(8 / 0.32), abs=1e-4)
    assert compute_output_cosine(wants, gots) == pytest.approx(0.5)  # of b: the mean of 1 and 0
    assert compute_output_cosine([{"i": i}], [{"i": i + 1}]) == 1


def test_a_metric_may_fall_by_the_limit_and_no_more():
    calls = []

    def metric(run):
        calls.append(run)
        return run({})["top1"]

    budget = Budget("metric", 0.5, metric, "mine")
    got = budget.judge(lambda f: {"top1": 89.5}, lambda f: {"top1": 90.0}, [])
    assert (got.value, got.reference, got.holds, got.text) == (89.5, 90.0, True, "89.5 against FP32's 90")
    assert not budget.judge(lambda f: {"top1": 89.49}, pytest.fail, []).holds  # the reference is measured once
    assert budget.judge(lambda f: {"top1": 95.0}, pytest.fail, []).holds
    assert len(calls) == 4
    assert Budget("metric", 0.0, metric).judge(lambda f: {"top1": 1.0}, lambda f: {"top1": 1.0}, []).holds
    assert Budget("metric", 0.5, metric).text == "the metric may fall by 0.5"


def test_a_budget_of_the_outputs():
    samples = [{"x": np.float32([3, 4])}]
    snr = Budget("snr", 20.0)
    got = snr.judge(lambda f: {"y": f["x"] * np.float32(0.9)}, lambda f: {"y": f["x"]}, samples)
    assert (got.value, got.reference, got.text) == (pytest.approx(20, abs=1e-4), None, "20.0 dB")
    assert snr.judge(lambda f: {"y": f["x"]}, pytest.fail, samples, [{"y": samples[0]["x"]}]).value == 200  # given outputs are used
    assert not snr.judge(lambda f: {"y": f["x"] * 0}, lambda f: {"y": f["x"]}, samples).holds
    cosine = Budget("cosine", 0.96)
    got = cosine.judge(lambda f: {"y": f["x"][::-1]}, lambda f: {"y": f["x"]}, samples)
    assert (got.value, got.holds, got.text) == (pytest.approx(0.96), got.value >= 0.96, "cosine 0.96000")
    assert Budget("snr", 3).text == "output SNR at least 3 dB"
    assert cosine.text == "output cosine at least 0.96"
    with pytest.raises(CalibrationError, match="needs calibration samples"):
        snr.judge(dict, dict, [])
    assert [Budget("cosine", v).limit for v in (-1, 1)] == [-1, 1]
    for kind, limit, metric in (
        ("cosine", 1.1, None),
        ("snr", np.inf, None),
        ("metric", 1.0, None),
        ("snr", 1.0, abs),
        ("metric", -1, abs),
        ("l2", 1, None),
    ):
        with pytest.raises(UsageError, match="an accuracy budget"):
            Budget(kind, limit, metric)


def test_the_percentile_leaves_out_one_in_ten_thousand():
    for outliers, limit in ((1, 1.0), (2, 100.0)):
        h = Histogram()
        h.add(np.concatenate([np.ones(10_000 - outliers), np.full(outliers, -100.0)]))
        assert LIMITS["percentile"](h) == pytest.approx(limit, rel=0.01)
        assert LIMITS["minmax"](h) == 100


CONV = """network n source
in %x: f32[2,3,7,6]
const %w: f32[4,3,3,2] = seed(1)
%y = Conv(%x, %w, strides=(2, 1), dilations=(1, 2), pads=(1, 0, 2, 1))
out %y
"""


def test_windows_times_weights_are_the_convolution():
    net = parse_network(CONV)
    (layer,) = net.layers
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 6)).astype("f4")
    w, y = layer.inputs[1].array(), run_network(net, {"x": x})["y"]
    want = y.transpose(0, 2, 3, 1).reshape(-1, 4)
    rows = sample_windows(layer, x, 10**6, np.random.default_rng(1))
    np.testing.assert_allclose(rows @ as_rows(layer, w).T, want, rtol=1e-5, atol=1e-5)
    some = sample_windows(layer, x, 9, np.random.default_rng(1))
    at = [int(np.flatnonzero((rows == r).all(axis=1))[0]) for r in some]
    assert len(set(at)) == 9
    assert at == sorted(at)
    np.testing.assert_array_equal(from_rows(layer, as_rows(layer, w), w.shape), w)
    h = compute_moments(layer, [x[:1], x[1:]], 2)
    np.testing.assert_allclose(h, np.cov(rows.T, ddof=0), rtol=1e-4, atol=1e-5)


def test_the_rows_of_moments_are_shared_among_the_samples(monkeypatch):
    layer = parse_network("network n source\nin %x: f32[9,2]\nconst %w: f32[2,3] = seed(1)\n%y = MatMul(%x, %w)\nout %y").layers[0]
    wanted = []

    def sample(layer, x, most, rng):
        wanted.append(most)
        return x[:most]

    monkeypatch.setattr(rounding, "ROWS", 10)
    monkeypatch.setattr(rounding, "sample_windows", sample)
    x = np.arange(18, dtype="f4").reshape(9, 2)
    for count, most in ((1, 10), (3, 3), (0, 10), (99, 1)):
        wanted.clear()
        compute_moments(layer, [x, x], count)
        assert wanted == [most, most]


def test_rows_of_products_are_their_inputs():
    x = np.arange(24, dtype="f4").reshape(2, 3, 4)
    product = parse_network("network n source\nin %x: f32[2,3,4]\nconst %w: f32[4,5] = seed(1)\n%y = MatMul(%x, %w)\nout %y").layers[0]
    turned = parse_network("network n source\nin %x: f32[3,4]\nconst %w: f32[5,4] = seed(1)\n%y = Gemm(%x, %w, transB=1)\nout %y").layers[0]
    np.testing.assert_array_equal(sample_windows(product, x, 99, np.random.default_rng(0)), x.reshape(6, 4))
    for layer, shape in ((product, (4, 5)), (turned, (5, 4))):
        w = layer.inputs[1].array()
        assert as_rows(layer, w).shape == (5, 4)
        assert from_rows(layer, as_rows(layer, w), shape).shape == shape
        np.testing.assert_array_equal(from_rows(layer, as_rows(layer, w), shape), w)
        assert fits(layer)
    assert fits(parse_network(CONV).layers[0])
    grouped = "network n source\nin %x: f32[1,4,5,5]\nconst %w: f32[4,2,3,3] = seed(1)\n%y = Conv(%x, %w, group=2)\nout %y"
    assert not fits(parse_network(grouped).layers[0])


def round_one_by_one(w, scale, h):
    """GPTQ by its definition: round the column with the largest diagonal, then move the other columns to where the error is least."""
    n = len(h)
    h = h + DAMPING * np.diag(h).mean() * np.eye(n)
    w, out = w.copy(), np.empty_like(w)
    left = list(np.argsort(-np.diag(h), kind="stable"))
    while left:
        j, *rest = left
        out[:, j] = np.rint(w[:, j] / scale) * scale
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        w[:, rest] -= np.outer((w[:, j] - out[:, j]) / inverse[0, 0], inverse[0, 1:])
        left = rest
    return out


@pytest.mark.parametrize("n", [1, 5, BLOCK_COLUMNS + 7])
def test_adaptive_rounding_by_its_definition(n):
    rng = np.random.default_rng(n)
    inputs = rng.standard_normal((4 * n + 3, n)) @ (rng.standard_normal((n, n)) / n + np.diag(rng.uniform(0.2, 2, n)))
    inputs *= 0.01  # small moments are damped as large ones
    h, w, scales = inputs.T @ inputs / len(inputs), rng.standard_normal((3, n)), np.array([0.2, 0.3, 0.4])
    got = round_rows(w, scales, h, lambda column, s: np.rint(column / s) * s)
    np.testing.assert_allclose(got, round_one_by_one(w, scales, h), atol=1e-9)
    nearest = np.rint(w / scales[:, None]) * scales[:, None]
    assert compute_expected_error(w, nearest, h) == pytest.approx(np.mean(np.sum((inputs @ (nearest - w).T) ** 2, axis=1)))
    if n > 1:
        assert compute_expected_error(w, got, h) < compute_expected_error(w, nearest, h)


IMAGES = "network n source\nin %x: f32[1,{0}]\nconst %w: f32[2,{1}] = seed(1)\n%y = Conv(%x, %w)\nout %y"


def test_images_are_resized_and_cropped_at_the_centre(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 14, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    net = parse_network(IMAGES.format("3,8,6", "3,1,1"))
    (got,) = calibration_data(str(tmp_path), net, Preprocessing.parse("resize:14"))  # the shorter side already has 14 pixels
    np.testing.assert_array_equal(got["x"], pixels[6:14, 4:10].transpose(2, 0, 1)[None])
    (got,) = calibration_data(str(tmp_path), net, Preprocessing.parse("resize:7,mean:1/2/3,std:2"))
    want = np.asarray(image.fromarray(pixels).resize((7, 10), image.Resampling.BILINEAR), "f4")[1:9, 0:6]
    np.testing.assert_array_equal(got["x"][0], ((want - np.float32([1, 2, 3])) / 2).transpose(2, 0, 1))
    with pytest.raises(CalibrationError, match="mean: has 2 values, the images have 3 channels"):
        list(calibration_data(str(tmp_path), net, Preprocessing.parse("mean:1/2")))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [("resize:0", "resize", 0), ("scale:3/4", "scale", 0.75), ("mean:[1, 2]", "mean", (1.0, 2.0)), ("layout:nhwc", "layout", "nhwc")],
)
def test_settings_of_preprocessing(text, key, value):
    assert getattr(Preprocessing.parse(text.replace(", ", "/")), key) == value


@pytest.mark.parametrize(
    "text", ["resize:-1", "resize:10000000", "order:rbg", "layout:chw", "scale:1/0", "scale:nan", "std:1/0/1", "mean:x", "size:3", "scale"]
)
def test_settings_that_preprocessing_refuses(text):
    with pytest.raises(UsageError, match="calibration preprocessing"):
        Preprocessing.parse(text)


@pytest.mark.parametrize(("wide", "method"), [(1.2, "minmax"), (2.0, "mse")])
@pytest.mark.parametrize("reader", ["MatMul(%x, %w)", "Relu(%x)"])
def test_a_clipping_range_must_halve_the_error(wide, method, reader):
    """The error grows with the square of the range; the product is with the identity."""
    net = parse_network(f"network n source\nin %x: f32[64,1]\nconst %w: f32[1,1] = [1.0]\n%z = {reader}\n%y = MatMul(%z, %w)\nout %y")
    x = np.random.default_rng(0).uniform(-1, 1, (64, 1)).astype("f4")
    ranges = [Range(-wide, wide, "minmax"), Range(-1.0, 1.0, "mse"), Range(-0.5, 0.5, "entropy")]
    errors = [float(np.sum((r.fake_quantize(x) - x) ** 2) / np.sum(x**2)) for r in ranges]
    sites = find_quantization_sites(net)
    (consumer,) = find_consumers(sites, net.inputs[0])
    got = select_range(sites, net.inputs[0], ranges, [{("x", consumer.name if consumer else ""): x}])
    assert (got.method, got.high, got.error) == (method, {"minmax": wide, "mse": 1.0}[method], pytest.approx(errors[method == "mse"], rel=1e-4))


def test_a_cache_of_another_model_names_both(tmp_path):
    write_cache(tmp_path / "c.json", Ranges({}, "0123456789abcdef", 1))
    with pytest.raises(CalibrationError, match=r"another model \(0123456789ab\.\.\., this is fedcba987654\.\.\.\)"):
        read_cache(tmp_path / "c.json", parse_network(CHAIN), "fedcba9876543210")


CHAIN = "network n source\nin %x: f32[1,4]\nconst %w: f32[4,4] = seed(1)\n%a = Gemm(%x, %w)\n%b = Gemm(%a, %w)\n%y = Gemm(%b, %w)\nout %y"


def test_a_text_cache_may_list_other_tensors_and_must_have_all(tmp_path):
    net, path = parse_network(CHAIN), tmp_path / "c.cache"
    path.write_text("TRT-1\nother: 3f800000\nx: 3f800000\n\na: 3f800000\nb: 40000000\n")
    assert {n: r.high for n, r in read_cache(path, net).tensors.items() if n in "xab"} == {"x": 127, "a": 127, "b": 254}
    for text, words in (("x: 3f800000\na: 3f800000\n", "no range for %b: it"), ("x: 3f800000\n", "no range for %a and 1 more: it")):
        path.write_text(f"TRT-1\n{text}")
        with pytest.raises(CalibrationError, match=words):
            read_cache(path, net)


# comparison of two runs


def compared(ours, theirs, tolerance=0.1):
    net = parse_network("network n source\nin %x: f32[2]\n%a = Relu(%x)\n%b = Relu(%a)\n%y = Relu(%b)\nout %y")
    return compare(net, ours, theirs, tolerance)


def test_rows_have_the_errors_of_the_worst_sample():
    a = [{"a": np.float32(v), "b": np.float32([1, 1]), "y": np.float32([2, 4])} for v in ([1, 2], [4, 8])]
    b = [{"a": np.float32(v), "b": np.float32([1, 1]), "y": np.float32([2, 5])} for v in ([1, 2], [4, 10])]
    got = compared(a, b)
    assert [(r.tensor, r.op, r.type, r.differs, r.output, r.enters) for r in got.rows] == [
        ("a", "Relu", "float32", True, False, True),
        ("b", "Relu", "float32", False, False, False),
        ("y", "Relu", "float32", True, True, True),
    ]
    first, same, last = got.rows
    assert (first.max_error, first.mean_error) == (pytest.approx(0.2), pytest.approx(1 / 7))
    assert first.snr_db == pytest.approx(10 * np.log10((1 + 4 + 16 + 100) / 4))
    assert (same.max_error, same.mean_error, same.snr_db, same.note) == (0, 0, 200, "")
    assert last.snr_db == pytest.approx(10 * np.log10(29))
    assert got.first is first
    assert not got.matches
    assert compared(a, b, 0.21).matches  # the outputs' error is 0.2
    assert compared([{"a": x["a"]} for x in a], [{"a": x["a"]} for x in b]).missing == ["b", "y"]
    assert not compared([{"a": x["a"]} for x in a], [{"a": x["a"]} for x in b]).matches  # without outputs all tensors count
    assert not compared([], [{}]).matches


def test_a_difference_enters_where_no_input_differs():
    bad = [{k: np.float32([2, 2]) for k in "aby"}]
    good = [{k: np.float32([1, 1]) for k in "aby"}]
    assert [(r.tensor, r.enters) for r in compared(bad, good).rows] == [("a", True), ("b", False), ("y", False)]


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "note"),
    [
        (np.int32([1, 2, 3, 4]), np.int32([1, 2, 3, 5]), 0.25, "25 % of the values differ"),
        (np.int32([1]), np.int32([1]), 0.0, ""),
        (np.empty(0, "i4"), np.empty(0, "i4"), 0.0, ""),
        (np.float32([1, np.nan]), np.float32([1, 2]), np.inf, "NaN or infinities on one side"),
        (np.float32([1, np.inf]), np.float32([1, -np.inf]), np.inf, "NaN or infinities on one side"),
        (np.float32([1, np.nan, 3, 4]), np.float32([1, np.nan, 3, 4]), 0.0, "NaN or infinities in 25 % of both"),
        (np.float32([np.nan]), np.float32([np.nan]), 0.0, "NaN or infinities in 100 % of both"),
        (np.float32([0.5]), np.float32([0.0]), np.inf, ""),
        (np.float32([1, 2]), np.float32([[1, 2]]), np.inf, "shape [2] against [1, 2]"),
    ],
)
def test_values_without_a_relative_error(ours, theirs, error, note):
    (row,) = compared([{"a": ours}], [{"a": theirs}]).rows
    assert (row.max_error, row.mean_error, row.differs, row.note) == (error, error, error > 0.1, note)
    assert row.snr_db == (-200 if "one side" in note else row.snr_db)


def test_images_that_would_be_enormous_are_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((4000, 2, 3), np.uint8)).save(tmp_path / "a.png")
    net = parse_network(IMAGES.format("3,8,6", "3,1,1"))
    with pytest.raises(CalibrationError, match="has 2 x 4000 pixels, and resize:30000 makes 30000 x 60000000 of them"):
        list(calibration_data(str(tmp_path), net, Preprocessing.parse("resize:30000")))


def test_rounded_layers_read_and_write_rounded_values():
    text = "network n source\nin %x: f32[1,3]\nconst %w: f32[3,2] = seed(1)\nconst %c: f32[2] = seed(2)\n%a = Gemm(%x, %w, %c)\n%y = Relu(%a)\nout %y"
    net = parse_network(text)
    x = np.float32([[0.1, -0.7, 1.3]])
    gemm, _ = net.layers
    made = emulate_network(net, "fp16", only=[gemm.name])

    def rounded(a):
        return a.astype("f2").astype("f4")

    w, c = gemm.inputs[1].array(), gemm.inputs[2].array()
    want = np.maximum(rounded(rounded(x) @ rounded(w) + c), 0)
    np.testing.assert_array_equal(run_network(made, {"x": x})["y"], want)
    both = emulate_network(net, "bf16")
    assert [t.name for t in both.outputs] == ["y"]
    assert not np.any(run_network(both, {"x": x})["y"].view(np.uint32) & 0xFFFF)


# batches, images, corrections, sites: one case per condition


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_an_array_is_split_into_samples_of_the_batch_size(batch):
    net = parse_network(f"network n source\nin %x: f32[{batch},2]\nin %s: f32[]\n%a = Relu(%x)\n%y = Add(%a, %s)\nout %y")
    x = np.arange(12 * batch).reshape(6 * batch, 2).astype("f4")
    one = parse_network(f"network n source\nin %x: f32[{batch},2]\n%y = Relu(%x)\nout %y")
    got = [f["x"] for f in name_samples([x], one, "data")]
    assert len(got) == 6
    np.testing.assert_array_equal(got, x.reshape(6, batch, 2))
    (single,) = name_samples([{"x": x[:batch], "s": np.float32(3)}], net, "data")
    np.testing.assert_array_equal(single["x"], x[:batch])
    assert single["s"] == 3
    with pytest.raises(CalibrationError, match=r"different numbers of samples \(1, 6\)"):
        list(name_samples([{"x": x, "s": np.float32(3)}], net, "data"))


@pytest.mark.parametrize(("layout", "size"), [("nchw", (8, 6)), ("nhwc", (8, 6)), ("nchw", (1, 6)), ("nchw", (8, 1)), ("nhwc", (1, 6))])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_channels_of_an_image_are_those_of_its_layout(tmp_path, layout, size, channels):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    made = image.fromarray(pixels)
    made.save(tmp_path / "a.png")
    shape = (channels, *size) if layout == "nchw" else (*size, channels)
    net = parse_network(f"network n source\nin %x: f32[1,{','.join(map(str, shape))}]\n%y = Relu(%x)\nout %y")
    (got,) = calibration_data(str(tmp_path), net, Preprocessing.parse(f"layout:{layout}"))
    want = np.asarray(made.convert("L"))[..., None] if channels == 1 else pixels
    np.testing.assert_array_equal(got["x"][0], want.transpose(2, 0, 1) if layout == "nchw" else want)


def test_the_centre_of_a_bin_is_the_mean_of_its_ends():
    centres, high = compute_bin_centres()
    for low in (0.25, 1.0, 3.0):
        k = int(np.float32(low).view(np.uint32)) >> 16
        following = float((np.uint32((k + 1) << 16)).view(np.float32))
        assert high[k] == np.nextafter(np.float32(following), np.float32(0))
        assert centres[k] == (low + high[k]) / 2


@pytest.mark.parametrize(
    ("attrs", "fits_int8"),
    [("", True), ("transB=1", True), ("transA=1", False), ("alpha=0.5", False), ("alpha=2.0", False), ("beta=0.5", False), ("beta=2.0", False)],
)
def test_a_gemm_with_another_factor_or_a_transposed_input_has_no_quantized_form(attrs, fits_int8):
    more = f", {attrs}" if attrs else ""
    text = f"network n source\nin %x: f32[4,4]\nconst %w: f32[4,4] = seed(1)\nconst %b: f32[4] = seed(2)\n%y = Gemm(%x, %w, %b{more})\nout %y"
    assert len(find_quantization_sites(parse_network(text)).layers) == fits_int8


@pytest.mark.parametrize(
    ("gated", "is_float"),
    [
        ("%s = Sigmoid(%a)\n%m = Mul(%a, %s)", True),
        ("%s = Sigmoid(%a)\n%m = Mul(%s, %a)", True),
        ("%s = Sigmoid(%r)\n%m = Mul(%a, %s)", False),  # gated by another value
        ("%s = Sigmoid(%r)\n%m = Mul(%r, %s)", False),  # no quantized layer computes it
        ("%s = Tanh(%a)\n%m = Mul(%a, %s)", False),
        ("%m = Relu(%a)", True),
        ("%m = Relu(%r)", False),
    ],
)
def test_a_silu_of_a_quantized_layer_takes_the_sum(gated, is_float):
    """The other operand, which a product reads too, is then stored as integers for the sum."""
    net = parse_network(f"""network n source
        in %x: f32[4,4]
        in %z: f32[4,4]
        in %r: f32[4,4]
        const %w: f32[4,4] = seed(1)
        const %v: f32[4,4] = seed(2)
        %a = MatMul(%x, %w)
        {gated}
        %o = MatMul(%z, %v)
        %y = Add(%m, %z)
        out %o
        out %y
        """)
    uses = find_quantization_sites(net).uses[net.tensor("z")]
    assert sorted(r.op for r in uses) == (["Add", "MatMul"] if is_float else ["MatMul"])


def test_rounding_that_does_not_pay_on_the_other_half_is_dropped():
    (layer,) = parse_network("network n source\nin %x: f32[9,6]\nconst %w: f32[6,4] = seed(1)\n%y = MatMul(%x, %w)\nout %y").layers
    w, scales = layer.inputs[1].array(), np.full(4, 0.5)

    def grid(column, s):
        return np.rint(column / s) * s

    nearest = (np.rint(w / 0.5) * 0.5).astype("f4")
    alike = np.ones((6, 6)) + 0.01 * np.eye(6)  # inputs that vary together: their errors can cancel
    got = adapt_weights(layer, w, nearest, scales, (alike, alike), grid)
    np.testing.assert_array_equal(got, round_rows(w.T.astype("f8"), scales, alike, grid).T)
    assert adapt_weights(layer, w, nearest, scales, (alike, np.eye(6)), grid) is None
    assert adapt_weights(layer, w, nearest, scales, (np.eye(6), np.eye(6)), grid) is None  # rounding to nearest is the best already
    got = adapt_weights(layer, w, nearest, scales, (alike, 2 * alike), grid)
    np.testing.assert_array_equal(got, round_rows(w.T.astype("f8"), scales, 1.5 * alike, grid).T)


def test_the_smallest_float8_weights_survive_packing():
    """-2^-9, the negative number next to zero, has the index -1."""
    values = [448.0, -448.0, 2**-9, -(2**-9), -(2**-8), 0.0]
    net = parse_network(f"network n source\nin %x: f32[1,6]\nconst %w: f32[6,1] = {values}\n%y = MatMul(%x, %w)\nout %y")
    w = net.constants["w"].array()
    name = net.layers[0].name
    (got,) = unpack_rounding(net, pack_rounding(net, {name: w})).values()
    np.testing.assert_allclose(got, w, rtol=1e-6)
    changed = np.float32([[448], [-416], [-(2**-9)], [2**-9], [-(2**-9)], [0]])
    (got,) = unpack_rounding(net, pack_rounding(net, {name: changed})).values()
    np.testing.assert_allclose(got, changed, rtol=1e-6)


def test_mean_inputs_of_products_are_over_all_rows():
    x = np.arange(24, dtype="f4").reshape(2, 3, 4) ** 2
    (layer,) = parse_network("network n source\nin %x: f32[2,3,4]\nconst %w: f32[4,5] = seed(1)\n%y = MatMul(%x, %w)\nout %y").layers
    np.testing.assert_allclose(compute_mean_inputs(layer, x), x.mean((0, 1), dtype="f8"))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_float8_correction_is_the_mean_shift_over_all_samples(count):
    net = parse_network("network n source\nin %x: f32[5,4]\nconst %w: f32[4,3] = seed(1)\nconst %b: f32[3] = seed(2)\n%y = Gemm(%x, %w, %b)\nout %y")
    (layer,) = net.layers
    rng = np.random.default_rng(count)
    samples = [{"x": (1.02 + 0.04 * rng.random((5, 4))).astype("f4")} for _ in range(count)]  # all are rounded down to 1
    ranges = Ranges({"x": Range(-224.0, 224.0)}, "", 1)  # the scale 1
    got = correct_biases(net, ranges, samples, lambda net, names: lambda feeds: feeds).corrections[layer.name]
    x = np.concatenate([f["x"] for f in samples]).astype("f8")
    w = layer.inputs[1].array()
    np.testing.assert_allclose(got, np.ones(4) @ round_weights_to_float8(layer, w).astype("f8") - x.mean(0) @ w.astype("f8"), rtol=1e-5)


SITE = """network n source
in %x: f32[2,3,5,5]
const %w: f32[4,3,1,1] = seed(1)
const %v: f32[6,4,3,3] = seed(2)
%a = Conv(%x, %w) from "a"
%r = Relu(%a)
%y = Conv(%r, %v) from "y"
out %y
"""


def test_only_the_enabled_steps_propose_scales():
    (site,) = find_sites(parse_network(SITE))[0].values()
    largest = np.array([1.0, 2.0, 4.0, 8.0])
    smooth = ["smooth 0.5", "smooth 0.75"]
    assert [list(propose_scales(site, largest, s)) for s in (("smooth",), ("bias",), ("equalize",), ("smooth", "equalize"))] == [
        smooth, [], ["equalize"], ["equalize", *smooth],
    ]  # fmt: skip
    for producer in (None, parse_network("network n source\nin %x: f32[4]\n%y = Relu(%x)\nout %y").layers[0]):
        assert list(propose_scales(replace(site, producer=producer), largest, ("equalize", "smooth"))) == smooth


@pytest.mark.parametrize("scaled", [False, True])
def test_the_error_of_a_scaling_by_its_definition(scaled):
    """The mean over the reader's output channels, whose powers differ, of noise by signal (and a hundredth of the mean signal)."""
    net = parse_network(SITE)
    (site,) = find_sites(net)[0].values()
    v = net.constants["v"].array() * np.float32([1, 4, 16, 64, 256, 1024]).reshape(6, 1, 1, 1)
    net.constants["v"].weight = Weight(v, net.constants["v"].weight.origin)
    x = np.random.default_rng(0).uniform(0, 1, (2, 4, 5, 5)).astype("f4") * np.float32([1, 2, 3, 4]).reshape(4, 1, 1)
    s = np.float32([0.25, 0.5, 1, 2]) if scaled else None
    by = np.ones((4, 1, 1), "f4") if s is None else s.reshape(4, 1, 1)
    r = Range.within(0.0, float((x / by).max()), np.inf)
    low = fake_quantize_weights(site.readers[0], v * by)
    want, got = (run_network(parse_network(READER), {"r": a, "v": w})["y"].astype("f8") for a, w in ((x, v), (r.fake_quantize(x / by), low)))
    signal = (want**2).sum((0, 2, 3))
    error = np.mean(((got - want) ** 2).sum((0, 2, 3)) / (signal + 0.01 * signal.mean()))
    assert steps.compute_scaling_error(site, [x[:1], x[1:]], 1, s, True, ("minmax",)) == pytest.approx(error, rel=1e-4)
    assert steps.compute_scaling_error(site, [x * 0], 1, s, True) == 0
    assert steps.SAMPLES % 2 == 0  # one half gives a correction, the other validates it


READER = "network n source\nin %r: f32[2,4,5,5]\nin %v: f32[6,4,3,3]\n%y = Conv(%r, %v)\nout %y"


def test_of_a_vector_and_of_rows_the_first_values_are_evaluated():
    """Of images the centre."""
    for shape in ((1000,), (1000, 3)):
        x = np.arange(np.prod(shape)).reshape(shape)
        assert np.array_equal(crop_middle(x, None), x[:64])
    assert crop_middle(np.zeros((2, 3, 100, 90)), None).shape == (2, 3, 28, 28)
    assert crop_middle(np.zeros((2, 3, 100, 90)), None, crop=2).shape == (2, 3, 2, 2)
