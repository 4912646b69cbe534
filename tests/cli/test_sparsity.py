"""`whet sparsity`: dense and sparse times per layer, reasons, the share of removed magnitude, whole engines, the verdict and the plot."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from report.page_parser import chart_data
from support.recorded import compare_with_record
from whet import BuildConfig
from whet.cli.sparsity import command
from whet.errors import UsageError
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.measure.compare import LoadLog
from whet.network import parse_network
from whet.pruning import EngineTimes, LayerAdvice, SparsityAdvice, advise_sparsity
from whet.sparsity import find_reduction_axis, is_two_four
from whet.tactics import TACTICS, load_tactics, tactic
from whet.tactics.null._cost import NullKernel, count_product_macs


def run(*args):
    done = CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_a_backend_without_sparse_tactics_says_so(model, tmp_path):
    flags = (model / "m.onnx", "--backend=null", "--timingCacheFile", tmp_path / "c.sqlite")
    (data,) = json.loads(run(*flags, "--json").stdout)["settings"]
    assert not data["has_sparse_tactics"]
    assert data["saved_ms"] == 0 < data["total_ms"]
    assert len(data["layers"]) == 4
    shares = [x["removed_magnitude"] for x in data["layers"]]
    assert shares[0] is None  # three input channels
    assert "alignment: 3 input channels" in data["layers"][0]["reason"]
    assert shares[1:3] == pytest.approx([0.256, 0.256], abs=0.01)  # the two smallest of four normally distributed values
    text = run(*flags).stdout
    assert "backend 'null' has no tactic that computes with 2:4 weights" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


@pytest.fixture
def sparse_null():
    """A tactic of the null backend for products of 2:4 weights whose cost counts half the multiply-adds; it needs 64 input channels or more."""
    load_tactics("null")
    dense = type(TACTICS["null/product"])

    @tactic
    class SparseProduct(dense):
        __module__ = "whet.tactics.null.sparse_product"
        ops = ("Gemm", "MatMul")

        def why_not(self, layer):
            found = find_reduction_axis(layer)
            if found is None or not is_two_four(found[0].array(), found[1]):
                return "weights are not 2:4"
            return super().why_not(layer)

        def refuses(self, layer, signature, backend):
            return "needs 64 channels" if find_reduction_axis(layer)[0].shape[0] < 64 else super().refuses(layer, signature, backend)

        def plan(self, layer, signature, config, backend):
            return NullKernel(layer, signature, "null_sparse_product", count_product_macs(layer) // 2)

    yield
    del TACTICS["null/sparse_product"]


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """Two matrix products of 256 and of 32 input channels, the first one with a large share of the work; a free batch and a free length."""
    net = parse_network(
        "network n source\nin %x: f32[N,L,256]\nconst %w: f32[256,32] = seed(3)\nconst %v: f32[32,8] = seed(4)\n%y = MatMul(%x, %w)\n"
        "%z = Relu(%y)\n%u = MatMul(%z, %v)\nout %u\n"
    )
    path = tmp_path_factory.mktemp("products") / "m.onnx"
    save_onnx(net, path)
    return path


def test_a_gain_is_predicted_at_each_batch_and_precision(products, sparse_null, tmp_path):
    flags = (products, "--backend=null", "--batch=1,64", "--fp16", "--bf16", "--shapes=x:9x100x256", "--noEngines", "--timingCacheFile",
             tmp_path / "c.sqlite")  # fmt: skip
    plot = tmp_path / "p.html"
    settings = json.loads(run(*flags, "--json", "--plot", plot).stdout)["settings"]
    assert [(s["precision"], s["batch"]) for s in settings] == [("fp16", 1), ("fp16", 64), ("bf16", 1), ("bf16", 64)]
    for s in settings:
        wide, narrow = s["layers"]
        assert (wide["kind"], wide["in_channels"], wide["out_channels"]) == ("linear", 256, 32)
        assert wide["speedup"] == pytest.approx(wide["dense_ms"] / wide["sparse_ms"])
        assert wide["speedup"] > 1.1
        assert narrow["sparse_ms"] is None
        assert narrow["reason"] == "needs 64 channels"
        assert s["saved_ms"] == pytest.approx(wide["dense_ms"] - wide["sparse_ms"])
        assert s["predicted_share"] == pytest.approx(s["saved_ms"] / (s["total_ms"] + s["other_ms"]))
    assert settings[1]["total_ms"] > 20 * settings[0]["total_ms"]
    figures = chart_data(plot.read_text())["figures"]
    assert [f["data"][1]["x"] for f in figures.values()] == [[256]] * 4  # the wide layer at each setting
    text = run(*flags).stdout
    assert len(re.findall(r"[\d.]+x ", text)) == 4
    assert re.search(r"fp16, batch 64 +[\d.]+ +[\d.]+ +\d+\.\d% +- +- +-\n", text)
    assert max(map(len, text.splitlines())) <= 100


def test_the_engine_with_forced_weights_is_measured_next_to_the_prediction(products, sparse_null):
    net = network_from_onnx(products)
    shape = {"x": (4, 8, 256)}
    advice = advise_sparsity(net, BuildConfig(backend="null", timing_cache="", profiles=((shape,) * 3,)), engines=True)
    assert advice.batch == 4
    assert advice.engine.sparse_layers == 1
    assert advice.measured_share == pytest.approx(advice.predicted_share)  # the null backend's clock adds the costs of the kernels
    assert advice.engine.saved_interval == pytest.approx((advice.measured_share,) * 2)
    assert "with forced 2:4 weights" in advice.verdict
    assert "+9.2% saved, measured, 95 % interval +9.2% to +9.2%; 1 layers run sparse" in advice.verdict
    assert advice.to_json()["engine"]["measured_share"] == advice.measured_share


def test_external_load_is_in_the_advice_and_its_json(products, sparse_null, monkeypatch):
    monkeypatch.setattr(LoadLog, "describe", lambda log, consequence: f"load: {consequence}")
    flags = (products, "--backend=null", "--shapes=x:1x8x256", "--noEngines", "--timingCacheFile=")
    text = "load: these times may be off. Run the command again when it is idle."
    (setting,) = json.loads(run(*flags, "--json").stdout)["settings"]
    assert setting["load"] == text
    assert f"note {text}" in " ".join(run(*flags).stdout.split())


def test_a_small_measured_gain_is_not_recommended():
    layer = LayerAdvice("a", "a", "3x3", 64, 64, 1.0, 0.5, "dense", "sparse", 0.26, "")
    advice = SparsityAdvice("cuda", "fp16", 8, "", 1.0, (layer,), EngineTimes(2.0, 1.99, 1, (0.004, 0.006)))
    assert advice.predicted_share == 0.25
    assert advice.verdict.startswith("Do not fine-tune for 2:4: the gain is below 2%. 2:4 saves 0.5000 of 2.0000 ms (25.0%")
    assert SparsityAdvice("cuda", "fp16", 8, "", 1.0, (layer,), EngineTimes(2.0, 1.5, 1, (0.2, 0.3))).verdict.startswith("2:4 saves")


def test_an_engine_whose_gain_is_noise_is_not_recommended():
    layer = LayerAdvice("a", "a", "3x3", 64, 64, 1.0, 0.5, "dense", "sparse", 0.26, "")
    advice = SparsityAdvice("cpu", "fp32", 8, "", 1.0, (layer,), EngineTimes(2.0, 1.8, 1, (-0.02, 0.22)))
    assert advice.verdict.startswith("Do not fine-tune for 2:4: the measured difference is noise.")
    assert "95 % interval -2.0% to +22.0%" in advice.verdict


@pytest.mark.parametrize(("factor", "wins"), [(0.99, False), (0.97, True)])
def test_a_difference_that_repeated_measurements_have_too_is_no_gain(sparse_null, monkeypatch, factor, wins):
    def scaled(self, layer, signature, config, backend):
        kernel = super(type(self), self).plan(layer, signature, config, backend)
        kernel.cost *= factor
        return kernel

    monkeypatch.setattr(type(TACTICS["null/sparse_product"]), "plan", scaled)
    net = parse_network("network n source\nin %x: f32[512,512]\nconst %w: f32[512,512] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n")
    advice = advise_sparsity(net, BuildConfig(backend="null", timing_cache=""))
    (layer,) = advice.layers
    assert layer.sparse_ms < layer.dense_ms
    assert layer.noise_ms == pytest.approx(0.02 * layer.dense_ms)
    assert (advice.saved_ms > 0) == wins
    assert layer.reason.startswith("slower or equal") != wins


@pytest.mark.parametrize(("flag", "message"), [("--batch=1,x", "positive numbers"), ("--plot=p.png", "name a file that ends in .html")])
def test_bad_flags(products, flag, message):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, [str(products), flag, "--backend=null"], catch_exceptions=False)


def test_a_depthwise_layer_has_no_groups_of_four():
    net = parse_network("network n source\nin %x: f32[1,8,4,4]\nconst %w: f32[8,1,1,1] = seed(3)\n%y = Conv(%x, %w, group=8)\nout %y\n")
    (layer,) = advise_sparsity(net, BuildConfig(backend="null", timing_cache="")).layers
    assert layer.reason == "alignment: 1 input channels per group are no multiple of 4"
    assert layer.removed_magnitude is None


def test_a_batch_for_fixed_shapes_is_refused(model):
    with pytest.raises(UsageError, match="fixed shapes"):
        CliRunner().invoke(command, [str(model / "m.onnx"), "--batch=2", "--backend=null"], catch_exceptions=False)


def test_the_cuda_backend_has_sparse_tactics_in_sixteen_bits_only(standin_gpu):
    net = parse_network("network n source\nin %x: f32[128,64]\nconst %w: f32[64,64] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n")
    half = advise_sparsity(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    assert half.layers[0].sparse_tactic == "cuda/sparse_gemm"
    assert half.saved_ms > 0
    single = advise_sparsity(net, BuildConfig(backend="cuda", timing_cache=""))
    assert not single.has_sparse_tactics
    assert "sparse" in single.verdict


def test_the_reason_of_a_slow_sparse_tactic_names_the_bound(sparse_null, monkeypatch):
    """The planted tactic at three times its cost: the network's best rates tell which bound holds for each layer."""
    plan = type(TACTICS["null/sparse_product"]).plan

    def slow(self, layer, signature, config, backend):
        kernel = plan(self, layer, signature, config, backend)
        kernel.cost *= 3
        return kernel

    monkeypatch.setattr(type(TACTICS["null/sparse_product"]), "plan", slow)
    net = parse_network(
        "network n source\nin %x: f32[4096,512]\nin %y: f32[1,4096]\nin %z: f32[1,64]\nconst %w: f32[512,512] = seed(3)\n"
        "const %v: f32[4096,512] = seed(4)\nconst %u: f32[64,4] = seed(5)\n%a = MatMul(%x, %w)\n%b = MatMul(%y, %v)\n%c = MatMul(%z, %u)\n"
        "out %a\nout %b\nout %c\n"
    )
    advice = advise_sparsity(net, BuildConfig(backend="null", timing_cache=""))
    many_rows, one_row, tiny = (x.reason for x in advice.layers)
    assert many_rows.startswith("slower or equal: compute bound (")
    assert many_rows.endswith("the sparse kernels of this backend save bytes, not multiply-adds")
    assert one_row.startswith("slower or equal: memory bound (")
    assert tiny.startswith("slower or equal: too little work for the device (")
    assert "Do not fine-tune for 2:4: no layer is faster" in advice.verdict


