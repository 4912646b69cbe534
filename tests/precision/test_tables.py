"""Activations by lookup table: their insertion points, the loss of their code, and integer execution equal to the reference."""

import dataclasses

import numpy as np
import pytest

from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.builder.lock.relock import Quantization
from whet.builder.precision import precision_search
from whet.builder.precision.int8 import Calibration, build_int8, prepare, quantize_network
from whet.measure.compare import Ranking
from whet.measure.policy import PRECISIONS
from whet.network import Network, parse_network, parse_type
from whet.ops import run_network
from whet.precision import quantize
from whet.precision.ranges import Range, Ranges
from whet.precision.tables import FUNCTIONS, Code, find_code, get_highest_value, insert, insert_tables
from whet.runtime import Runtime
from whet.tactics import is_quantized
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.onednn import _api as dnn

VNNI = pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni") or jit.why_unavailable() is not None, reason="no VNNI, or no compiler for own kernels")
QUICK = {"timing_cache": "", "threads": 1, "avg_timing": 1, "optimization_level": 1, "whole_engines": 1}


def silu(net, x):
    return net.add("Mul", x, net.add("Sigmoid", x))


def network(branch=False):
    """Convolutions with SiLU, a Concat of two of them; with `branch`, one result of SiLU is an output."""
    rng = np.random.default_rng(3)
    net = Network("n")
    x = net.add_input("x", parse_type("f32[1,8,12,12]"))

    def conv(t, c, k):
        w = net.constant((rng.standard_normal((k, c, 3, 3)) / np.sqrt(4.5 * c)).astype(np.float32), f"w{len(net.layers)}")
        return net.add("Conv", t, w, pads=(1, 1, 1, 1))

    a = silu(net, conv(x, 8, 16))
    b = silu(net, conv(a, 16, 16))
    c = silu(net, conv(net.add("Concat", a, b, axis=1), 32, 16))
    net.mark_output(conv(c, 16, 4))
    if branch:
        net.mark_output(a)
    return net


def data(n=8):
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((1, 8, 12, 12)).astype(np.float32)} for _ in range(n)]


@pytest.mark.parametrize("kind", sorted(FUNCTIONS))
@pytest.mark.parametrize("highest", [0.3, 1.0, 4.0, 20.0])
def test_a_code_loses_little_precision(kind, highest):
    """Rounding before the activation costs less than 5 dB on normal values; a second rounding of equal size costs 3 dB."""
    f, found = FUNCTIONS[kind], find_code(kind, highest)
    x = np.random.default_rng(0).standard_normal(20000) * highest / 3.5
    y = f(x)
    step = (y.max() - y.min()) / 255
    q = np.clip(np.rint(np.where(x < 0, found.squeeze * x, x) / found.scale) + found.zero, 0, 255) - found.zero
    back = f(np.where(q < 0, q / found.squeeze, q) * found.scale)
    once = np.mean((np.rint(y / step) * step - y) ** 2)
    twice = np.mean((np.rint(back / step) * step - y) ** 2)
    assert 10 * np.log10(twice / once) < 5
    assert 0 < found.zero < 255
    assert float(found.scale) * (255 - found.zero) >= 0.99 * highest  # the largest result stays representable


def test_tables_are_inserted_after_quantized_layers():
    config = BuildConfig(**QUICK)
    made = prepare(network(), config)
    chosen = quantize(made, calibrated(made))
    assert insert_tables(chosen, calibrated(made)) == 3
    branched = prepare(network(branch=True), config)
    chosen = quantize(branched, calibrated(branched))
    assert insert_tables(chosen, calibrated(branched)) == 2  # values read in floating point are computed in floating point
    skipped = quantize(made, calibrated(made), skip=[x.name for x in made.layers if x.op == "Conv"][:1])
    assert insert_tables(skipped, calibrated(made)) == 2


