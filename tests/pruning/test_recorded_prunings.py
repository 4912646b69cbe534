"""Whole prunings of small networks, with many options: what is kept, the report, the recipe and the progress must stay as recorded.

The other tests of this folder check parts by definition. Times are those of the null machine, which depend on shapes only. After an intended
change: `WHET_UPDATE_GOLDEN=1 pytest tests/pruning/test_recorded_prunings.py`, and review the diff.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from support.recorded import UPDATE, compare_with_record, rounded
from whet import BuildConfig
from whet.errors import WhetError
from whet.network import Network, parse_network, parse_type
from whet.ops import run_network
from whet.pruning import (
    PruneConfig,
    Samples,
    Target,
    advise_sparsity,
    apply_pattern,
    branches,
    compare,
    groups,
    importance,
    prune,
    recover,
    zero_channels,
    zero_smallest,
)
from whet.pruning.patterned import explain_unusable_pattern
from whet.pruning.recovery import RecoveryConfig, reestimate_batch_norms
from whet.pruning.sensitivity import compute_gates, compute_mean_absolute_gradients, compute_output_sensitivities
from whet.sparsity import find_reduction_axis, parse_pattern

GOLDEN = Path(__file__).parents[1] / "golden" / "prunings"
NULL = BuildConfig(backend="null", timing_cache="")
ROUNDED = ("  ~", "  outputs", "  change of the outputs", "  of the selections", "  best of")  # lines of results that machines round differently
NUMBER = re.compile(r"\d+\.?\d*")
PRICES = 24  # steps of the search, the total of its progress
TAIL = re.compile(r": (relative output error .*|already exact)")


def residual(batch):
    """A stem, three residual blocks of different widths inside, the second one with little influence; pooling and a linear layer."""
    rng, net = np.random.default_rng(3), Network("residual")

    def conv(x, cout, cin, name, gain=1.0):
        w = net.constant((gain * rng.standard_normal((cout, cin, 3, 3)) * np.sqrt(2 / (9 * cin))).astype("f4"), f"{name}.w")
        y = net.add("Conv", x, w, pads=(1, 1, 1, 1), name=name)
        norm = [net.constant(a.astype("f4"), f"{name}.{k}") for k, a in (
            ("scale", rng.uniform(0.5, 1.5, cout)), ("shift", 0.1 * rng.standard_normal(cout)), ("mean", 0.1 * rng.standard_normal(cout)),
            ("var", rng.uniform(0.5, 1.5, cout)))]  # fmt: skip
        return net.add("BatchNormalization", y, *norm, name=f"{name}.bn")

    x = net.add_input("x", parse_type(f"f32[{batch},3,4,4]"))
    y = net.add("Relu", conv(x, 16, 3, "stem"))
    for n, (wide, gain) in enumerate(((24, 1.0), (16, 0.05), (40, 0.7))):
        inner = net.add("Relu", conv(y, wide, 16, f"a{n}"))
        y = net.add("Relu", net.add("Add", y, conv(inner, 16, wide, f"b{n}", gain), name=f"sum{n}"))
    pooled = net.add("Flatten", net.add("GlobalAveragePool", y))
    head = net.constant((rng.standard_normal((10, 16)) / 4).astype("f4"), "head.w")
    net.mark_output(net.add("Gemm", pooled, head, net.constant(np.linspace(-1, 1, 10, dtype="f4"), "head.b"), transB=1, name="head"), "out")
    return net


PLAIN = """network plain source
in %x: f32[N,3,6,6]
const %w0: f32[20,3,3,3] = seed(1)
const %w1: f32[20,1,3,3] = seed(2)
const %w2: f32[32,20,1,1] = seed(3)
const %w3: f32[12,32,1,1] = seed(4)
const %w4: f32[48,24] = seed(5)
const %b4: f32[24] = seed(6)
const %w5: f32[24,7] = seed(7)
%a = Conv(%x, %w0, pads=[1,1,1,1])
%b = Relu(%a)
%c = Conv(%b, %w1, group=20, pads=[1,1,1,1])
%d = Relu(%c)
%e = Conv(%d, %w2)
%f = MaxPool(%e, kernel_shape=[3,3], strides=[3,3])
%g = Conv(%f, %w3)
%h = Relu(%g)
%i = Flatten(%h)
%j = MatMul(%i, %w4)
%k = Add(%j, %b4)
%l = Relu(%k)
%m = MatMul(%l, %w5)
out %m
"""


def dense(parts=6):
    """A layer that reads the channels of six others, more combinations of widths than a table holds, and a second layer of this kind."""
    rng, net = np.random.default_rng(9), Network("dense")
    x = net.add_input("x", parse_type("f32[N,3,4,4]"))
    read = [x]
    for n in range(parts):
        y = read[0] if n < 3 else net.add("Concat", *read[1:], axis=1)
        w = net.constant(rng.standard_normal((8, y.shape[1], 1, 1)).astype("f4"), f"w{n}")
        read.append(net.add("Relu", net.add("Conv", y, w, name=f"c{n}")))
    every = net.add("Concat", *read[1:], axis=1)
    net.mark_output(net.add("Conv", every, net.constant(rng.standard_normal((5, every.shape[1], 1, 1)).astype("f4"), "last"), name="last"), "out")
    return net


NETWORKS = {"residual": lambda: residual("N"), "fixed": lambda: residual(4), "plain": lambda: parse_network(PLAIN), "dense": dense}


def data(net, count):
    return {"x": np.random.default_rng(1).standard_normal((count, *net.inputs[0].shape[1:])).astype("f4")}


def of(kind, ratio=None, **more):
    return {"target": Target(kind, ratio=ratio, value=more.pop("value", None)), **more}


#: options, and how many samples (0: no data)
CASES = {
    "ratio": ({"ratio": 0.3, "multiple": 1}, 0),
    "ratio per group": ({"ratio": 0.5, "scope": "group", "importance": "l2"}, 0),
    "ratio with data": ({"ratio": 0.3, "multiple": 4, "importance": "activation"}, 20),
    "geometric median": ({"ratio": 0.45, "multiple": 2, "importance": "fpgm"}, 0),
    "random": ({"ratio": 0.4, "multiple": 1, "importance": "random", "seed": 5}, 0),
    "flops": (of("flops", 0.5), 0),
    "flops with branches": (of("flops", 0.4, depth=True, multiple=2), 0),
    "params": (of("params", 0.35, multiple=1), 0),
    "channels": (of("channels", 0.6), 0),
    "flops as a number": (of("flops", value=100_000), 0),
    "latency": (of("latency", 0.9, build=NULL), 0),
    "latency in odd widths": (of("latency", 0.7, build=NULL, multiple=1, depth=True), 0),
    "throughput": (of("throughput", 0.9, build=NULL), 0),
    "latency with data": (of("latency", 0.75, build=NULL), 24),
    "flops with data": (of("flops", 0.5, multiple=4), 40),
    "few samples": (of("flops", 0.6), 8),
    "taylor": (of("flops", 0.5, importance="taylor1", multiple=2), 24),
    "trials": (of("flops", 0.45, trials=2, seed=3), 32),
    "without floor": (of("params", 0.5, floor=False), 24),
    "compared": (of("flops", 0.4, importance="compared"), 32),
    "in steps": (of("flops", 0.4, steps=2, multiple=1), 24),
    "without recovery": (of("flops", 0.5, recovery=None), 24),
    "small recovery": (of("flops", 0.5, recovery=RecoveryConfig(rows=40, ridge=0.01, batch_norms=False, seed=2)), 24),
    "impossible": (of("flops", 0.0001), 0),
    "already met": (of("flops", value=10**9), 0),
}  # fmt: skip
#: cases of the network with a batch of 4
OF_BATCHES = ("ratio with data", "latency", "flops with data", "taylor")
#: cases of the network with a layer that depends on many widths
OF_MANY_WIDTHS = ("flops", "params", "taylor")


class Log:
    """The progress as ranges of counts: "1-7 of 7", with the last message of each range."""

    def __init__(self):
        self.ranges = []

    def __call__(self, n, total, message):
        if self.ranges and self.ranges[-1][1:3] == [n - 1, total]:
            self.ranges[-1][1:] = [n, total, message]
        else:
            self.ranges.append([n, n, total, message])

    def lines(self, measured=False):
        """Of scores `measured` on data the search's steps are left out: which states it meets depends on the last digits of the scores."""
        return [f"  {a}-{b} of {total}: {TAIL.sub('', message)}" for a, b, total, message in self.ranges if not (measured and total == PRICES)]