LAYERS = {
    "products": """in %x: f32[N,192]
const %w: f32[192,512] = seed(1)
const %v: f32[64,512] = seed(2)
const %b: f32[64] = seed(3)
const %u: f32[64,10] = seed(4)
%a = MatMul(%x, %w)
%c = Relu(%a)
%d = Gemm(%c, %v, %b, transB=1)
%y = MatMul(%d, %u)
out %y
""",
    "filters": """in %x: f32[2,3,12,12]
const %w: f32[64,3,3,3] = seed(1)
const %v: f32[64,64,3,3] = seed(2)
const %g: f32[32,16,1,1] = seed(3)
const %u: f32[18,128] = seed(4)
const %t: f32[18,96] = seed(5)
%a = Conv(%x, %w, strides=[2,2], pads=[1,1,1,1])
%b = Relu(%a)
%c = Conv(%b, %v, pads=[1,1,1,1])
%d = Add(%b, %c)
%e = Conv(%d, %g, group=4)
%f = Flatten(%e)
%i = Reshape(%f, shape=[128,18])
%j = MatMul(%i, %u)
%k = Sigmoid(%i)
%l = MatMul(%k, %t)
out %j
out %l
""",
    "slow": """in %x: f32[64,4096]
const %w: f32[4096,64] = seed(1)
const %v: f32[64,64] = seed(2)
%a = MatMul(%x, %w)
%b = Tanh(%a)
%y = MatMul(%b, %v)
out %y
""",
}


