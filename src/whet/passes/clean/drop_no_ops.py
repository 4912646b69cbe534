"""Removes layers without effect: Identity, Dropout, Cast to its own type, Mul by 1, Concat of one, full Slices, empty Pads, constant Wheres."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops.pad import pad_amounts
from whet.ops.slice import slice_ranges
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule(
    "Cast", "Clip", "Concat", "Div", "Dropout", "Expand", "Identity", "Max", "Mean", "Min", "Mul", "Pad", "Slice", "Sub", "Sum", "Tile", "Where",
    phase=Phase.CLEAN,
    level=0,
)  # fmt: skip
def drop_no_ops(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = _find_unchanged_input(layer)
    if x is None or x.type != layer.output.type:
        return None
    if layer.op == "Identity" and g.is_output(layer.output) and (g.maker(x) is None or g.is_output(x)):
        return Skip(f"%{x.name} keeps its own name; as an output it needs a copy")
    return x


def _find_unchanged_input(layer: Layer) -> Tensor | None:
    """The input that the layer returns unchanged, or None."""
    x = layer.inputs[0]
    second = layer.input(1)
    match layer.op:
        case "Identity" | "Dropout" | "Cast" | "Expand" | "Tile":
            return x  # no effect on equal types
        case "Concat" | "Max" | "Min" | "Mean" | "Sum" if len(layer.inputs) == 1:
            return x
        case "Clip" if second is None and layer.input(2) is None:
            return x
        case "Mul" if scalar_value(x) == 1.0:
            return second
        case "Mul" | "Div" if scalar_value(second) == 1.0:
            return x
        case "Sub" if scalar_value(second) == 0.0:
            return x
        case "Where" if x is not None and x.weight is not None and x.weight.array.size and len(set(x.weight.array.reshape(-1).tolist())) == 1:
            return second if x.weight.array.reshape(-1)[0] else layer.input(2)
        case "Pad" if all(p == (0, 0) for p in pad_amounts(layer)):
            return x
        case "Slice" if all(step == 1 for _, _, step in slice_ranges(layer).values()):
            return x
    return None
