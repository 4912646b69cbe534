"""Making Fused layers, and what may follow an anchor in one: scale, bias, one residual Add, activations around it.

The order of an epilogue is [scale] [bias] [activation] [Add] [activation]: what a convolution or matrix product of any backend can do while
its result is in registers. More would make fused layers that only the reference computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.network import Layer, Network, Tensor, copy_into
from whet.passes._base import Skip
from whet.passes._graph import Graph

CONVS = ("Conv", "ConvTranspose")
PRODUCTS = ("Gemm", "MatMul")
ACTIVATIONS = (
    "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh",
)  # fmt: skip


def fuse(g: Graph, composite: str, *members: Layer) -> Tensor:
    """A Fused layer that does what `members` (in running order, each reading what stands before it) do; returns its output.

    Members that are Fused themselves are opened. Its inputs are all that the members read from outside, weights included; its
    output is that of the last member, in whose type it agrees.
    """
    body = Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []

    def inner(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if t not in inside:
            inside[t] = made = Tensor(body.fresh(t.name), t.type)
            made.shape_value = t.shape_value
            body.inputs.append(made)
            inputs.append(t)
        return inside[t]

    def copy(layer: Layer) -> None:
        made = body.add_layer(
            layer.op, [inner(t) for t in layer.inputs], layer.attrs, name=layer.name, outputs=[t.name for t in layer.outputs],
            sources=layer.sources,
        )  # fmt: skip
        inside.update(zip(layer.outputs, made.outputs, strict=True))

    for m in members:
        if m.op != "Fused":
            copy(m)
            continue
        opened = m.regions["body"]
        for own, fed in zip(opened.inputs, m.inputs, strict=True):
            inside[own] = inner(fed)  # type: ignore[assignment]
        for layer in opened.layers:
            copy(layer)
        for own, made in zip(opened.outputs, m.outputs, strict=True):
            inside[made] = inside[own]
    body.outputs = [inside[t] for t in members[-1].outputs]
    return g.add("Fused", *inputs, regions={"body": body}, composite=composite)


def fuse_whole(
    g: Graph, composite: str, *members: Layer, outputs: Sequence[Tensor] = (), given: Mapping[Layer, Mapping[str, Any]] | None = None
) -> Any:
    """As `fuse`, but members that are Fused stay so within the body: taken apart, they are what they were.

    `outputs` are what the members make that is read outside (default: the last one's); of several a tuple comes back. Members in `given` have these
    attributes more, and of their inputs the first: within a body, constants that say how large a result is are not known.
    """
    body = Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []
    for m in members:
        more = (given or {}).get(m)
        reads = m.inputs if more is None else m.inputs[:1]
        for t in reads:
            if t is not None and t not in inside:
                inside[t] = made = Tensor(body.fresh(t.name), t.type)
                made.shape_value = t.shape_value
                body.inputs.append(made)
                inputs.append(t)
        regions = {k: copy_into(r, Network(r.name, "lowered"), {}) for k, r in m.regions.items()}
        fed = [None if t is None else inside[t] for t in reads]
        attrs = {**m.attrs, **(more or {})}
        copy = body.add_layer(m.op, fed, attrs, name=m.name, regions=regions, outputs=[t.name for t in m.outputs], sources=m.sources)
        inside.update(zip(m.outputs, copy.outputs, strict=True))
    body.outputs = [inside[t] for t in outputs or members[-1].outputs]
    return g.add("Fused", *inputs, regions={"body": body}, composite=composite)


def anchored(layer: Layer | None, anchors: tuple[str, ...]) -> str:
    """The op among `anchors` that the layer is, or is fused around; "" when it is another layer or none."""
    if layer is None:
        return ""
    op = layer.composite or layer.op
    return op if op in anchors else ""


def steps(head: Layer) -> list[str]:
    """What follows the anchor in a fused layer: "scale", "bias", "activation" and "add" in order; nothing for a plain layer."""
    if head.op != "Fused":
        return []
    body = head.regions["body"]
    constants = {own for own, fed in zip(body.inputs, head.inputs, strict=True) if fed is not None and fed.is_constant}
    found = []
    for layer in body.layers:
        if layer.op == head.composite:
            continue
        if layer.op in ACTIVATIONS:
            found.append("activation")
        elif layer.op in ("Mul", "Div") and any(t in constants for t in layer.inputs):
            found.append("scale")
        elif layer.op == "Add":
            vector = any(t in constants and t.type.rank <= 1 for t in layer.inputs)
            found.append("bias" if vector else "add")
    return found


def conv_of(layer: Layer) -> Layer:
    """The convolution itself of a Conv layer, alone or fused."""
    return layer if layer.op == "Conv" else next(x for x in layer.regions["body"].layers if x.op == "Conv")


def conv_read(layer: Layer, conv: Layer) -> Tensor | None:
    """What the convolution of a layer reads, as the network knows it."""
    if layer is conv:
        return conv.inputs[0]
    body = layer.regions["body"]
    return dict(zip(body.inputs, layer.inputs, strict=True)).get(conv.inputs[0])


def plain_product(conv: Layer) -> bool:
    """1x1, stride 1, no padding."""
    w, a = conv.inputs[1], conv.attrs
    return w is not None and w.type.rank == 4 and w.shape[2:] == (1, 1) and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or ())


def before_product(g: Graph, layer: Layer) -> tuple[Layer, Tensor] | None:
    """The layer of a convolution that the 1x1 convolution `layer` (either alone or fused) reads, and what it reads of it; None for another layer."""
    if anchored(layer, ("Conv",)) != "Conv" or not plain_product(conv_of(layer)):
        return None
    value = conv_read(layer, conv_of(layer))
    first = g.maker(value)
    return None if value is None or first is None or anchored(first, ("Conv",)) != "Conv" else (first, value)


def fuse_product(g: Graph, composite: str, first: Layer, value: Tensor, layer: Layer) -> Tensor | Skip:
    """Both convolutions of `before_product`, whole, as one layer, or why they cannot be."""
    if reason := obstacle(g, first, value, layer):
        return Skip(reason)
    if "add" in steps(first):
        return Skip(f"'{first.name}' adds something to what the product reads")
    if conv_of(layer).attrs["group"] != 1:
        return Skip("the second convolution has groups too")
    return fuse_whole(g, composite, first, layer)


def obstacle(g: Graph, head: Layer, value: Tensor, *readers: Layer) -> str | None:
    """Why `readers` cannot be computed in the layer `head` that makes `value`, whatever they are; None when they might."""
    if not value.dtype.is_float:
        return f"%{value.name} is {value.dtype}: only floating point is fused"
    return g.shared(value, *readers)


def fuse_activation(g: Graph, layer: Layer, anchors: tuple[str, ...]) -> Tensor | Skip | None:
    """The shared rule of `fuse_*_activation`: an activation goes into the anchored layer that makes its input."""
    x = layer.inputs[0]
    head = g.maker(x)
    composite = anchored(head, anchors)
    if head is None or not composite or x is None:
        return None
    if reason := obstacle(g, head, x, layer):
        return Skip(reason)
    if steps(head)[-1:] == ["activation"]:
        return Skip(f"'{head.name}' ends with an activation already")
    for t in layer.inputs[1:]:
        if t is not None and not t.is_constant:
            return Skip(f"%{t.name}, a parameter of {layer.op}, is computed at run time")
        if t is not None and layer.op == "PRelu" and not _per_channel(t, x, 1 if composite in CONVS else x.type.rank - 1):
            return Skip(f"the slopes %{t.name}: {t.type} differ within a channel")
    return fuse(g, composite, head, layer)


def _per_channel(t: Tensor, x: Tensor, axis: int) -> bool:
    """Whether `t` broadcasts over `x` with one value, or one per index of `axis`."""
    shape = (1,) * (x.type.rank - t.type.rank) + t.shape
    return all(d == 1 or i == axis for i, d in enumerate(shape))


def fuse_add(g: Graph, layer: Layer, anchors: tuple[str, ...]) -> Tensor | Skip | None:
    """The shared rule of `fuse_*_add`: a residual Add goes into the anchored layer that makes one of its inputs.

    When both inputs come from such layers, the later one takes it: by then the other value is there.
    """
    heads = [(g.maker(t), t, layer.inputs[1 - i]) for i, t in enumerate(layer.inputs)]
    found = [(head, t, other) for head, t, other in heads if head is not None and t is not None and anchored(head, anchors)]
    skip: Skip | None = None
    for head, value, other in sorted(found, key=lambda f: -g.place(f[0])):
        reason = obstacle(g, head, value, layer)
        if other is None or value is other:
            reason = f"%{value.name} is added to itself"
        elif value.type != layer.output.type or other.type != value.type:
            reason = f"%{value.name}: {value.type} and %{other.name}: {other.type} broadcast"
        elif "add" in steps(head):
            reason = reason or f"'{head.name}' holds an Add already"
        if reason is None:
            return fuse(g, anchored(head, anchors), head, layer)
        skip = skip or Skip(reason)
    return skip
