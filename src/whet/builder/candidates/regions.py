"""Lifting captures: outer tensors read by the regions of If, Loop and Scan become inputs of the layer, so that kernels get them as operands."""

from __future__ import annotations

from whet.network import Layer, Network, Tensor


def lift_captures(net: Network) -> int:
    """Makes computed values that regions capture inputs of their layers, the innermost regions first; returns how many layers changed.

    Constants stay captured, since they carry their values. Inputs are in the order of first use.
    """
    changed = 0
    for layer in net.layers:
        if layer.op == "Fused":
            continue
        changed += sum(lift_captures(r) for r in layer.regions.values())
        captured = list(dict.fromkeys(t for r in layer.regions.values() for t in r.captures() if not t.is_constant))
        if captured:
            _lift(layer, captured)
            changed += 1
    return changed


def _lift(layer: Layer, captured: list[Tensor]) -> None:
    if layer.op in ("Loop", "Scan") and layer.attrs.get("states") is None:
        layer.attrs["states"] = len(layer.inputs) - (2 if layer.op == "Loop" else layer.attrs["num_scan_inputs"])
    layer.inputs = (*layer.inputs, *captured)
    for region in layer.regions.values():
        for t in captured:
            _replace(region, t, _add_input(region, t))


def _add_input(region: Network, t: Tensor) -> Tensor:
    """A new input of a region for the outer tensor `t`, named like it if that name is free."""
    name = region.fresh(t.name)
    inner = Tensor(name, t.type)
    inner.shape_value = t.shape_value
    region.inputs.append(inner)
    return inner


def _replace(region: Network, old: Tensor, new: Tensor) -> None:
    """Replaces `old` by `new` in `region` and its nested regions."""
    for layer in region.layers:
        layer.inputs = tuple(new if t is old else t for t in layer.inputs)
        for inner in layer.regions.values():
            _replace(inner, old, new)
    region.outputs = [new if t is old else t for t in region.outputs]
