"""A plot of the sensitivity analysis: one bar per layer with its output SNR and the time saved, as SVG or in an HTML page.

The file is self-contained.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from whet.errors import UsageError
from whet.files import replace_atomically
from whet.precision.sensitivity import LayerSensitivity

_ROW, _LEFT, _WIDTH, _TOP, _RIGHT = 18, 330, 560, 54, 150
_NAME = 46  # characters of layer name and op that fit left of the bars
_MOST = 60  # rows drawn; the others are counted in a line
_FLOOR = 90.0  # dB at the end of the scale


def draw_sensitivity_svg(rows: Sequence[LayerSensitivity], title: str, all_db: float) -> str:
    """Draws one bar per row: output SNR in dB with the layer alone rounded (short = sensitive); a dot marks the SNR with all rows below too."""
    shown = rows[:_MOST]
    top = max(_FLOOR, 10.0)

    def at(db: float) -> float:
        return _LEFT + _WIDTH * min(max(db, 0.0), top) / top

    height = _TOP + _ROW * len(shown) + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12" style="background: #fff">',
        f'<text x="8" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="8" y="40" fill="#555">all layers: {all_db:.1f} dB at the outputs. Bar: this layer alone. Dot: this layer and all below.</text>',
    ]
    for db in range(0, int(top) + 1, 10):
        parts.append(f'<line x1="{at(db):.1f}" y1="{_TOP - 6}" x2="{at(db):.1f}" y2="{height - 40}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{at(db):.1f}" y="{height - 26}" text-anchor="middle" fill="#777">{db}</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH / 2:.0f}" y="{height - 8}" text-anchor="middle" fill="#777">SNR of the outputs against FP32, dB</text>')
    for i, r in enumerate(shown):
        y = _TOP + _ROW * i
        share = min(max(r.alone_db, 0.0), 60.0) / 60.0
        colour = f"hsl({130 * share:.0f}, 60%, 48%)"
        most = _NAME - len(r.op)
        name = r.layer if len(r.layer) <= most else "..." + r.layer[3 - most :]
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)} <tspan fill="#888">{escape(r.op)}</tspan></text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 2}" width="{at(r.alone_db) - _LEFT:.1f}" height="{_ROW - 5}" fill="{colour}">'
            f"<title>{escape(r.layer)}: {r.alone_db:.1f} dB alone</title></rect>"
        )
        if r.from_here_db is not None:
            parts.append(f'<circle cx="{at(r.from_here_db):.1f}" cy="{y + _ROW / 2:.1f}" r="3" fill="#222"/>')
        saved = "" if r.saved_ms is None else f", {'saves' if r.saved_ms > 0 else 'costs'} {abs(r.saved_ms):.4f} ms"
        parts.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 12}" fill="#444">{r.alone_db:.1f}{saved}</text>')
    if len(rows) > len(shown):
        parts.append(f'<text x="8" y="{height - 8}" fill="#777">and {len(rows) - len(shown)} less sensitive layers</text>')
    return "\n".join([*parts, "</svg>"])


def write_plot(path: str | Path, rows: Sequence[LayerSensitivity], title: str, all_db: float) -> None:
    """Writes the plot as .svg or .html. Raises UsageError for another extension or a path that cannot be written."""
    svg = draw_sensitivity_svg(rows, title, all_db)
    ending = Path(path).suffix.lower()
    if ending not in (".svg", ".html"):
        raise UsageError(f"--plot={path}: the plot is written as .svg or .html")
    head = f'<!doctype html><html><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    page = svg if ending == ".svg" else f"{head}<body>{svg}</body></html>"
    try:
        with replace_atomically(path) as part:
            part.write_text(page, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"--plot={path} cannot be written: {e.strerror}; choose another path") from e
