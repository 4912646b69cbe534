"""Short texts about an engine that fit 100 columns: names of layers, the layer table, the candidates of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from whet.engine import EnginePlan
from whet.inspector.explain import explain
from whet.inspector.facts import LayerFacts, layer_facts

WIDTH = 100
_NAME, _TACTIC, _KERNEL, _LEAST = 34, 26, 14, 12  # characters
_NUMBERED = re.compile(r" \(\d+\)$")


def shorten_name(name: str, most: int = _NAME) -> str:
    """A display name as its first node and the number of the others, shortened in the middle: "/conv1/Conv + /bn/BN + /relu/Relu" becomes
    "/conv1/Conv +2"."""
    numbered = _NUMBERED.search(name)
    parts = (name[: numbered.start()] if numbered else name).split(" + ")
    hidden = next((int(p.split()[1]) - 1 for p in parts if p.startswith("... ")), 0)
    others = len(parts) - 1 + hidden
    suffix = (f" +{others}" if others else "") + (numbered[0] if numbered else "")
    return shorten(parts[0], max(most - len(suffix), 3)) + suffix


def is_short_name(text: str, name: str) -> bool:
    """True if `text` is `shorten_name(name, n)` for some n: an ellipsis in it stands for any characters."""
    head, ellipsis, tail = text.partition("…")
    whole = shorten_name(name, len(name) + 8)
    return whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) < len(whole) if ellipsis else text == whole


def shorten(text: str, most: int) -> str:
    """`text` with its middle replaced by an ellipsis if it is longer than `most`."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"


def shorten_cells(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH, gap: int = 2) -> list[list[str]]:
    """The rows with shorter cells in the columns `layer`, `tactic` and `kernel`, so that a line has at most `width` characters.

    The longest of these columns is shortened first, to no less than 12 characters.
    """
    names = [c.lstrip(">") for c in columns]
    widths = [max([len(n), *(len(r[i]) for r in rows)]) for i, n in enumerate(names)]
    flexible = [i for i, n in enumerate(names) if n in ("layer", "tactic", "kernel")]
    while sum(widths) + gap * (len(widths) - 1) > width and any(widths[i] > _LEAST for i in flexible):
        widths[max(flexible, key=lambda i: widths[i])] -= 1
    return [
        [shorten_name(c, widths[i]) if names[i] == "layer" else shorten(c, widths[i]) if i in flexible else c for i, c in enumerate(r)] for r in rows
    ]


def describe_storage_types(f: LayerFacts) -> str:
    """The element types of a layer's inputs and outputs in memory: "f32", or "u8>f32" if they differ."""
    ins = ",".join(dict.fromkeys(o[1] for o in f.choice.inputs if o is not None))
    outs = ",".join(dict.fromkeys(o[1] for o in f.choice.outputs if o is not None))
    return ins or outs if ins == outs or not ins or not outs else f"{ins}>{outs}"


def describe_verification(plan: EnginePlan) -> str:
    """What the build found when it compared the engine with the reference."""
    v = plan.report.verification
    if v is None:
        return "no: built with --noVerify (verify=False), or for a backend that runs nothing"
    if v.failures:
        return f"{len(v.failures)} FAILURES: {v.failures[0]}"
    error = "" if v.network_error is None or v.network_bound is None else f"; outputs differ by {v.network_error:.2g} (allowed {v.network_bound:.2g})"
    return f"{v.layers} layers agree with the reference{error}"


COLUMNS = (">ms", ">share", "layer", "types", "tactic", "kernel", "bound")


def make_layer_table(facts: Sequence[LayerFacts], total: float) -> list[list[str]]:
    """Rows of the table with COLUMNS (`>`: right-justified), one line of at most WIDTH characters a layer. `total` is the sum of all layers'
    times in ms."""
    rows = [
        [
            "-" if f.ms is None else f"{f.ms:.4f}",
            f"{100 * f.ms / total:.1f}%" if f.ms is not None and total else "",
            f.name,
            shorten(describe_storage_types(f), 12),
            shorten(f.choice.tactic, _TACTIC),
            shorten(f.choice.implementation, _KERNEL),
            f.bound or "",
        ]
        for f in facts
    ]
    return shorten_cells(COLUMNS, rows)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table without colours; empty columns are left out."""
    cells = [list(r) for r in rows]
    kept = [i for i in range(len(columns)) if any(r[i] for r in cells)]
    lines = []
    for row in [[c.lstrip(">") for c in columns], *cells]:
        padded = []
        for i in kept:
            width = max(len(columns[i].lstrip(">")), *(len(r[i]) for r in cells))
            padded.append(row[i].rjust(width) if columns[i].startswith(">") else row[i].ljust(width))
        lines.append("  ".join(padded).rstrip())
    return lines


def make_explanation(plan: EnginePlan, layer: str | None = None) -> str:
    """The text of `Engine.explain`: the engine and its layers in execution order, or one layer with its candidates. At most 100 columns wide.

    Raises UsageError for an unknown layer.
    """
    data = explain(plan, layer)
    return "\n".join(_format_engine(plan, data) if layer is None else _format_layer(data))


def _format_engine(plan: EnginePlan, d: dict[str, Any]) -> list[str]:
    facts = layer_facts(plan)
    latency = "not timed" if d["latency_ms"] is None else f"{d['latency_ms']:.4f} ms"
    return [
        f"{d['network']} on {d['backend']}, {d['threads']} thread(s): {latency}",
        f"{d['layers']} layers, {d['flops'] / 1e9:.3g} GFLOP, {d['bytes'] / 1e6:.4g} MB moved",
        "",
        *format_table(COLUMNS, make_layer_table(facts, sum(f.ms or 0.0 for f in facts))),
    ]


def _format_layer(d: dict[str, Any]) -> list[str]:
    timed = d["candidates"]
    rows = [[f"{c['ms']:.4f}", shorten(c["tactic"], _TACTIC), shorten(c["implementation"], 20), shorten(c["reason"] or "", 40)] for c in timed]
    lines = [shorten_name(d["name"], 60), f"computes {', '.join(d['sources']) or 'no node of the model: added by the builder'}"]
    lines += [f"runs on {d['tactic']} ({d['kernel']})", d["why"], *([d["sparsity"]["Text"]] if d["sparsity"] else [])]
    if rows:
        lines += ["", *format_table((">ms", "tactic", "kernel", "why not"), rows)]
    refused, others = select_relevant_refusals(d)
    if refused:
        lines += ["", f"refused ({len(refused)})", *dict.fromkeys(f"  {c['tactic']}: {c['reason']}" for c in refused)]
    if others:
        lines.append(f"{others} tactics are for other operators")
    return [wrapped for line in lines for wrapped in _wrap(line)]


def select_relevant_refusals(d: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The refused candidates in the data of a layer (`explain`), and the number of those that are for other operators, which are left out."""
    suffixes = tuple(f", not {op}" for op in {d["op"], d["composite"]} if op)
    refused = [c for c in d["refused"] if not (c["reason"].startswith("computes ") and c["reason"].endswith(suffixes))]
    return refused, len(d["refused"]) - len(refused)


def _wrap(line: str) -> list[str]:
    from textwrap import wrap

    return [line] if len(line) <= WIDTH else wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False)
