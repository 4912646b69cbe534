"""Terminal output: tables as wide as the terminal (140 columns in a file or a pipe), JSON, and progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from whet.progress_lines import ProgressLines, Steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

PIPED_WIDTH = 140
_GAP = "  "
_INDENT = 4


def make_console() -> Console:
    """A rich console on standard output that interprets neither markup nor emoji: layer names, 'whet[jit]' and python:m:f are printed unchanged."""
    from rich.console import Console

    def with_width(width: int | None = None) -> Console:
        return Console(soft_wrap=False, markup=False, highlight=False, emoji=False, width=width)

    default = with_width()
    return default if default.is_terminal or "COLUMNS" in os.environ else with_width(PIPED_WIDTH)


def style_text(*parts: str | tuple[str, str]) -> Text:
    """One line from strings and (string, style) pairs."""
    from rich.text import Text

    return Text.assemble(*parts)


def print_json(data: Any) -> None:
    """Prints `data` as JSON to standard output: infinite values and NaNs as null, paths and other objects as text."""
    import click

    click.echo(json.dumps(_replace_non_finite(data), indent=1, default=str))


def _replace_non_finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _replace_non_finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_replace_non_finite(v) for v in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def make_progress_bar() -> Progress:
    """A transient bar on standard error: stage, progress, time left, and the field `what`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    what = TextColumn("{task.fields[what]}", style="dim", markup=False)  # names of layers may look like markup
    columns = (TextColumn("{task.description:<14}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(), what)
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar:
    """A progress bar on standard error, advanced by `update(done, total, note)`; lines every ten seconds unless standard error is a terminal."""

    def __init__(self, title: str, enabled: bool | None = None):
        self.title = title
        self.enabled = sys.stderr.isatty() if enabled is None else enabled
        self._steps = Steps(title)
        self._lines = ProgressLines(self._steps)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self.enabled:
            self._bar = make_progress_bar()
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None, what="")
        else:
            self._lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._lines.__exit__()

    def update(self, done: int, total: int, note: str) -> None:
        """Shows `done` of `total` and a short description of the current item."""
        self._steps.update(done, total, note)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, what=note[:60])


def print_table(out: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", below: Sequence[str] = ()) -> None:
    """Prints `rows` under `columns` (`>name`: right-aligned). Cells are strings without markup, or rich Text.

    If the table is wider than the console, the columns `below` go to separate lines under each row: long names of fused layers,
    folded into a narrow column, could not be read or copied.
    """
    from rich.table import Table
    from rich.text import Text

    names = [c.lstrip(">") for c in columns]
    cells = [[c if isinstance(c, Text) else Text(str(c)) for c in row] for row in rows]
    widths = [max([len(n), *(r[i].cell_len for r in cells)]) for i, n in enumerate(names)]
    if below and sum(widths) + len(_GAP) * (len(widths) - 1) > out.width:
        _print_with_lines_below(out, columns, cells, title, below, widths)
        return
    if title:
        out.print(style_text((title, "bold cyan")))  # rich's own title wraps at the width of a narrow table
    table = Table(box=None, header_style="bold", pad_edge=False)
    for c, n in zip(columns, names, strict=True):
        table.add_column(n, justify="right" if c.startswith(">") else "left", overflow="fold")
    for r in cells:
        table.add_row(*r)
    out.print(table)


def print_indented(out: Console, text: Any, indent: int = 2) -> None:
    """Prints a text (str without markup, or rich Text), each line indented by `indent` columns."""
    from rich.padding import Padding
    from rich.text import Text

    out.print(Padding(text if isinstance(text, Text) else Text(text), (0, 0, 0, indent), expand=False))


def _print_with_lines_below(
    out: Console, columns: Sequence[str], cells: list[list[Any]], title: str, below: Sequence[str], widths: list[int]
) -> None:
    from rich.text import Text

    names = [c.lstrip(">") for c in columns]
    head = [i for i, n in enumerate(names) if n not in below]
    under = [names.index(n) for n in below]

    def format_line(parts: Sequence[Any]) -> Any:
        padded = []
        for i, part in zip(head, parts, strict=True):
            cell = part.copy()
            cell.pad_left(widths[i] - cell.cell_len) if columns[i].startswith(">") else cell.pad_right(widths[i] - cell.cell_len)
            padded.append(cell)
        text = Text(_GAP).join(padded)
        text.rstrip()
        return text

    if title:
        out.print(Text(title, style="bold cyan"))
    if len(head) > 1:
        header = format_line([Text(names[i]) for i in head])
        header.stylize("bold")
        out.print(header)
    for row in cells:
        out.print(format_line([row[i] for i in head]))
        extra = Text(_GAP).join([row[i] for i in under if row[i].plain])
        if extra.plain:
            print_indented(out, extra, _INDENT)
