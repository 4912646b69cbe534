"""Common subexpressions: layers with the same operation, attributes and inputs are computed once."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.network.text import format_value
from whet.ops import get_op, is_data_sized
from whet.rewrite.constants import are_equal_weights, assume_equal, compute_fingerprint
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, network_pass


@network_pass(phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes", "drop_no_ops", "merge_equal_weights"])
def merge_equal_layers(g: Graph) -> list[Fired]:
    seen: dict[tuple, list[Layer]] = {}
    merged: dict[Tensor, Tensor] = {}  # applied at the end: a Concat may read 100,000 of them
    sources: dict[Layer, list[str]] = {}
    outputs = set(g.net.outputs)
    fired = []

    def list_inputs(layer: Layer) -> list[Tensor | None]:
        return [None if t is None else merged.get(t, t) for t in layer.inputs]

    for layer in g.layers:
        if layer.regions or not get_op(layer.op).pure or is_data_sized(layer) or (layer.op == "Identity" and g.is_output(layer.output)):
            continue
        inputs = list_inputs(layer)
        attrs = tuple((k, format_value(v)) for k, v in sorted(layer.attrs.items()))
        candidates = seen.setdefault((layer.op, attrs, len(layer.outputs), tuple(map(_make_key, inputs))), [])
        first = next((x for x in candidates if all(a is b or are_equal_weights(a, b) for a, b in zip(list_inputs(x), inputs, strict=True))), None)
        if first is None:
            candidates.append(layer)
            continue
        for kept, removed in zip(list_inputs(first), inputs, strict=True):
            if kept is not removed and kept is not None and removed is not None:
                assume_equal(kept, removed)
        for old, new in zip(layer.outputs, first.outputs, strict=True):
            if old in outputs:
                g.replace(old, new, g.position(layer))
            else:
                merged[old] = new
        g.remove([layer])
        sources.setdefault(first, []).extend(layer.sources)
        fired.append(Fired(f"computes the same as '{first.name}'", layer.name))
    g.replace_all(merged)
    for first, further in sources.items():
        first.sources = tuple(dict.fromkeys((*first.sources, *further)))
    return fired


def _make_key(t: Tensor | None) -> object:
    return None if t is None else (compute_fingerprint(t) if t.weight is not None else id(t))
