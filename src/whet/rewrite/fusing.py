"""Building fused layers, and the epilogue of a root operation: scale, bias, activation and one residual Add.

The order of an epilogue is [scale] [bias] [activation] [Add] [activation]: what the convolutions and matrix products of every backend compute while
the result is in registers. A longer epilogue would be a fused layer that only the reference implementation computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.errors import NetworkError
from whet.network import Layer, Network, Tensor, copy_into
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

CONVS = ("Conv", "ConvTranspose")
PRODUCTS = ("Gemm", "MatMul")
ACTIVATIONS = (
    "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh",
)  # fmt: skip


def fuse_flat(g: Graph, kind: str, *members: Layer) -> Tensor:
    """Adds a Fused layer that computes `members` (in execution order) and returns its output. Members that are fused are inlined.

    Its inputs are all tensors that the members read from outside, weights included; its output is that of the last member.
    """
    body = Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []

    def map_outer_tensor(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if t not in inside:
            inside[t] = _add_body_input(body, t)
            inputs.append(t)
        return inside[t]

    def copy(layer: Layer) -> None:
        copied = body.add_layer(
            layer.op, [map_outer_tensor(t) for t in layer.inputs], layer.attrs, name=layer.name, outputs=[t.name for t in layer.outputs],
            sources=layer.sources,
        )  # fmt: skip
        inside.update(zip(layer.outputs, copied.outputs, strict=True))

    for m in members:
        if m.op != "Fused":
            copy(m)
            continue
        inlined = m.regions["body"]
        for own, outer in zip(inlined.inputs, m.inputs, strict=True):
            t = map_outer_tensor(outer)
            if t is None:
                raise NetworkError(f"fused layer '{m.name}' has an absent input")
            inside[own] = t
        for layer in inlined.layers:
            copy(layer)
        for own, result in zip(inlined.outputs, m.outputs, strict=True):
            inside[result] = inside[own]
    body.outputs = [inside[t] for t in members[-1].outputs]
    return g.add("Fused", *inputs, regions={"body": body}, composite=kind)


def fuse_nested(
    g: Graph, kind: str, *members: Layer, outputs: Sequence[Tensor] = (), attributes: Mapping[Layer, Mapping[str, Any]] | None = None
) -> Any:
    """As `fuse_flat`, but members that are fused stay fused layers within the body, so that decomposition restores them.

    `outputs` are the members' outputs that are read outside (default: the last one's); of several a tuple is returned. A member in `attributes` gets
    these additional attributes and keeps only its first input: sizes that constants determine are not known within a body.
    """
    body = Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []
    for m in members:
        added_attrs = (attributes or {}).get(m)
        reads = m.inputs if added_attrs is None else m.inputs[:1]
        for t in reads:
            if t is not None and t not in inside:
                inside[t] = _add_body_input(body, t)
                inputs.append(t)
        regions = {k: copy_into(r, Network(r.name, "lowered"), {}) for k, r in m.regions.items()}
        own_inputs = [None if t is None else inside[t] for t in reads]
        attrs = {**m.attrs, **(added_attrs or {})}
        copy = body.add_layer(m.op, own_inputs, attrs, name=m.name, regions=regions, outputs=[t.name for t in m.outputs], sources=m.sources)
        inside.update(zip(m.outputs, copy.outputs, strict=True))
    body.outputs = [inside[t] for t in outputs or members[-1].outputs]
    return g.add("Fused", *inputs, regions={"body": body}, composite=kind)


def _add_body_input(body: Network, outer: Tensor) -> Tensor:
    t = Tensor(body.fresh(outer.name), outer.type)
    t.shape_value = outer.shape_value
    body.inputs.append(t)
    return t


def find_root_op(layer: Layer | None, ops: tuple[str, ...]) -> str:
    """The operation or kind of `layer` if it is one of `ops`, else "". A fused layer has its composite kind."""
    if layer is None:
        return ""
    op = layer.composite or layer.op
    return op if op in ops else ""


def list_epilogue_steps(layer: Layer) -> list[str]:
    """The epilogue of a fused layer as "scale", "bias", "activation" and "add" in order; empty for a plain layer."""
    if layer.op != "Fused":
        return []
    body = layer.regions["body"]
    constants = {own for own, outer in zip(body.inputs, layer.inputs, strict=True) if outer is not None and outer.is_constant}
    steps = []
    for x in body.layers:
        if x.op == layer.composite:
            continue
        if x.op in ACTIVATIONS:
            steps.append("activation")
        elif x.op in ("Mul", "Div") and any(t in constants for t in x.inputs):
            steps.append("scale")
        elif x.op == "Add":
            is_vector = any(t is not None and t in constants and t.type.rank <= 1 for t in x.inputs)
            steps.append("bias" if is_vector else "add")
    return steps


def is_conv(layer: Layer | None) -> bool:
    """True if the layer is a convolution, alone or with an epilogue."""
    return find_root_op(layer, ("Conv",)) == "Conv"


def find_inner_conv(layer: Layer) -> Layer:
    """The Conv of a convolution layer: the layer itself, or the one in its body."""
    return layer if layer.op == "Conv" else next(x for x in layer.regions["body"].layers if x.op == "Conv")


def outer_tensor(layer: Layer, inner: Tensor | None) -> Tensor | None:
    """The network's tensor for `inner`, an input of the layer's body; None for other tensors."""
    if layer.op != "Fused":
        return inner
    body = layer.regions["body"]
    return None if inner is None else dict(zip(body.inputs, layer.inputs, strict=True)).get(inner)


def find_conv_input(layer: Layer) -> Tensor | None:
    """The activation that a convolution layer reads; None when its body computes it."""
    return outer_tensor(layer, find_inner_conv(layer).inputs[0])


def find_conv_weights(conv: Layer) -> Tensor | None:
    """The weights of a two-dimensional Conv [filters, channels / group, height, width]; None for other ranks."""
    w = conv.inputs[1]
    return w if w is not None and w.type.rank == 4 else None


def is_pointwise_conv(conv: Layer) -> bool:
    """True if a Conv is 1x1 with stride 1 and no padding."""
    w, a = find_conv_weights(conv), conv.attrs
    return w is not None and w.shape[2:] == (1, 1) and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or ())


def has_few_channels(conv: Layer, limit: int) -> bool:
    """True if a Conv reads at most `limit` channels (a static number)."""
    x = conv.inputs[0]
    return x is not None and isinstance(x.shape[1], int) and x.shape[1] <= limit


def find_conv_before_pointwise(g: Graph, layer: Layer) -> tuple[Layer, Tensor] | None:
    """For a pointwise convolution that reads another convolution's result: (the producing layer, the tensor between). Else None."""
    if not is_conv(layer) or not is_pointwise_conv(find_inner_conv(layer)):
        return None
    value = find_conv_input(layer)
    first = g.maker(value)
    return None if value is None or first is None or not is_conv(first) else (first, value)


