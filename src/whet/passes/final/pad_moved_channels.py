"""Channels that come in no sixteens, of an image that is only moved about (a detector's head), are filled with ones that nobody reads.

Rows of 255 numbers begin anywhere, so a convolution can store them one by one only; with 256 it stores whole lines. The move behind it leaves the
last out.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored
from whet.passes._graph import Graph
from whet.passes._weights import filled
from whet.passes.final.fuse_moves import KIND

LINE = 16  # channels: 32 bytes of 16-bit numbers


@rule("Fused", phase=Phase.FINAL, after=["fuse_moves"])
def pad_moved_channels(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.composite != KIND:
        return None
    wider: dict[Tensor, Tensor] = {}
    skip: Skip | None = None
    for t in dict.fromkeys(layer.inputs):
        if t is None or t.is_constant or t.type.rank != 4 or not isinstance(t.shape[1], int) or t.shape[1] % 8 == 0:
            continue
        maker = g.maker(t)
        if maker is None or anchored(maker, ("Conv",)) != "Conv":
            continue
        if reason := g.shared(t, layer) or _unfit(maker, t.shape[1]):
            skip = skip or Skip(reason)
        else:
            wider[t] = _padded(g, maker, t.shape[1])
    return _reading(g, layer, wider) if wider else skip


def _unfit(conv: Layer, channels: int) -> str | None:
    """Why a convolution cannot have more output channels, or None."""
    head = conv if conv.op == "Conv" else next(x for x in conv.regions["body"].layers if x.op == "Conv")
    if head.attrs["group"] != 1:
        return f"'{conv.name}' has several groups"
    if sum(t is not None and not t.is_constant for t in conv.inputs) != 1:
        return f"'{conv.name}' adds something"
    odd = next((t for t in conv.inputs if t is not None and t.is_constant and _axis(t, channels) is None and t.type.elements != 1), None)
    return None if odd is None else f"%{odd.name}: {odd.type} is no constant of its {channels} output channels"


def _axis(t: Tensor, channels: int) -> int | None:
    """The axis of a convolution's constant that counts output channels; None for one that has none."""
    shape = tuple(t.shape)
    if shape[:1] == (channels,) and len(shape) in (1, 4):
        return 0
    return 1 if shape == (1, channels, 1, 1) else None


def _padded(g: Graph, conv: Layer, channels: int) -> Tensor:
    """The convolution with filters of zeros behind its own; scales of those are 1."""
    more = -channels % LINE
    scales = {id(t) for t in _scales(conv)}

    def wider(t: Tensor | None) -> Tensor | None:
        axis = None if t is None or not t.is_constant or t.type.elements == 1 else _axis(t, channels)
        if t is None or axis is None or t.weight is None:
            return t
        layout = np.r_[np.arange(channels), np.full(more, -1)]
        return g.constant(filled(t.weight, axis, layout, int(id(t) in scales)), f"{t.name}_filled")

    inputs = [wider(t) for t in conv.inputs]
    more_args = dict(conv.attrs) if conv.op == "Conv" else {"regions": {"body": _again(conv, inputs)}, "composite": conv.composite}
    made: Tensor = g.add(conv.op, *inputs, **more_args)
    assert made.maker is not None
    made.maker.name, made.maker.sources = g.net.fresh(f"{conv.name} filled"), conv.sources
    return made


def _scales(conv: Layer) -> list[Tensor]:
    """The scales of dequantized constants among a fused convolution's inputs."""
    if conv.op == "Conv":
        return []
    outer = dict(zip(conv.regions["body"].inputs, conv.inputs, strict=True))
    found = [outer.get(x.inputs[1]) for x in conv.regions["body"].layers if x.op == "DequantizeLinear"]
    return [t for t in found if t is not None]


def _again(layer: Layer, inputs: list[Tensor | None]) -> Network:
    """The body of a fused layer over inputs of other sizes."""
    old, body = layer.regions["body"], Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    for t, fed in zip(old.inputs, inputs, strict=True):
        assert fed is not None
        inside[t] = body.add_input(t.name, fed.type)
        inside[t].shape_value = t.shape_value
    _copy(body, old, inside)
    body.outputs = [inside[t] for t in old.outputs]
    return body


def _copy(body: Network, old: Network, inside: dict[Tensor, Tensor]) -> None:
    """The layers of `old` in `body`; `inside` says what its tensors are there, and learns more."""
    for t in old.constants.values():
        inside[t] = body.constant(t.constant(), t.name)
    for x in old.layers:
        fed = [None if t is None else inside[t] for t in x.inputs]
        made = body.add_layer(x.op, fed, x.attrs, name=x.name, outputs=[t.name for t in x.outputs], sources=x.sources)
        inside.update(zip(x.outputs, made.outputs, strict=True))


def _reading(g: Graph, layer: Layer, wider: dict[Tensor, Tensor]) -> Tensor:
    """The moves over the wider images, whose last channels are cut off first."""
    old, body = layer.regions["body"], Network("body", "lowered")
    inside: dict[Tensor, Tensor] = {}
    inputs: list[Tensor] = []
    for t, fed in zip(old.inputs, layer.inputs, strict=True):
        assert fed is not None
        inputs.append(wider.get(fed, fed))
        inside[t] = body.add_input(t.name, inputs[-1].type)
        inside[t].shape_value = t.shape_value
    zero, one = (body.constant(np.array([v], np.int64), f"slice_{v}") for v in (0, 1))
    for t, fed in zip(old.inputs, layer.inputs, strict=True):
        if fed in wider:
            end = body.constant(np.array([fed.shape[1]], np.int64), f"{t.name}_end")
            inside[t] = body.add_layer("Slice", [inside[t], zero, end, one], {}, name=f"{t.name}_own", outputs=[f"{t.name}_own"]).outputs[0]
    _copy(body, old, inside)
    body.outputs = [inside[t] for t in old.outputs]
    return g.add("Fused", *inputs, regions={"body": body}, composite=KIND)