def flat(prefix, data):
    """Lines `path: value` of JSON data, with four digits of floats."""
    if isinstance(data, dict | list):
        for k, v in data.items() if isinstance(data, dict) else enumerate(data):
            yield from flat(f"{prefix}.{k}", v)
    else:
        yield f"{prefix}: {f'{data:.4g}' if isinstance(data, float) else data}"


@pytest.mark.parametrize("name", LAYERS)
def test_advice_stays_as_recorded(sparse_null, monkeypatch, name):
    """After an intended change: `WHET_UPDATE_GOLDEN=1 pytest tests/cli/test_sparsity.py`, and review the diff."""
    net, lines = parse_network("network n source\n" + LAYERS[name]), []
    profiles = ((({"x": (6, 192)},) * 3),) if name == "products" else ()
    for title, factor, more in (("", 1.0, {}), ("slow sparse kernels", 3.0, {}), ("fp16", 1.0, {"precisions": ("fp16",)})):
        def scaled(self, layer, signature, config, backend, factor=factor):
            kernel = super(type(self), self).plan(layer, signature, config, backend)
            kernel.cost *= factor / 2
            return kernel

        monkeypatch.setattr(type(TACTICS["null/sparse_product"]), "plan", scaled)
        seen = []
        config = BuildConfig(backend="null", timing_cache="", profiles=profiles, **more)
        advice = advise_sparsity(net, config, lambda *a, seen=seen: seen.append(a), engines=not title)
        lines += [f"# {title}", *flat(name, advice.to_json()), f"label {advice.label}, {seen[0]} to {seen[-1]}, {len(seen)} in all"]
    compare_with_record(Path(__file__).parents[1] / "golden" / "advice" / f"{name}.txt", lines)


