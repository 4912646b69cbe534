"""Common claims about pruning, measured: one row per claim with its number, its command and a verdict; writes docs/claims.md.

`python benchmarks/claims.py [--backend cpu|cuda] [--only NAME,...] [--quick] [--out FILE]` measures and stores the rows in
benchmarks/results/<device>/claims.json (a repeated measurement replaces its row). `--write` alone writes docs/claims.md from the result
files. Times are medians of interleaved engine runs; accuracies are of real CIFAR-10 networks on 1,000 pixel-exact test images
(whet's own calibration data are 256 training images without labels) and need the shared data folder; claims with missing requirements
are reported. Verdicts follow from the numbers by the rule in each docstring. Of times, both ends of the 95 % interval of the ratio must be on one
side of the bar, otherwise the verdict is "undecided"; rows of before the intervals were stored say "medians only".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _record import describe_origin, median_interval, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import datasets
from whet import zoo
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.engine.probe import probe_inputs, probe_shapes
from whet.frontends import network_from_onnx, onnx_from_network
from whet.measure.compare import compare
from whet.measure.policy import BENCHMARKS
from whet.network import Network
from whet.pruning import (
    PruneConfig,
    Target,
    choose,
    count_flops,
    cut,
    groups,
    importance,
    prune,
    recover,
    zero_smallest,
)
from whet.pruning.importance import Samples
from whet.runtime import Runtime, bind
from whet.zoo.layers import conv, relu
from whet.zoo.writer import GraphWriter

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results"
NORMS = {"importance": "l1", "scope": "group"}


@dataclass(frozen=True)
class Row:
    """One measured claim: `number` as text, a short `verdict`, `rows` the underlying figures."""

    name: str
    claim: str
    number: str
    verdict: str
    rows: list[dict[str, Any]]
    others: float = 0.0  # external load in CPUs during timing: above a few hundredths the times are unreliable


class Bench:
    """The machine, and comparisons of engines on it."""

    def __init__(self, backend: str, quick: bool, cache: str):
        self.backend, self.quick = backend, quick
        half = ("fp16",) if backend == "cuda" else ()  # types of a GPU's engines
        self.config = BuildConfig(backend=backend, precisions=half, verify=False, timing_cache=cache)
        self.machine = get_backend(backend)
        self.others = 0.0
        self.samples: list[list[float]] = []  # of the last comparison, per network and round

    def plans(self, nets: list[Network], batch: int = 1) -> list:
        plans = []
        for net in nets:
            shapes = {t.name: tuple(d if isinstance(d, int) else batch for d in t.shape) for t in net.inputs}
            plans.append(build(net, replace(self.config, profiles=((shapes, shapes, shapes),))))
        return plans

    def ms(self, nets: list[Network], batch: int = 1, plans: list | None = None) -> list[float]:
        """Median ms of each network's engine, compared for some seconds."""
        plans = plans or self.plans(nets, batch)
        bounds = [bind(p, self.machine) for p in plans]
        for p, b in zip(plans, bounds, strict=True):
            b.feed(probe_inputs(p.network, 0, probe_shapes(p)))
        rules = BENCHMARKS.with_seconds(2.0 if self.quick else 6.0)
        ranking = compare([partial(run_once, b) for b in bounds], rules, watch=getattr(self.machine, "watch", None))  # GPU times come from GPU events
        self.others = max(self.others, getattr(ranking.load, "others", None) or 0.0)
        self.samples = ranking.samples
        return [1e3 * median(samples) for samples in ranking.samples]

    def interval(self, above: int, below: int) -> list[float] | None:
        """The 95 % interval of the ratio of two networks' times in the last comparison, from its rounds; None for fewer than six rounds."""
        ratios = [a / b for a, b in zip(self.samples[above], self.samples[below], strict=False)]  # a network that was dropped has fewer rounds
        return list(median_interval(ratios)[1:]) if len(ratios) >= 6 else None


def run_once(bound) -> float:
    return bound.seconds(1)[0]


