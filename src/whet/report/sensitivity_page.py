"""The page of a sensitivity analysis: the SNR of the outputs with each layer in low precision, and the time that this saves.

It is rendered from the data that `whet debug precision --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.inspector.summary import shorten, shorten_name
from whet.report._figures import Figure, format_hover, plot_bars
from whet.report._html import Html, format_digits, render_table, tag
from whet.report._page import make_page, render_chart

Data = Mapping[str, Any]
_SHOWN = 60  # layers in the chart; the table has all
_NAME = 24  # characters of a layer's name next to its bar


def render_sensitivity_page(data: Data, *, title: str = "sensitivity") -> str:
    """The page as self-contained HTML. `data`: {"precision": ..., "rows": [...], "all_db": ...} as `whet debug precision --json` prints it.

    Raises UsageError if plotly is not installed.
    """
    rows, precision = data["rows"], data["precision"]
    shown = rows[:_SHOWN]
    rest = f" The {len(rows) - len(shown)} least sensitive layers are in the table only." if len(rows) > len(shown) else ""
    about = "Bar: SNR with this layer alone in low precision; short is sensitive. Dot: with this layer and all below it in low precision."
    tiles = [_render_tile(f"{data['all_db']:.1f} dB", f"SNR of the outputs with all {len(rows)} layers in {precision}")]
    if data["float_ms"] is not None and data["low_ms"] is not None:
        tiles.append(_render_tile(f"{format_digits(data['float_ms'])} → {format_digits(data['low_ms'])} ms", f"engine in FP32 and in {precision}"))
    body = [
        tag("h1", title),
        tag("p", f"Sensitivity of the layers to {precision}, on {data['samples']} samples, the most sensitive first.", class_="dim"),
        *(tag("p", note, class_="dim") for note in data["notes"]),
        tag("div", *tiles, class_="tiles"),
        tag("h2", "SNR of the outputs"),
        tag("p", about + rest, class_="dim"),
        tag("div", render_chart("sensitivity", "SNR of the outputs by layer", 90 + 34 * len(shown)), class_="scroll"),
        tag("h2", "Layers"),
        tag("p", tag("input", id="filter", data_table="layers", placeholder="show only layers with…", aria_label="filter the layers")),
        tag("div", _render_layers(rows, precision), class_="limited", id="layers"),
    ]
    return make_page(f"whet: {title}", Html("\n".join(body)), {"sensitivity": _plot_layers(shown)})


def _render_tile(value: str, label: str) -> Html:
    return tag("div", tag("b", value), tag("span", label), class_="tile")


def _plot_layers(rows: Sequence[Data]) -> Figure:
    shown = [f"{r['alone_db']:.1f} dB{_describe_saving(r)}" for r in rows]
    hover = [format_hover(r["layer"], r["op"], text, *_format_below(r)) for r, text in zip(rows, shown, strict=True)]
    names = [shorten(shorten_name(r["layer"]), _NAME) for r in rows]
    figure = plot_bars(names, [r["alone_db"] for r in rows], hover, title="SNR of the outputs against FP32, dB", shown=shown)
    known = [k for k, r in enumerate(rows) if r["from_here_db"] is not None]
    figure["data"].append(
        {"type": "scatter", "mode": "markers", "x": [rows[k]["from_here_db"] for k in known], "y": known, "hoverinfo": "text",
         "hovertext": [hover[k] for k in known], "marker": {"color": "--warm", "size": 9, "line": {"color": "--card", "width": 1}}}
    )  # fmt: skip
    return figure


def _describe_saving(r: Data) -> str:
    ms = r["saved_ms"]
    return "" if ms is None else f", {'saves' if ms > 0 else 'costs'} {format_digits(abs(ms))} ms"


def _format_below(r: Data) -> list[str]:
    return [] if r["from_here_db"] is None else [f"{r['from_here_db']:.1f} dB with all layers below"]


def _render_layers(rows: Sequence[Data], precision: str) -> Html:
    head = ("layer", "op", "alone dB", "from here dB", "own output dB", "FP32 ms", f"{precision} ms", "saves ms")
    cells = [
        (r["layer"], r["op"], *(f"{r[c]:.1f}" if r[c] is not None else "-" for c in ("alone_db", "from_here_db", "tensor_db")),
         *(format_digits(r[c], 4) for c in ("float_ms", "low_ms", "saved_ms")))
        for r in rows
    ]  # fmt: skip
    return render_table(head, cells, right=range(2, len(head)))
