"""Widening: layers in a 16-bit float type that the backend has no arithmetic for compute in FP32.

Weights stay 16 bits in the file (the FP32 weight is a Cast of them); inputs and outputs of the network keep their types and are converted.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection

from whet.network import F32, DType, Network, Tensor

_BITS = ("BitCast",)  # they read the bits of their input, not its value


def widen_floats(net: Network, dtypes: Collection[DType]) -> tuple[Network, int]:
    """A copy of `net` in which all values of `dtypes` are f32 but its inputs and outputs, and the number of layers that this concerns.

    Returns `net` itself and 0 if no layer but Cast has such a value: a Cast to 16 bits and back rounds on purpose, and every backend casts.
    """
    if not _count(net, dtypes, ignored=("Cast",)):
        return net, 0
    count = _count(net, dtypes)
    wide = Network(net.name, net.stage)
    wide.metadata = dict(net.metadata)
    _copy(net, wide, ChainMap(), dtypes)
    values, wide.outputs = wide.outputs, []
    for t, target in zip(net.outputs, values, strict=True):
        wide.mark_output(wide.add("Cast", target, to=t.dtype, name=t.name) if t.dtype in dtypes else target, t.name)
    return wide, count


def _count(net: Network, dtypes: Collection[DType], ignored: Collection[str] = ()) -> int:
    """Number of layers, regions included, that read or write a value of `dtypes` and whose op is not `ignored`."""
    used = [layer for layer in net.layers if any(t is not None and t.dtype in dtypes for t in (*layer.inputs, *layer.outputs))]
    return sum(layer.op not in ignored for layer in used) + sum(_count(r, dtypes, ignored) for x in net.layers for r in x.regions.values())


def _copy(net: Network, wide: Network, outer: ChainMap[Tensor, Tensor], dtypes: Collection[DType], region: bool = False) -> None:
    """Copies inputs, constants, layers and outputs of `net` into the empty `wide`. Inputs of a region get f32, those of the network a Cast."""
    copies: ChainMap[Tensor, Tensor] = outer.new_child()
    reserved = [name for layer in net.layers for name in (layer.name, *(t.name for t in layer.outputs))]

    def widen_copy(t: Tensor, copy: Tensor) -> Tensor:
        return wide.add("Cast", copy, to=F32, name=f"{t.name}_f32") if copy.dtype in dtypes else copy

    for t in net.inputs:
        type_ = t.type.with_dtype(F32) if region and t.dtype in dtypes else t.type
        copies[t] = copy = wide.add_input(t.name, type_)
        copy.shape_value = t.shape_value
    for t in net.constants.values():
        copies[t] = wide.constant(t.constant(), t.name)
    wide.reserve(*reserved)
    for t in (*net.inputs, *net.constants.values()):
        copies[t] = widen_copy(t, copies[t])
    for layer in net.layers:
        regions = {}
        for key, body in layer.regions.items():
            regions[key] = Network(body.name, wide.stage)
            _copy(body, regions[key], copies, dtypes, region=True)
        inputs = [None if t is None else copies[t] for t in layer.inputs]
        if layer.op in _BITS:
            pairs = zip(inputs, layer.inputs, strict=True)
            inputs = [wide.add("Cast", x, to=t.dtype) if t is not None and t.dtype in dtypes else x for x, t in pairs]
            attrs = dict(layer.attrs)
        else:
            attrs = {k: F32 if isinstance(v, DType) and v in dtypes else v for k, v in layer.attrs.items()}
        new = wide.add_layer(layer.op, inputs, attrs, regions=regions, sources=layer.sources)
        new.name = layer.name
        for t, out in zip(layer.outputs, new.outputs, strict=True):
            out.name = f"{t.name}_f32" if t in net.outputs and t.dtype in dtypes and not region else t.name
            copies[t] = widen_copy(t, out)
    wide.outputs = [copies[t] for t in net.outputs]