def find_distribution(name: str) -> bool:
    """Whether a package is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def percent(before: float, after: float) -> str:
    """"-48.2 %"."""
    return f"{100 * (after / before - 1):+.1f} %"


# --- real data ---

def cifar(name: str) -> Network:
    """A CIFAR-10 ResNet with its published weights. FileNotFoundError without the data folder."""
    return network_from_onnx(datasets.path_of(f"cifar10/{name}_cifar10.onnx"))


def calibration(count: int = 256) -> dict[str, np.ndarray]:
    """Training images by input name, no labels."""
    return {"x": datasets.imagenet_norm(datasets.cifar10_train_lossless()[0][:count])}


def accuracy(net: Network) -> float:
    """Accuracy in percent on 1,000 test images, by ONNX Runtime, which shares no code with whet."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_from_network(net).SerializeToString(), options, providers=["CPUExecutionProvider"])
    images, labels = datasets.cifar10_lossless()
    x = datasets.imagenet_norm(images)
    guesses = [session.run(None, {"x": x[i : i + 200]})[0].argmax(1) for i in range(0, len(x), 200)]
    return 100 * float((np.concatenate(guesses) == labels).mean())


def uniform(net: Network, ratio: float, data: dict | None, kind: str = "l1") -> Network:
    """The same share of every group cut to multiples of two, recovered without labels if there are data."""
    channel_groups = groups(net)
    samples = Samples(data) if data else None
    kept = choose(channel_groups, importance(channel_groups, kind, net=net, samples=samples), ratio, scope="group", multiple=2)
    small = cut(net, kept, channel_groups)
    return recover(small, net, kept, data) if data else small


# --- the claims ---

CLAIMS: dict[str, Callable[[Bench], Row]] = {}


def claim(f: Callable[[Bench], Row]) -> Callable[[Bench], Row]:
    CLAIMS[f.__name__] = f
    return f


def large(b: Bench) -> tuple[str, Network]:
    """ResNet-50; with --quick ResNet-18, which only tests that the claim runs."""
    name = "resnet18" if b.quick else "resnet50"
    return name, network_from_onnx(zoo.build(name))


@claim
def zeros(b: Bench) -> Row:
    """Confirmed as ineffective if the change is under 10 %."""
    name, net = large(b)
    dense, sparse = b.ms([net, zero_smallest(net, 0.5)])
    rows = [{"weights": "dense", "ms": dense}, {"weights": "half zeros", "ms": sparse, "interval": b.interval(1, 0)}]
    return Row("zeros", f"Setting 50 % of {name}'s weights to zero makes it faster", f"{dense:.3g} -> {sparse:.3g} ms ({percent(dense, sparse)})",
               _zeros(rows), rows)  # fmt: skip


@claim
def macs_are_not_time(b: Bench) -> Row:
    """Refuted if the relative reduction of time is less than nine tenths of that of the FLOPs."""
    rows = []
    for name, net in (large(b), ("mobilenet_v2", network_from_onnx(zoo.build("mobilenet_v2")))):
        small = prune(net, PruneConfig(target=Target("flops", ratio=0.5), depth=False)).cut
        before, after = b.ms([net, small])
        rows.append({"network": name, "FLOPs x": count_flops(net) / count_flops(small), "time x": before / after, "ms": before, "ms after": after,
                     "interval": b.interval(0, 1)})  # fmt: skip
    number = "; ".join(f"{r['network']}: FLOPs {r['FLOPs x']:.2f}x fewer, time {r['time x']:.2f}x less" for r in rows)
    return Row("macs_are_not_time", "Half the multiply-adds take half the time", number, _macs_are_not_time(rows), rows)


