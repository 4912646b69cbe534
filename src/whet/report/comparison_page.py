"""The page of a comparison of engines: latencies with intervals, what each difference is worth, and the layers side by side.

It is rendered from the data that `whet compare --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.inspector.alignment import format_setting
from whet.inspector.summary import shorten, shorten_name
from whet.report._figures import PALETTE, Figure, format_hover, make_figure, make_index_axis, plot_bars
from whet.report._html import Html, format_digits, h, render_table, tag
from whet.report._page import make_page, render_chart

Data = Mapping[str, Any]
_SHOWN = 60  # groups of layers in the chart; the table has all


def render_comparison_page(data: Data, *, title: str = "comparison", about: str = "") -> str:
    """The page as self-contained HTML. `data`: {"engines": [...], "settings": {...}, "layers": [...]} as `whet compare --json` prints it;
    `about`: text below the title.

    Raises UsageError if plotly is not installed.
    """
    engines, groups = data["engines"], data["layers"]
    figures: dict[str, Figure] = {"latency": _plot_latency(engines)}
    changed = [g for g in groups if not g["same_choices"]]
    body = [
        tag("h1", title),
        *([tag("p", about, class_="dim")] if about else []),
        _render_verdicts(engines),
        tag("h2", "Latency"),
        tag("p", "Medians of engines timed interleaved on equal inputs; the whiskers end at the 95 % interval.", class_="dim"),
        render_chart("latency", "Latency of each engine", 90 + 34 * len(engines)),
    ]
    if len(engines) > 1:
        figures["change"] = _plot_change(engines)
        body += [tag("h2", f"Time compared with {engines[0]['name']}"), render_chart("change", "Change of the time", 90 + 34 * (len(engines) - 1))]
    body += [tag("h2", "Engines"), _render_engines(engines)]
    names = [e["name"] for e in engines if "layers" in e]  # engines of other tools have no layers
    if settings := data.get("settings"):
        rows = [(name, *(format_setting(v) for v in values)) for name, values in settings.items()]
        body += [tag("h3", "Options and machines that differ"), render_table(("", *names), rows)]
    details: dict[str, Html] = {}
    if groups:
        figures["groups"] = _plot_groups(names, groups)
        details = {str(k): _render_detail(names, g) for k, g in enumerate(groups)}
        count = f"{len(changed)} of {len(groups)} groups of layers"
        shown = f"{count} differ in kernels, types, formats or fusion." if changed else "All layers run alike."
        about = "Layers aligned by the nodes of the model that they compute, timed launch by launch, with the engines interleaved."
        body += [
            tag("h2", "Layer by layer"),
            tag("p", f"{about} {shown}", class_="dim"),
            render_chart("groups", "Times of aligned layers", 360),
            tag(
                "div",
                tag("section", _render_filter_field(), tag("div", _render_layers(names, groups), class_="limited"), id="layers"),
                tag("div", tag("p", "Select a row."), id="detail", aria_live="polite"),
                class_="columns",
            ),
        ]
    return make_page(f"whet: {title}", Html("\n".join(body)), figures, details)


def _render_filter_field() -> Html:
    return tag("p", tag("input", id="filter", data_table="layers", placeholder="show only layers with…", aria_label="filter the layers"))


def _render_verdicts(engines: Sequence[Data]) -> Html:
    texts = [f"{e['name']}: {e['verdict']}" for e in engines[1:]]
    return tag("ul", *(tag("li", text) for text in texts)) if texts else Html("")


def _plot_latency(engines: Sequence[Data]) -> Figure:
    values = [e["latency_ms"] for e in engines]
    hover = [format_hover(e["name"], f"{e['latency_ms']:.4f} ms, 95 %: {e['interval_ms'][0]:.4f} to {e['interval_ms'][1]:.4f}") for e in engines]
    best = min(range(len(engines)), key=lambda k: values[k])
    return plot_bars(
        [shorten(e["name"], 30) for e in engines],
        values,
        hover,
        title="ms",
        shown=[f"{format_digits(v, 4)} ms" for v in values],
        error=[max(e["interval_ms"][1] - e["latency_ms"], 0.0) for e in engines],
        error_left=[max(e["latency_ms"] - e["interval_ms"][0], 0.0) for e in engines],
        colors=["--accent" if k == best else "--grey" for k in range(len(engines))],
    )


def _plot_change(engines: Sequence[Data]) -> Figure:
    """Bars to the right are slower than the first engine; grey where the interval includes no change."""
    rest = engines[1:]
    values = [100 * e["change"] for e in rest]
    low, high = ([100 * e["change_interval"][k] for e in rest] for k in (0, 1))
    colors = ["--grey" if a <= 0 <= b else "--warm" if v > 0 else "--accent" for v, a, b in zip(values, low, high, strict=True)]
    shown = plot_bars(
        [shorten(e["name"], 30) for e in rest],
        values,
        [format_hover(e["name"], e["verdict"]) for e in rest],
        title="% of time (left: faster)",
        shown=[f"{v:+.1f} %" for v in values],
        error=[max(b - v, 0.0) for v, b in zip(values, high, strict=True)],
        error_left=[max(v - a, 0.0) for v, a in zip(values, low, strict=True)],
        colors=colors,
    )
    shown["layout"]["xaxis"].pop("rangemode")
    return shown


def _render_engines(engines: Sequence[Data]) -> Html:
    head = ("engine", "ms", "95 % interval", "change", "build s", "launches", "MB moved", "SNR dB", "largest difference")
    rows = [
        (
            e["name"],
            format_digits(e["latency_ms"], 4),
            f"{format_digits(e['interval_ms'][0], 4)} to {format_digits(e['interval_ms'][1], 4)}",
            "" if k == 0 else f"{100 * e['change']:+.1f} %",
            *((format_digits(e["build_seconds"]), e["layers"], format_digits(e["mb_moved"])) if "layers" in e else ("", "", "")),
            "" if k == 0 else "equal" if e["max_error"] == 0 else format_digits(e["snr_db"]),
            "" if k == 0 else format_digits(e["max_error"]),
        )
        for k, e in enumerate(engines)
    ]
    return render_table(head, rows, right=range(1, len(head)), classes=["chosen", *(None for _ in rows[1:])])


def _sum_ms(layers: Sequence[Data]) -> float | None:
    times = [x["ms"] for x in layers]
    return None if not times or None in times else sum(times)


def _format_group_name(group: Data) -> str:
    return shorten_name(" + ".join(group["nodes"])) if group["nodes"] else "(added by the builder)"


def _plot_groups(names: Sequence[str], groups: Sequence[Data]) -> Figure:
    """The slowest groups, in the order of the network."""
    weight = {k: max((_sum_ms(x) or 0.0) for x in g["engines"]) for k, g in enumerate(groups)}
    kept = sorted(sorted(weight, key=lambda k: -weight[k])[:_SHOWN])
    traces = []
    for e, name in enumerate(names):
        times = [_sum_ms(groups[k]["engines"][e]) for k in kept]
        hover = [
            format_hover(
                _format_group_name(groups[k]), name, "not timed" if t is None else f"{t:.4f} ms", *(x["tactic"] for x in groups[k]["engines"][e][:6])
            )
            for k, t in zip(kept, times, strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "name": str(h(shorten(name, 30))),
                "x": list(range(len(kept))),
                "y": [t or 0.0 for t in times],
                "customdata": [str(k) for k in kept],
                "hovertext": hover,
                "hoverinfo": "text",
                "marker": {"color": PALETTE[e % len(PALETTE)]},
            }
        )
    return make_figure(
        traces,
        showlegend=True,
        barmode="group",
        yaxis={"title": {"text": "ms"}},
        margin={"t": 30},
        xaxis=make_index_axis("group of layers, in the order of the network", len(kept)),
    )


def describe_difference(g: Data) -> str:
    """Differences between the engines in a group of layers."""
    if g["same_choices"]:
        return ""
    if not g["same_fusion"]:
        return "fused differently"
    parts = {"kernels": ("tactic", "kernel"), "types": ("types",)}
    found = [name for name, keys in parts.items() if len({tuple(x[k] for x in layers for k in keys) for layers in g["engines"]}) > 1]
    return ", ".join(found) or "formats"


def _render_layers(names: Sequence[str], groups: Sequence[Data]) -> Html:
    rows, classes = [], []
    for g in groups:
        rows.append(
            (
                _format_group_name(g),
                *(format_digits(_sum_ms(x), 4) for x in g["engines"]),
                describe_difference(g),
            )
        )
        classes.append("rejected" if g["same_choices"] else None)
    head = ("layers", *(f"{shorten(n, 24)} ms" for n in names), "difference")
    return render_table(head, rows, right=range(1, 1 + len(names)), classes=classes, keys=[str(k) for k in range(len(groups))])


def _render_detail(names: Sequence[str], group: Data) -> Html:
    parts = [tag("h3", _format_group_name(group)), tag("p", ", ".join(group["nodes"]) or "Layers without a node of the model.", class_="dim")]
    for name, layers in zip(names, group["engines"], strict=True):
        rows = [(format_digits(x["ms"], 4), Html(h(x["tactic"]) + tag("small", f"{x['kernel']} {x['types']}")), x["layer"]) for x in layers]
        parts += [tag("h3", name), render_table(("ms", "tactic, kernel, types", "layer"), rows, right=(0,)) if rows else tag("p", "no layer")]
    return Html("".join(parts))
