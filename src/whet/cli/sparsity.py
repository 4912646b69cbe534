"""`whet sparsity`: times dense against 2:4 sparse tactics of each layer, before anyone fine-tunes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar, make_console, print_table, style_text
from whet.cli._output_files import check_page, write_page
from whet.cli._prune_flags import build_config, build_flags

_SIXTEEN = ("fp16", "bf16")


@click.command()
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="JSON output, times in milliseconds.")
@click.option("--batch", help="Batches to time, as 1,8,128: the first axis of every input that has a free one.")
@click.option("--noEngines", "no_engines", is_flag=True, help="Predict from single layers only; build no engines.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write an HTML page with the speed-up over the channels.")
@build_flags
def command(model: str, as_json: bool, batch: str | None, no_engines: bool, plot: str | None, **build: Any) -> None:
    """Say which layers of MODEL would be faster with 2:4 sparse weights, before any fine-tuning.

    2:4 means that two of every four weights along the input channels are zero. Each layer is timed on this machine with its dense and its
    sparse tactics, as if its weights were pruned. `removed` is the share of the weights' magnitude that pruning would take: the larger it
    is, the more fine-tuning has to repair (normally distributed weights: 26 %). The gain depends on the batch and the precision: each batch
    of --batch is timed with each of --fp16, --bf16 and --int8 (then layers without INT8 kernels may use the 16-bit types that are given).
    If a layer gains, the engine is also built with and without forced 2:4 weights, and its measured times are shown next to the prediction.
    """
    from whet.pruning import advise_sparsity

    check_page(model, plot=plot)
    advices = []
    for net, flags in _list_settings(model, batch, build):
        config = build_config(**flags)
        with Bar("timing") as bar:
            advices.append(advise_sparsity(net, config, bar.update, engines=not no_engines))
    data = {"model": model, "settings": [a.to_json() for a in advices]}
    if plot:
        from whet.report import render_sparsity_page

        write_page(plot, render_sparsity_page(data, title=f"{Path(model).name}: 2:4 sparsity"))
    if as_json:
        click.echo(json.dumps(data, indent=1))
        return
    out = make_console()
    out.width = min(out.width, 100)
    if len(advices) == 1:
        _print_layers(out, advices[0])
    else:
        _print_speedups(out, advices)
        _print_settings(out, advices)
    labels: dict[str, list[str]] = {}
    for a in advices:
        labels.setdefault(a.verdict, []).append(a.label)
    for verdict, settings in labels.items():
        out.print(f"{'; '.join(settings)}: {verdict}" if 1 < len(advices) and len(settings) < len(advices) else verdict)
    if load := next((a.load for a in advices if a.load), ""):
        out.print(style_text(("note", "yellow"), f" {load}"))
    if plot:
        click.echo(f"Wrote {plot}")


def _list_settings(model: str, batch: str | None, build: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """A network and build flags for each precision and batch. Raises UsageError for batches that the model does not have."""
    from whet.cli._model import read_network

    given = [p for p in (*_SIXTEEN, "int8") if build[p]]
    precisions = [{p: p == x or (x == "int8" and build[p]) for p in (*_SIXTEEN, "int8")} for x in given] or [{}]
    shapes = [build["shapes"]] if batch is None else [_format_shapes(model, n, build["shapes"]) for n in _parse_batches(batch)]
    nets = [(read_network(model, text)[0], text) for text in shapes]
    return [(net, {**build, **precision, "shapes": text}) for precision in precisions for net, text in nets]


def _parse_batches(text: str) -> list[int]:
    """Parses 1,8,128. Raises UsageError."""
    from whet.errors import UsageError

    words = text.split(",")
    if not all(w.isdecimal() and int(w) > 0 for w in words):
        raise UsageError(f"--batch={text}: write positive numbers with commas, as --batch=1,8,128")
    return list(dict.fromkeys(map(int, words)))


def _format_shapes(model: str, batch: int, text: str | None) -> str:
    """Shapes in the syntax of --shapes: the batch for dynamic first axes of inputs, the other axes from `text`, or 1."""
    from whet.cli import _exec_values as values
    from whet.cli._model import read_network
    from whet.errors import UsageError
    from whet.network import evaluate, find_symbols

    shapes = values.parse_shapes(text, "shapes") if text else {}
    inputs = read_network(model, None)[0].inputs
    free = [t for t in inputs if t.type.rank and not isinstance(t.shape[0], int)]
    if not free:
        raise UsageError(f"--batch={batch}: the inputs of {model} have fixed shapes. Export it with a dynamic batch, or leave out --batch.")
    for t in inputs:
        if not t.type.static:
            named = shapes.get(t.name) or tuple(d if isinstance(d, int) else evaluate(d, dict.fromkeys(find_symbols(d), 1)) for d in t.shape)
            shapes[t.name] = (batch, *named[1:]) if t in free else named
    return ",".join(f"{n}:{values.format_shape(s)}" for n, s in shapes.items())


def _print_layers(out: Any, advice: Any) -> None:
    """Prints the layers of one setting: times, saving, removed magnitude, and the reason or the tactic."""
    rows = [[*map(_format_ms, (x.dense_ms, x.sparse_ms, x.saved_ms)), _format_percent(x.removed_magnitude), x.layer, x.reason or x.sparse_tactic]
            for x in advice.layers]  # fmt: skip
    print_table(out, [">dense ms", ">sparse ms", ">saved", ">removed", "layer", "result"], rows, below=("layer", "result"))


def _print_speedups(out: Any, advices: Sequence[Any]) -> None:
    """Prints dense over sparse time of each layer in each setting; a minus marks a layer that gains nothing."""
    nodes = list(dict.fromkeys(x.node for a in advices for x in a.layers))
    by_node = [{x.node: x for x in a.layers} for a in advices]
    rows = []
    for node in nodes:
        found = [layers.get(node) for layers in by_node]
        first = next(x for x in found if x is not None)
        reasons = dict.fromkeys(x.reason.partition(" (")[0] for x in found if x is not None and x.reason)
        shape = f"{first.in_channels}-{first.out_channels}"
        rows.append([*map(_format_gain, found), _format_percent(first.removed_magnitude), first.kind, shape, node,
                     "; ".join(reasons)])  # fmt: skip
    columns = [*(f">{a.label}" for a in advices), ">removed", "kernel", "channels", "layer", "result"]
    print_table(out, columns, rows, "Dense over sparse time", below=("layer", "result"))
    out.print("- after a factor: slower, or equal within the noise")


def _print_settings(out: Any, advices: Sequence[Any]) -> None:
    """Prints the prediction and the measured engines of each setting."""
    rows = [[a.label, _format_ms(a.total_ms + a.other_ms), _format_ms(a.saved_ms), f"{a.predicted_share:.1%}",
             *(("-",) * 3 if a.engine is None else (_format_ms(a.engine.dense_ms), _format_ms(a.engine.sparse_ms), f"{a.measured_share:+.1%}"))]
            for a in advices]  # fmt: skip
    columns = ["setting", ">dense ms", ">saved", ">predicted", ">engine ms", ">2:4 engine", ">measured"]
    print_table(out, columns, rows, "Sum of the layers, and whole engines")


def _format_gain(x: Any) -> str:
    if x is None or x.speedup is None:
        return "-"
    return f"{x.speedup:.2f}x" + ("-" if x.reason else "")


def _format_percent(v: float | None) -> str:
    return "-" if v is None else f"{v:.0%}"


def _format_ms(v: float | None) -> str:
    return "-" if v is None else f"{v:.4f}"
