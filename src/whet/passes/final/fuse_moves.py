"""Reshapes, transposes, splits, joins and the arithmetic between them become one layer: a detector's heads, from channels to boxes.

Each would read and write all numbers; as one layer each number is read where it lies, computed and written where it belongs.
"""

from __future__ import annotations

from whet.network import BF16, F16, F32, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import ACTIVATIONS, fuse
from whet.passes._graph import Graph
from whet.passes.final.fuse_rearrange import KIND as REARRANGE

KIND = "Moves"
MOVES = ("Concat", "Reshape", "Split", "Transpose")
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
UNARY = (*(a for a in ACTIVATIONS if a != "PRelu"), "Abs", "Exp", "Neg", "Sqrt")
FLOATS = (F16, BF16, F32)  # a model in half precision throughout has heads as well
SOURCES = 4  # tensors that are computed at run time and come from outside


@rule("Concat", "Fused", "Reshape", "Transpose", *ARITHMETIC, *UNARY, phase=Phase.FINAL, after=["fuse_pointwise", "fuse_rearrange"])
def fuse_moves(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """From the last layer back to what is no move and no arithmetic. Needs a Transpose, a Concat and arithmetic: else there is little to gain."""
    if len(layer.outputs) > 1 or layer.composite == KIND or not _able(layer) or any(_able(r) for r in g.readers(layer.output)):
        return None
    members = _members(g, layer)
    ops = [x.op for m in members for x in (m.regions["body"].layers if m.op == "Fused" else [m])]
    if not {"Transpose", "Concat"} <= set(ops) or not set(ops) - set(MOVES):
        return None
    inside = {t for m in members for t in m.outputs}
    sources = {t: None for m in members for t in m.inputs if t is not None and t not in inside and not t.is_constant}
    if not 0 < len(sources) <= SOURCES:
        return Skip(f"it reads {len(sources)} tensors, at most {SOURCES} can be moved at once")
    wrong = next((t for t in (*sources, *inside) if t.dtype != layer.output.dtype or t.dtype not in FLOATS), None)
    if wrong is not None:
        return Skip(f"%{wrong.name} is {wrong.dtype}, what is moved and computed has to be of one float type")
    unknown = next((t for t in sources if g.maker(t) is None), None)
    if unknown is not None:
        return Skip(f"%{unknown.name} comes from outside as it is: it lies row-major already")
    return fuse(g, KIND, *members)


def _able(layer: Layer) -> bool:
    """Whether a layer can be one of them: its parameters are constants."""
    if layer.op in MOVES:
        return layer.op == "Concat" or all(t is None or t.is_constant for t in layer.inputs[1:])
    if layer.composite == REARRANGE:
        return True
    steps = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    if any(x.op not in ARITHMETIC and x.op not in UNARY for x in steps):
        return False
    return all(t is None or t.is_constant or t.type == layer.outputs[0].type for t in layer.inputs)


def _members(g: Graph, last: Layer) -> list[Layer]:
    """All that only `last` needs, in running order."""
    found: set[Layer] = {last}
    waiting = [last]
    while waiting:
        for t in waiting.pop().inputs:
            maker = g.maker(t)
            if maker is not None and maker not in found and _able(maker):
                found.add(maker)
                waiting.append(maker)
    while True:
        needed = {x for x in found if x is not last and any(g.is_output(t) or any(r not in found for r in g.readers(t)) for t in x.outputs)}
        if not needed:
            break
        found -= needed
    kept, waiting = {last}, [last]  # what is left over may hang on something that went
    while waiting:
        for t in waiting.pop().inputs:
            maker = g.maker(t)
            if maker in found and maker not in kept:
                kept.add(maker)
                waiting.append(maker)
    return sorted(kept, key=g.place)
