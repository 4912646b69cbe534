"""The page of an engine: graph with fused groups, time, roofline, precision and sparsity, memory, candidates and refusals of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.engine import EnginePlan
from whet.inspector.summary import select_relevant_refusals, shorten
from whet.report._figures import PALETTE, Figure, format_hover, make_figure, make_index_axis, plot_bars
from whet.report._graph import plot_graph
from whet.report._html import Html, format_digits, h, render_table, tag
from whet.report._page import make_page, render_chart
from whet.report.engine_data import EngineData, ReportLayer, collect_engine_data

_SHOWN = 40  # candidates and refusals in a layer's table


def render_engine_page(plan: EnginePlan, *, title: str = "", profile: int = 0) -> str:
    """The report of an engine as self-contained HTML, for one optimization profile.

    Times are those that the build recorded. Raises UsageError if plotly is not installed.

    >>> page = whet.report.render_engine_page(whet.read_engine("model.engine"))           # doctest: +SKIP
    """
    d = collect_engine_data(plan, profile)
    colors = _assign_colors(d.layers)
    graph, height = plot_graph(d, colors)
    figures: dict[str, Figure] = {"graph": graph, "roofline": _plot_roofline(d), "precision": _plot_precision(d, colors), "memory": _plot_memory(d)}
    timed = any(x.facts.ms for x in d.layers)
    if timed:
        figures |= {"types": _time_by_type(d, colors), "layers-time": _time_by_layer(d, colors)}
    if d.engine["engines"]:
        figures["engines"] = _plot_engines(d)
    types = len({x.type for x in d.layers})
    body = [
        _render_head(d, title or plan.network.name or "engine"),
        tag("h2", "Graph"),
        tag(
            "p",
            "Layers in execution order. A shaded group is one fused layer with the operations in it; the bar behind a name is the layer's time. "
            "Select a layer for its candidates.",
            class_="dim",
        ),
        tag(
            "div",
            tag("div", render_chart("graph", "Graph of the layers", height), class_="scroll", tabindex="-1"),
            tag("div", tag("p", "Select a layer."), id="detail", aria_live="polite"),
            class_="columns",
        ),
    ]
    if timed:
        body += [
            tag("h2", "Time by layer type"),
            render_chart("types", "Time by layer type", 90 + 34 * types),
            tag("h2", "Time by layer"),
            render_chart("layers-time", "Time by layer in execution order", 300),
        ]
    body += [
        tag("h2", "Roofline"),
        tag("p", f"Operations a second over operations per byte moved. Lines: {d.peaks_of}. A layer close to a line is bound by it.", class_="dim"),
        render_chart("roofline", "Roofline", 430),
        tag("h2", "Precision and sparsity"),
        tag(
            "p",
            "Storage types of each layer in execution order, and the share of zeros in its weights. A diamond runs on a 2:4 kernel, an open "
            "circle has 2:4 weights and runs dense.",
            class_="dim",
        ),
        render_chart("precision", "Precision and sparsity by layer", 400),
        tag("h2", "Memory over time"),
        tag(
            "p",
            "Each rectangle is a tensor in the arena: from the first to the last layer that uses it, at its offset. The line is the "
            "number of bytes in use.",
            class_="dim",
        ),
        render_chart("memory", "Tensors in the arena over time", 360),
        *(
            [tag("h2", "Whole engines that were timed"), render_chart("engines", "Times of whole engines", 90 + 34 * len(d.engine["engines"]))]
            if d.engine["engines"]
            else []
        ),
        _render_table(d),
        _render_passes(d),
        _render_about(d),
    ]
    details = {x.key: _render_detail(x) for x in d.layers}
    return make_page(f"whet: {title or plan.network.name}", Html("\n".join(body)), figures, details)


def _assign_colors(layers: Sequence[ReportLayer]) -> dict[str, str]:
    """A colour per layer type, the most frequent operation first; types after the seventh share one."""
    weight: dict[str, float] = {}
    for x in layers:
        weight[x.type] = weight.get(x.type, 0.0) + (x.facts.ms or 0.0) + 1e-9
    ordered = sorted(weight, key=lambda t: -weight[t])
    return {t: PALETTE[min(k, len(PALETTE) - 1)] for k, t in enumerate(ordered)}


def _render_head(d: EngineData, title: str) -> Html:
    e, report = d.engine, d.plan.report
    weights = sum(x.facts.weight_bytes for x in d.layers)
    launches = sum(not x.facts.choice.tactic.endswith("view") for x in d.layers)
    tiles = [
        (f"{format_digits(e['latency_ms'])} ms" if e["latency_ms"] else "not timed", "median of the whole engine"),
        (f"{e['layers']}", f"layers; {launches} launches, {e['reformats']} reformats"),
        (f"{format_digits(e['flops'] / 1e9)} GFLOP", "operations of a run"),
        (f"{format_digits(e['bytes'] / 1e6)} MB", "moved by a run"),
        (f"{format_digits(weights / 2**20)} MiB", "weights as stored by the kernels"),
        (f"{format_digits(max(e['arena_bytes'], default=0) / 2**20)} MiB", "activations (arena)"),
    ]
    v = report.verification
    if v is None:
        tiles.append(("not verified", "built so, or for a backend that runs nothing"))
    else:
        state = f"{len(v.failures)} failures" if v.failures else f"{v.layers} layers verified"
        tiles.append((state, "" if v.network_error is None else f"network error {v.network_error:.2g}, bound {v.network_bound or 0:.2g}"))
    if report.build_seconds:
        tiles.append((f"{format_digits(report.build_seconds)} s", "build"))
    machine = e["machine"].get("model") or e["machine"].get("name") or ""
    about = f"{e['backend']}, {e['threads']} thread(s), {machine}" + (f" · built {report.built[:16].replace('T', ' ')} UTC" if report.built else "")
    return Html(
        "".join(
            [
                tag("h1", title),
                tag("p", about, class_="dim"),
                tag("div", *(tag("div", tag("b", value), tag("span", what), class_="tile") for value, what in tiles), class_="tiles"),
                *(tag("p", text, class_="dim") for text in e["notes"]),
            ]
        )
    )


def _format_layer_hover(x: ReportLayer) -> str:
    f = x.facts
    ms = "not timed" if f.ms is None else f"{f.ms:.4f} ms" + (f", {x.explanation['percent']:.1f} %" if x.explanation["percent"] is not None else "")
    work = f"{f.flops / 1e6:.4g} MFLOP, {f.bytes / 1e3:.4g} kB" + (f", bound by {f.bound}" if f.bound else "")
    return format_hover(shorten(f.name, 70), f"{x.type}, {x.types}", f"{f.choice.tactic}: {ms}", work)


def _time_by_type(d: EngineData, colors: dict[str, str]) -> Figure:
    groups: dict[str, list[ReportLayer]] = {}
    for x in d.layers:
        groups.setdefault(x.type, []).append(x)
    ordered = sorted(groups, key=lambda t: -_sum_ms(groups[t]))
    total = _sum_ms(d.layers) or 1.0
    values = [_sum_ms(groups[t]) for t in ordered]
    counts = [f"{n} layer{'s' * (n != 1)}" for n in (len(groups[t]) for t in ordered)]
    shown = [f"{v:.4g} ms, {100 * v / total:.1f} %, {n}" for v, n in zip(values, counts, strict=True)]
    hover = [format_hover(t, text) for t, text in zip(ordered, shown, strict=True)]
    return plot_bars(ordered, values, hover, title="ms", shown=shown, colors=[colors[t] for t in ordered])


def _sum_ms(layers: Sequence[ReportLayer]) -> float:
    return sum(x.facts.ms or 0.0 for x in layers)


def _time_by_layer(d: EngineData, colors: dict[str, str]) -> Figure:
    traces = []
    for kind, color in colors.items():
        members = [(k, x) for k, x in enumerate(d.layers) if x.type == kind]
        traces.append(
            {
                "type": "bar",
                "name": str(h(kind)),
                "x": [k for k, _ in members],
                "y": [x.facts.ms or 0.0 for _, x in members],
                "customdata": [x.key for _, x in members],
                "hovertext": [_format_layer_hover(x) for _, x in members],
                "hoverinfo": "text",
                "marker": {"color": color},
            }
        )
    return make_figure(
        traces,
        showlegend=len(traces) > 1,
        xaxis=make_index_axis("layer", len(d.layers)),
        yaxis={"title": {"text": "ms"}},
        bargap=0.15,
        margin={"t": 30},
    )


def _plot_roofline(d: EngineData) -> Figure:
    points = [x for x in d.layers if x.facts.ms and x.facts.flops and x.facts.bytes]
    most = max((x.facts.ms or 0.0 for x in points), default=1.0)
    traces: list[dict[str, Any]] = []
    bounds = {"compute": "--c1", "memory": "--c2", "launch": "--c3"}
    for bound, color in bounds.items():
        members = [x for x in points if x.facts.bound == bound]
        if members:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"bound by {bound}",
                    "x": [x.facts.flops / x.facts.bytes for x in members],
                    "y": [x.facts.flops / (x.facts.ms or 1.0) / 1e6 for x in members],
                    "customdata": [x.key for x in members],
                    "hovertext": [_format_layer_hover(x) for x in members],
                    "hoverinfo": "text",
                    "marker": {"color": color, "opacity": 0.85, "size": [6 + 22 * ((x.facts.ms or 0.0) / most) ** 0.5 for x in members]},
                }
            )
    if points and d.peak_flops and d.peak_bytes:
        low, high = (f(x.facts.flops / x.facts.bytes for x in points) for f in (min, max))
        ridge = d.peak_flops / d.peak_bytes
        at = sorted({low / 2, ridge, max(high, ridge) * 2})
        roof = [min(d.peak_flops, d.peak_bytes * x) / 1e9 for x in at]
        text = f"{format_digits(d.peak_flops / 1e9)} GFLOP/s, {format_digits(d.peak_bytes / 1e9)} GB/s"
        traces.append(
            {"type": "scatter", "mode": "lines", "x": at, "y": roof, "line": {"color": "--grey", "dash": "dash"}, "name": text, "hoverinfo": "skip"}
        )
    return make_figure(
        traces,
        showlegend=True,
        margin={"t": 50},
        xaxis={"type": "log", "dtick": 1, "title": {"text": "operations per byte"}},
        yaxis={"type": "log", "dtick": 1, "title": {"text": "GFLOP/s"}},
    )


def _plot_precision(d: EngineData, colors: dict[str, str]) -> Figure:
    symbols = {"runs sparse": "diamond", "2:4, runs dense": "circle-open", "dense": "circle", "": "square"}
    most = max((x.facts.ms or 0.0 for x in d.layers), default=0.0) or 1.0
    types = sorted({x.types for x in d.layers}, key=lambda t: (t.count(">"), t))
    xs = list(range(len(d.layers)))
    marks = {
        "type": "scatter",
        "mode": "markers",
        "x": xs,
        "y": [types.index(x.types) for x in d.layers],
        "customdata": [x.key for x in d.layers],
        "hovertext": [_format_layer_hover(x) + ("<br>weights: " + format_hover(x.sparse) if x.sparse else "") for x in d.layers],
        "hoverinfo": "text",
        "marker": {
            "color": [colors[x.type] for x in d.layers],
            "symbol": [symbols[x.sparse] for x in d.layers],
            "size": [7 + 13 * ((x.facts.ms or 0.0) / most) ** 0.5 for x in d.layers],
            "line": {"width": 1.5},
        },
    }
    weighted = [(k, x) for k, x in enumerate(d.layers) if x.zeros is not None]
    zeros = {
        "type": "bar",
        "x": [k for k, _ in weighted],
        "y": [100 * (x.zeros or 0.0) for _, x in weighted],
        "yaxis": "y2",
        "customdata": [x.key for _, x in weighted],
        "hovertext": [format_hover(x.short, f"{100 * (x.zeros or 0.0):.2f} % zeros", x.sparse) for _, x in weighted],
        "hoverinfo": "text",
        "marker": {"color": "--accent"},
    }
    axis = {
        "tickmode": "array",
        "tickvals": list(range(len(types))),
        "ticktext": [str(h(t)) for t in types],
        "domain": [0.4, 1],
        "range": [-0.6, len(types) - 0.4],
    }
    return make_figure(
        [marks, zeros],
        yaxis=axis,
        yaxis2={"domain": [0, 0.28], "title": {"text": "% zeros"}, "range": [0, 100]},
        xaxis=make_index_axis("layer", len(d.layers)) | {"anchor": "y2"},
    )


def _plot_memory(d: EngineData) -> Figure:
    names = [x.short for x in d.layers]
    tensors = d.tensors
    rectangles = {
        "type": "bar",
        "x": [(t.first + t.last) / 2 for t in tensors],
        "width": [t.last - t.first + 0.9 for t in tensors],
        "base": [t.offset / 2**20 for t in tensors],
        "y": [t.size / 2**20 for t in tensors],
        "hoverinfo": "text",
        "hovertext": [
            format_hover(
                shorten(t.name, 60),
                f"{format_digits(t.size / 2**10)} KiB at {format_digits(t.offset / 2**10)} KiB",
                f"{names[t.first]} to {names[t.last]}",
            )
            for t in tensors
        ],
        "marker": {"color": [PALETTE[k % 6] for k in range(len(tensors))], "opacity": 0.55, "line": {"color": "--card", "width": 1}},
        "name": "tensors",
    }
    live = [_count_covered_bytes([(t.offset, t.offset + t.size) for t in tensors if t.first <= k <= t.last]) / 2**20 for k in range(len(d.layers))]
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": list(range(len(live))),
        "y": live,
        "line": {"color": "--fg", "shape": "hvh", "width": 1.5},
        "name": "live",
        "hoverinfo": "skip",
    }
    return make_figure([rectangles, line], barmode="overlay", yaxis={"title": {"text": "MiB"}}, xaxis=make_index_axis("layer", len(d.layers)))


def _count_covered_bytes(intervals: Sequence[tuple[int, int]]) -> int:
    """The number of bytes in at least one interval: tensors that are computed in place share theirs."""
    total = end = 0
    for first, last in sorted(intervals):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total


def _plot_engines(d: EngineData) -> Figure:
    rows = d.engine["engines"]
    shown = [f"{format_digits(r['ms'], 4)} ms" for r in rows]
    hover = [format_hover(r["what"], f"{r['ms']:.4f} ms, spread {r['spread_ms']:.4f} ms") for r in rows]
    return plot_bars(
        [shorten(r["what"], 38) for r in rows],
        [r["ms"] for r in rows],
        hover,
        title="ms",
        error=[r["spread_ms"] for r in rows],
        shown=shown,
        colors=["--accent", *("--grey" for _ in rows[1:])],
    )


def _render_table(d: EngineData) -> Html:
    rows = [
        (
            x.short,
            x.type,
            x.types,
            "-" if x.facts.ms is None else f"{x.facts.ms:.4f}",
            "" if x.explanation["percent"] is None else f"{x.explanation['percent']:.1f}",
            x.facts.choice.tactic,
            x.facts.choice.implementation,
            x.facts.bound or "",
            x.sparse,
        )
        for x in d.layers
    ]
    head = ("layer", "type", "types", "ms", "%", "tactic", "kernel", "bound", "weights")
    slowest = max(d.layers, key=lambda x: x.facts.ms or 0.0, default=None)  # selected when the page opens
    shown = render_table(head, rows, right=(3, 4), classes=["start" if x is slowest else None for x in d.layers], keys=[x.key for x in d.layers])
    field = tag("p", tag("input", id="filter", data_table="layers", placeholder="show only layers with…", aria_label="filter the layers"))
    return tag("section", tag("h2", "Layers"), field, tag("div", shown, class_="limited"), id="layers")


def _render_detail(x: ReportLayer) -> Html:
    """What is shown when the layer is selected."""
    e = x.explanation
    parts = [tag("h3", x.facts.name), tag("p", e["why"])]
    work = f"{e['flops'] / 1e6:.4g} MFLOP, {e['bytes'] / 1e3:.4g} kB moved" + (f", bound by {e['bound']}" if e["bound"] else "")
    parts.append(tag("p", f"{x.type} on {e['tactic']} ({e['kernel']}): {work}", class_="dim"))
    if e["sparsity"]:
        parts.append(tag("p", e["sparsity"]["Text"], class_="dim"))
    timed = e["candidates"]
    if timed:
        rows = [
            (f"{c['ms']:.4f}", Html(h(c["tactic"]) + tag("small", f"{c['implementation']} {shorten(c['signature'], 60)}")), c["reason"])
            for c in timed[:_SHOWN]
        ]
        parts += [tag("h3", f"Timed ({len(timed)})"), render_table(("ms", "tactic, kernel, formats", "why not"), rows, right=(0,))]
    refused, others = select_relevant_refusals(e)
    distinct = list(dict.fromkeys((c["tactic"], c["reason"]) for c in refused))
    if distinct:
        parts += [tag("h3", f"Refused ({len(refused)})"), render_table(("tactic", "reason"), distinct[:_SHOWN])]
    if len(distinct) > _SHOWN or len(timed) > _SHOWN:
        parts.append(tag("p", "More: whet explain ENGINE LAYER --json", class_="dim"))
    if others:
        parts.append(tag("p", f"{others} tactics are for other operators", class_="dim"))
    events = [f"{p['pass']}: {p['what']}" for p in e["passes_fired"]] + [f"{p['pass']} did not fire: {p['reason']}" for p in e["skips"]]
    if events:
        parts += [tag("h3", "Passes"), tag("ul", *(tag("li", text) for text in dict.fromkeys(events)))]
    return Html("".join(parts))


def _render_passes(d: EngineData) -> Html:
    e = d.engine
    fired = [(name, k) for name, k in e["passes_fired"].items() if k]
    skips = [(s["pass"], s["layer"], s["reason"]) for s in e["skips"]]
    blocks: list[Any] = [tag("h2", "Passes"), tag("p", ", ".join(f"{n} x{k}" for n, k in fired) or "No pass fired.")]
    if skips:
        blocks.append(
            tag("details", tag("summary", f"Matched without firing ({len(skips)})"), render_table(("pass", "layer", "reason"), skips[:500]))
        )
    return Html("".join(blocks))


def _render_about(d: EngineData) -> Html:
    facts = "\n".join(f"{k}: {v}" for k, v in d.engine["machine"].items())
    notes = "\n".join(d.engine["info"])
    return Html(
        tag("details", tag("summary", "Machine"), tag("pre", facts))
        + (tag("details", tag("summary", "Findings of the build"), tag("pre", notes)) if notes else "")
    )