@claim
def fusion_and_memory(b: Bench) -> Row:
    """Confirmed if the fused nodes stay fused, node by node, and memory is reduced by at least half the share of the channels. If the same nodes
    are fused, but the selection by time distributes them over other launches, that is reported.

    Reformats between layers are not fusions: their number may change with the fastest formats for other widths.
    """
    name, net = large(b)
    channel_groups = groups(net)
    small = cut(net, choose(channel_groups, importance(channel_groups), 0.4), channel_groups)
    plans = b.plans([net, small], batch=8)
    runtime = Runtime(None if b.backend == "cpu" else b.backend)
    fused = [{frozenset(x.sources) for x in p.network.layers if x.op == "Fused"} for p in plans]
    peaks = []
    for p in plans:
        with runtime.load(p) as engine:
            peaks.append(engine.memory().peak / 2**20)
    rows = [
        {
            "network": n, "fused layers": len(f), "source nodes in them": len(frozenset().union(*f)),
            "reformats": sum(x.op == "Reformat" for x in p.network.layers), "peak MiB": m,
        }
        for n, f, p, m in zip(("whole", "40 % of channels cut"), fused, plans, peaks, strict=True)
    ]  # fmt: skip
    kept = len(fused[0] & fused[1])
    same = fused[0] == fused[1] or frozenset().union(*fused[0]) == frozenset().union(*fused[1])
    verdict = "no" if not same or peaks[1] >= 0.8 * peaks[0] else "yes" if kept == len(fused[0]) else "yes, though in other launches"
    return Row("fusion_and_memory", f"Channel pruning keeps every fusion and needs less memory ({name}, 40 % of channels, batch 8)",
               f"{kept} of {len(fused[0])} fused layers hold the same nodes, peak {peaks[0]:.0f} -> {peaks[1]:.0f} MiB ({percent(*peaks)})",
               verdict, rows)  # fmt: skip


