"""Layers of several engines side by side, aligned by the source nodes that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.engine import EnginePlan
from whet.inspector.facts import LayerFacts, layer_facts
from whet.inspector.summary import describe_storage_types, shorten_name

NO_NODE = "(added by the builder)"


@dataclass(frozen=True)
class Aligned:
    """Source nodes that share layers in at least one engine, and the layers of each engine that compute them, in execution order."""

    nodes: tuple[str, ...]
    layers: tuple[tuple[LayerFacts, ...], ...]

    @property
    def name(self) -> str:
        """The first node and the number of the others."""
        return shorten_name(" + ".join(self.nodes)) if self.nodes else NO_NODE

    def ms(self, k: int) -> float | None:
        """The sum of the layers' times in engine `k`; None if one of them was not timed."""
        times = [f.ms for f in self.layers[k]]
        return None if not times or None in times else sum(t for t in times if t is not None)

    def description(self, k: int) -> str:
        """Tactics, storage types and kernels of the layers in engine `k`, several layers joined by " | "; equal ones are counted. With the formats
        in memory if the engines differ in nothing else."""
        counted = Counter(describe_choice(f) + (f" ({describe_formats(f)})" if self.differ_in_formats else "") for f in self.layers[k])
        return " | ".join(text if n == 1 else f"{n} x {text}" for text, n in counted.items()) or "-"

    @property
    def differ_in_formats(self) -> bool:
        """True if the engines use the same kernels and types, in different formats."""
        return not self.same_choices and len({tuple(map(describe_choice, layers)) for layers in self.layers}) == 1

    @property
    def same_fusion(self) -> bool:
        """True if all engines cut these nodes into the same layers."""
        return len({frozenset(frozenset(f.layer.sources) for f in layers) for layers in self.layers}) == 1

    @property
    def same_choices(self) -> bool:
        """True if all engines compute these nodes by the same tactics and configs in the same types and formats."""
        choices = {tuple((f.choice.tactic, f.choice.config, f.choice.inputs, f.choice.outputs) for f in layers) for layers in self.layers}
        return self.same_fusion and len(choices) == 1

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        engines = [
            [
                {"layer": f.name, "tactic": f.choice.tactic, "kernel": f.choice.implementation, "types": describe_storage_types(f),
                 "formats": describe_formats(f), "ms": f.ms}
                for f in layers
            ]
            for layers in self.layers
        ]  # fmt: skip
        return {"nodes": list(self.nodes), "same_fusion": self.same_fusion, "same_choices": self.same_choices, "engines": engines}


def find_differing_settings(plans: Sequence[EnginePlan]) -> dict[str, list[Any]]:
    """Build options and facts of the machine ("machine.model") that are not equal in all engines: name -> values.

    A library that not all of the engines use is no difference.
    """
    rows = [{n: _convert_tuples_to_lists(v) for n, v in p.options.items()} | dict(_iterate_leaves("machine", p.machine)) for p in plans]
    values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
    return {
        name: found for name, found in values.items()
        if any(v != found[0] for v in found) and not (name.startswith("machine.libraries.") and None in found)
    }  # fmt: skip


def format_setting(value: Any) -> str:
    """A value of `find_differing_settings` as text for people: "bf16, int8" for a list, "none" for nothing."""
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value)) or "none"
    return "none" if value in (None, "") else "on" if value is True else "off" if value is False else str(value)


def _convert_tuples_to_lists(value: Any) -> Any:
    """A value as it is in a loaded engine, where JSON made lists of tuples."""
    return [_convert_tuples_to_lists(v) for v in value] if isinstance(value, list | tuple) else value


def _iterate_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def describe_choice(f: LayerFacts) -> str:
    """Tactic, storage types and kernel of a layer: "cpu/winograd_conv f32 F(2,3) 8 tiles x 64 channels"."""
    return " ".join(x for x in (f.choice.tactic, describe_storage_types(f), f.choice.implementation) if x)


def describe_formats(f: LayerFacts) -> str:
    """Formats of a layer's inputs and outputs in memory: "nhwc", or "linear to nChw8c" if they differ."""
    ins, outs = (", ".join(dict.fromkeys(o[0] for o in operands if o is not None)) for operands in (f.choice.inputs, f.choice.outputs))
    return ins or outs if ins == outs or not ins or not outs else f"{ins} to {outs}"


def align_layers(plans: Sequence[EnginePlan], times: Sequence[Mapping[str, float]] | None = None) -> list[Aligned]:
    """Groups of layers in the order of the first engine; layers without a source node (reformats) form the last group.

    `times`: milliseconds by layer name of each engine, in place of those that its build recorded.
    """
    rows = [layer_facts(p) for p in plans]
    if times is not None:
        rows = [[replace(f, ms=ms.get(f.layer.name)) for f in facts] for facts, ms in zip(rows, times, strict=True)]
    group: dict[str, str] = {}  # node -> a node of its group; roots are their own

    def find_root(node: str) -> str:
        while group.setdefault(node, node) != node:
            node = group[node]
        return node

    for facts in rows:
        for f in facts:
            for other in f.layer.sources[1:]:
                group[find_root(other)] = find_root(f.layer.sources[0])
    members: dict[str, tuple[dict[str, None], list[list[LayerFacts]]]] = {}
    for k, facts in enumerate(rows):
        for f in facts:
            key = find_root(f.layer.sources[0]) if f.layer.sources else ""
            nodes, layers = members.setdefault(key, ({}, [[] for _ in plans]))
            nodes.update(dict.fromkeys(f.layer.sources))
            layers[k].append(f)
    ordered = sorted(members.items(), key=lambda item: item[0] == "")
    return [Aligned(tuple(nodes), tuple(map(tuple, layers))) for _, (nodes, layers) in ordered]
