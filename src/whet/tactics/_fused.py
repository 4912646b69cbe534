"""A fused layer taken apart: the layer that it is fused around, what follows it, which of its inputs are whose; without Q and DQ.

Fused means a body plus a composite (ops/fused.py); tactics ask here what they have to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import BuildError
from whet.network import Layer, Network, Tensor


def anchor(layer: Layer) -> Layer:
    """The layer that a fused layer is fused around (the first of its composite's op in the body); a plain layer is its own."""
    if layer.op != "Fused":
        return layer
    for inner in layer.regions["body"].layers:
        if inner.op == layer.attrs["composite"]:
            return inner
    return layer  # a composite that is no op ("GELU", "Attention"): the pattern is the whole body


def is_quantized(layer: Layer) -> bool:
    """Whether a fused layer dequantizes what it reads: its anchor computes on integers with scales."""
    return layer.op == "Fused" and any(x.op == "DequantizeLinear" for x in layer.regions["body"].layers)


@dataclass(frozen=True)
class Unquantized:
    """A quantized fused layer without its Q and DQ layers: `layer` has the same inputs at the same places, integers as floats of their
    real type (constants keep their integers); `dequantize` has the DQ layer by input place, `quantize` the Q layer at the end."""

    layer: Layer
    dequantize: dict[int, Layer]
    quantize: Layer | None


def unquantized(layer: Layer) -> Unquantized | str:
    """Takes a fused layer's Q and DQ away, or says why they are not where a quantized layer has them."""
    body = layer.regions["body"]
    inner, outer = list(body.inputs), list(layer.inputs)
    place = {t: i for i, t in enumerate(inner)}
    seen: dict[Tensor, Tensor] = {t: t for t in inner}
    made = Network("body", "lowered")
    found: dict[int, Layer] = {}
    last: Layer | None = None
    for x in body.layers:
        if x.op == "QuantizeLinear":
            if x is not body.layers[-1]:
                return "an integer is stored before the end"
            source = x.needs(0)
            last, seen[x.output] = x, seen[source]
        elif x.op == "DequantizeLinear":
            i = place.get(x.inputs[0])
            if i is None or i in found:
                return "one value is dequantized twice"
            t = layer.needs(i)
            found[i] = x
            seen[x.output] = inner[i] = Tensor(t.name, x.output.type)
            outer[i] = Tensor(t.name, t.type.with_dtype(x.output.dtype), weight=t.weight)
        else:
            copy = Layer(x.op, x.name, [None if t is None else seen[t] for t in x.inputs], x.attrs, x.regions, x.sources)
            copy.outputs = tuple(Tensor(t.name, t.type, copy, t.index) for t in x.outputs)
            seen.update(zip(x.outputs, copy.outputs, strict=True))
            made.layers.append(copy)
    made.inputs, made.outputs = inner, [seen[t] for t in body.outputs]
    view = Layer("Fused", layer.name, outer, layer.attrs, {"body": made}, layer.sources)
    view.outputs = tuple(Tensor(t.name, made.outputs[0].type, view) for t in layer.outputs)
    return Unquantized(view, found, last)


@dataclass(frozen=True)
class Post:
    """One step of an epilogue: an op applied to the running value; `other` is its second operand as an input index of the fused layer."""

    op: str
    attrs: Mapping[str, Any]
    other: int | None = None
    other_tensor: Tensor | None = None
    swapped: bool = False  # the running value is the second operand


def epilogue(layer: Layer) -> list[Post] | None:
    """What follows the anchor, in order, when the body is a chain; None when it is not. SiLU stands as one "Silu" step.

    An operand that is not the running value must be an input of the fused layer.
    """
    if layer.op != "Fused":
        return []
    body: Network = layer.regions["body"]
    head = anchor(layer)
    if head is layer:
        return None
    place = {t: i for i, t in enumerate(body.inputs)}
    running = head.outputs[0]
    steps: list[Post] = []
    rest = [x for x in body.layers if x is not head]
    while rest:
        x = rest.pop(0)
        if x.op == "Sigmoid" and rest and rest[0].op == "Mul" and x.inputs[0] is running and set(rest[0].inputs) == {running, x.output}:
            running = rest.pop(0).output
            steps.append(Post("Silu", {}))
            continue
        if running not in x.inputs or len(x.outputs) != 1:
            return None
        others = [(i, t) for i, t in enumerate(x.inputs) if t is not None and t is not running]
        if len(others) > 1 and any(t not in place for _, t in others):
            return None
        if len(others) == 1 and others[0][1] in place and x.op != "Clip":  # a Clip with one bound: which one is what counts
            t = others[0][1]
            steps.append(Post(x.op, dict(x.attrs), place[t], layer.inputs[place[t]], swapped=x.inputs[0] is not running))
        elif not others:
            steps.append(Post(x.op, dict(x.attrs)))
        else:
            # Clip's bounds and the like: constants of the fused layer
            if any(t not in place or layer.inputs[place[t]].weight is None for _, t in others):
                return None
            bounds = {f"input{i}": layer.inputs[place[t]].array() for i, t in others}
            steps.append(Post(x.op, {**x.attrs, **bounds}))
        running = x.outputs[0]
    return steps if body.outputs == [running] else None


def steps_after(layer: Layer) -> list[Post]:
    """`epilogue` of a layer that a tactic has taken, whose body is a chain. Raises BuildError for another one."""
    steps = epilogue(layer)
    if steps is None:
        raise BuildError(f"what is fused to {layer.name} is not a chain")
    return steps


def outer_input(layer: Layer, inner: Tensor | None) -> int | None:
    """Index among `layer.inputs` of what the anchor calls `inner`; None when absent. Raises BuildError for what is computed inside."""
    if inner is None:
        return None
    for i, t in enumerate(layer.regions["body"].inputs if layer.op == "Fused" else layer.inputs):
        if t is inner:
            return i
    raise BuildError(f"{layer.name}: its {layer.op if layer.op != 'Fused' else layer.composite} reads %{inner.name}, which is no input of the layer")


def _place(layer: Layer, i: int) -> int:
    found = outer_input(layer, anchor(layer).needs(i))
    assert found is not None
    return found


def source_place(layer: Layer) -> int:
    """Index among `layer.inputs` of what the anchor reads first."""
    return _place(layer, 0)


def places(layer: Layer) -> tuple[int, int, int | None]:
    """Indices among `layer.inputs` of what the anchor reads as data, as weights and as bias (None: it has none)."""
    return _place(layer, 0), _place(layer, 1), outer_input(layer, anchor(layer).input(2))


def constants_of(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """The tensors that the anchor reads as weights and as bias, as the layer has them."""
    _, w, b = places(layer)
    weights = layer.needs(w)
    return weights, None if b is None else layer.inputs[b]


def seen(inner: Layer, outer: Mapping[Tensor, Tensor | None]) -> Layer:
    """A layer of the body with the whole's inputs in the place of the body's: constants have their values."""
    fed = [outer.get(t, t) if t is not None else None for t in inner.inputs]
    view = Layer(inner.op, inner.name, fed, inner.attrs, inner.regions, inner.sources)
    view.outputs = inner.outputs
    return view