def calibrated(network):
    tensors = {}
    for feeds in data(4):

        def watch(t, a):
            low, high = float(a.min()), float(a.max())
            old = tensors.get(t.name)
            tensors[t.name] = Range(min(low, 0.0), high) if old is None else Range(min(low, old.low), max(high, old.high))

        run_network(network, feeds, watch=watch)
    tensors["x"] = Range(-5.0, 5.0)
    return Ranges({n: r for n, r in tensors.items() if r.high > r.low})


@VNNI
def test_a_network_with_tables_runs_on_integers():
    config = BuildConfig(**QUICK)
    made = prepare(network(), config)
    ranges = calibrated(made)
    chosen = quantize_network(made, Quantization(ranges, tables=True))
    plan = build(chosen, config)
    tables = [x for x in plan.network.layers if x.composite == "QuantizedTable"]
    assert len(tables) == 3 or len(tables) == 4  # a part of the Concat may have a separate scale for its other reader
    assert all(plan.choices[x.name].tactic == "cpu/lookup_table" for x in tables)
    assert not any(x.op in ("Sigmoid", "Mul", "LeakyRelu") for x in plan.network.layers)
    assert sum(is_quantized(x) and x.composite == "Conv" for x in plan.network.layers) == 4
    feeds = data(9)[-1]
    truth = next(iter(run_network(network(), feeds).values()))
    got = next(iter(Runtime().load(plan).create_context().run(feeds).values()))
    computed = next(iter(run_network(quantize_network(made, Quantization(ranges)), feeds).values()))
    noise, before = (float(np.sum((a - truth) ** 2)) for a in (got, computed))
    assert 10 * np.log10(noise / before) < 4  # decibels for one additional rounding
    assert noise < 0.01 * float(np.sum(truth**2))


@VNNI
@pytest.mark.parametrize("faster", ["int8", "int8, activations looked up"])
def test_both_forms_are_timed_and_the_lock_keeps_the_selected_one(faster, tmp_path, monkeypatch):
    """The faster one (with given times) is kept, and rebuilt from the lock without calibration."""
    seen = []

    def compare_engines(plans, machine, config):
        seen.extend(plans)
        looked_up = [any(x.composite == "QuantizedTable" for x in p.network.layers) for p in plans]
        floats = [not any(is_quantized(x) for x in p.network.layers) for p in plans]
        times = [[3e-3 if f else 1e-3 if t == ("looked up" in faster) else 2e-3] * 9 for t, f in zip(looked_up, floats, strict=True)]
        return Ranking(PRECISIONS, times, times, list(range(len(plans))))

    monkeypatch.setattr(precision_search, "compare_engines", compare_engines)
    config = BuildConfig(precisions=("int8",), **QUICK)
    plan = build_int8(network(), config, Calibration(samples=lambda: data()))
    tried = {c.what: c.kept for c in plan.report.precision_choice}
    assert {"floating point", "int8", "int8, activations looked up"} <= set(tried)
    (kept,) = (what for what, is_kept in tried.items() if is_kept)
    assert kept == faster or kept.startswith("int8 without")  # equally fast by these times, if the layers' own times led to it
    assert any(x.composite == "QuantizedTable" for x in plan.network.layers) == ("looked up" in faster)
    save_lock(plan, tmp_path / "lock.json")
    again = build_int8(network(), dataclasses.replace(config, lock=str(tmp_path / "lock.json")), Calibration())
    assert plan_digest(again) == plan_digest(plan)