@claim
def knee(b: Bench) -> Row:
    """A knee at 60 % is the first point at which each further tenth costs more than five points of accuracy, or time stops falling."""
    net, data = cifar("resnet20"), calibration()
    ratios = [0, 0.2, 0.4, 0.6, 0.8] if b.quick else [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    nets = [uniform(net, r, data) if r else net for r in ratios]
    times = b.ms(nets)
    rows = [{"ratio": r, "accuracy %": accuracy(n), "ms": t, "FLOPs": count_flops(n)} for r, n, t in zip(ratios, nets, times, strict=True)]
    for last, row in pairwise(rows):
        tenths = 10 * (row["ratio"] - last["ratio"])
        row["points lost a tenth"] = (last["accuracy %"] - row["accuracy %"]) / tenths
        row["ms won a tenth"] = (last["ms"] - row["ms"]) / tenths
    number = "; ".join(f"{r['ratio']:.0%}: {r['accuracy %']:.1f} %, {r['ms']:.3f} ms" for r in rows)
    return Row("knee", "ResNet-20 on CIFAR-10, uniform ratio, recovered without labels: the knee is at 60 %", number, _knee(rows), rows)


@claim
def odd_channels(b: Bench) -> Row:
    """Confirmed if a width that is not a multiple of 8 costs over 5 % more than the next multiple of 16."""
    rows = []
    for width in (56, 60, 61, 63, 64, 65, 72, 80):
        g = GraphWriter(batch=1, opset=17)
        x = g.input("x", (1, width, 56, 56))
        for i in range(4):
            x = relu(g, conv(g, x, f"c{i}", width, width, 3, padding=1), f"r{i}")
        g.output(x, "y", (1, width, 56, 56))
        rows.append({"channels": width, "net": network_from_onnx(g.model("row"))})
    times, aligned = b.ms([r.pop("net") for r in rows]), [r["channels"] for r in rows].index(64)
    for i, (row, ms) in enumerate(zip(rows, times, strict=True)):
        row["ms"], row["interval"] = ms, b.interval(i, aligned)
        row["us a channel pair"] = 1e3 * ms / row["channels"] ** 2
    number = "; ".join(f"{r['channels']}: {r['ms']:.3f} ms" for r in rows)
    said = "Odd channel counts are slower than the next aligned one (four 3x3 convolutions, 56x56)"
    return Row("odd_channels", said, number, _odd_channels(rows), rows)


@claim
def one_by_one(b: Bench) -> Row:
    """Confirmed if nine times the FLOPs cost less than twice the time."""
    rows = []
    for width, side in ((64, 56), (256, 14)):
        nets = []
        for kernel in (1, 3):
            g = GraphWriter(batch=1, opset=17)
            x = g.input("x", (1, width, side, side))
            for i in range(4):
                x = relu(g, conv(g, x, f"c{i}", width, width, kernel, padding=kernel // 2), f"r{i}")
            g.output(x, "y", (1, width, side, side))
            nets.append(network_from_onnx(g.model("row")))
        small, large = b.ms(nets)
        rows.append({"channels": width, "side": side, "1x1 ms": small, "3x3 ms": large, "x": large / small, "interval": b.interval(1, 0)})
    number = "; ".join(f"{r['channels']} channels at {r['side']}²: {r['1x1 ms']:.3f} -> {r['3x3 ms']:.3f} ms ({r['x']:.1f}x)" for r in rows)
    return Row("one_by_one", "A 1x1 convolution can become a 3x3 at little cost (9x the FLOPs)", number, _one_by_one(rows), rows)


@claim
def order(b: Bench) -> Row:
    """Confirmed if ranges measured before pruning or recovery lose at least a point (ten images) against those measured after."""
    from whet.precision import calibrate, quantize

    net, data = cifar("resnet20"), calibration()
    feeds = [{"x": data["x"][i : i + 1]} for i in range(128)]
    rows = []
    for ratio in (0.3, 0.5):
        small = uniform(net, ratio, data)
        raw = uniform(net, ratio, None)
        by_hand = [("prune, recover, calibrate", calibrate(small, feeds)), ("calibrate the original, prune, recover", calibrate(net, feeds)),
                   ("prune, calibrate, recover", calibrate(raw, feeds))]  # fmt: skip
        floats = accuracy(small)
        for what, ranges in by_hand:
            rows.append({"ratio": ratio, "order": what, "INT8 accuracy %": accuracy(quantize(small, ranges)), "FP32 accuracy %": floats})
    number = "; ".join(f"{r['ratio']:.0%} {r['order']}: {r['INT8 accuracy %']:.1f} %" for r in rows)
    return Row("order", "The order matters: prune, recover, then calibrate (ResNet-20, INT8, 128 images)", number, _order(rows), rows)


@claim
def criteria(b: Bench) -> Row:
    """The importance with the highest accuracy after recovery, and a comparison with random choice."""
    net, data = cifar("resnet20"), calibration()
    kinds = ("random", "l1", "fpgm", "taylor2") if b.quick else ("random", "l1", "l2", "fpgm", "activation", "taylor1", "taylor2")
    rows = [{"importance": k, "accuracy %": accuracy(uniform(net, 0.4, data, k)), "not recovered %": accuracy(_bare(net, 0.4, data, k))}
            for k in kinds]  # fmt: skip
    number = "; ".join(f"{r['importance']}: {r['accuracy %']:.1f} % ({r['not recovered %']:.1f} %)" for r in rows)
    return Row("criteria", "The importance criterion decides (ResNet-20, 40 % of every group; in brackets before recovery)", number,
               _criteria(rows), rows)  # fmt: skip


def _bare(net: Network, ratio: float, data: dict, kind: str) -> Network:
    channel_groups = groups(net)
    scores = importance(channel_groups, kind, net=net, samples=Samples(data))
    return cut(net, choose(channel_groups, scores, ratio, scope="group", multiple=2), channel_groups)


@claim
def predicted(b: Bench) -> Row:
    """Confirmed if the engine's time is within a tenth of the original's time of the prediction from the table."""
    rows = []
    nets = [("resnet56 on CIFAR-10", cifar("resnet56"), (0.5,) if b.quick else (0.7, 0.5))] if datasets.root() else []
    if not b.quick or not nets:
        nets.append(("resnet18", network_from_onnx(zoo.build("resnet18")), (0.5,)))
    path = Path(tempfile.mkdtemp()) / "table.json"  # the rows of all networks
    for name, net, shares in nets:
        for share in shares:
            made = prune(net, PruneConfig(target=Target("latency", ratio=share), build=b.config, engines=False, table=str(path)))
            before, after = b.ms([net, made.cut])
            was, foreseen = made.report.predicted or (1.0, 1.0)
            rows.append({"network": name, "asked": share, "predicted": foreseen / was, "measured": after / before, "ms": before, "ms after": after,
                         "interval": b.interval(1, 0),
                         "FLOPs": count_flops(made.cut) / count_flops(net), "branches removed": len(made.recipe.removed)})  # fmt: skip
    path.unlink(missing_ok=True)
    number = "; ".join(f"{r['network']}, asked {r['asked']}x: predicted {r['predicted']:.2f}x, measured {r['measured']:.2f}x" for r in rows)
    return Row("predicted", "A table of layer times predicts what pruning will bring", number,
               _predicted(rows), rows)


@claim
def latency_or_flops(b: Bench) -> Row:
    """Confirmed if at the same measured latency (within 3 %) the selection by latency keeps more importance than that by FLOPs.

    As in `whet prune`, a selection whose engine misses the predicted time is repeated with a tighter budget, up to twice.
    """
    from whet.pruning.costs import make_flop_costs
    from whet.pruning.knapsack import choose_within, scale_by_weight_count
    from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs
    from whet.pruning.latency_table import LatencyTable
    from whet.pruning.meter import Meter

    net = network_from_onnx(zoo.build("mobilenet_v2"))
    channel_groups, base = groups(net), lower_to_static_layers(net, b.config)
    scores, most = scale_by_weight_count(channel_groups, [], importance(channel_groups)), 5 if b.quick else 12  # widths of each group that are timed
    with Meter(b.config, LatencyTable(), base) as meter:
        ms, flops = make_latency_costs(net, channel_groups, [], meter, base), make_flop_costs(net, channel_groups, [])
        by_flops = choose_within(channel_groups, [], scores, flops, 0.5 * flops.total({}), most=most)
        reached = ms.total({g: len(k) for g, k in by_flops.kept.items()})
        for _ in range(3):
            by_ms = choose_within(channel_groups, [], scores, ms, reached, most=most)
            nets = [net, *(cut(net, c.kept, channel_groups) for c in (by_flops, by_ms))]
            whole, f, t = b.ms(nets)
            if t <= 1.03 * f:
                break
            reached *= f / t
    rows = [{"objective": "FLOPs", "ms": f, "importance lost": by_flops.lost, "FLOPs": count_flops(nets[1]) / count_flops(net)},
            {"objective": "latency", "ms": t, "interval": b.interval(2, 1),
             "importance lost": by_ms.lost, "FLOPs": count_flops(nets[2]) / count_flops(net)}]  # fmt: skip
    number = f"of {whole:.3g} ms: by FLOPs {f:.3g} ms losing {by_flops.lost:.0f}, by latency {t:.3g} ms losing {by_ms.lost:.0f} (L1, per layer)"
    return Row("latency_or_flops", "Choosing by measured latency beats choosing by FLOPs (MobileNetV2)", number, _latency_or_flops(rows), rows)


OF_NETWORKS = ("order", "criteria")  # only accuracies, independent of the machine

OPEN = (
    ("The same claims on Jetson, T4 and under TensorRT itself", "could not be run: neither the devices nor the library are here"),
)  # fmt: skip


def _range(row: dict[str, Any], ratio: float) -> tuple[float, float]:
    """The interval of a row's ratio; of an older row, which has none, the ratio itself."""
    low, high = row.get("interval") or (ratio, ratio)
    return low, high


def _judge(rows: list[dict[str, Any]], met: bool, missed: bool, details: str) -> str:
    """yes if even the worse ends of all intervals are on the good side of the bar, no if the better ends are not, otherwise undecided."""
    plain = "" if all("interval" in r for r in rows) else "; medians only"
    return f"{'yes' if met else 'no' if missed else 'undecided'}: {details}{plain}"


def _zeros(rows: list[dict[str, Any]]) -> str:
    gain = 1 - rows[1]["ms"] / rows[0]["ms"]
    low, high = _range(rows[1], 1 - gain)
    said = f"{100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'} time (bar 10 % less)"
    return _judge(rows[1:], 1 - high >= 0.1, 1 - low < 0.1, said)


def _macs_are_not_time(rows: list[dict[str, Any]]) -> str:
    if max(r["FLOPs x"] for r in rows) < 1.01:
        return "no case: nothing was cut"
    worst = min(r["time x"] / r["FLOPs x"] for r in rows)
    low, high = (min(_range(r, r["time x"])[end] / r["FLOPs x"] for r in rows) for end in (0, 1))
    said = f"the time falls by {100 * worst:.0f} % of the factor of the FLOPs in the worst network (bar 90 %)"
    return _judge(rows, low >= 0.9, high < 0.9, said)


def _knee(rows: list[dict[str, Any]]) -> str:
    falls = [r["ratio"] for r in rows[1:] if r["points lost a tenth"] > 5]
    if not falls:
        return f"no: no knee up to {rows[-1]['ratio']:.0%}"
    return f"{'yes' if falls[0] >= 0.6 else 'no'}: more than 5 points a tenth are lost from {falls[0]:.0%} on (bar 60 %)"


def _odd_channels(rows: list[dict[str, Any]]) -> str:
    of = {r["channels"]: r["ms"] for r in rows}
    odd = [r for r in rows if r["channels"] in (61, 63)]
    worst = max(of[61], of[63]) / of[64]
    low, high = (max(_range(r, r["ms"] / of[64])[end] for r in odd) for end in (0, 1))
    return _judge(odd, low > 1.05, high <= 1.05, f"61 or 63 channels take up to {worst:.3f} times as long as 64 (bar 1.05)")


def _one_by_one(rows: list[dict[str, Any]]) -> str:
    low, high = min(r["x"] for r in rows), max(r["x"] for r in rows)
    least, most = (max(_range(r, r["x"])[end] for r in rows) for end in (0, 1))
    return _judge(rows, most < 2, least >= 2, f"{low:.1f} to {high:.1f} times the time (bar 2)")


def _order(rows: list[dict[str, Any]]) -> str:
    worst = max(rows[k]["INT8 accuracy %"] - min(rows[k + 1]["INT8 accuracy %"], rows[k + 2]["INT8 accuracy %"]) for k in (0, 3))
    return f"{'yes' if worst >= 1 else 'undecided'}: up to {worst:.1f} points of accuracy (bar 1 point, ten of 1,000 images)"


def _criteria(rows: list[dict[str, Any]]) -> str:
    best, chance = max(rows, key=lambda r: r["accuracy %"]), next(r["accuracy %"] for r in rows if r["importance"] == "random")
    return f"{best['importance']} keeps {best['accuracy %'] - chance:+.1f} points of accuracy over random after recovery"


def _predicted(rows: list[dict[str, Any]]) -> str:
    if all(r["FLOPs"] > 0.99 and not r["branches removed"] for r in rows):
        return "no case: nothing was cut"
    worst = max(abs(r["measured"] - r["predicted"]) for r in rows)
    ends = [[abs(x - r["predicted"]) for x in _range(r, r["measured"])] for r in rows]
    inside = [(lambda low, high: low <= r["predicted"] <= high)(*_range(r, r["measured"])) for r in rows]
    least = max(0.0 if within else min(e) for within, e in zip(inside, ends, strict=True))
    return _judge(rows, max(map(max, ends)) <= 0.1, least > 0.1, f"off by up to {100 * worst:.0f} % of the original's time (bar 10 %)")


def _latency_or_flops(rows: list[dict[str, Any]]) -> str:
    flops, latency = rows
    if not flops["importance lost"] or not latency["importance lost"]:
        return "no case: one of the two cuts nothing"
    time, lost = latency["ms"] / flops["ms"], latency["importance lost"] / flops["importance lost"]
    low, high = _range(latency, time)
    said = f"{100 * (1 - lost):.1f} % less importance lost at {time:.2f} times the time (bars 3 % and 1.03)"
    return _judge([latency], lost < 0.97 and high <= 1.03, lost >= 0.97 or low > 1.03, said)


#: The verdict of a claim from its rows; fusion_and_memory's needs the sets of nodes, so that it is stored with them.
VERDICTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    f.__name__[1:]: f
    for f in (_zeros, _macs_are_not_time, _knee, _odd_channels, _one_by_one, _order, _criteria, _predicted, _latency_or_flops)
}


def verdict_of(name: str, row: dict[str, Any]) -> str:
    """The verdict from a stored row, so that a changed rule holds for earlier measurements too."""
    return VERDICTS[name](row["rows"]) if name in VERDICTS else row["verdict"]


def remark(name: str, rows: list[dict[str, Any]]) -> str:
    """A row's figures printed after its verdict."""
    if name == "fusion_and_memory" and rows[0]["fused layers"] != rows[1]["fused layers"]:
        nodes = " and ".join(str(r["source nodes in them"]) for r in rows)
        launches = " and ".join(str(r["fused layers"]) for r in rows)
        return f" ({nodes} source nodes are fused before and after, in {launches} launches: the clock chooses them)"
    if name == "latency_or_flops" and rows[1]["importance lost"] == 0:
        return " (by latency nothing is cut: half the FLOPs win next to no time here, launches take it)"
    if name == "knee" and rows[-1]["ms"] > 0.95 * rows[0]["ms"]:
        return f" ({rows[-1]['ratio']:.0%} fewer channels win no time here: launches take it)"
    return ""


def write(doc: Path = DOC) -> None:
    """docs/claims.md from all result files."""
    lines = [
        "# What people believe about pruning, measured", "",
        "Written by `python benchmarks/claims.py --write` from the rows that `python benchmarks/claims.py` measured. A verdict is of these",
        "networks on this machine at batch 1 unless it says otherwise; random weights where only time is asked, published ones for accuracy.",
        "A command with `--quick` measured fewer points. Rows that choose what to cut under a budget (half the multiply-adds, predicted, latency",
        "or FLOPs) and are of before November 22, 2026 were chosen by an earlier knapsack (docs/design/pruning.md). \"Medians only\": the row is of",
        "before the 95 % intervals were stored; with them a verdict needs the whole interval on one side of the bar.", "",
    ]  # fmt: skip
    for device in ("cpu", "h200"):
        path = RESULTS / device / "claims.json"
        lines += [f"## {device.upper() if device == 'cpu' else 'One H200'}", ""]
        if not path.exists():
            lines += ["Not measured yet: `python benchmarks/claims.py --backend cuda` on a machine with the GPU.", ""]
            continue
        data = json.loads(path.read_text())
        lines += [data["machine"] + (".", "; engines in FP16.")[device == "h200"], ""]
        lines += ["| claim | measured | verdict | command, date, commit |", "|---|---|---|---|"]
        for name in CLAIMS:
            r = data["rows"].get(name)
            if r is None and name in OF_NETWORKS:
                lines.append(f"| {name.replace('_', ' ')} | an accuracy, no time: the CPU's row says it | - | - |")
                continue
            if r is None:
                lines.append(f"| {name.replace('_', ' ')} | not measured yet | - | `claims.py --only {name}` |")
                continue
            busy = f" (others took {r['others']:.1f} CPUs)" if r["others"] > 0.05 else ""
            how = f"`claims.py{r['flags']} --only {name}`, {r['date'][:10]}, {r['commit']}"
            lines.append(f"| {r['claim']} | {r['number']}{busy}{remark(name, r['rows'])} | **{verdict_of(name, r)}** | {how} |")
        lines.append("")
    lines += ["## Not measured", "", *(f"- {what}: {why}." for what, why in OPEN), ""]
    doc.write_text("\n".join(lines))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--only", default="", help="names of claims, separated by commas")
    p.add_argument("--quick", action="store_true", help="fewer points and shorter timing")
    p.add_argument("--out", help="result file (default: benchmarks/results/<device>/claims.json)")
    p.add_argument("--cache", help="timing cache to go on with (default: a new one, so that all is timed now)")
    p.add_argument("--write", action="store_true", help="only write docs/claims.md from the result files")
    args = p.parse_args()
    if args.write:
        return write()
    path = Path(args.out) if args.out else RESULTS / ("cpu" if args.backend == "cpu" else "h200") / "claims.json"
    names = args.only.split(",") if args.only else list(CLAIMS)
    unknown = [n for n in names if n not in CLAIMS]
    if unknown:
        p.error(f"there is no claim {unknown[0]!r}; there are {', '.join(CLAIMS)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            b = Bench(args.backend, args.quick, args.cache or str(Path(folder) / "t.sqlite"))
            try:
                row = CLAIMS[name](b)
            except FileNotFoundError as e:
                print(f"{name}: not measured ({e})")
                continue
            about = provenance([n for n in ("numpy", "onnx", "onnxruntime", "onednn-cpu-gomp") if find_distribution(n)])
            flags = (" --backend cuda" if args.backend == "cuda" else "") + (" --quick" if args.quick else "")
            about["machine"] = b.machine.describe().get("model", "")
            old = json.loads(path.read_text())["rows"] if path.exists() else {}  # read now: other runs may have added rows
            old[name] = {**asdict(replace(row, others=b.others)), "flags": flags, **describe_origin(about)}
            print(f"{row.claim}\n  {row.number}\n  {row.verdict}", flush=True)
            data = {**about, "rows": old}
            path.write_text(json.dumps(data, indent=1) + "\n")
    if args.out is None:
        write()


if __name__ == "__main__":
    main()
