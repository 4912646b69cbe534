"""A plot of 2:4 advice: the speed-up of the sparse tactics over the input channels, by kernel size, one panel per setting, as SVG or HTML.

The file is self-contained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, exp, floor, log, log2
from pathlib import Path

from whet.errors import UsageError
from whet.files import replace_atomically
from whet.pruning.sparsity_advice import SparsityAdvice

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 210, 46, 66, 58  # of a panel, in pixels
_COLUMNS = 3
_STEPS = tuple(m * 10.0**k for k in range(9) for m in (0.5, 1.0, 2.0))  # between horizontal lines
_LINES = 8  # at most
_COLOURS = ("#2563a8", "#b45309", "#15803d", "#9333ea", "#be123c", "#555555")  # the last one for all further kinds


@dataclass(frozen=True)
class SpeedupPoint:
    """One layer: `speedup` is dense over sparse time at `channels` input channels."""

    panel: str
    kind: str  # "1x1", "3x3", "linear"
    channels: int
    speedup: float
    name: str


def points_of(advices: Iterable[SparsityAdvice]) -> list[SpeedupPoint]:
    """A point per layer whose dense and sparse tactics were timed, in a panel per setting."""
    rows = [(a, x) for a in advices for x in a.layers]
    return [SpeedupPoint(a.label, x.kind, x.in_channels, x.speedup, x.node) for a, x in rows if x.speedup is not None]


def speedup_svg(points: Sequence[SpeedupPoint], title: str) -> str:
    """Draws the panels; a line connects the geometric means of the layers of one kind. Above the dashed line sparse is faster."""
    panels = list(dict.fromkeys(p.panel for p in points))
    kinds = sorted({p.kind for p in points}, key=lambda k: (k == "linear", k))
    columns = min(_COLUMNS, max(len(panels), 1))
    rows = ceil(len(panels) / columns) if panels else 1
    low, high = min([p.channels for p in points], default=1), max([p.channels for p in points], default=2)
    x0, x1 = floor(log2(low)), max(ceil(log2(high)), floor(log2(low)) + 1)
    top = max(2.0, ceil(4 * max([p.speedup for p in points], default=1.0)) / 4)
    width, height = columns * (_WIDTH + _GAP) + _LEFT, _TOP + rows * (_HEIGHT + _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="ui-sans-serif, system-ui, sans-serif" '
        'font-size="12" style="background: #fff">',
        f'<text x="8" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for i, kind in enumerate(kinds):
        parts.append(f'<circle cx="{14 + 110 * i}" cy="38" r="4" fill="{_colour(kinds, kind)}"/>')
        parts.append(f'<text x="{22 + 110 * i}" y="42">{escape(kind)}</text>')
    if not points:
        parts.append(f'<text x="8" y="{_TOP + 20}">No layer has both a dense and a sparse tactic.</text>')
    for i, panel in enumerate(panels):
        left, above = _LEFT + i % columns * (_WIDTH + _GAP), _TOP + i // columns * (_HEIGHT + _GAP)
        parts += _panel([p for p in points if p.panel == panel], panel, kinds, (left, above), (x0, x1), top)
    return "\n".join([*parts, "</svg>"])


def _colour(kinds: Sequence[str], kind: str) -> str:
    return _COLOURS[min(kinds.index(kind), len(_COLOURS) - 1)]


def _panel(
    points: Sequence[SpeedupPoint], title: str, kinds: Sequence[str], corner: tuple[int, int], powers: tuple[int, int], top: float
) -> list[str]:
    left, above = corner
    x0, x1 = powers

    def at(channels: float, speedup: float) -> tuple[float, float]:
        return left + _WIDTH * (log2(channels) - x0) / (x1 - x0), above + _HEIGHT * (1 - speedup / top)

    parts = [f'<text x="{left}" y="{above - 6}" font-weight="bold">{escape(title)}</text>']
    for power in range(x0, x1 + 1):
        x, _ = at(2**power, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{above}" x2="{x:.1f}" y2="{above + _HEIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{x:.1f}" y="{above + _HEIGHT + 14}" text-anchor="middle" fill="#777">{2**power}</text>')
    step = next(s for s in _STEPS if top / s <= _LINES)
    first = 0 if step <= 1 else 1  # 0 would be drawn over 1
    for factor in sorted({1.0, *(step * k for k in range(first, int(top / step) + 1))}):
        _, y = at(2**x0, factor)
        style = 'stroke="#444" stroke-dasharray="4 3"' if factor == 1 else 'stroke="#e3e3e3"'
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" {style}/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#777">{factor:g}x</text>')
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{above + _HEIGHT + 30}" text-anchor="middle" fill="#777">input channels</text>')
    for kind in kinds:
        mine = [p for p in points if p.kind == kind]
        by_channels: dict[int, list[float]] = {}
        for p in mine:
            by_channels.setdefault(p.channels, []).append(log(p.speedup))
        means = [at(c, exp(sum(v) / len(v))) for c, v in sorted(by_channels.items())]
        if len(means) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in means)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{_colour(kinds, kind)}" stroke-opacity="0.5"/>')
        for p in mine:
            x, y = at(p.channels, p.speedup)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_colour(kinds, kind)}" fill-opacity="0.75">'
                f"<title>{escape(p.name)}: {p.speedup:.2f}x at {p.channels} input channels</title></circle>"
            )
    return parts


def check_plot_path(path: str | Path) -> None:
    """Raises UsageError unless the extension is .svg or .html."""
    if Path(path).suffix.lower() not in (".svg", ".html"):
        raise UsageError(f"--plot={path}: the plot is written as .svg or .html")


def write_speedup_plot(path: str | Path, points: Sequence[SpeedupPoint], title: str) -> None:
    """Writes the plot as .svg or .html. Raises UsageError for another extension or a path that cannot be written."""
    check_plot_path(path)
    svg = speedup_svg(points, title)
    head = f'<!doctype html><html><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    page = svg if Path(path).suffix.lower() == ".svg" else f"{head}<body>{svg}</body></html>"
    try:
        with replace_atomically(path) as part:
            part.write_text(page, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"--plot={path} cannot be written: {e.strerror}; choose another path") from e
