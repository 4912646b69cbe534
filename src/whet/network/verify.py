"""verify(): invariants of every network between passes. Errors name the layer."""

from __future__ import annotations

from whet.errors import NetworkError
from whet.network.network import Network, Tensor


def verify(net: Network, *, types: bool = True) -> Network:
    """Checks `net` and its regions; returns it.

    Names are unique; values are computed before they are used; no removed tensor is used; outputs exist; and with `types`
    every layer's inferred types equal those of its outputs. Raises NetworkError naming the layer.
    """
    return _verify(net, set(), types)


def _verify(net: Network, outer: set[Tensor], types: bool) -> Network:
    from whet.ops import infer_layer

    defined: set[Tensor] = set(outer)
    names: dict[str, str] = {}

    def claim(name: str, subject: str) -> None:
        if name in names:
            raise NetworkError(f"the name %{name} is given twice in '{net.name}': to {names[name]} and to {subject}")
        names[name] = subject

    for t in net.inputs:
        claim(t.name, "an input")
        if t.maker is not None or t.weight is not None:
            raise NetworkError(f"input %{t.name} has a maker or values")
        defined.add(t)
    for key, t in net.constants.items():
        claim(t.name, "a constant")
        if t.weight is None or t.weight.type != t.type or key != t.name:
            raise NetworkError(f"constant %{t.name} has no values of its type {t.type}")
        defined.add(t)
    layer_names: set[str] = set()
    for layer in net.layers:
        where = f"{layer.op} '{layer.name}'"
        if layer.name in layer_names:
            raise NetworkError(f"two layers are called '{layer.name}'")
        layer_names.add(layer.name)
        for i, x in enumerate(layer.inputs):
            if x is not None and x not in defined:
                raise NetworkError(f"{where} reads %{x.name} (input {i}), which nothing before it makes")
        for region in layer.regions.values():
            _verify(region, defined, types)
        if not layer.outputs:
            raise NetworkError(f"{where} has no outputs")
        for i, t in enumerate(layer.outputs):
            if t.maker is not layer or t.index != i:
                raise NetworkError(f"{where}: output %{t.name} does not point back to it")
            claim(t.name, where)
            defined.add(t)
        if types:
            inferred, _ = infer_layer(layer)
            for t, want in zip(layer.outputs, inferred, strict=True):
                if t.type != want:
                    raise NetworkError(f"{where}: %{t.name} is {t.type}, but {layer.op} makes {want}")
    for t in net.outputs:
        if t not in defined:
            raise NetworkError(f"output %{t.name} of '{net.name}' is made by nothing in it")
    if not net.outputs:
        raise NetworkError(f"network '{net.name}' has no outputs")
    return net
