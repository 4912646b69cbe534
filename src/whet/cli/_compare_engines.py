"""The engine comparisons of `whet compare`: saved engines, models built for it, optimization levels, and passes switched off one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from math import isinf
from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar


def compare_files(
    paths: tuple[str, ...], config: Any, shapes: Any, seconds: float, top: int, as_json: bool, html: str | None = None, *, tensorrt: bool = False
) -> None:
    """Compares engines and models; models are built with `config`, and with `tensorrt` by TensorRT too. Raises UsageError if there is no model."""
    from whet.builder.build import build
    from whet.cli._model import read_network
    from whet.cli._runners import is_engine
    from whet.engine import read_engine
    from whet.errors import UsageError
    from whet.measure.tensorrt_engine import build_tensorrt

    if tensorrt and all(map(is_engine, paths)):
        raise UsageError("--tensorrt builds ONNX files: name the model too")
    stems = [Path(p).stem for p in paths]
    names = stems if len(set(stems)) == len(stems) else list(paths)
    plans = {}
    with Bar("building") as bar:
        for k, (name, path) in enumerate(zip(names, paths, strict=True)):
            bar.update(k, len(paths), name)
            plans[name] = read_engine(path) if is_engine(path) else build(read_network(path, None)[0], config)
        others = {}
        for name, path in zip(names, paths, strict=True):
            if tensorrt and not is_engine(path):
                bar.update(len(paths), len(paths), f"TensorRT {name}")
                others[f"TensorRT {name}"] = build_tensorrt(path, precisions=config.precisions, shapes=shapes)
    _report(plans, shapes, seconds, top, as_json, html, others=others)


def compare_builds(path: str, config: Any, shapes: Any, seconds: float, top: int, as_json: bool, html: str | None = None, *, ablate: bool) -> None:
    """Compares builds of one model: all optimization levels and a build without passes, or with `ablate` the build without each pass that fired."""
    from whet.builder.build import build
    from whet.cli._model import read_network

    net, _ = read_network(path, None)
    with Bar("building") as bar:
        if ablate:
            plans = {"all passes": build(net, config)}
            fired = list(dict.fromkeys(name for name, *_ in plans["all passes"].report.passes.fired))
            for k, name in enumerate(fired):
                bar.update(k + 1, len(fired) + 1, f"without {name}")
                plans[f"-{name}"] = build(net, dataclasses.replace(config, passes=(*config.passes, f"-{name}")))
        else:
            variants = {f"level {n}": {"optimization_level": n} for n in (3, 0, 1, 2, 4, 5)} | {"passes=none": {"passes": ("none",)}}
            plans = {}
            for k, (name, changes) in enumerate(variants.items()):
                bar.update(k, len(variants), name)
                plans[name] = build(net, dataclasses.replace(config, **changes))
    _report(plans, shapes, seconds, top, as_json, html, per_layer=False)


def compare_models(comparison: Any, shapes: Any, top: int, as_json: bool, html: str | None) -> None:
    """Shows the engines that `whet.pruning.compare` has built and timed, below its counts."""
    from whet.measure.engine_comparison import EngineRow, compute_output_differences
    from whet.runtime import Runtime

    plans = {n: m.plan for n, m in zip(comparison.names, comparison.measured, strict=True)}
    differences = compute_output_differences({n: Runtime().load(p) for n, p in plans.items()}, shapes)
    rows = [
        EngineRow(n, m.ms, m.interval_ms, m.ratio - 1, (m.ratio_interval[0] - 1, m.ratio_interval[1] - 1), *difference)
        for n, m, difference in zip(comparison.names, comparison.measured, differences, strict=True)
    ]
    _show(plans, rows, shapes, top, as_json, html, counts=comparison.to_json())


def _report(
    plans: Mapping[str, Any], shapes: Any, seconds: float, top: int, as_json: bool, html: str | None, *, per_layer: bool = True,
    others: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Times and shows the engines of `plans`, and `others` that have no plan."""
    from whet.measure.engine_comparison import compare_engines
    from whet.runtime import Runtime

    rows = compare_engines({n: Runtime().load(p) for n, p in plans.items()} | dict(others or {}), shapes=shapes, seconds=seconds)
    _show(plans, rows, shapes, top, as_json, html, per_layer=per_layer)