PRODUCT = """network n source
in %x: f32[2,4]
const %w: f32[4,4] = seed(1)
const %b: f32[4] = seed(2)
const %v: f32[4,4] = seed(3)
const %shape: i64[2] = [2, 4]
%m = MatMul(%x, %w)
{0}
%y = MatMul(%g, %v)
out %y
"""


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("%g = Swish(%m)", 1),
        ("%g = Swish(%m, alpha=1.702)", 0),
        ("%g = Swish(%m, alpha=0.0)", 0),
        ("%g = Gelu(%m)", 1),
        ("%g = Mish(%m)", 1),
        ("%g = Relu(%m)", 0),
        ("%a = Add(%m, %b)\n%g = Swish(%a)", 1),  # a bias
        ("%a = Add(%b, %m)\n%g = Swish(%a)", 1),
        ("%a = Add(%m, %x)\n%g = Swish(%a)", 0),  # a sum of two computed values
        ("%r = Relu(%m)\n%a = Add(%r, %b)\n%g = Swish(%a)", 0),
        ("%s = Sigmoid(%m)\n%g = Mul(%m, %s)", 1),
        ("%s = Sigmoid(%m)\n%g = Mul(%s, %m)", 1),
        ("%s = Sigmoid(%x)\n%g = Mul(%m, %s)", 0),
        ("%r = Reshape(%x, %shape)\n%n = MatMul(%r, %w)\n%g = Swish(%n)", 1),  # the product reads moved integers; their shape is not quantized
    ],
)
def test_activations_of_one_quantized_product_become_tables(text, tables):
    """Also where only the quantization gives the range of the result."""
    made = parse_network(PRODUCT.format(text))
    ranges = Ranges({t.name: Range(-4.0, 4.0) for t in made.tensors() if t.name in "xmag"}, "", 1)
    assert insert_tables(quantize(made, ranges), ranges) == tables
    assert insert_tables(quantize(made, ranges), Ranges({}, "", 1)) == tables


@pytest.mark.parametrize(
    ("inputs", "highest"),
    [
        ("%s", 63.5),
        ("%one", 63.5),  # one value in an array
        ("%s, %z8", 68.5),
        ("%s, %zu", 122.5),
        ("%s4", np.inf),  # a scale per channel
        ("%x1", np.inf),  # a computed scale
        ("%s, %z16", np.inf),
    ],
)
def test_the_highest_value_of_a_quantization(inputs, highest):
    net = parse_network(f"""network n source
        in %x: f32[2,4]
        in %x1: f32[]
        const %s: f32[] = [0.5]
        const %one: f32[1] = [0.5]
        const %s4: f32[4] = [0.5, 0.5, 0.5, 0.5]
        const %z8: i8[] = [-10]
        const %zu: u8[] = [10]
        const %z16: i16[] = [10]
        %y = QuantizeLinear(%x, {inputs}{", axis=1" if "4" in inputs else ""}{"" if "," in inputs else ", output_dtype=i8"})
        out %y
        """)
    assert get_highest_value(net.layers[0]) == highest


def test_the_code_of_an_activation_is_inserted_with_a_squeeze_only_where_it_has_one():
    for squeeze, ops in ((1.0, []), (0.5, [0.5, 2.0])):
        net = parse_network("network n source\nin %x: f32[4]\n%a = Relu(%x)\n%y = Swish(%a)\nout %y")
        a, swish = net.layers[0].output, net.layers[1]
        insert(net, a, [swish], Code(squeeze, np.float32(0.25), 3))
        net.sort()
        assert [x.attrs["alpha"] for x in net.layers if x.op == "LeakyRelu"] == ops
        want = ["QuantizeLinear", "DequantizeLinear"] if not ops else ["LeakyRelu", "QuantizeLinear", "DequantizeLinear", "LeakyRelu"]
        assert [x.op for x in net.layers] == ["Relu", *want, "Swish"]
        assert swish.inputs[0].maker is net.layers[-2]


@pytest.mark.parametrize(
    ("kind", "highest", "squeeze", "zero"),
    [("Silu", 1.0, 0.75, 96), ("Mish", 4.0, 0.5, 73), ("Gelu", 1.0, 0.75, 79),
     ("Silu", 9.0, 0.375, 47), ("Silu", 20.0, 0.375, 26), ("Gelu", 20.0, 0.375, 14), ("Mish", 60.0, 0.375, 12)],
)  # fmt: skip
def test_codes_of_known_activations(kind, highest, squeeze, zero):
    """For inputs up to 3.5 standard deviations: wider values would leave more integers below zero, narrower ones fewer."""
    code = find_code(kind, highest)
    assert (code.squeeze, code.zero) == (squeeze, zero)
