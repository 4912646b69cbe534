"""The engine as JSON in the format of TensorRT 10's `IEngineInspector`, and as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.engine import EnginePlan, display_names, profile_suffix
from whet.errors import UsageError
from whet.inspector.facts import LayerFacts, get_tuned_shapes, layer_facts
from whet.inspector.layers import make_layer_object
from whet.inspector.summary import shorten

VERBOSITIES = ("layer_names_only", "detailed", "none")


def engine_information(
    plan: EnginePlan, verbosity: str = "detailed", *, shapes: Mapping[str, tuple[int, ...]] | None = None, profile: int | None = None
) -> dict[str, Any]:
    """The JSON of `--exportLayerInfo`: layer names, all keys, or nothing; for one profile, or for all profiles in TensorRT's order.

    `shapes` are those of the first profile listed (default: its opt shapes). Names of profile N > 0 end in ` [profile N]`.
    Raises UsageError for an unknown verbosity.
    """
    if verbosity not in VERBOSITIES:
        raise UsageError(f"profiling verbosity {verbosity!r} is none of {', '.join(VERBOSITIES)}")
    layers: list[Any] = []
    bindings: list[str] = []
    for k in range(max(len(plan.profiles), 1)) if profile is None else [profile]:
        part, _ = plan.part(k)
        bindings += [t.name + profile_suffix(k) for t in (*plan.network.inputs, *plan.network.outputs)]
        if verbosity == "layer_names_only":
            layers += [n + profile_suffix(k) for n in display_names(part.network).values()]
        elif verbosity == "detailed":
            objects = [make_layer_object(f) for f in layer_facts(part, (shapes if not layers else None) or get_tuned_shapes(plan, k))]
            for o in objects:
                o["Name"] += profile_suffix(k)
            layers += objects
    return {"Layers": layers, "Bindings": bindings}


def layer_lines(plan: EnginePlan, verbosity: str = "detailed") -> list[str]:
    """The lines of `--dumpLayerInfo`, one per layer."""
    if verbosity == "none":
        return ["The engine was built with --profilingVerbosity=none: it tells nothing of its layers."]
    if verbosity == "layer_names_only":
        return list(display_names(plan.network).values())
    rows = layer_rows(plan)
    widths = [max(len(r[c]) for r in rows) for c in COLUMNS]
    head = "  ".join(c.ljust(w) for c, w in zip(COLUMNS, [max(w, len(c)) for c, w in zip(COLUMNS, widths, strict=True)], strict=True))
    lines = [head.rstrip()]
    for r in rows:
        cells = (r[c].rjust(max(w, len(c))) if c in _RIGHT else r[c].ljust(max(w, len(c))) for c, w in zip(COLUMNS, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


COLUMNS = ("layer", "type", "tactic", "kernel", "formats", "ms", "share", "GFLOP/s", "MB", "bound", "runner-up")
_RIGHT = {"ms", "share", "GFLOP/s", "MB"}


def layer_rows(plan: EnginePlan, shapes: Mapping[str, tuple[int, ...]] | None = None) -> list[dict[str, str]]:
    """The layer table: one dict of strings per layer, with the keys of COLUMNS. Times of untimed layers are empty."""
    from whet.inspector.words import get_layer_type

    facts = layer_facts(plan, shapes)
    total = sum(f.ms or 0.0 for f in facts)
    return [
        {
            "layer": shorten(f.name, 60),
            "type": get_layer_type(f.layer, f.choice),
            "tactic": f.choice.tactic,
            "kernel": shorten(f.choice.implementation, 40),
            "formats": _join_formats(f),
            "ms": f"{f.ms:.4f}" if f.ms is not None else "",
            "share": f"{100 * f.ms / total:.1f}%" if f.ms is not None and total else "",
            "GFLOP/s": f"{f.flops / f.ms / 1e6:.1f}" if f.ms and f.flops else "",
            "MB": f"{f.bytes / 1e6:.3f}",
            "bound": f.bound or "",
            "runner-up": _format_runner_up(f),
        }
        for f in facts
    ]


def _format_runner_up(f: LayerFacts) -> str:
    if f.runner_up is None or f.runner_up.ms is None:
        return ""
    same = f.runner_up.tactic == f.choice.tactic
    label = f.runner_up.implementation if same else f.runner_up.tactic.partition("/")[2]
    return f"{shorten(label or f.runner_up.tactic, 30)} {f.runner_up.ms:.4f}"


def _join_formats(f: LayerFacts) -> str:
    def show(o: tuple[str, str] | None) -> str:
        return "-" if o is None else o[0] if o[1] == "f32" else f"{o[1]}:{o[0]}"

    ins = dict.fromkeys(show(o) for o in f.choice.inputs if o is not None)
    outs = dict.fromkeys(show(o) for o in f.choice.outputs)
    return f"{','.join(ins) or '-'} -> {','.join(outs)}"