def _show(
    plans: Mapping[str, Any], rows: Sequence[Any], shapes: Any, top: int, as_json: bool, html: str | None, *, per_layer: bool = True,
    counts: Any = None,
) -> None:  # fmt: skip
    """Times the layers (`per_layer`) and prints rows and layers, or their JSON together with `counts`; writes the page."""
    from whet.cli._console import make_console, print_table
    from whet.inspector import layer_facts
    from whet.inspector.alignment import align_layers, find_differing_settings, format_setting
    from whet.measure.engine_comparison import make_comparison_records

    aligned = []
    if per_layer:
        timed = _time_layers(plans, shapes)
        aligned = align_layers([t.plan for t in timed], [t.ms for t in timed])
    facts = {n: layer_facts(p) for n, p in plans.items()}
    moved = {n: sum(f.bytes for f in fs) / 1e6 for n, fs in facts.items()}
    launches = {n: sum(not f.choice.tactic.endswith("view") for f in fs) for n, fs in facts.items()}
    built = {n: {"build_seconds": p.report.build_seconds, "layers": launches[n], "mb_moved": moved[n]} for n, p in plans.items()}
    settings = find_differing_settings(list(plans.values()))
    data = (counts or {}) | {
        "engines": [r | built.get(r["name"], {}) for r in make_comparison_records(rows)], "settings": settings,
        "layers": [a.to_dict() for a in aligned],
    }  # fmt: skip
    if html is not None:
        _write_page(Path(html), data, plans)
    if as_json:
        click.echo(json.dumps(data, indent=1, default=str))
        return
    out = make_console()
    table = [
        [
            r.name, f"{r.latency_ms:.4f}", f"{r.interval_ms[0]:.4f}..{r.interval_ms[1]:.4f}", "" if r is rows[0] else f"{100 * r.change:+.1f}%",
            *([f"{plans[r.name].report.build_seconds or 0:.1f}", str(launches[r.name]), f"{moved[r.name]:.2f}"] if r.name in plans else [""] * 3),
            _format_decibels(r.snr_db),
        ]
        for r in rows
    ]  # fmt: skip
    print_table(out, ["engine", ">ms", ">95 % interval", ">change", ">build s", ">launches", ">MB", ">SNR dB"], table)
    for r in rows[1:]:
        out.print(f"{r.name}: {r.verdict}; outputs differ by at most {r.max_error:.3g}" if r.max_error is not None else f"{r.name}: {r.verdict}")
    if per_layer:
        for name, values in settings.items():
            out.print(f"{name}: " + "; ".join(f"{n} {format_setting(v)}" for n, v in zip(plans, values, strict=True)))
        print_aligned(out, list(plans), [a for a in aligned if not a.same_choices][:top], "medians, launch by launch, engines interleaved")


def _time_layers(plans: Mapping[str, Any], shapes: Any) -> list[Any]:
    from whet.measure.engine_comparison import compare_layers
    from whet.runtime import Runtime

    return list(compare_layers({n: Runtime().load(p) for n, p in plans.items()}, shapes=shapes).values())


def _write_page(path: Path, data: Mapping[str, Any], plans: Mapping[str, Any]) -> None:
    from whet.cli._output_files import write_page
    from whet.report import render_comparison_page

    first = next(iter(plans.values()))
    about = f"{first.backend}, {first.threads} thread(s), {first.machine.get('model') or first.machine.get('name') or ''}"
    page = render_comparison_page(data, title=f"{first.network.name or 'engines'}: {' / '.join(plans)}", about=about)
    write_page(path, page)
    click.echo(f"Wrote {path}", err=True)


def _format_decibels(snr: float | None) -> str:
    return "" if snr is None else "equal" if isinf(snr) and snr > 0 else f"{snr:.1f}"


def print_aligned(out: Any, names: list[str], aligned: list[Any], source: str) -> None:
    """Prints the groups of layers that differ: one line for the nodes and one for each engine, with time, tactics, types and kernels. Engines that
    fuse the nodes differently have one line for each layer. `source` is the origin of the times."""
    from whet.inspector.alignment import describe_choice
    from whet.inspector.summary import WIDTH, shorten, shorten_name

    if not aligned:
        out.print("All layers run on the same tactics in the same types.")
        return
    out.print(f"Layers that differ (times: {source}):")
    width = max(map(len, names))
    for a in aligned:
        split = bool(a.nodes) and not a.same_fusion
        out.print(f"{a.name}" + ("  (fused differently)" if split else ""))
        for k, name in enumerate(names):
            lines = [(a.ms(k), a.description(k))]
            if split and len(a.layers[k]) > 1:
                lines = [(a.ms(k), f"{len(a.layers[k])} layers:"), *((f.ms, f"{shorten_name(f.name)}  {describe_choice(f)}") for f in a.layers[k])]
            elif split and a.layers[k]:
                lines = [(a.ms(k), f"{shorten_name(a.layers[k][0].name)}  {describe_choice(a.layers[k][0])}")]
            for i, (ms, text) in enumerate(lines):
                head = name if i == 0 else ""
                out.print(shorten(f"  {head.ljust(width)}  {'-' if ms is None else f'{ms:.4f}':>8} ms  {text}", WIDTH))