def agree(recorded, line):
    """True if only the last digit of results of floating-point computations differs, and by one."""
    if line == recorded or not line.startswith(ROUNDED) or NUMBER.sub("", line) != NUMBER.sub("", recorded):
        return line == recorded
    return all(abs(float(a) - float(b)) <= 1.1 * 10 ** -len(a.partition(".")[2]) for a, b in zip(*map(NUMBER.findall, (recorded, line)), strict=True))


def compare_lines(path, lines):
    if UPDATE:
        compare_with_record(path, lines)
    recorded = path.read_text().splitlines()
    assert len(lines) == len(recorded)
    assert [(a, b) for a, b in zip(recorded, lines, strict=True) if not agree(a, b)] == []


def digits(a):
    """Three digits of the sum of absolute values and of the sum of the values times their positions."""
    flat = np.asarray(a, np.float64).reshape(-1)
    return f"{rounded(np.abs(flat).sum())} {rounded(np.abs(flat) @ np.arange(1, flat.size + 1))}"


def describe_output(net, count=4):
    y = run_network(net, data(net, count))
    return ", ".join(digits(a) for a in y.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_prunings_stay_as_recorded(name):
    lines = []
    for title, (options, count) in CASES.items():
        if (name == "fixed" and title not in OF_BATCHES) or (name == "dense" and title not in OF_MANY_WIDTHS):
            continue
        net, log = NETWORKS[name](), Log()
        lines.append(title)
        try:
            made = prune(net, PruneConfig(**options), data(net, count) if count else None, log)
        except WhetError as e:
            lines.append(f"  {type(e).__name__}: {e}")
            continue
        lines += [f"  {k}: {len(e.kept)} of {e.size}, indices {sum(e.kept)}" for k, e in made.recipe.groups.items()]
        lines += [f"  removed {', '.join(made.recipe.removed)}"] * bool(made.recipe.removed)
        lines.append(f"  {made.recipe.about}")
        lines.append(f"  channels {made.channels}, share {made.share:.4f}; FLOPs {made.report.flops}, parameters {made.report.params}")
        lines += [f"  {line}" for line in made.report.lines()]
        if made.report.summed is not None:
            lines.append(f"  sum of layer times {made.report.summed:.5f}")
        lines.append(f"  outputs {describe_output(made.cut)}; recovered {describe_output(made.network)}")
        lines += log.lines(measured=count > 0)
    compare_lines(GOLDEN / f"{name}.txt", lines)


@pytest.mark.parametrize("name", NETWORKS)
def test_progress_of_parts_counts_up_to_its_total(name):
    """Each function that takes long announces every layer or batch once, and ends with its total."""
    net = NETWORKS[name]()
    found, blocks = groups(net), branches(net)
    for kind in ("activation", "taylor1", "reconstruction"):
        log = Log()
        importance(found, kind, net=net, samples=Samples(data(net, 40)), blocks=blocks, progress=log)
        assert log.ranges
        assert all(b == total for _, b, total, _ in log.ranges[-1:])
        counts = [n for a, b, _, _ in log.ranges for n in range(a, b + 1)]
        size = 4 if name == "fixed" else 16
        assert counts == ([*range(size, 40, size), 40] if kind != "reconstruction" else list(range(1, len(net.layers) + 1)))
    for run in (lambda log: reestimate_batch_norms(net, data(net, 8), log), lambda log: recover(net, net, {}, data(net, 8), progress=log)):
        log = Log()
        run(log)
        ((a, b, total, _),) = log.ranges
        assert (a, b, total) == (1, len(net.layers), len(net.layers))


MIXED = """network mixed source
in %x: f32[N,8,5,5]
const %w0: f32[16,4,3,3] = seed(1)
const %s: f32[16] = seed(8)
const %w1: f32[12,16,1,1] = seed(2)
const %w2: f32[12,16] = seed(3)
const %w3: f32[16,8] = seed(4)
const %w4: f32[6,8] = seed(5)
const %c: f32[6] = seed(6)
%a = Conv(%x, %w0, %s, group=2, strides=[2,2], pads=[1,1,1,1])
%b = Tanh(%a)
%d = Conv(%b, %w1)
%e = ReduceMean(%d, axes=[2,3], keepdims=0)
%f = MatMul(%e, %w2)
%g = Sigmoid(%f)
%h = MatMul(%g, %w3)
%i = Gemm(%h, %w4, %c, alpha=0.5, transB=1)
%j = Softmax(%i, axis=1)
out %j
"""
PARTS = {"plain": NETWORKS["plain"], "mixed": lambda: parse_network(MIXED), "fixed": NETWORKS["fixed"]}


def test_nothing_is_compiled_for_a_machine_that_compiles_nothing(monkeypatch):
    started = []
    monkeypatch.setattr("whet.pruning.meter.start_compiling", lambda *args: started.append(args))
    monkeypatch.setattr("whet.pruning.sparsity_advice.start_compiling", lambda *args: started.append(args))
    prune(NETWORKS["plain"](), PruneConfig(target=Target("latency", ratio=0.9), build=NULL))
    advise_sparsity(NETWORKS["plain"](), NULL)
    assert started == []


@pytest.mark.parametrize("name", PARTS)
def test_scores_and_gradients_stay_as_recorded(name):
    net = PARTS[name]()
    found, blocks = groups(net), branches(net)
    layers = {x.name: x for x in net.layers if find_reduction_axis(x) is not None}
    x, classes = data(net, 12), net.outputs[0].shape[1]
    lines = []
    for title, labels in (("without labels", None), ("with labels", np.arange(12) % classes)):
        for batch in (1, 5, 12):
            lines.append(f"{title}, batch {batch}")
            seen = compute_gates(net, found, blocks, x, labels, batch=batch, seed=3)
            lines += [f"  ~ {g.name}: {digits(seen.first(g.name))}, {digits(seen.second(g.name))}, {digits(seen.energy[g.name])}" for g in found]
            lines += [f"  ~ {b.name}: {digits(seen.first(b.name))}, {digits(seen.second(b.name))}" for b in blocks]
            lines += [
                f"  ~ gradient of {k}: {digits(v)}" for k, v in compute_mean_absolute_gradients(net, layers, x, labels, batch=batch, seed=3).items()
            ]
            of = compute_output_sensitivities(net, x, labels, samples=7, batch=batch, seed=3)
            lines += [f"  ~ %{t.name}: {digits(v)}" for t, v in of.items()]
        for kind in ("reconstruction", "weighted_reconstruction"):
            scores = importance(found, kind, 2, net=net, samples=Samples(x, labels), blocks=blocks)
            lines += [f"  ~ {kind} {k}: {digits(v)}" for k, v in scores.items()]
    compare_lines(GOLDEN / f"scores_{name}.txt", lines)


@pytest.mark.parametrize("name", PARTS)
def test_patterns_stay_as_recorded(name):
    net, lines = PARTS[name](), []
    made = {"original": net}
    for pattern, kind, count in (
        ("2:4", "l1", 0), ("2:4", "activation", 12), ("2:4", "second_order", 12), ("1:4", "taylor1", 12), ("block:4x1", "auto", 0),
        ("block:2x2", "activation", 8), ("4:8", "l1", 8),
    ):  # fmt: skip
        lines.append(f"{pattern} by {kind} of {count} samples")
        log = Log()
        try:
            ratio, samples = 0.5 if "block" in pattern else 0, data(net, count) if count else None
            done = apply_pattern(net, parse_pattern(pattern, ratio), samples, importance=kind, progress=log)
        except WhetError as e:
            lines.append(f"  {e}")
            continue
        made[f"{pattern} {kind}"] = done.network
        lines += [f"  {k}: {int(m.sum())} of {m.size} kept, positions {int(np.flatnonzero(m).sum())}" for k, m in done.masks.items()]
        lines += [f"  ~ {k} lost {100 * v:.1f} %" for k, v in done.removed.items()] + [f"  {k}: {why}" for k, why in done.left.items()]
        lines += [f"  refitted {done.refitted}, 2:4 {done.two_four}; {explain_unusable_pattern(parse_pattern('2:4', 0), done)}"]
        lines += [f"  ~ outputs {describe_output(done.network)}", *log.lines()]
    sparse = zero_smallest(net, 0.6)
    made["scattered"] = sparse
    made["zero"] = zero_channels(net, {g.name: range(g.size // 2) for g in groups(net)})
    told = compare(made)
    lines += ["  ".join(row) for row in told.rows()] + list(told.said)
    compare_lines(GOLDEN / f"patterns_{name}.txt", lines)
