"""Calibration: independent of order and batch, repeatable, errors name the tensor, caches round-trip."""

import json

import numpy as np
import pytest

from whet.builder.precision.int8 import EngineRun
from whet.errors import BuildWarning, CalibrationError, UsageError
from whet.network import Network, parse_network, parse_type
from whet.ops import run_network
from whet.precision import Histogram, Preprocessing, calibrate, calibration_data, find_quantization_sites, quantize, read_cache, write_cache
from whet.precision.calibrate import JUDGES, compute_content_digest, list_candidate_ranges, select_range, take_activations
from whet.precision.data import split_samples
from whet.precision.methods import LIMITS
from whet.precision.ranges import Range


def small_network():
    """Two convolutions with a residual, a pool, a SiLU, and a product."""
    rng = np.random.default_rng(1)
    net = Network("small")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[N,3,12,12]"))
    a = net.add("Relu", net.add("Conv", x, w(16, 3, 3, 3), w(16), pads=(1,) * 4), name="a")
    p = net.add("MaxPool", a, kernel_shape=(2, 2), strides=(2, 2), name="p")
    c = net.add("Conv", p, w(16, 16, 3, 3), pads=(1,) * 4, name="c")
    r = net.add("Relu", net.add("Add", c, p), name="r")
    d = net.add("Conv", r, w(16, 16, 1, 1), name="d")
    s = net.add("Mul", d, net.add("Sigmoid", d), name="s")
    e = net.add("Conv", s, w(8, 16, 1, 1), name="e")
    g = net.add("Flatten", net.add("GlobalAveragePool", e), name="g")
    net.mark_output(net.add("Gemm", g, w(8, 5), name="y"))
    return net


def samples(n=12, seed=3):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((1, 3, 12, 12)).astype(np.float32)} for _ in range(n)]


def bits(ranges):
    return {n: (float(r.low).hex(), float(r.high).hex(), r.method) for n, r in ranges.tensors.items()}


def test_order_changes_nothing():
    net, data = small_network(), samples()
    forward = calibrate(net, data)
    assert bits(calibrate(net, data[::-1])) == bits(forward)
    shuffled = [data[i] for i in np.random.default_rng(0).permutation(len(data))]
    assert bits(calibrate(net, shuffled)) == bits(forward)


def test_batch_changes_nothing(tmp_path):
    """However the data are split into files, each sample runs by itself."""
    net, data = small_network(), samples(8)
    whole = np.concatenate([f["x"] for f in data])
    np.savez(tmp_path / "all.npz", x=whole)
    (tmp_path / "parts").mkdir()
    for k, part in enumerate(np.split(whole, [1, 3, 6])):
        np.save(tmp_path / "parts" / f"{3 - k}.npy", part)
    one = calibrate(net, calibration_data(str(tmp_path / "all.npz"), net))
    parts = calibrate(net, calibration_data(str(tmp_path / "parts"), net))
    assert bits(one) == bits(parts) == bits(calibrate(net, data))


@pytest.mark.parametrize("workers", [1, 3])
def test_each_sample_is_computed_once_and_the_smallest_digests_select_ranges(workers):
    """The evaluation samples are the eight with the smallest digests, wherever they come; their activations are kept from the only pass."""
    net, data, seen = small_network(), samples(20), []
    names = find_quantization_sites(net).names()
    run = EngineRun(net, names)

    def count(feeds):
        seen.append(compute_content_digest(feeds))
        return run(feeds)

    found = calibrate(net, data, run=count, workers=workers)
    assert sorted(seen) == sorted(map(compute_content_digest, data))
    sites, smallest = find_quantization_sites(net), sorted(data, key=compute_content_digest)[:JUDGES]
    judged = [take_activations(sites, run(f)) for f in smallest]
    for t in sites.roots:
        h = Histogram()
        for f in data:
            h.add(run(f)[t.name])
        candidates = list_candidate_ranges(h, LIMITS, True)
        wanted = select_range(sites, t, candidates, judged)
        assert (wanted.low, wanted.high, wanted.method) == (found.tensors[t.name].low, found.tensors[t.name].high, found.tensors[t.name].method)


