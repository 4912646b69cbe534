"""HTML generation: all values are escaped here and only here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_VOID = ("br", "hr", "img", "input", "link", "meta")  # elements without end tag


class Html(str):
    """A string of HTML, not escaped again."""


def h(value: Any) -> Html:
    """A value as HTML: escaped, unless it is HTML."""
    return value if isinstance(value, Html) else Html(escape("" if value is None else str(value), quote=True))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element; attributes that are None or False are omitted, `class_` is class, `_` in a name becomes `-`."""
    shown = "".join(
        f' {k.rstrip("_").replace("_", "-")}' + ("" if v is True else f'="{h(v)}"') for k, v in attributes.items() if v is not None and v is not False
    )
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{''.join(h(c) for c in children)}</{name}>")


def render_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[int] = (), classes: Sequence[str | None] | None = None,
          keys: Sequence[str] | None = None) -> Html:  # fmt: skip
    """A table; columns in `right` are right-aligned; `classes` are optional CSS classes per row, `keys` make the rows selectable (page.js)."""
    numbers = set(right)

    def render_cells(kind: str, row: Sequence[Any]) -> Html:
        return Html("".join(tag(kind, c, class_="n" if i in numbers else None) for i, c in enumerate(row)))

    body = [tag("tr", render_cells("td", r), class_=classes[k] if classes else None, data_key=keys[k] if keys else None) for k, r in enumerate(rows)]
    made = tag("table", tag("thead", tag("tr", render_cells("th", head))), tag("tbody", Html("\n".join(body))))
    return tag("div", made, class_="wide")


def render_bar(share: float, kind: str = "") -> Html:
    """A small bar, `share` of its full width (0 to 1)."""
    return tag("span", tag("i", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"), class_=f"bar {kind}".strip())


def format_digits(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits and thousands separators; a dash for None."""
    if value is None:
        return "-"
    v = float(value)
    if v == int(v) and abs(v) >= 10 ** (digits - 1):
        return f"{v:,.0f}"
    if abs(v) >= 10**digits:
        return f"{v:,.0f}"
    return f"{v:#.{digits}g}".rstrip(".") if v else "0"
