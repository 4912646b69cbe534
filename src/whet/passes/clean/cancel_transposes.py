"""Two transposes in a row become one; one that moves nothing goes."""

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
    joined = tuple(first.attrs["perm"][p] for p in perm)
    inner = first.inputs[0]
    return inner if joined == tuple(range(len(joined))) else g.add("Transpose", inner, perm=joined)
