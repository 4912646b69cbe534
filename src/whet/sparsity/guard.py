"""The 2:4 guard: notices when a change of the network turns 2:4 weights into others, which no sparse kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

from whet.network import Layer, Network, Tensor
from whet.sparsity.two_four import find_first_violation, find_reduction_axis, is_two_four


@dataclass(frozen=True)
class BrokenLayer:
    """A layer whose 2:4 weights are no longer 2:4, and the first group of four with more than two nonzeros."""

    layer: str
    where: str

    def __str__(self) -> str:
        return f"'{self.layer}' ({self.where})"


class TwoFourGuard:
    """Remembers the nodes of `net` with 2:4 weights; `check(net)` finds their layers with other weights in a changed copy of it.

    Weights are also found through a DequantizeLinear. A weight is examined once, so checking after every pass is cheap.
    """

    def __init__(self, net: Network):
        self._known: dict[tuple[Tensor, int], bool] = {}
        found = ((x, _find_stored_weight(x)) for x in net.layers)
        self.nodes = frozenset(x.name for x, place in found if place is not None and self._is_two_four(*place) and place[0].array().any())

    def check(self, net: Network) -> list[BrokenLayer]:
        """The layers of `net` that come from a remembered node and have weights that are not 2:4, in execution order."""
        broken = []
        for layer in net.layers if self.nodes else ():
            if self.nodes.isdisjoint((layer.name, *layer.sources)) or _count_weighted_parts(layer) > 1:
                continue
            place = _find_stored_weight(layer)
            if place is not None and not self._is_two_four(*place):
                broken.append(BrokenLayer(layer.name, find_first_violation(place[0].array(), place[1])))
        return broken

    def _is_two_four(self, w: Tensor, axis: int) -> bool:
        if (w, axis) not in self._known:
            self._known[w, axis] = is_two_four(w.array(), axis)
        return self._known[w, axis]


def _find_stored_weight(layer: Layer) -> tuple[Tensor, int] | None:
    """`find_reduction_axis`, also for a Conv, Gemm or MatMul of dequantized weights, whose integers are returned."""
    w = layer.input(1) if layer.op in ("Conv", "Gemm", "MatMul") else None
    if w is None or w.maker is None or w.maker.op != "DequantizeLinear":
        return find_reduction_axis(layer)
    stored = w.maker.inputs[0]
    if stored is None or stored.weight is None or stored.type.rank < 2:
        return None
    return stored, 1 if layer.op == "Conv" or (layer.op == "Gemm" and layer.attrs.get("transB")) else stored.type.rank - 2


def _count_weighted_parts(layer: Layer) -> int:
    """Convolutions and matrix products in a layer; with several, the weights of one say nothing about those of another node."""
    body = layer.regions.get("body")
    return 1 if body is None else sum(x.op in ("Conv", "ConvTranspose", "Gemm", "MatMul") for x in body.layers)