@pytest.mark.parametrize(("seen", "expected"), [
    ((64, False, 0.0, None), "Do not fine-tune for 2:4: no layer is faster with a sparse tactic."),
    ((64, True, 0.5, None), "2:4 saves 0.5000 of 2.0000 ms (25.0%, predicted from single layers) in 1 of 2 layers with weights."),
    ((64, True, 0.03, None), "Do not fine-tune for 2:4: the gain is below 2%. 2:4 saves 0.0300 of 2.0000 ms (1.5%"),
    ((64, True, 0.04, None), "2:4 saves 0.0400 of 2.0000 ms (2.0%"),
    ((64, True, 0.5, (0.0, 0.2)), "Do not fine-tune for 2:4: the measured difference is noise."),
    ((64, True, 0.5, (-0.2, 0.0)), "Do not fine-tune for 2:4: the measured difference is noise."),
    ((64, True, 0.5, (0.1, 0.2)), "2:4 saves 0.5000"),
    ((64, True, 0.5, (-0.2, -0.1)), "2:4 saves 0.5000"),
])  # fmt: skip
def test_verdicts(seen, expected):
    channels, pays, saved, interval = seen
    first = LayerAdvice("a", "a", "3x3", channels, channels, 1.0, 1.0 - saved, "dense", "sparse", 0.26, "" if pays else "slower or equal")
    other = LayerAdvice("b", "b", "3x3", channels, channels, None, None, "", "", 0.26, "alignment")
    engine = None if interval is None else EngineTimes(2.0, 1.6, 1, interval)
    advice = SparsityAdvice("cuda", "fp16", None, "", 1.0, (first, other), engine)
    assert advice.verdict.startswith(expected)
    assert advice.label == "fp16"
    assert (first.speedup, other.speedup, other.saved_ms) == (1.0 / (1.0 - saved), None, 0.0)
