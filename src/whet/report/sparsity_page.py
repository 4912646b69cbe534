"""The page of 2:4 advice: the speed-up of the sparse kernels over the input channels, the advice for each setting, and the layers.

It is rendered from the data that `whet sparsity --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, floor, log, log2, log10
from typing import Any

from whet.inspector.summary import shorten_name
from whet.report._figures import PALETTE, Figure, format_hover, make_figure
from whet.report._html import Html, format_digits, h, render_table, tag
from whet.report._page import make_page, render_chart

Data = Mapping[str, Any]
_NOTHING = "No layer has both a dense and a sparse tactic."
_MARGIN = 0.2  # powers of two left and right of the points


def render_sparsity_page(data: Data, *, title: str = "2:4 sparsity") -> str:
    """The page as self-contained HTML. `data`: {"settings": [...]} as `whet sparsity --json` prints it, one setting per batch and precision.

    Raises UsageError if plotly is not installed.
    """
    settings = data["settings"]
    nodes = list(dict.fromkeys(x["node"] for s in settings for x in s["layers"]))
    keys = {node: str(k) for k, node in enumerate(nodes)}
    timed = [s for s in settings if any(x["speedup"] for x in s["layers"])]
    figures = {f"setting{k}": _plot_speedups(timed, k, keys) for k in range(len(timed))}
    note = "A point is a layer; a line connects the geometric means of one kind of layers. Above the dashed line the sparse kernel is faster."
    plots = [
        tag("section", tag("h3", _format_label(s)), render_chart(f"setting{k}", f"Speed-up of 2:4 sparse kernels, {_format_label(s)}", 320))
        for k, s in enumerate(timed)
    ]
    body = [
        tag("h1", title),
        tag("p", f"2:4 sparse against dense kernels on {settings[0]['backend']}, as if the weights of each layer were 2:4 already.", class_="dim"),
        _render_verdicts(settings),
        *(tag("p", text, class_="dim") for text in dict.fromkeys(s["load"] for s in settings) if text),
        tag("h2", "Speed-up over the input channels"),
        *([tag("p", note, class_="dim"), tag("div", *plots, class_="pairs")] if plots else [tag("p", _NOTHING)]),
        tag("h2", "Sum of the layers, and whole engines"),
        _render_settings(settings),
        tag("h2", "Layers"),
        tag("p", "Speed-up: dense over sparse time. Removed: the share of the weights' magnitude that 2:4 takes.", class_="dim"),
        tag(
            "div",
            tag("section", _render_filter_field(), tag("div", _render_layers(settings, keys), class_="limited"), id="layers"),
            tag("div", tag("p", "Select a row."), id="detail", aria_live="polite"),
            class_="columns",
        ),
    ]
    return make_page(f"whet: {title}", Html("\n".join(body)), figures, {key: _render_detail(settings, node) for node, key in keys.items()})


def _format_label(s: Data) -> str:
    """The setting in a few characters."""
    return s["precision"] + ("" if s["batch"] is None else f", batch {s['batch']}")


def _render_filter_field() -> Html:
    return tag("p", tag("input", id="filter", data_table="layers", placeholder="show only layers with…", aria_label="filter the layers"))


def _render_verdicts(settings: Sequence[Data]) -> Html:
    """Each verdict once, with the settings that it is for."""
    labels: dict[str, list[str]] = {}
    for s in settings:
        labels.setdefault(s["verdict"], []).append(_format_label(s))
    if len(labels) == 1:
        return tag("p", settings[0]["verdict"], class_="verdict")
    return tag("ul", *(tag("li", tag("b", "; ".join(names)), ": ", verdict) for verdict, names in labels.items()))


def _plot_speedups(settings: Sequence[Data], index: int, keys: Mapping[str, str]) -> Figure:
    """The speed-up of each layer of one setting. All settings have equal axes and colours."""
    layers = [x for s in settings for x in s["layers"] if x["speedup"]]
    kinds = sorted({x["kind"] for x in layers}, key=lambda kind: (kind == "linear", kind))
    channels = [x["in_channels"] for x in layers]
    first, last = floor(log2(min(channels))), max(ceil(log2(max(channels))), floor(log2(min(channels))) + 1)
    top = max(1.5, *(x["speedup"] for x in layers)) * 1.08
    traces: list[dict[str, Any]] = []
    for k, kind in enumerate(kinds):
        members = [x for x in settings[index]["layers"] if x["speedup"] and x["kind"] == kind]
        logs: dict[int, list[float]] = {}
        for x in members:
            logs.setdefault(x["in_channels"], []).append(log(x["speedup"]))
        means = {c: exp(sum(v) / len(v)) for c, v in sorted(logs.items())}
        color = PALETTE[k % len(PALETTE)]
        traces += [
            {"type": "scatter", "mode": "lines", "x": list(means), "y": list(means.values()), "line": {"color": color, "width": 1.5}, "opacity": 0.6,
             "hoverinfo": "skip", "showlegend": False, "legendgroup": kind},
            {"type": "scatter", "mode": "markers", "name": str(h(kind)), "legendgroup": kind, "x": [x["in_channels"] for x in members],
             "y": [x["speedup"] for x in members], "customdata": [keys[x["node"]] for x in members], "hoverinfo": "text", "cliponaxis": False,
             "hovertext": [_format_layer_hover(x) for x in members], "marker": {"color": color, "size": 9, "opacity": 0.8}},
        ]  # fmt: skip
    powers = [2**p for p in range(first, last + 1)]
    dashed = {"color": "--fg", "dash": "dash", "width": 1}
    equal = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": dashed, "layer": "below"}
    visible = [log10(2 ** (first - _MARGIN)), log10(2 ** (last + _MARGIN))]  # plotly takes the logarithms
    return make_figure(
        traces,
        showlegend=True,
        shapes=[equal],
        xaxis={"title": {"text": "input channels"}, "type": "log", "range": visible, "tickvals": powers, "ticktext": [str(p) for p in powers]},
        yaxis={"title": {"text": "dense over sparse time"}, "range": [0, top], "ticksuffix": "x", "tickformat": "~r"},
        margin={"t": 34},
    )  # fmt: skip


def _format_layer_hover(x: Data) -> str:
    times = f"dense {x['dense_ms']:.4f} ms, sparse {x['sparse_ms']:.4f} ms"
    return format_hover(x["node"], f"{x['speedup']:.2f}x at {x['in_channels']} input channels", times, x["reason"])


def _render_settings(settings: Sequence[Data]) -> Html:
    """The prediction and the measured engines of each setting."""
    head = ("setting", "layers ms", "saved ms", "predicted", "engine ms", "engine with 2:4 ms", "measured", "95 % interval")
    rows = []
    for s in settings:
        e = s["engine"]
        measured = ("-",) * 4
        if e is not None:
            low, high = e["saved_interval"]
            measured = (
                format_digits(e["dense_ms"], 4),
                format_digits(e["sparse_ms"], 4),
                f"{e['measured_share']:+.1%}",
                f"{low:+.1%} to {high:+.1%}",
            )
        rows.append(
            (
                _format_label(s),
                format_digits(s["total_ms"] + s["other_ms"], 4),
                format_digits(s["saved_ms"]),
                f"{s['predicted_share']:.1%}",
                *measured,
            )
        )
    return render_table(head, rows, right=range(1, len(head)))


def _find(s: Data, node: str) -> Data | None:
    return next((x for x in s["layers"] if x["node"] == node), None)


def _format_gain(x: Data | None) -> str:
    return "-" if x is None or x["speedup"] is None else f"{x['speedup']:.2f}x"


def _render_layers(settings: Sequence[Data], keys: Mapping[str, str]) -> Html:
    """A row per layer with its speed-up in each setting; dim if 2:4 pays in none."""
    rows, classes = [], []
    for node in keys:
        found = [_find(s, node) for s in settings]
        known = [x for x in found if x is not None]
        x = known[0]
        removed = "-" if x["removed_magnitude"] is None else f"{x['removed_magnitude']:.0%}"
        rows.append((shorten_name(node), x["kind"], f"{x['in_channels']}-{x['out_channels']}", removed, *map(_format_gain, found)))
        classes.append(None if any(x["saved_ms"] > 0 for x in known) else "rejected")
    head = ("layer", "kernel", "channels", "removed", *map(_format_label, settings))
    return render_table(head, rows, right=range(2, len(head)), classes=classes, keys=list(keys.values()))


def _render_detail(settings: Sequence[Data], node: str) -> Html:
    """Times and the result of a layer in each setting."""
    parts = [tag("h3", node)]
    for s in settings:
        x = _find(s, node)
        if x is None:
            continue
        rows = [
            ("dense", format_digits(x["dense_ms"], 4), x["dense_tactic"] or "-"),
            ("2:4", format_digits(x["sparse_ms"], 4), x["sparse_tactic"] or "-"),
        ]
        result = x["reason"] or f"saves {format_digits(x['saved_ms'])} ms"
        parts += [tag("h3", _format_label(s)), tag("p", result), render_table(("weights", "ms", "tactic"), rows, right=(1,))]
    return Html("".join(parts))