def test_quantized_weights_are_computed_once_for_networks_that_share_them():
    net = small_network()
    ranges = calibrate(net, samples(4))
    names = [x.name for x in find_quantization_sites(net).layers]
    first, second = (quantize(net, ranges, skip=skip) for skip in ((), names[:1]))

    def read_integers(q):
        return {t.weight for x in q.layers if x.op == "DequantizeLinear" and (t := x.needs(0)).is_constant}

    assert len(read_integers(first)) == len(names)
    assert read_integers(second) < read_integers(first)


def test_engines_give_the_same_bits_twice_and_write_the_same_cache(tmp_path):
    net, data = small_network(), samples(6)
    names = find_quantization_sites(net).names()
    for k in range(2):
        write_cache(tmp_path / f"{k}.json", calibrate(net, data, run=EngineRun(net, names), model="m"))
        write_cache(tmp_path / f"{k}.cache", calibrate(net, data, run=EngineRun(net, names)))
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert (tmp_path / "0.cache").read_bytes() == (tmp_path / "1.cache").read_bytes()


def test_every_tensor_for_which_a_range_is_selected_is_told():
    """Not one that has a single value everywhere, as the output of a dead ReLU."""
    net, rng = Network("dead"), np.random.default_rng(0)
    t = net.add_input("x", parse_type("f32[1,8]"))
    for name in ("first", "second", "third"):
        t = net.add("Relu", net.add("MatMul", t, net.constant(np.abs(rng.standard_normal((8, 8))).astype("f4")), name=name), name=f"{name}_relu")
        if name == "first":
            t = net.add("Neg", t, name="negative")
    net.mark_output(t, "y")
    told = []
    with pytest.warns(UserWarning, match="constant|everywhere"):
        found = calibrate(net, [{"x": rng.random((1, 8)).astype("f4")} for _ in range(3)], tell=told.append)
    methods = {n: r.method for n, r in found.tensors.items()}
    assert methods.pop("second_relu") == "constant"
    assert methods
    assert "constant" not in methods.values()
    assert [n for n in told if n in found.tensors] == list(methods)


