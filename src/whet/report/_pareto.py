"""The Pareto plot of a search: time against the metric, one point per trial and per compared engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.report._figures import Figure, format_hover, make_figure
from whet.report._html import h

_FAR = 1.3  # times the slowest point's time
_LEAST_SPAN = 0.01  # of the best value; without it a difference of one sample would fill the plot
_KINDS = {  # kind -> name, colour, symbol
    "scout": ("trial (short recovery)", "--grey", "circle"),
    "original": ("original", "--warm", "square"),
    "survivor": ("survivor (full recovery)", "--accent", "diamond"),
}

Point = Mapping[str, Any]  # x, y, kind (scout, original, survivor), chosen, front, name, lines


def plot_pareto(points: Sequence[Point], *, x_name: str, y_name: str, limit_x: float | None, limit_y: float | None, higher: bool = True) -> Figure:
    """The figure. `limit_x`: largest time that meets the target; `limit_y`: worst metric that meets it.

    Points far below the limit are drawn at the lower edge, so that one bad trial does not flatten the rest; a limit far to the right of all
    points is drawn at the right edge.
    """
    farthest = max(p["x"] for p in points)
    targeted = limit_x is not None or limit_y is not None
    if limit_x is not None and limit_x > _FAR * farthest:
        limit_x = None
    x1 = max(farthest, limit_x or 0.0) * 1.05
    y0, y1 = _compute_range([p["y"] for p in points], limit_y, higher)
    front = _find_staircase([p for p in points if p.get("front") and y0 <= p["y"] <= y1], higher)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [p["x"] for p in front],
            "y": [p["y"] for p in front],
            "line": {"color": "--accent", "width": 1.5},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    beneath = _find_hidden_points(points, x1, y1 - y0)
    for kind, (name, color, symbol) in _KINDS.items():
        members = [p for p in points if p["kind"] == kind]
        outside = [not y0 <= p["y"] <= y1 for p in members]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [p["x"] for p in members],
                "y": [min(max(p["y"], y0), y1) for p in members],
                "hovertext": [format_hover(p["name"], *p["lines"], *beneath[id(p)]) for p in members],
                "hoverinfo": "text",
                "customdata": [str(h(p["name"])) for p in members],
                "cliponaxis": False,
                "marker": {
                    "color": color,
                    "symbol": ["triangle-down" if o else symbol for o in outside],
                    "size": 10,
                    "opacity": 0.8,
                    "line": {"color": "--fg", "width": [3 if p.get("chosen") else 0 for p in members]},
                },
            }
        )
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    if targeted:
        low, high = sorted((limit_y if limit_y is not None else (y0 if higher else y1), y1 if higher else y0))
        right = limit_x if limit_x is not None else x1
        corner = {"x": right, "xanchor": "right", "y": max(low, y0), "yanchor": "bottom", "showarrow": False}
        notes = [{"text": "meets the target", "font": {"color": "--dim"}, **corner}]
        shapes = [
            {
                "type": "rect",
                "x0": 0,
                "x1": right,
                "y0": low,
                "y1": high,
                "fillcolor": "--goal",
                "line": {"color": "--accent", "dash": "dash"},
                "layer": "below",
            }
        ]
    return make_figure(
        traces,
        showlegend=True,
        shapes=shapes,
        annotations=notes,
        xaxis={"title": {"text": str(h(x_name))}, "range": [0, x1]},
        yaxis={"title": {"text": str(h(y_name))}, "range": [y0, y1]},
        margin={"t": 40},
    )


def _find_staircase(points: Sequence[Point], higher: bool) -> list[Point]:
    """The points that are better than all to their left, by x: noise also keeps others in the Pareto set, which would make the line a zigzag."""
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p["x"], -p["y"] if higher else p["y"])):
        if not found or (p["y"] > found[-1]["y"] if higher else p["y"] < found[-1]["y"]):
            found.append(p)
    return found


def _find_hidden_points(points: Sequence[Point], width: float, height: float) -> dict[int, list[str]]:
    """For each point the names of those at the same place, which its mark hides."""
    cells: dict[tuple[int, int], list[Point]] = {}
    for p in points:
        cells.setdefault((round(150 * p["x"] / (width or 1)), round(75 * p["y"] / (height or 1))), []).append(p)
    texts = {}
    for members in cells.values():
        for p in members:
            others = [o for o in members if o is not p]
            named = [f"{o['name']}: {o['lines'][0] if o['lines'] else ''}" for o in others[:6]]
            texts[id(p)] = [f"{len(others)} more here", *named, *(["…"] if len(others) > 6 else [])] if others else []
    return texts


def _compute_range(values: Sequence[float], limit: float | None, higher: bool) -> tuple[float, float]:
    """The visible range of the metric: the best value, the limit, and three times their distance below it."""
    best = max(values) if higher else min(values)
    worst = min(values) if higher else max(values)
    if limit is not None and best != limit:
        far = limit - 3 * (best - limit)
        worst = max(worst, far) if higher else min(worst, far)
    low, high = sorted((best, worst))
    room = max((high - low) * 0.08, (_LEAST_SPAN * abs(best) - (high - low)) / 2) or 1.0
    return low - room, high + room
