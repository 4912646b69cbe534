"""Charts of the README and of the results pages, drawn from the result files.

    python benchmarks/chart.py           draw them (needs matplotlib: pip install '.[bench]')
    python benchmarks/chart.py --check   exit 1 if one was drawn from other results; needs no matplotlib

The values that a chart was drawn from are stored in its SVG metadata.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BETTER, WORSE, NEUTRAL = "#2563a8", "#b45309", "#808080"
KINDS = ("#0b8a7f", "#c2691f", "#5b7fd0")  # legible on white and on black

Values = dict[str, float]  # name of a bar -> its value


@dataclass(frozen=True)
class Panel:
    """One group of bars: the rows of a result file whose columns equal `where`. A later run of the same row replaces it."""

    title: str
    file: str  # below benchmarks/results, without .json
    label: str  # name of a bar, with columns in braces
    value: str  # column, or "a / b" for the quotient of two
    where: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> Values:
        data = json.loads((RESULTS / f"{self.file}.json").read_text())
        rows = [r for run in (data if isinstance(data, list) else [data]) for r in run["rows"]]
        found = {}
        for row in rows:
            value = _value(row, self.value)
            if value is not None and all(row.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in self.where.items()):
                found[self.label.format(**row)] = round(value, 3)
        return found


@dataclass(frozen=True)
class Chart:
    """An SVG file with panels that share one axis; a dashed line at `reference` separates better from worse."""

    path: str  # below docs/
    axis: str
    panels: tuple[Panel, ...]
    reference: float | None = 1.0
    text: str = "{:.2f}x"  # of a value, at the end of its bar
    first_column: int | None = None  # panels of the first of two columns

    def values(self) -> dict[str, Values]:
        """Panel title -> bar -> value."""
        return {p.title: p.values() for p in self.panels}

    def draw(self, plt: Any) -> Any:
        """The figure: a panel of horizontal bars per entry, in columns of about equal height."""
        panels = list(self.values().items())
        heights = [len(values) + 1.6 for _, values in panels]
        last = max(v for _, values in panels for v in values.values())
        columns = [range(len(panels))] if self.first_column is None else [range(self.first_column), range(self.first_column, len(panels))]
        tallest = max(sum(heights[k] for k in column) for column in columns)
        figure = plt.figure(figsize=(8 + 2 * (len(columns) - 1), 0.27 * (tallest + 1.5 * (len(panels) == 1))), layout="constrained")
        for column, part in zip(columns, [figure] if len(columns) == 1 else figure.subfigures(1, len(columns)), strict=True):
            axes = part.subplots(len(column), 1, height_ratios=[heights[k] for k in column], sharex=True, squeeze=False)[:, 0]
            for axis, k in zip(axes, column, strict=True):
                self._draw_panel(axis, *panels[k])
                if last > 0 and all(v >= 0 for v in panels[k][1].values()):
                    axis.set_xlim(0, 1.12 * last)
            axes[-1].set_xlabel(self.axis, fontsize=8, color=NEUTRAL)
        return figure

    def _draw_panel(self, axis: Any, title: str, values: Values) -> None:
        names = list(values)[::-1]
        level = -float("inf") if self.reference is None else self.reference
        bars = axis.barh(names, [values[n] for n in names], color=[BETTER if values[n] >= level else WORSE for n in names], height=0.7)
        axis.bar_label(bars, [self.text.format(values[n]) for n in names], padding=3, fontsize=8, color=NEUTRAL)
        if self.reference is not None:
            axis.axvline(self.reference, color="#888888", linewidth=1, linestyle="--")
        axis.set_title(title, fontsize=9, loc="left", color=NEUTRAL)
        axis.tick_params(labelsize=8, colors=NEUTRAL, length=0)
        axis.spines[:].set_visible(False)
        axis.margins(x=0.12)


@dataclass(frozen=True)
class CrossoverChart:
    """An SVG file with the speed-up of 2:4 sparse layers over their channels: a panel per precision and batch, a line per kind of layer."""

    path: str  # below docs/
    file: str  # below benchmarks/results, without .json: rows of sparsity_crossover.py

    def values(self) -> dict[str, Values]:
        """Panel title -> "kind, channels" -> dense over sparse time."""
        panels: dict[str, Values] = {}
        for r in json.loads((RESULTS / f"{self.file}.json").read_text())["rows"]:
            if r["speedup"]:
                panels.setdefault(f"{r['precision'].upper()}, batch {r['batch']}", {})[f"{r['kind']}, {r['channels']}"] = r["speedup"]
        return panels

    def draw(self, plt: Any) -> Any:
        """The figure: up to three panels in a row."""
        panels = self.values()
        kinds = sorted({name.split(", ")[0] for values in panels.values() for name in values}, key=lambda kind: (kind == "linear", kind))
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns)
        size = (8, 2.4 * rows + 0.4)
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False)
        for axis, (title, values) in zip(axes.flat, panels.items(), strict=False):
            for kind, color in zip(kinds, KINDS, strict=False):
                points = sorted((int(name.split(", ")[1]), v) for name, v in values.items() if name.split(", ")[0] == kind)
                axis.plot([c for c, _ in points], [v for _, v in points], marker="o", markersize=4, linewidth=1.2, color=color, label=kind)
            axis.axhline(1, color="#888888", linewidth=1, linestyle="--")
            axis.set_title(title, fontsize=9, loc="left", color=NEUTRAL)
            axis.tick_params(labelsize=7, colors=NEUTRAL, length=0)
            axis.spines[:].set_visible(False)
            axis.grid(color="#88888840", linewidth=0.6)
        channels = sorted({int(name.split(", ")[1]) for values in panels.values() for name in values})
        for axis in axes.flat:  # axes are shared: limits after all lines are drawn
            axis.set_xscale("log", base=2)
            axis.set_xticks(channels, [str(c) for c in channels], fontsize=7)
            axis.set_ylim(0, 1.05 * max(v for values in panels.values() for v in values.values()))
        figure.supxlabel("input channels", fontsize=8, color=NEUTRAL)
        figure.supylabel("dense over sparse time", fontsize=8, color=NEUTRAL)
        lines = axes.flat[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside upper left", ncols=len(kinds), fontsize=8, frameon=False, labelcolor=NEUTRAL)
        return figure


_PEERS = "against ONNX Runtime, OpenVINO"
_CPU_PEERS = "against the better of ONNX Runtime and OpenVINO"
_LOW_PRECISION = {"model": ("resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny", "lenet_mnist", "vit_mnist", "squeezenet1.1")}
_RESNET56 = ("original", "depth", "gpu128-50", "latency-45", "flops-50", "2:4", "stages-39")
CHARTS: tuple[Chart | CrossoverChart, ...] = (
    Chart(
        "speed.svg",
        "times as fast as the better peer (batch 1; dashed: equal speed)",
        (
            Panel(f"FP32 on 2 CPU cores, {_PEERS}", "cpu/peers_xeon", "{case}", "ratio", {"batch": 1}),
            Panel(f"INT8 on 2 CPU cores, {_PEERS}", "cpu/int8", "{case}", "ratio_better_peer", {"batch": 1}),
            Panel("FP16 on one H100, against torch.compile (max-autotune)", "h100/networks", "{network}", "against_compile", {"batch": 1}),
        ),
        first_column=1,
    ),
    Chart(
        "results/cpu.svg",
        "times as fast as the better peer (the dashed line is equal speed)",
        (
            Panel(f"FP32 on 2 CPU cores, {_CPU_PEERS}", "cpu/peers_xeon", "{case}, batch {batch}", "ratio"),
            Panel(f"INT8 on 2 CPU cores, {_CPU_PEERS}", "cpu/int8", "{case}, batch {batch}", "ratio_better_peer"),
        ),
    ),
    Chart(
        "results/gpu.svg",
        "times as fast as the peer (the dashed line is equal speed)",
        (
            Panel("FP16 on an H100 against torch.compile (max-autotune)", "h100/networks", "{network}, batch {batch}", "against_compile"),
            Panel("FP16 on an H200 against PyTorch eager in a CUDA graph", "h200/networks", "{network}, batch {batch}", "eager_ms / whet_ms"),
        ),
    ),
    Chart(
        "results/accuracy.svg",
        "points of top-1 accuracy against FP32 (the dashed line is equal accuracy)",
        tuple(
            Panel(f"{name} on the CPU", "cpu/accuracy_precision", "{model}", "difference_points", {"precision": precision, **_LOW_PRECISION})
            for name, precision in (("INT8", "int8"), ("FP8", "fp8"), ("BF16", "bf16"))
        ),
        reference=0.0,
        text="{:+.2f}",
    ),
    Chart(
        "results/pruning.svg",
        "times as fast as the published network in FP32 (the dashed line is equal speed)",
        tuple(
            Panel(f"ResNet-56 on CIFAR-10 in {p}, batch 1, one CPU thread", "cpu/resnet56", "{network} ({exact %} %)", "speed",
                  {"precision": p, "batches": "1", "batch": 1, "network": _RESNET56})
            for p in ("FP32", "INT8")
        ),
    ),
    Chart(
        "results/builds.svg",
        "seconds of a build, verification included",
        (
            Panel("FP16 engines on one H200, nothing cached", "h200/builds", "{network}, batch {batch}", "build_s"),
            Panel("Once more, with the timing cache and the compiled kernels", "h200/builds", "{network}, batch {batch}", "rebuild_s"),
        ),
        reference=None,
        text="{:.1f} s",
    ),
    CrossoverChart("results/sparsity_cpu.svg", "cpu/sparsity_crossover"),
    CrossoverChart("results/sparsity_crossover.svg", "h200/sparsity_crossover"),
)  # fmt: skip


def _value(row: Mapping[str, Any], column: str) -> float | None:
    over, _, under = column.partition(" / ")
    a, b = row.get(over), row.get(under) if under else 1.0
    return None if a is None or not b else a / b


def draw(chart: Chart | CrossoverChart) -> None:
    """Writes a chart, with its values as the SVG's description."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "whet"
    import matplotlib.pyplot as plt

    figure = chart.draw(plt)
    figure.savefig(ROOT / "docs" / chart.path, transparent=True, metadata={"Date": None, "Description": json.dumps(chart.values())})
    plt.close(figure)


def drawn_values(text: str) -> dict | None:
    """The values in the metadata of a chart's SVG, or None if there are none."""
    start, end = text.find("<dc:description>"), text.find("</dc:description>")
    return json.loads(html.unescape(text[start + len("<dc:description>") : end])) if 0 <= start < end else None


def main() -> int:
    """Draws or checks all charts; returns the exit code."""
    if "--check" not in sys.argv:
        for chart in CHARTS:
            draw(chart)
        return 0
    old = [c.path for c in CHARTS if not (f := ROOT / "docs" / c.path).is_file() or drawn_values(f.read_text()) != c.values()]
    print(f"drawn from other results: {', '.join(old)}; run python benchmarks/chart.py" if old else "the charts are current")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
