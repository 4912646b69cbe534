"""Tables on narrow terminals: words that users read or copy are not broken."""

import io

from rich.console import Console
from rich.text import Text

from whet.cli._console import make_progress_bar, print_table

COLUMNS = [">ms", "layer", "tactic"]
ROWS = [["0.5", "/layer1/conv1/Conv + /layer1/bn1/BatchNormalization", "cpu/onednn_conv"], ["10.25", "/fc[/b]/Gemm", Text("cpu/x")]]


def printed(width: int) -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width), COLUMNS, ROWS, "Slowest", below=("layer",))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_that_fits_has_one_line_per_row():
    lines = printed(100)
    assert lines[0] == "Slowest"
    assert lines[2].split() == ["0.5", *ROWS[0][1].split(), "cpu/onednn_conv"]
    assert "/fc[/b]/Gemm" in lines[3]  # brackets of a name are not markup


def test_a_title_is_not_wrapped_to_the_width_of_its_table():
    out = io.StringIO()
    print_table(Console(file=out, width=100), [">ms", "engine"], [["1.0", "a"]], "Whole engines timed; the first is kept")
    assert out.getvalue().splitlines()[0] == "Whole engines timed; the first is kept"


def test_long_names_are_printed_below_their_row():
    lines = printed(60)
    assert lines == [
        "Slowest",
        "   ms  tactic",
        "  0.5  cpu/onednn_conv",
        "    /layer1/conv1/Conv + /layer1/bn1/BatchNormalization",
        "10.25  cpu/x",
        "    /fc[/b]/Gemm",
    ]


def test_a_bar_accepts_names_that_look_like_markup():
    bar = make_progress_bar()
    bar.add_task("timing", total=3, what="conv[/b] + [x]")
    out = io.StringIO()
    Console(file=out, width=200).print(bar.get_renderable())
    assert "conv[/b] + [x]" in out.getvalue()
