"""The README's bar chart, docs/speed.svg: how many times faster than the best peer whet's engines run, from the result files.

    python benchmarks/chart.py           draw it (needs matplotlib: pip install '.[bench]')
    python benchmarks/chart.py --check   exit 1 if it was drawn from other results; needs no matplotlib

The values that a chart was drawn from are stored in its SVG metadata.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHART = ROOT / "docs" / "speed.svg"
RESULTS = ROOT / "benchmarks" / "results"
PANELS = (  # title, result file, field of the network, field of the paired ratio: peer's time / whet's
    ("FP32 on 2 CPU cores, against the better of ONNX Runtime and OpenVINO", "cpu/peers", "case", "ratio"),
    ("INT8 on 2 CPU cores, against the better of ONNX Runtime and OpenVINO", "cpu/int8", "case", "ratio_better_peer"),
    ("FP16 on one H200, against torch.compile (max-autotune)", "h200/peers", "network", "compile_over_whet"),
)


def ratios() -> dict[str, dict[str, float]]:
    """Panel title -> network -> time of the best peer divided by whet's, batch 1."""
    panels = {}
    for title, name, network, ratio in PANELS:
        data = json.loads((RESULTS / f"{name}.json").read_text())
        rows = [r for run in (data if isinstance(data, list) else [data]) for r in run["rows"]]  # a later run of the same row replaces it
        panels[title] = {r[network]: round(r[ratio], 3) for r in rows if r["batch"] == 1 and r.get(ratio)}
    return panels


def draw(panels: dict[str, dict[str, float]]) -> None:
    """Writes CHART with one panel of horizontal bars per entry, and the values as the SVG's description."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "whet"
    import matplotlib.pyplot as plt

    heights = [len(p) + 1.6 for p in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 0.27 * sum(heights)), height_ratios=heights, layout="constrained", sharex=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        names = list(values)[::-1]
        bars = axis.barh(names, [values[n] for n in names], color=["#2563a8" if values[n] >= 1 else "#b45309" for n in names], height=0.7)
        axis.bar_label(bars, [f"{values[n]:.2f}x" for n in names], padding=3, fontsize=8, color="#666666")
        axis.axvline(1, color="#888888", linewidth=1, linestyle="--")
        axis.set_title(title, fontsize=9, loc="left", color="#666666")
        axis.tick_params(labelsize=8, colors="#666666", length=0)
        axis.spines[:].set_visible(False)
    axes[-1].set_xlabel("times as fast as the peer (batch 1; the dashed line is equal speed)", fontsize=8, color="#666666")
    figure.savefig(CHART, transparent=True, metadata={"Date": None, "Description": json.dumps(panels)})


def drawn_values(text: str) -> dict | None:
    """The values in the metadata of a chart's SVG, or None if there are none."""
    start, end = text.find("<dc:description>"), text.find("</dc:description>")
    return json.loads(html.unescape(text[start + len("<dc:description>") : end])) if 0 <= start < end else None


def main() -> int:
    if "--check" not in sys.argv:
        draw(ratios())
        return 0
    current = CHART.is_file() and drawn_values(CHART.read_text()) == ratios()
    print("the chart is current" if current else "the chart was drawn from other results: run python benchmarks/chart.py")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
