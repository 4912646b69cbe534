"""The Pareto plot as inline SVG: time against the metric, one point per trial with a tooltip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

from whet.report._html import Html, h, tag

WIDTH, HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 16, 14, 50
_FAR = 1.3  # times the slowest point's time

Point = Mapping[str, Any]  # x, y, kind (scout, original, survivor), chosen, front, name, lines


def pareto_plot(points: Sequence[Point], *, x_name: str, y_name: str, limit_x: float | None, limit_y: float | None, higher: bool = True) -> Html:
    """The plot. `limit_x`: largest time that meets the target; `limit_y`: worst metric that meets it.

    Points far below the limit are drawn at the lower edge, so that one bad trial does not flatten the rest; a limit far to the right of all
    points is drawn at the right edge. The tab key focuses one point, the arrow keys move to the others (search_page.html).
    """
    if not points:
        return tag("p", "No trial finished.")
    farthest = max(p["x"] for p in points)
    some = limit_x is not None or limit_y is not None
    if limit_x is not None and limit_x > _FAR * farthest:
        limit_x = None
    x0, x1 = 0.0, max(farthest, limit_x or 0.0) * 1.05
    y0, y1 = _range([p["y"] for p in points], limit_y, higher)

    def sx(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (x - x0) / (x1 - x0)

    def sy(y: float) -> float:
        share = (min(max(y, y0), y1) - y0) / (y1 - y0)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    parts: list[Html] = []
    if some:
        left, right = sx(x0), sx(limit_x) if limit_x is not None else sx(x1)
        ends = sorted((sy(limit_y) if limit_y is not None else sy(y0 if higher else y1), sy(y1 if higher else y0)))
        parts.append(tag("rect", x=f"{left:.1f}", y=f"{ends[0]:.1f}", width=f"{right - left:.1f}", height=f"{ends[1] - ends[0]:.1f}", class_="goal"))
        parts.append(tag("text", "meets the target", x=f"{right - 8:.1f}", y=f"{ends[1] - 8:.1f}", text_anchor="end", class_="goaltext"))
    for v in _ticks(x0, x1):
        parts.append(_line(sx(v), _TOP, sx(v), HEIGHT - _BOTTOM, "grid"))
        parts.append(tag("text", _short(v), x=f"{sx(v):.1f}", y=HEIGHT - _BOTTOM + 17, text_anchor="middle"))
    for v in _ticks(y0, y1):
        parts.append(_line(_LEFT, sy(v), WIDTH - _RIGHT, sy(v), "grid"))
        parts.append(tag("text", _short(v), x=_LEFT - 8, y=f"{sy(v) + 4:.1f}", text_anchor="end"))
    parts.append(tag("text", x_name, x=(WIDTH + _LEFT) // 2, y=HEIGHT - 8, text_anchor="middle", class_="axis"))
    parts.append(tag("text", y_name, x=14, y=HEIGHT // 2, text_anchor="middle", class_="axis up", transform=f"rotate(-90 14 {HEIGHT // 2})"))
    front = sorted((p for p in points if p.get("front") and y0 <= p["y"] <= y1), key=lambda p: p["x"])
    if len(front) > 1:
        way = " ".join(f"{sx(p['x']):.1f},{sy(p['y']):.1f}" for p in front)
        parts.append(tag("polyline", points=way, class_="front"))
    order = {"scout": 0, "original": 1, "survivor": 2}
    drawn = sorted(points, key=lambda p: (bool(p.get("chosen")), order[p["kind"]]))
    for p in drawn:
        parts.append(_mark(p, sx(p["x"]), sy(p["y"]), outside=not y0 <= p["y"] <= y1, reached=p is drawn[-1]))
    label = f"{y_name} against {x_name}; arrow keys move between points"
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", id="pareto", role="group", aria_label=label)


def _mark(p: Point, x: float, y: float, outside: bool, reached: bool) -> Html:
    """A circle for a scout, a square for the original, a diamond for a survivor; a triangle for one beyond the edge.

    `reached`: it can be focused with the tab key.
    """
    kind = p["kind"]
    if outside:
        shape = tag("path", d=f"M{x - 5:.1f},{y - 6:.1f} h10 l-5,8 z")
    elif kind == "scout":
        shape = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4.5")
    elif kind == "original":
        shape = tag("rect", x=f"{x - 5:.1f}", y=f"{y - 5:.1f}", width="10", height="10")
    else:
        shape = tag("path", d=f"M{x:.1f},{y - 7:.1f} l7,7 l-7,7 l-7,-7 z")
    ring = [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="11", class_="ring")] if p.get("chosen") else []
    text = "\n".join([p["name"], *p["lines"]])
    classes = " ".join(["pt", kind, *(["chosen"] if p.get("chosen") else [])])
    spoken = h(text.replace("\n", ", "))
    return tag("g", *ring, shape, class_=classes, data_tip=text, tabindex="0" if reached else "-1", role="img", aria_label=spoken)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=kind)


def _range(values: Sequence[float], limit: float | None, higher: bool) -> tuple[float, float]:
    """The visible range of the metric: the best value, the limit, and three times their distance below it."""
    best = max(values) if higher else min(values)
    worst = min(values) if higher else max(values)
    if limit is not None and best != limit:
        far = limit - 3 * (best - limit)
        worst = max(worst, far) if higher else min(worst, far)
    low, high = sorted((best, worst))
    room = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers in [low, high]."""
    rough = (high - low) / 6
    power = 10 ** floor(log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = ceil(low / step)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]


def _short(v: float) -> str:
    return f"{v:.6g}"
