"""And with a constant that is true everywhere, and Or with one that is false everywhere, return the other operand, expanded if it was broadcast.

transformers joins the padding mask with a mask of the model's kind, which hides nothing in encoders.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("And", "Or", phase=Phase.CLEAN, after=["fold_constants"])
def drop_true_masks(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, mask in (layer.inputs, layer.inputs[::-1]):
        if x is None or mask is None or not mask.is_constant or x.is_constant or not mask.array().size:
            continue
        if bool(mask.array().all()) != (layer.op == "And") or bool(mask.array().any()) != (layer.op == "And"):
            continue
        if x.type == layer.output.type:
            return x
        if any(d == 0 for d in layer.output.shape) or not g.is_sized(layer.output.shape):
            return Skip(f"the shape of %{layer.output.name}: {layer.output.type} is not known")
        return g.add("Expand", x, shape=tuple(layer.output.shape))
    return None
