"""Two transposes in a row become one; one that moves nothing goes."""

from whet.network import Layer, Network, Tensor
from whet.passes._base import Phase, Skip, rule


@rule("Transpose", phase=Phase.CLEAN)
def cancel_transposes(net: Network, layer: Layer) -> Tensor | Skip | None:
    perm = layer.attrs["perm"]
    x = layer.inputs[0]
    if perm == tuple(range(len(perm))):
        return x
    first = x.maker
    if first is None or first.op != "Transpose":
        return None
    if x in net.outputs:
        return Skip(f"%{x.name} is an output of the network")
    joined = tuple(first.attrs["perm"][p] for p in perm)
    inner = first.inputs[0]
    return inner if joined == tuple(range(len(joined))) else net.add("Transpose", inner, perm=joined)
