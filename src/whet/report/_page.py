"""The frame of every report: one self-contained page with the charts' data and library, without network access."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from whet.errors import UsageError
from whet.report._html import Html, h, tag


def make_page(title: str, body: Html, figures: Mapping[str, Any], details: Mapping[str, Html] | None = None) -> str:
    """The page. `figures`: element id -> plotly figure (see `chart`); `details`: key of a point or a table row -> HTML shown when it is selected.

    Raises UsageError if plotly is not installed.
    """
    own = files("whet.report")
    data = json.dumps({"figures": figures, "details": details or {}}, allow_nan=False, separators=(",", ":"))
    return Template(own.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=h(title),
        style=own.joinpath("page.css").read_text(encoding="utf-8"),
        script=own.joinpath("page.js").read_text(encoding="utf-8"),
        body=body,
        data=_compress(data.encode()),
        library=read_library() if figures else "",
    )


def render_chart(name: str, label: str, height: int) -> Html:
    """The element in which the script of the page draws the figure `name`; `label` is for screen readers, `height` in pixels."""
    return tag("div", id=name, class_="chart", style=f"height:{height}px", role="group", aria_label=f"{label}; arrow keys move between points")


@cache
def read_library() -> str:
    """plotly.js from the package plotly, compressed. Raises UsageError if plotly is not installed."""
    try:
        source = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise UsageError("report pages need plotly: pip install 'whet[report]'") from None
    return _compress(source)


def _compress(data: bytes) -> str:
    return b64encode(gzip.compress(data, 9, mtime=0)).decode()
