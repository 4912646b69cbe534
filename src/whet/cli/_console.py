"""What is printed for people: tables, as wide as the terminal (140 columns into a file or a pipe, where nothing tells), and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

PIPED_WIDTH = 140
_GAP = "  "
_INDENT = 4


def console() -> Console:
    """A rich console on standard output. Strings are printed as they are: names of layers and 'whet[jit]' are no markup, python:m:f is no face."""
    from rich.console import Console

    def made(width: int | None = None) -> Console:
        return Console(soft_wrap=False, markup=False, highlight=False, emoji=False, width=width)

    found = made()
    return found if found.is_terminal or "COLUMNS" in os.environ else made(PIPED_WIDTH)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of strings and (string, style)."""
    from rich.text import Text

    return Text.assemble(*parts)


def progress_bar() -> Progress:
    """A bar on standard error that is gone when it ends: name of the stage, how far, time left, and the field `what` as it stands."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    what = TextColumn("{task.fields[what]}", style="dim", markup=False)  # names of layers may look like markup
    columns = (TextColumn("{task.description:<14}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(), what)
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar:
    """A progress bar on standard error with the time left; `tell(done, total, what)` moves it. Disabled off a terminal."""

    def __init__(self, what: str, enabled: bool | None = None):
        self.what = what
        self.enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self.enabled:
            self._bar = progress_bar()
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=None, what="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, done: int, total: int, note: str) -> None:
        """`done` of `total`; `note` says at what."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, what=note[:60])


def print_table(where: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", below: Sequence[str] = ()) -> None:
    """Prints `rows` under `columns` (`>name`: to the right). Cells are strings, taken as they are, or rich Text.

    Names of fused layers are long, and folded into a narrow column nobody can read or copy them: where the table is wider than `where`,
    the columns `below` go to lines of their own under each row.
    """
    from rich.table import Table
    from rich.text import Text

    names = [c.lstrip(">") for c in columns]
    cells = [[c if isinstance(c, Text) else Text(str(c)) for c in row] for row in rows]
    widths = [max([len(n), *(r[i].cell_len for r in cells)]) for i, n in enumerate(names)]
    if below and sum(widths) + len(_GAP) * (len(widths) - 1) > where.width:
        _print_with_lines_below(where, columns, cells, title, below, widths)
        return
    table = Table(box=None, header_style="bold", title=title or None, title_justify="left", title_style="bold cyan", pad_edge=False)
    for c, n in zip(columns, names, strict=True):
        table.add_column(n, justify="right" if c.startswith(">") else "left", overflow="fold")
    for r in cells:
        table.add_row(*r)
    where.print(table)


def print_indented(where: Console, text: Any, indent: int = 2) -> None:
    """Prints a text (str or rich Text, without markup), every line of it `indent` columns in."""
    from rich.padding import Padding
    from rich.text import Text

    where.print(Padding(text if isinstance(text, Text) else Text(text), (0, 0, 0, indent), expand=False))


def _print_with_lines_below(
    where: Console, columns: Sequence[str], cells: list[list[Any]], title: str, below: Sequence[str], widths: list[int]
) -> None:
    from rich.text import Text

    names = [c.lstrip(">") for c in columns]
    head = [i for i, n in enumerate(names) if n not in below]
    under = [names.index(n) for n in below]

    def line(parts: Sequence[Any]) -> Any:
        made = []
        for i, part in zip(head, parts, strict=True):
            cell = part.copy()
            cell.pad_left(widths[i] - cell.cell_len) if columns[i].startswith(">") else cell.pad_right(widths[i] - cell.cell_len)
            made.append(cell)
        text = Text(_GAP).join(made)
        text.rstrip()
        return text

    if title:
        where.print(Text(title, style="bold cyan"))
    header = line([Text(names[i]) for i in head])
    header.stylize("bold")
    where.print(header)
    for row in cells:
        where.print(line([row[i] for i in head]))
        said = Text(_GAP).join([row[i] for i in under if row[i].plain])
        if said.plain:
            print_indented(where, said, _INDENT)
