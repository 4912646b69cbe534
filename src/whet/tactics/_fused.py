"""The structure of a fused layer: its root layer, its epilogue, the roles of its inputs, and its form without Q and DQ layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import BuildError
from whet.network import Layer, Network, Tensor


def get_root_layer(layer: Layer) -> Layer:
    """The root layer of a fused layer: the first in its body whose operation is its composite kind. A plain layer is its own root."""
    if layer.op != "Fused":
        return layer
    for inner in layer.regions["body"].layers:
        if inner.op == layer.attrs["composite"]:
            return inner
    return layer  # a kind that is not an operation ("Attention"): the whole body is the pattern


def is_quantized(layer: Layer) -> bool:
    """True if a fused layer dequantizes its inputs, so that its root layer computes on integers with scales."""
    return layer.op == "Fused" and any(x.op == "DequantizeLinear" for x in layer.regions["body"].layers)


@dataclass(frozen=True)
class Unquantized:
    """A quantized fused layer without its Q and DQ layers. `layer` has the same inputs at the same indices, integers with the float type that
    they are dequantized to (constants keep their integers). `dequantize` has the DQ layer by input index, `quantize` is the final Q layer."""

    layer: Layer
    dequantize: dict[int, Layer]
    quantize: Layer | None


def remove_quantization(layer: Layer) -> Unquantized | str:
    """Removes a fused layer's Q and DQ layers, or returns the reason why their positions are not those of a quantized layer."""
    body = layer.regions["body"]
    inner, outer = list(body.inputs), list(layer.inputs)
    place = {t: i for i, t in enumerate(inner)}
    seen: dict[Tensor, Tensor] = {t: t for t in inner}
    plain = Network("body", "lowered")
    dequantizers: dict[int, Layer] = {}
    last: Layer | None = None
    for x in body.layers:
        if x.op == "QuantizeLinear":
            if x is not body.layers[-1]:
                return "an intermediate value is quantized"
            source = x.needs(0)
            last, seen[x.output] = x, seen[source]
        elif x.op == "DequantizeLinear":
            i = place.get(x.needs(0))
            if i is None or i in dequantizers:
                return "one value is dequantized twice"
            t = layer.needs(i)
            dequantizers[i] = x
            seen[x.output] = inner[i] = Tensor(t.name, x.output.type)
            outer[i] = Tensor(t.name, t.type.with_dtype(x.output.dtype), weight=t.weight)
        else:
            copy = Layer(x.op, x.name, [None if t is None else seen[t] for t in x.inputs], x.attrs, x.regions, x.sources)
            copy.outputs = tuple(Tensor(t.name, t.type, copy, t.index) for t in x.outputs)
            seen.update(zip(x.outputs, copy.outputs, strict=True))
            plain.layers.append(copy)
    plain.inputs, plain.outputs = inner, [seen[t] for t in body.outputs]
    view = Layer("Fused", layer.name, outer, layer.attrs, {"body": plain}, layer.sources)
    view.outputs = tuple(Tensor(t.name, plain.outputs[0].type, view) for t in layer.outputs)
    return Unquantized(view, dequantizers, last)


@dataclass(frozen=True)
class EpilogueStep:
    """One step of an epilogue: an op applied to the running value; `other` is its second operand as an input index of the fused layer."""

    op: str
    attrs: Mapping[str, Any]
    other: int | None = None
    other_tensor: Tensor | None = None
    swapped: bool = False  # the running value is the second operand


def find_epilogue_steps(layer: Layer) -> list[EpilogueStep] | None:
    """The steps after the root layer, in order, when the body is a chain; None when it is not. SiLU is one "Silu" step.

    An operand that is not the running value must be an input of the fused layer.
    """
    if layer.op != "Fused":
        return []
    body: Network = layer.regions["body"]
    head = get_root_layer(layer)
    if head is layer:
        return None
    place = {t: i for i, t in enumerate(body.inputs)}
    running = head.outputs[0]
    steps: list[EpilogueStep] = []
    rest = [x for x in body.layers if x is not head]
    while rest:
        x = rest.pop(0)
        if x.op == "Sigmoid" and rest and rest[0].op == "Mul" and x.inputs[0] is running and set(rest[0].inputs) == {running, x.output}:
            running = rest.pop(0).output
            steps.append(EpilogueStep("Silu", {}))
            continue
        if running not in x.inputs or len(x.outputs) != 1:
            return None
        others = [(i, t) for i, t in enumerate(x.inputs) if t is not None and t is not running]
        if len(others) > 1 and any(t not in place for _, t in others):
            return None
        if len(others) == 1 and others[0][1] in place and x.op != "Clip":  # a Clip with one bound: its input index says which
            t = others[0][1]
            steps.append(EpilogueStep(x.op, dict(x.attrs), place[t], layer.inputs[place[t]], swapped=x.inputs[0] is not running))
        elif not others:
            steps.append(EpilogueStep(x.op, dict(x.attrs)))
        else:
            # Clip's bounds and the like: constants of the fused layer
            if any(t not in place or layer.needs(place[t]).weight is None for _, t in others):
                return None
            bounds = {f"input{i}": layer.needs(place[t]).array() for i, t in others}
            steps.append(EpilogueStep(x.op, {**x.attrs, **bounds}))
        running = x.outputs[0]
    return steps if body.outputs == [running] else None


def require_epilogue_steps(layer: Layer) -> list[EpilogueStep]:
    """`find_epilogue_steps` of a layer with a chain as body. Raises BuildError for another layer."""
    steps = find_epilogue_steps(layer)
    if steps is None:
        raise BuildError(f"the body of {layer.name} is not a chain")
    return steps


def outer_input(layer: Layer, inner: Tensor | None) -> int | None:
    """Index in `layer.inputs` of the body input `inner`; None when absent. Raises BuildError for a tensor that the body computes."""
    if inner is None:
        return None
    for i, t in enumerate(layer.regions["body"].inputs if layer.op == "Fused" else layer.inputs):
        if t is inner:
            return i
    raise BuildError(f"{layer.name}: its {layer.op if layer.op != 'Fused' else layer.composite} reads %{inner.name}, not an input of the layer")


def _get_input_index(layer: Layer, i: int) -> int:
    index = outer_input(layer, get_root_layer(layer).needs(i))
    assert index is not None
    return index


def get_source_index(layer: Layer) -> int:
    """Index in `layer.inputs` of the root layer's first input."""
    return _get_input_index(layer, 0)


def get_operand_indices(layer: Layer) -> tuple[int, int, int | None]:
    """Indices in `layer.inputs` of the root layer's data, weights and bias (None: without bias)."""
    return _get_input_index(layer, 0), _get_input_index(layer, 1), outer_input(layer, get_root_layer(layer).input(2))


def get_weight_and_bias(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """The outer tensors of the root layer's weights and bias."""
    _, w, b = get_operand_indices(layer)
    weights = layer.needs(w)
    return weights, None if b is None else layer.inputs[b]


def with_outer_inputs(inner: Layer, outer: Mapping[Tensor, Tensor | None]) -> Layer:
    """A layer of the body that reads the fused layer's inputs instead of the body's, so that constants have their values."""
    fed = [outer.get(t, t) if t is not None else None for t in inner.inputs]
    view = Layer(inner.op, inner.name, fed, inner.attrs, inner.regions, inner.sources)
    view.outputs = inner.outputs
    return view
