"""Common subexpressions: layers with the same operation, attributes and inputs are computed once."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.network.text import value_text
from whet.ops import get_op
from whet.rewrite.constants import assume_equal, equal_weights, fingerprint
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, network_pass


@network_pass(phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes", "drop_no_ops", "merge_equal_weights"])
def merge_equal_layers(g: Graph) -> list[Fired]:
    seen: dict[tuple, list[Layer]] = {}
    fired = []
    for layer in g.layers:
        if layer.regions or not get_op(layer.op).pure or (layer.op == "Identity" and g.is_output(layer.output)):
            continue
        attrs = tuple((k, value_text(v)) for k, v in sorted(layer.attrs.items()))
        candidates = seen.setdefault((layer.op, attrs, len(layer.outputs), tuple(map(_key, layer.inputs))), [])
        first = next((x for x in candidates if all(a is b or equal_weights(a, b) for a, b in zip(x.inputs, layer.inputs, strict=True))), None)
        if first is None:
            candidates.append(layer)
            continue
        for kept, removed in zip(first.inputs, layer.inputs, strict=True):
            if kept is not removed and kept is not None and removed is not None:
                assume_equal(kept, removed)
        for old, new in zip(layer.outputs, first.outputs, strict=True):
            g.replace(old, new, g.position(layer))
        g.remove([layer])
        first.sources = tuple(dict.fromkeys((*first.sources, *layer.sources)))
        fired.append(Fired(f"computes the same as '{first.name}'", layer.name))
    return fired


def _key(t: Tensor | None) -> object:
    return None if t is None else (fingerprint(t) if t.weight is not None else id(t))
