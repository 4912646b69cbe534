"""Plotly figures as plain data. Colours are names of the page's custom properties (`--accent`), which the script resolves for the theme."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from whet.report._html import h

_FEW = 12  # bars; for more, plotly's own ticks are whole numbers

PALETTE = tuple(f"--c{k}" for k in range(1, 9))

Figure = dict[str, Any]


def make_figure(traces: Sequence[dict[str, Any]], **layout: Any) -> Figure:
    """A figure; the page's script adds theme and margins."""
    return {"data": list(traces), "layout": {"xaxis": {}, "yaxis": {}, "showlegend": False} | layout}


def make_index_axis(title: str, count: int) -> dict[str, Any]:
    """An x axis of `count` numbered bars, with ticks at whole numbers."""
    axis: dict[str, Any] = {"title": {"text": title}, "showgrid": False}
    return axis | ({"dtick": 1} if count <= _FEW else {})


def format_hover(*texts: str) -> str:
    """A hover text; plotly reads a subset of HTML in it, so the texts are escaped."""
    return "<br>".join(str(h(t)) for t in texts if t)


def plot_bars(
    names: Sequence[str],
    values: Sequence[float],
    hover: Sequence[str],
    *,
    title: str,
    error: Sequence[float] | None = None,
    error_left: Sequence[float] | None = None,
    shown: Sequence[str] | None = None,
    colors: Sequence[str] | str = "--accent",
    keys: Sequence[str] | None = None,
) -> Figure:
    """One bar per name, the first on top.

    `error`, `error_left`: lengths of the whiskers to the right and left (none); `shown`: texts below the names, where neither a whisker crosses them
    nor a narrow window cuts them.
    """
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": list(range(len(names))),
        "hovertext": list(hover),
        "hoverinfo": "text",
        "marker": {"color": colors if isinstance(colors, str) else list(colors)},
    }
    if error is not None:
        trace["error_x"] = {
            "type": "data",
            "array": list(error),
            "symmetric": False,
            "arrayminus": list(error_left) if error_left is not None else [0] * len(error),
            "color": "--fg",
            "thickness": 1.2,
        }
    if keys is not None:
        trace["customdata"] = list(keys)
    return make_figure([trace], xaxis={"title": {"text": title}, "rangemode": "tozero"}, yaxis=_make_row_axis(names, shown), margin={"t": 8})


def plot_waterfall(
    steps: Sequence[str], totals: Sequence[float], hover: Sequence[str], *, title: str, shown: Sequence[str], more_is_better: bool
) -> Figure:  # fmt: skip
    """From top to bottom: the first total as a bar, the change by each further step, and the last total. `shown`: texts below the
    names of the steps and of the result."""
    changes = [b - a for a, b in itertools.pairwise(totals)]
    up, down = ("--accent", "--warm") if more_is_better else ("--warm", "--accent")
    trace = {
        "type": "waterfall",
        "orientation": "h",
        "x": [*totals[:1], *changes, totals[-1]],
        "measure": ["absolute", *("relative" for _ in changes), "total"],
        "y": list(range(len(steps) + 1)),
        "hovertext": [*hover, hover[-1]],
        "hoverinfo": "text",
        "totals": {"marker": {"color": "--grey"}},
        "increasing": {"marker": {"color": up}},
        "decreasing": {"marker": {"color": down}},
        "connector": {"line": {"color": "--line"}},
    }
    return make_figure(
        [trace], xaxis={"title": {"text": title}, "rangemode": "tozero"}, yaxis=_make_row_axis([*steps, "result"], shown), margin={"t": 8}
    )


def _make_row_axis(names: Sequence[str], shown: Sequence[str] | None) -> dict[str, Any]:
    """A y axis with one row per name, the first on top; `shown`: texts below the names."""
    labels = [str(h(n)) for n in names]
    if shown is not None:
        labels = [f"{a}<br>{h(b)}" for a, b in zip(labels, shown, strict=True)]
    return {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": labels, "range": [len(names) - 0.5, -0.5], "showgrid": False}
