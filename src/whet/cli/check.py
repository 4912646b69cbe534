"""`whet check`: lists the unsupported nodes of a model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click


@click.command()
@click.argument("model", type=click.Path())
@click.option("--shapes", default="", help="Pin dynamic inputs: input:1x3x224x224,...")
@click.option("--all", "every", is_flag=True, help="List every node, including those with the same reason.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
@click.pass_context
def command(ctx: click.Context, model: str, shapes: str, every: bool, as_json: bool) -> None:
    """Try every node of a model (ONNX, TensorFlow, Caffe), and list the unsupported ones, with the reason and the nearest workaround.

    Exit code 0 if every node is supported, else 1.
    """
    from whet.cli import _exec_values as values
    from whet.frontends import check_file

    report = check_file(model, shapes=values.parse_shapes(shapes, "shapes") if shapes else None)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        click.echo(str(report) if every else _shorten_report(report))
    ctx.exit(0 if report.supported else 1)


def _shorten_report(report: Any) -> str:
    """The report with one line per unsupported op and the number of its nodes."""
    lines = str(dataclasses.replace(report, problems=[])).splitlines()[:-1]
    first: dict[str, Any] = {}
    for p in report.problems:
        if p.reached:
            first.setdefault(p.op, p)
    counts = report.unsupported_ops()
    for op, p in first.items():
        more = f" ({counts[op] - 1} more {op} like it)" if counts[op] > 1 else ""
        lines.append(f"  not supported: {p.reason}{more}")
    follows = sum(not p.reached for p in report.problems)
    if follows:
        lines.append(f"  {follows} {report.unit}s were not tried, because they read outputs of these")
    lines.append(f"  {report.verdict()}" + ("" if report.supported else " (--all lists each)"))
    return "\n".join(lines)