def test_an_engine_has_the_same_ranges_as_the_reference():
    net, data = small_network(), samples(1)
    values = {}
    run_network(net, data[0], watch=lambda t, a: values.setdefault(t.name, a))
    got = EngineRun(net, find_quantization_sites(net).names())(data[0])
    for name in got:
        if name != "x":
            np.testing.assert_allclose(got[name], values[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", [1, 5, 500])
def test_histograms_merge(split):
    a = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    whole, parts = Histogram(), Histogram()
    whole.add(a)
    for piece in np.array_split(a, split)[::-1]:
        h = Histogram()
        h.add(piece)
        parts.merge(h)
    assert np.array_equal(whole.counts, parts.counts)
    assert (whole.low, whole.high) == (parts.low, parts.high) == (a.min(), a.max())
    assert whole.total == 1000


def test_methods_clip_outliers():
    a = np.abs(np.random.default_rng(4).standard_normal(200_000)).astype(np.float32)
    a[:3] = 500
    h = Histogram()
    h.add(a)
    limits = {name: f(h) for name, f in LIMITS.items()}
    assert limits["minmax"] == 500
    assert 3.5 < limits["percentile"] < 5
    assert limits["mse"] < 500
    assert limits["entropy"] < 100


def rounding_error(a: np.ndarray, limit: float) -> float:
    """The mean squared error of `a` in 8 bits that saturate at `limit`, computed value by value."""
    step = limit / 127
    return float(np.mean((np.clip(np.rint(a / step), -127, 127) * step - a) ** 2))


def test_mean_squared_error_balances_clipping_and_step_size():
    a = np.random.default_rng(4).standard_normal(100_000)
    a[:3000] *= 6
    h = Histogram()
    h.add(a)
    least = min(rounding_error(a, limit) for limit in np.linspace(0.05, 1, 200) * h.largest)
    assert rounding_error(a, LIMITS["mse"](h)) < 1.03 * least
    assert rounding_error(a, LIMITS["mse"](h)) < 0.8 * rounding_error(a, LIMITS["minmax"](h))


def test_entropy_ignores_zeros():
    """After a Relu most values are zeros, which every range represents exactly: they must not influence the clipping threshold."""
    a = np.abs(np.random.default_rng(4).standard_normal(50_000))
    a[:5] = 40
    few, many = Histogram(), Histogram()
    few.add(a)
    many.add(np.concatenate([a, np.zeros(2_000_000)]))
    assert LIMITS["entropy"](few) == LIMITS["entropy"](many) < 20


@pytest.mark.parametrize("r", [Range(-1.0, 1.0), Range(0.0, 2.0), Range(-0.25, 3.0)], ids=["i8", "u8", "zero point"])
def test_rounding_of_a_range_equals_quantize_and_dequantize(r):
    a = np.linspace(-4, 4, 4001, dtype=np.float32)
    net = Network("rounding")
    x = net.add_input("x", parse_type("f32[4001]"))
    scale, zero = net.constant(np.float32(r.scale), "scale"), net.constant(np.array(r.zero, r.dtype.numpy), "zero")
    net.mark_output(net.add("DequantizeLinear", net.add("QuantizeLinear", x, scale, zero), scale, zero), "y")
    np.testing.assert_array_equal(r.fake_quantize(a), run_network(net, {"x": a})["y"])
    assert len(np.unique(r.fake_quantize(a))) == 256


def test_the_range_with_the_least_error_in_its_reader_is_selected():
    net = Network("outlier")
    x = net.add_input("x", parse_type("f32[1,64]"))
    w = np.eye(64, dtype=np.float32)
    w[0, 0] = 0.0  # the outlier's column is multiplied by zero: clipping it costs nothing
    net.mark_output(net.add("Gemm", x, net.constant(w, "w")))
    rng = np.random.default_rng(5)
    data = [{"x": rng.standard_normal((1, 64)).astype(np.float32)} for _ in range(400)]
    for f in data[:2]:
        f["x"][0, 0] = 1e4
    found = calibrate(net, data)
    assert found.tensors["x"].method != "minmax"
    forced = calibrate(net, data, forced={"x": "minmax"})
    assert forced.tensors["x"].high == 1e4


FAULTS = {
    "nan": (lambda f: f["x"].__setitem__((0, 0, 3, 3), np.nan), "%x holds NaN"),
    "infinite": (lambda f: f["x"].__setitem__((0, 0, 3, 3), np.inf), "%x holds infinite"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_for_nan_name_the_tensor(name):
    spoil, words = FAULTS[name]
    data = samples(3)
    spoil(data[1])
    with pytest.raises(CalibrationError, match=words):
        calibrate(small_network(), data)


@pytest.mark.parametrize("value", [0.0, 2.5, -2.5])
def test_a_constant_inner_tensor_gets_a_range_with_its_value(value):
    """A ReLU that is never active, or channels that pruning left without weights, must not end the calibration of the whole network."""
    rng = np.random.default_rng(0)
    net = Network("dead")
    x = net.add_input("x", parse_type("f32[1,3,8,8]"))

    def conv(a, k, c, weight=1.0, bias=0.0, **name):
        weights = (weight * rng.standard_normal((k, c, 3, 3))).astype(np.float32)
        return net.add("Conv", a, net.constant(weights), net.constant(np.full(k, bias, np.float32)), pads=(1, 1, 1, 1), **name)

    dead = net.add("Relu", conv(x, 4, 3, bias=-1e3)) if value == 0 else conv(x, 4, 3, weight=0.0, bias=value)
    net.mark_output(conv(net.add("Add", conv(dead, 4, 4), conv(x, 4, 3)), 2, 4))
    data = [{"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(2)]
    with pytest.warns(BuildWarning, match=rf"%{dead.name} is {value:g} everywhere in the 2 calibration samples"):
        found = calibrate(net, data).tensors[dead.name]
    assert found.usable
    np.testing.assert_allclose(found.fake_quantize(np.full(3, value, np.float32)), value, rtol=1e-6)


def test_errors_for_constant_and_missing_data_name_the_tensor():
    with pytest.raises(CalibrationError, match="%x is 0 everywhere in the 2 calibration samples"):
        calibrate(small_network(), [{"x": np.zeros((1, 3, 12, 12), np.float32)}] * 2)
    with pytest.raises(CalibrationError, match=r"no calibration samples.*%x"):
        calibrate(small_network(), [])
    with pytest.raises(UsageError, match="unknown calibration method 'median'"):
        calibrate(small_network(), samples(1), method="median")


def test_caches_round_trip(tmp_path):
    net = small_network()
    found = calibrate(net, samples(4), model="abc")
    write_cache(tmp_path / "c.json", found)
    again = read_cache(tmp_path / "c.json", net, "abc")
    assert again.tensors == found.tensors
    write_cache(tmp_path / "c.cache", found)
    text = (tmp_path / "c.cache").read_text().splitlines()
    assert text[0].startswith("TRT-")
    assert all(len(line.rpartition(": ")[2]) == 8 for line in text[1:])
    rough = read_cache(tmp_path / "c.cache", net)
    for name, r in rough.tensors.items():
        assert r.high == pytest.approx(max(-found.tensors[name].low, found.tensors[name].high), rel=1e-6)
    assert rough.tensors["a"].low == 0.0  # after a Relu
    assert rough.tensors["x"].low == -rough.tensors["x"].high


def test_tensorrts_text_format_is_read(tmp_path):
    net = small_network()
    names = find_quantization_sites(net).names()
    path = tmp_path / "trt.cache"
    path.write_text("TRT-8601-EntropyCalibration2\n" + "".join(f"{n}: 3c010a14\n" for n in names) + "(Unnamed Layer* 5)_output: 3c010a14\n")
    found = read_cache(path, net)
    assert found.tensors["x"].scale == np.uint32(0x3C010A14).view(np.float32)


BAD_CACHES = {
    "other model": (lambda p, r: write_cache(p, r), "x.json", "calibrated for another model"),
    "empty": (lambda p, r: p.write_text(""), "x.cache", "first line is not TensorRT's"),
    "damaged": (lambda p, r: p.write_text('{"whet_calibration": 1, "tensors"'), "x.json", "damaged"),
    "deep": (lambda p, r: p.write_text('{"a":' + "[" * 100_000), "x.json", "damaged"),
    "line": (lambda p, r: p.write_text("TRT-1\nx: nothex\n"), "x.cache", "line 2"),
    "missing": (lambda p, r: p.write_text("TRT-1\nx: 3c010a14\n"), "x.cache", "no range for %a"),
    "zero": (lambda p, r: p.write_text("TRT-1\nx: 00000000\n"), "x.cache", "range of %x"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CACHES)
def test_errors_for_bad_caches(name, tmp_path):
    write, file, words = BAD_CACHES[name]
    net = small_network()
    write(tmp_path / file, calibrate(net, samples(2), model="other"))
    with pytest.raises(CalibrationError, match=words):
        read_cache(tmp_path / file, net, "this one")


def test_a_quantized_network_is_accurate_and_real_ranges_improve_it():
    net, data = small_network(), samples(16)
    made = quantize(net, calibrate(net, data))
    x = {"x": np.concatenate([f["x"] for f in samples(8, seed=9)])}
    want, got = run_network(net, x)["y"], run_network(made, x)["y"]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 0.03
    wild = calibrate(net, data)
    wild.tensors = {n: Range(r.low * 40, r.high * 40) for n, r in wild.tensors.items()}
    assert np.linalg.norm(run_network(quantize(net, wild), x)["y"] - want) / np.linalg.norm(want) > 5 * error


def test_skewed_tensors_get_zero_points_if_allowed():
    net = small_network()
    r = calibrate(net, samples(), method="minmax").tensors["s"]  # a SiLU: -0.28 and up
    assert r.zero > 0 or r.low == -r.high
    h = Range.within(-0.28, 5.0, 5.0)
    assert (h.low, h.zero) == (-0.28, round(0.28 / (5.28 / 255)))
    assert h.fake_quantize(np.float32([0.0])) == 0  # zero is exact, so padding is exact
    plain = calibrate(net, samples(), zero_points=False)
    assert all(r.zero == 0 for r in plain.tensors.values())


def test_errors_for_missing_ranges_name_the_tensor():
    found = calibrate(small_network(), samples(2))
    del found.tensors["a"]
    with pytest.raises(CalibrationError, match="no range for %a"):
        quantize(small_network(), found)


def test_layers_can_stay_in_floating_point():
    net = small_network()
    found = calibrate(net, samples(2))
    made = quantize(net, found, skip=["d", "y"])
    assert {x.op for x in made.layers if x.name in ("d", "y")} == {"Conv", "Gemm"}
    assert next(x for x in made.layers if x.name == "d").inputs[1].is_constant
    assert not next(x for x in made.layers if x.name == "c").inputs[1].is_constant


# data


def test_data_of_a_function(tmp_path, monkeypatch):
    code = "import numpy as np\ndef make():\n    for k in range(3):\n        yield np.full((3, 12, 12), k, np.float32)\n"
    (tmp_path / "mydata.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    got = list(calibration_data("python:mydata:make", small_network()))
    assert [f["x"].shape for f in got] == [(1, 3, 12, 12)] * 3
    with pytest.raises(UsageError, match="has no attribute 'nothing'"):
        list(calibration_data("python:mydata:nothing", small_network()))
    with pytest.raises(UsageError, match="not python:MODULE:FUNCTION"):
        list(calibration_data("python:mydata", small_network()))


def test_images_are_decoded_and_prepared(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    p = Preprocessing.parse("scale:1/255,mean:0.5/0.25/0,std:0.5/1/2,order:bgr")
    (got,) = calibration_data(str(tmp_path), small_network(), p)
    want = (pixels[:, :, ::-1].astype(np.float32) / 255 - np.float32([0.5, 0.25, 0])) / np.float32([0.5, 1, 2])
    np.testing.assert_allclose(got["x"][0], want.transpose(2, 0, 1), rtol=1e-6, atol=1e-6)
    (tmp_path / "p.yaml").write_text("scale: 1/255   # to 0..1\nmean: [0.5, 0.25, 0]\nstd: 0.5/1/2\norder: bgr\n")
    assert Preprocessing.parse(str(tmp_path / "p.yaml")) == p


def test_16_bit_images_keep_their_brightness(tmp_path):
    image = pytest.importorskip("PIL.Image")
    deep = np.repeat(np.arange(12, dtype=np.uint16)[None] * 5957, 12, axis=0)  # 0 to 65527
    image.fromarray(deep).save(tmp_path / "a.png")
    (got,) = calibration_data(str(tmp_path), small_network(), Preprocessing.parse("scale:1/255"))
    np.testing.assert_allclose(got["x"][0, 0], deep / 65535, atol=1 / 255)


def test_an_image_with_an_excessive_size_is_named(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(CalibrationError, match=r"a\.png cannot be decoded: Image size"):
        list(calibration_data(str(tmp_path), small_network()))


BAD_DATA = {
    "shape": (lambda p: np.save(p / "d.npy", np.zeros((2, 4, 12, 12), np.float32)), "d.npy", "has 4 along axis 1"),
    "rank": (lambda p: np.save(p / "d.npy", np.zeros(3, np.float32)), "d.npy", "has shape"),
    "no file": (lambda p: None, "none.npz", "no such file"),
    "empty folder": (lambda p: None, "", "holds no"),
    "garbage": (lambda p: (p / "d.npz").write_bytes(b"PK\x03\x04 nothing"), "d.npz", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DATA)
def test_errors_for_bad_data(name, tmp_path):
    make, file, words = BAD_DATA[name]
    make(tmp_path)
    with pytest.raises((CalibrationError, UsageError), match=words):
        list(calibration_data(str(tmp_path / file), small_network()))


def test_a_json_cache_records_its_model(tmp_path):
    write_cache(tmp_path / "c.json", calibrate(small_network(), samples(2), model="m1"))
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["model"] == "m1"
    assert data["samples"] == 2
    with pytest.raises(UsageError, match="cannot be written"):
        write_cache(tmp_path / "no" / "c.json", calibrate(small_network(), samples(2)))


def weighted(inputs, make):
    """A network with one input and the layers that `make(net, x, w)` adds; w(*shape) is a random constant."""
    rng = np.random.default_rng(5)
    net = Network("weighted")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    net.mark_output(make(net, net.add_input("x", parse_type(inputs)), w))
    return net


@pytest.mark.parametrize(
    ("inputs", "make"),
    [
        ("f32[1,100,3000]", lambda net, x, w: net.add("Conv", net.add("Relu", net.add("Conv", x, w(80, 100, 3))), w(90, 80, 3), strides=(2,))),
        ("f32[1,80,12,14,40]", lambda net, x, w: net.add("Conv", x, w(8, 80, 3, 3, 3))),
        ("f32[1,66,300]", lambda net, x, w: net.add("Conv", x, w(66, 1, 9), group=66, dilations=(16,))),
        ("f32[1,56,56,96]", lambda net, x, w: net.add("MatMul", x, w(96, 12))),
        ("f32[1,12,200,64]", lambda net, x, w: net.add("MatMul", x, w(64, 12))),
        (
            "f32[1,96,96]",
            lambda net, x, w: net.add("Add", net.add("MatMul", x, w(96, 96)), net.add("Conv", x, w(96, 96, 1))),
        ),
    ],
    ids=["1-d", "3-d", "dilated", "channels last", "heads", "a convolution and a product"],
)
def test_channels_are_never_cut(inputs, make):
    """Layers of every rank: the part of a large activation that is evaluated keeps its channels."""
    net = weighted(inputs, make)
    data = [{"x": np.random.default_rng(i).standard_normal(net.inputs[0].shape).astype(np.float32)} for i in range(2)]
    ranges = calibrate(net, data)
    assert ranges.tensors
    want = run_network(net, data[0])
    got = run_network(quantize(net, ranges), data[0])
    for name, a in got.items():
        assert np.linalg.norm(a - want[name]) < 0.05 * np.linalg.norm(want[name])


@pytest.mark.parametrize(("values", "fails"), [([[1.0, 2.0]], False), ([[1.0, 2.5]], True), ([[1.0, np.nan]], True), ([[1, 2]], False)])
def test_numbers_with_fractions_are_no_token_ids(values, fails):
    net = parse_network("network n source\nin %ids: i64[N,2]\nconst %e: f32[9,4] = seed(1)\n%y = Gather(%e, %ids)\nout %y\n")
    if fails:
        with pytest.raises(CalibrationError, match=r"'ids' has fractions or NaN, the input is i64\[N,2\]"):
            list(split_samples({"ids": np.array(values)}, net, "data"))
    else:
        (sample,) = split_samples({"ids": np.array(values)}, net, "data")
        assert sample["ids"].dtype == np.int64
