"""The graph of an engine as a figure: a row per operation, lanes of live tensors, fused layers as shaded groups, times as bars under the names."""

from __future__ import annotations

from typing import Any

from whet.inspector.summary import shorten, shorten_name
from whet.report._figures import Figure, format_hover, make_figure
from whet.report._html import h
from whet.report._lanes import assign_lanes
from whet.report.engine_data import EngineData, ReportLayer

ROW = 22  # pixels
_MOST_ROWS = 700  # larger graphs have one row per layer
_LABEL, _UNIT = 100.0, 3.0  # the x axis: lanes of 3 units left of 0, labels and bars from 0 to 100


def plot_graph(d: EngineData, colors: dict[str, str]) -> tuple[Figure, int]:
    """The figure and its height in pixels. `colors`: by layer type."""
    expand = sum(len(x.parts) for x in d.layers) <= _MOST_ROWS
    nodes = [
        ([t.name for t in x.facts.layer.inputs if t is not None and not t.is_constant], [t.name for t in x.facts.layer.outputs]) for x in d.layers
    ]
    lanes = assign_lanes(nodes)
    unit = _UNIT if lanes.width < 12 else 36.0 / lanes.width

    def compute_lane_x(lane: int) -> float:
        return unit * (lane - lanes.width)

    row = 0
    places, rows = [], []  # first row of each layer; (row, layer, text, is a fused layer's part)
    for x in d.layers:
        places.append(row)
        if expand and len(x.parts) > 1:
            members = [(f"{op} {shorten_name(node, 44)}" if node else op) for op, node in x.parts]
            rows += [(row + i, x, text, i > 0) for i, text in enumerate(members)]
            row += len(members)
        else:
            rows.append((row, x, x.short if len(x.parts) > 1 or x.short.startswith(x.parts[0][0]) else f"{x.parts[0][0]} {x.short}", False))
            row += 1
    ends = [*places[1:], row]
    traces = [_draw_edges(lanes.edges, places, ends, [compute_lane_x(n) for n in range(lanes.width)], lanes.lane), _draw_bars(d, places, ends)]
    index = {x.key: k for k, x in enumerate(d.layers)}
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [compute_lane_x(lanes.lane[index[x.key]]) for _, x, _, _ in rows],
            "y": [r for r, *_ in rows],
            "customdata": [x.key for _, x, _, _ in rows],
            "hovertext": [_format_layer_hover(x) for _, x, _, _ in rows],
            "hoverinfo": "text",
            "marker": {"size": [6 if part else 11 for *_, part in rows], "color": [colors[x.type] for _, x, _, _ in rows], "line": {"width": 0}},
        }
    )
    traces.append(
        {
            "type": "scatter",
            "mode": "text",
            "x": [1.0] * len(rows),
            "y": [r for r, *_ in rows],
            "text": [_format_label(x, text, part) for _, x, text, part in rows],
            "textposition": "middle right",
            "textfont": {"size": 11.5},
            "hoverinfo": "skip",
            "cliponaxis": True,
        }
    )
    groups = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "y",
            "x0": compute_lane_x(lanes.lane[k]) - unit * 0.45,
            "x1": _LABEL,
            "y0": places[k] - 0.42,
            "y1": ends[k] - 0.58,
            "fillcolor": colors[x.type],
            "opacity": 0.13,
            "line": {"width": 0},
            "layer": "below",
        }
        for k, x in enumerate(d.layers)
        if ends[k] - places[k] > 1
    ]
    hidden: dict[str, Any] = {"visible": False, "fixedrange": True}
    shown = make_figure(
        traces,
        xaxis={**hidden, "range": [compute_lane_x(0) - unit, _LABEL]},
        yaxis={**hidden, "range": [row - 0.2, -0.8]},
        shapes=groups,
        barmode="overlay",
        margin={"l": 4, "r": 4, "t": 4, "b": 4},
    )
    return shown, max(ROW * row + 20, 120)


def _format_label(x: ReportLayer, text: str, part: bool) -> str:
    ms = "" if part or x.facts.ms is None else f"{x.facts.ms:.3f} ms  "
    return f"{ms}{h(shorten(text, 56))}"


def _format_layer_hover(x: ReportLayer) -> str:
    f = x.facts
    return format_hover(
        shorten(f.name, 70), f"{x.type}, {x.types}", f"{f.choice.tactic} {f.choice.implementation}", "" if f.ms is None else f"{f.ms:.4f} ms"
    )


def _draw_edges(edges: list[tuple[int, int, int]], places: list[int], ends: list[int], xs: list[float], lane: list[int]) -> dict[str, Any]:
    """Lines from the producer along the tensor's lane to the consumer, as one trace with gaps."""
    x: list[float | None] = []
    y: list[float | None] = []
    for start, end, at in edges:
        begin, target = ends[start] - 1, places[end]
        x += [xs[lane[start]], xs[at], xs[at], xs[lane[end]], None]
        y += [begin, begin + (0.5 if at != lane[start] else 0), max(target - 0.6, begin), target, None]
    for k, (first, last) in enumerate(zip(places, ends, strict=True)):  # operations of one fused layer
        if last - first > 1:
            x += [xs[lane[k]], xs[lane[k]], None]
            y += [first, last - 1, None]
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": {"color": "--grey", "width": 1.4}, "hoverinfo": "skip", "connectgaps": False}


def _draw_bars(d: EngineData, places: list[int], ends: list[int]) -> dict[str, Any]:
    """Times as bars under the names; the longest one fills the column."""
    most = max((x.facts.ms or 0.0 for x in d.layers), default=0.0) or 1.0
    return {
        "type": "bar",
        "orientation": "h",
        "x": [(_LABEL - 1) * (x.facts.ms or 0.0) / most for x in d.layers],
        "y": places,
        "base": [0.5] * len(places),
        "width": [0.86] * len(places),
        "marker": {"color": "--accent", "opacity": 0.25},
        "hoverinfo": "text",
        "hovertext": [_format_layer_hover(x) for x in d.layers],
        "customdata": [x.key for x in d.layers],
        "meta": "unmarked",
    }
