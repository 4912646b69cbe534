"""The data of an engine's report: its layers with explanations, tensors in memory, rates of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.engine import EnginePlan
from whet.inspector import explain, layer_sparsity
from whet.inspector.explain import explain_layer
from whet.inspector.facts import LayerFacts, find_rates, layer_facts
from whet.inspector.summary import describe_storage_types, shorten_name
from whet.inspector.words import get_layer_type


@dataclass(frozen=True)
class ReportLayer:
    """A layer of the engine. `parts`: (operator, source node) of each operation in it. `zeros`: the fraction of its weights that is zero."""

    key: str
    facts: LayerFacts
    type: str
    types: str  # storage types of inputs and outputs
    short: str
    parts: tuple[tuple[str, str], ...]
    zeros: float | None
    sparse: str  # "runs sparse", "2:4, runs dense", "dense" or "" without weights
    explanation: dict[str, Any]


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in the arena: first and last layer that use it, byte offset and size."""

    name: str
    first: int
    last: int
    offset: int
    size: int


@dataclass(frozen=True)
class EngineData:
    """All facts of one profile's engine. `peak_flops`, `peak_bytes`: rates per second; `peaks_of`: where they come from."""

    engine: dict[str, Any]  # as `whet explain ENGINE --json`
    plan: EnginePlan
    layers: list[ReportLayer]
    tensors: list[LiveTensor]
    peak_flops: float | None
    peak_bytes: float | None
    peaks_of: str


def collect_engine_data(plan: EnginePlan, profile: int = 0) -> EngineData:
    """The data of the report of `plan` for one optimization profile."""
    part, number = plan.part(profile)
    facts = layer_facts(part)
    layers = [
        ReportLayer(
            str(k),
            f,
            get_layer_type(f.layer, f.choice),
            describe_storage_types(f),
            shorten_name(f.name),
            tuple(_list_parts(f)),
            _compute_zero_fraction(f),
            _describe_sparsity(f),
            explain_layer(part, f),
        )
        for k, f in enumerate(facts)
    ]
    flops, moved, source = find_rates(facts, part)
    return EngineData(explain(part), part, layers, _list_tensors(part, number), flops, moved, source)


def _list_parts(f: LayerFacts) -> list[tuple[str, str]]:
    """Operators in a layer, those of nested fused layers included, each with its source node."""
    if f.layer.op != "Fused":
        return [(f.layer.op, f.layer.sources[0] if f.layer.sources else "")]

    def list_inner_parts(layer: Any) -> list[tuple[str, str]]:
        if layer.op == "Fused":
            return [p for x in layer.regions["body"].layers for p in list_inner_parts(x)]
        return [(layer.op, layer.sources[0] if layer.sources else "")]

    parts = list_inner_parts(f.layer)
    left = [s for s in f.layer.sources if s not in {node for _, node in parts}]
    return [(op, node or (left.pop(0) if left else "")) for op, node in parts]


def _compute_zero_fraction(f: LayerFacts) -> float | None:
    weights = [t.array() for t in f.layer.inputs if t is not None and t.is_constant and t.type.rank >= 2]
    total = sum(w.size for w in weights)
    return 1 - sum(int(np.count_nonzero(w)) for w in weights) / total if total else None


def _describe_sparsity(f: LayerFacts) -> str:
    found = layer_sparsity(f)
    if found is None:
        return ""
    return "runs sparse" if found.runs_sparse else "2:4, runs dense" if found.eligible else "dense"


def _list_tensors(plan: EnginePlan, profile: int) -> list[LiveTensor]:
    """Lifetimes of the tensors in the arena; views share the bytes of another tensor and are included."""
    arena = plan.arenas[profile] if plan.arenas else None
    if arena is None:
        return []
    uses: dict[str, list[int]] = {}
    for k, layer in enumerate(plan.network.layers):
        for t in (*layer.inputs, *layer.outputs):
            if t is not None and t.name in arena.offsets:
                uses.setdefault(t.name, []).append(k)
    return [LiveTensor(n, min(ks), max(ks), arena.offsets[n], arena.sizes[n]) for n, ks in uses.items() if arena.sizes.get(n)]
