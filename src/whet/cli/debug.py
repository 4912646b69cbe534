"""`whet debug`: accuracy analysis. `precision`: sensitivity of the layers to low precision."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


@click.group()
def command() -> None:
    """Find the layers at which a network loses accuracy."""


@command.command(short_help="Rank the layers of MODEL by their sensitivity.")
@click.argument("model", type=click.Path())
@click.option("--int8", "kind", flag_value="int8", default="int8", help="8-bit integers, calibrated (default).")
@click.option("--fp8", "kind", flag_value="fp8", help="Float8 e4m3, scaled by the largest magnitude (emulated).")
@click.option("--fp16", "kind", flag_value="fp16", help="FP16: inputs, weights and outputs of each layer rounded.")
@click.option("--bf16", "kind", flag_value="bf16", help="BF16.")
@click.option("--calibData", "data", help="DIR, FILE.npz, FILE.npy or python:MODULE:FUNCTION.")
@click.option("--calibPreprocess", "preprocess", help="Preprocessing of images, as for whet exec.")
@click.option("--calib", "cache", help="Calibration cache: read if it exists, else written.")
@click.option("--calibMethod", "method", type=click.Choice(["auto", "minmax", "entropy", "percentile", "mse"]), default="auto", show_default=True)
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Number of samples (those with the smallest digests).")
@click.option("--times/--noTimes", default=True, show_default=True, help="Also build engines, and list the time that low precision saves per layer.")
@click.option("--shapes", help="Shapes to time: x:8x3x224x224 (default: 1 for dynamic dimensions).")
@click.option("--numThreads", "threads", type=click.IntRange(0), default=0, help="CPU threads (default: all).")
@click.option("--builderOptimizationLevel", "level", type=click.IntRange(0, 5), default=2, show_default=True, help="Level of the timed engines.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Rows to print.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write an HTML page with a chart of the layers.")
@click.option("--json", "as_json", is_flag=True, help="Full JSON output.")
def precision(model: str, kind: str, top: int, plot: str | None, as_json: bool, **o: Any) -> None:
    """Rank the layers of MODEL by their sensitivity to low precision, the most sensitive first.

    alone: SNR of the outputs (dB) with only this layer in low precision. from here: with this layer and all rows below it in low precision,
    so the rows above stay in FP32. own output: SNR of the layer's output with every layer in low precision.
    """
    from whet.builder.precision.int8 import Calibration, is_explicit
    from whet.builder.precision.layer_sensitivity import analyze_sensitivity
    from whet.cli._build_progress import BuildProgress
    from whet.cli._model import read_network
    from whet.cli._output_files import check_page, write_page
    from whet.errors import UsageError
    from whet.precision import Preprocessing, calibration_data

    check_page(model, plot=plot)
    net, _ = read_network(model, o["shapes"])
    if is_explicit(net) and kind in ("int8", "fp8"):
        raise UsageError("the model has Q/DQ nodes; give the floating-point model, which can be analysed layer by layer")
    preprocessing = Preprocessing.parse(o["preprocess"]) if o["preprocess"] else None
    samples = None if o["data"] is None else lambda: calibration_data(o["data"], net, preprocessing)
    calibration = Calibration(samples=samples, cache=o["cache"], method=o["method"])
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        report = analyze_sensitivity(net, kind, calibration, _make_config(net, o), samples=o["samples"], times=o["times"], progress=progress)
    data = {"model": model, **report.to_json()}
    if plot:
        from whet.report import render_sensitivity_page

        write_page(plot, render_sensitivity_page(data, title=f"{Path(model).name}: sensitivity to {kind}"))
    if as_json:
        click.echo(json.dumps(data, indent=1))
    else:
        _print(report, top)
        if plot:
            click.echo(f"Wrote {plot}")


def _make_config(net: Any, o: dict[str, Any]) -> Any:
    from whet.builder.config import BuildConfig
    from whet.cli import _exec_values as values

    given = values.parse_model_shapes(o["shapes"], "shapes", {t.name: t.shape for t in net.inputs}) if o["shapes"] else {}
    shapes = {t.name: given.get(t.name) or tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
    dynamic = any(not t.type.static for t in net.inputs)
    return BuildConfig(threads=o["threads"], optimization_level=o["level"], profiles=((shapes, shapes, shapes),) if dynamic else ())


def _print(report: Any, top: int) -> None:
    from whet.cli._console import make_console as make_console
    from whet.cli._console import print_table, style_text

    console = make_console()
    for note in report.notes:
        console.print(style_text(("note", "yellow"), f" {note}"))
    columns = [">", "layer", "op", ">alone dB", ">from here dB", ">own output dB", ">FP32 ms", f">{report.precision} ms", ">saves ms"]
    rows = [
        [str(i), r.layer, r.op, *map(_format_db, (r.alone_db, r.from_here_db, r.tensor_db)), *map(_format_ms, (r.float_ms, r.low_ms, r.saved_ms))]
        for i, r in enumerate(report.rows[:top], 1)
    ]
    print_table(console, columns, rows, f"{report.precision}: sensitivity by layer, on {report.samples} samples", below=("layer",))
    if len(report.rows) > top:
        console.print(f"and {len(report.rows) - top} less sensitive layers (--top, or --json for all)")
    timed = report.float_ms is not None and report.low_ms is not None
    whole = f" Engines: FP32 {report.float_ms:.3f} ms, {report.precision} {report.low_ms:.3f} ms." if timed else ""
    console.print(f"All {len(report.rows)} layers in {report.precision}: {report.all_db:.1f} dB at the outputs.{whole}")


def _format_db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