def fuse_conv_pair(g: Graph, kind: str, first: Layer, value: Tensor, layer: Layer) -> Tensor | Skip:
    """Fuses both convolutions that `find_conv_before_pointwise` found, nested, or returns why they cannot be fused."""
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    if "add" in list_epilogue_steps(first):
        return Skip(f"the epilogue of '{first.name}' adds a residual")
    if find_inner_conv(layer).attrs["group"] != 1:
        return Skip("the second convolution has groups too")
    return fuse_nested(g, kind, first, layer)


def find_fusion_obstacle(g: Graph, value: Tensor, *readers: Layer) -> str | None:
    """Why `readers` cannot be fused with the layer that produces `value`, whatever they compute; None when they might."""
    if not value.dtype.is_float:
        return f"%{value.name} is {value.dtype}: only floating point is fused"
    return g.escapes(value, *readers)


def fuse_activation(g: Graph, layer: Layer, roots: tuple[str, ...]) -> Tensor | Skip | None:
    """The common rule of `fuse_*_activation`: appends an activation to the epilogue of the root operation that produces its input."""
    x = layer.inputs[0]
    head = g.maker(x)
    root = find_root_op(head, roots)
    if head is None or not root or x is None:
        return None
    if reason := find_fusion_obstacle(g, x, layer):
        return Skip(reason)
    if list_epilogue_steps(head)[-1:] == ["activation"]:
        return Skip(f"the epilogue of '{head.name}' ends with an activation already")
    for t in layer.inputs[1:]:
        if t is not None and not t.is_constant:
            return Skip(f"%{t.name}, a parameter of {layer.op}, is computed at run time")
        if t is not None and layer.op == "PRelu" and not _is_per_channel(t, x, 1 if root in CONVS else x.type.rank - 1):
            return Skip(f"the slopes %{t.name}: {t.type} differ within a channel")
    return fuse_flat(g, root, head, layer)


def _is_per_channel(t: Tensor, x: Tensor, axis: int) -> bool:
    """True if `t` broadcasts over `x` with one value, or one per index of `axis`."""
    shape = (1,) * (x.type.rank - t.type.rank) + t.shape
    return all(d == 1 or i == axis for i, d in enumerate(shape))


def fuse_add(g: Graph, layer: Layer, roots: tuple[str, ...]) -> Tensor | Skip | None:
    """The common rule of `fuse_*_add`: appends a residual Add to the epilogue of the root operation that produces one of its inputs.

    When both inputs come from such layers, the later one is chosen: the other value has been computed by then.
    """
    heads = [(g.maker(t), t, layer.inputs[1 - i]) for i, t in enumerate(layer.inputs)]
    candidates = [(head, t, other) for head, t, other in heads if head is not None and t is not None and find_root_op(head, roots)]
    skip: Skip | None = None
    for head, value, other in sorted(candidates, key=lambda c: -g.position(c[0])):
        reason = find_fusion_obstacle(g, value, layer)
        if other is None or value is other:
            reason = f"%{value.name} is added to itself"
        elif value.type != layer.output.type or other.type != value.type:
            reason = f"%{value.name}: {value.type} and %{other.name}: {other.type} broadcast"
        elif "add" in list_epilogue_steps(head):
            reason = reason or f"the epilogue of '{head.name}' has an Add already"
        if reason is None:
            return fuse_flat(g, find_root_op(head, roots), head, layer)
        skip = skip or Skip(reason)
    return skip
