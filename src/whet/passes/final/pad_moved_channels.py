"""Pads the channels of convolutions whose results are only rearranged (a detector's head) to a multiple of 16.

Rows of 255 values start at any address, so a convolution can only store them one by one; with 256 it stores whole vectors. The composite Moves
that reads them slices the padding off.
"""

from __future__ import annotations

import numpy as np

from whet.composites.moves import MOVES
from whet.network import Layer, Network, Tensor
from whet.rewrite.constants import gather_padded
from whet.rewrite.fusing import find_inner_conv, is_conv
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_MULTIPLE = 16  # channels: 32 bytes of 16-bit values


@rule("Fused", phase=Phase.FINAL, after=["fuse_moves"])
def pad_moved_channels(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.composite != MOVES.kind:
        return None
    padded: dict[Tensor, Tensor] = {}
    skip: Skip | None = None
    for t in dict.fromkeys(layer.inputs):
        if t is None or t.is_constant or t.type.rank != 4:
            continue
        channels, maker = t.shape[1], g.maker(t)
        if not isinstance(channels, int) or channels % 8 == 0 or maker is None or not is_conv(maker):
            continue
        if reason := g.escapes(t, layer) or _why_not_padded(maker, channels):
            skip = skip or Skip(reason)
        else:
            padded[t] = _pad_conv(g, maker, channels)
    return _rebuild_moves(g, layer, padded) if padded else skip


def _why_not_padded(conv: Layer, channels: int) -> str | None:
    """Why a convolution layer cannot have more output channels, or None."""
    if find_inner_conv(conv).attrs["group"] != 1:
        return f"'{conv.name}' has several groups"
    if sum(t is not None and not t.is_constant for t in conv.inputs) != 1:
        return f"the epilogue of '{conv.name}' adds a residual"
    odd = next((t for t in conv.inputs if t is not None and t.is_constant and find_channel_axis(t, channels) is None and t.type.elements != 1), None)
    return None if odd is None else f"%{odd.name}: {odd.type} has no axis of the {channels} output channels"


def find_channel_axis(t: Tensor, channels: int) -> int | None:
    """The axis of a convolution's constant that holds output channels; None for a constant without one."""
    shape = tuple(t.shape)
    if shape[:1] == (channels,) and len(shape) in (1, 4):
        return 0
    return 1 if shape == (1, channels, 1, 1) else None


def _pad_conv(g: Graph, conv: Layer, channels: int) -> Tensor:
    """The convolution layer with filters of zeros appended; their quantization scales are 1."""
    added = -channels % _MULTIPLE
    scales = {id(t) for t in _list_weight_scales(conv)}

    def pad(t: Tensor | None) -> Tensor | None:
        axis = None if t is None or not t.is_constant or t.type.elements == 1 else find_channel_axis(t, channels)
        if t is None or axis is None or t.weight is None:
            return t
        layout = np.r_[np.arange(channels), np.full(added, -1)]
        return g.constant(gather_padded(t.weight, axis, layout, int(id(t) in scales)), f"{t.name}_filled")

    inputs = [pad(t) for t in conv.inputs]
    attrs = dict(conv.attrs) if conv.op == "Conv" else {"regions": {"body": _retype_body(conv, inputs)}, "composite": conv.composite}
    result: Tensor = g.add(conv.op, *inputs, **attrs)
    assert result.maker is not None
    result.maker.name, result.maker.sources = g.net.fresh(f"{conv.name} filled"), conv.sources
    return result


def _list_weight_scales(conv: Layer) -> list[Tensor]:
    """The scales of dequantized constants among a fused convolution's inputs."""
    if conv.op == "Conv":
        return []
    outer = dict(zip(conv.regions["body"].inputs, conv.inputs, strict=True))
    scales = [outer.get(x.needs(1)) for x in conv.regions["body"].layers if x.op == "DequantizeLinear"]
    return [t for t in scales if t is not None]


def _retype_body(layer: Layer, inputs: list[Tensor | None]) -> Network:
    """The body of a fused layer for inputs of other sizes."""
    old, body = layer.regions["body"], Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    for t, outer in zip(old.inputs, inputs, strict=True):
        assert outer is not None
        inside[t] = body.add_input(t.name, outer.type)
        inside[t].shape_value = t.shape_value
    _copy_layers(body, old, inside)
    body.outputs = [inside[t] for t in old.outputs]
    return body


def _copy_layers(body: Network, old: Network, inside: dict[Tensor, Tensor]) -> None:
    """Copies the layers of `old` to `body`. `inside` maps tensors of `old` to tensors of `body` and is extended."""
    for t in old.constants.values():
        inside[t] = body.constant(t.constant(), t.name)
    for x in old.layers:
        inputs = [None if t is None else inside[t] for t in x.inputs]
        copy = body.add_layer(x.op, inputs, x.attrs, name=x.name, outputs=[t.name for t in x.outputs], sources=x.sources)
        inside.update(zip(x.outputs, copy.outputs, strict=True))


def _rebuild_moves(g: Graph, layer: Layer, padded: dict[Tensor, Tensor]) -> Tensor:
    """The Moves layer over the padded images, whose last channels it slices off first."""
    old, body = layer.regions["body"], Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []
    for t, outer in zip(old.inputs, layer.inputs, strict=True):
        assert outer is not None
        inputs.append(padded.get(outer, outer))
        inside[t] = body.add_input(t.name, inputs[-1].type)
        inside[t].shape_value = t.shape_value
    zero, one = (body.constant(np.array([v], np.int64), f"slice_{v}") for v in (0, 1))
    for t, outer in zip(old.inputs, layer.inputs, strict=True):
        if outer is not None and outer in padded:
            end = body.constant(np.array([outer.shape[1]], np.int64), f"{t.name}_end")
            inside[t] = body.add_layer("Slice", [inside[t], zero, end, one], {}, name=f"{t.name}_own", outputs=[f"{t.name}_own"]).outputs[0]
    _copy_layers(body, old, inside)
    body.outputs = [inside[t] for t in old.outputs]
    fused: Tensor = g.add("Fused", *inputs, regions={"body": body}, composite=MOVES.kind)
    return fused
