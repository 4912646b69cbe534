"""Two successive transposes become one; an identity transpose is removed."""

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Transpose", phase=Phase.CLEAN)
def cancel_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    perm = layer.attrs["perm"]
    x = layer.inputs[0]
    if perm == tuple(range(len(perm))):
        return x
    first = g.maker(x)
    if x is None or first is None or first.op != "Transpose":
        return None
    if g.is_output(x):
        return Skip(f"%{x.name} is an output of the network")
    combined = tuple(first.attrs["perm"][p] for p in perm)
    inner = first.inputs[0]
    return inner if combined == tuple(range(len(combined))) else g.add("Transpose", inner, perm=combined)
