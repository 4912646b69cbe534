"""Taking fused layers apart where no kernel computes them whole but kernels exist for what is in them."""

from __future__ import annotations

from whet.composites import decomposition
from whet.network import Layer, Network, Tensor, copy_into
from whet.ops._origin import express


def unfuse(net: Network, layer: Layer) -> list[Layer]:
    """Replaces a Fused layer of `net` by the layers of its body, in place; returns them. They keep its sources.

    What was joined for several layers before they were fused, or was for another one that is apart already, is joined once.
    """
    body = decomposition(layer)
    at = net.layers.index(layer)
    seen: dict[Tensor, Tensor] = {inner: outer for inner, outer in zip(body.inputs, layer.inputs, strict=True) if outer is not None}
    for t in body.constants.values():
        seen[t] = net.constant(t.constant(), t.name)
    made: list[Layer] = []
    for inner in body.layers:
        regions = {k: copy_into(r, Network(r.name, net.stage), seen) for k, r in inner.regions.items()}
        inputs = [None if t is None else seen[t] for t in inner.inputs]
        if inner.op == "DequantizeLinear" and all(t is None or t.is_constant for t in inputs):
            # quantized weights that no kernel takes: numbers once, not at every run
            folded = express(inner.op, *[None if t is None else t.weight for t in inputs], **inner.attrs)
            seen[inner.output] = net.constant(folded, inner.output.name)
            continue
        if (joined := _joined_already(net, inner, inputs)) is not None:
            seen[inner.output] = joined
            continue
        new = net.add_layer(
            inner.op,
            inputs,
            inner.attrs,
            name=f"{layer.name}.{inner.name}",
            regions=regions,
            sources=inner.sources or layer.sources,
            at=at + len(made),
        )
        made.append(new)
        seen.update(zip(inner.outputs, new.outputs, strict=True))
    for old, inner_out in zip(layer.outputs, body.outputs, strict=True):
        net.replace(old, seen[inner_out])
    net.remove(layer)
    net.sort()
    return made


def _joined_already(net: Network, inner: Layer, inputs: list[Tensor | None]) -> Tensor | None:
    """What a layer of `net` makes that joins the same tensors in the same way, where `inner` joins."""
    if inner.op != "Concat":
        return None
    return next((x.output for x in net.layers if x.op == "Concat" and list(x.inputs) == inputs and x.attrs == inner.attrs), None)
