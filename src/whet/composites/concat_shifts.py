"""A Concat along the last axis of a tensor's shifted copies, with zeros at the ends, becomes one layer: the depth taps of 3-D convolutions.

conv_3d_to_2d writes each tap as a Pad that adds positions at one end of an axis and crops as many at the other. All taps are then copied once more by
the Concat. One layer reads each value where it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.network import BF16, F16, F32, Layer, Tensor, static_shape
from whet.ops import Sample
from whet.rewrite.fusing import fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_FLOATS = (F16, BF16, F32)
MOST_PARTS = 32


def concat_shifts_sample(shape: tuple[int, ...], shifts: Sequence[int], axis: int = 1) -> Sample:
    """The copies of a tensor shifted along `axis`; a shift of 0 is the tensor itself."""
    inputs = [f"f32[{','.join(map(str, shape))}]"]

    def regions() -> Regions:
        body, (x,) = make_body(inputs, "x")
        parts = []
        for n in shifts:
            pads = [0] * (2 * len(shape))
            pads[axis], pads[len(shape) + axis] = n, -n
            parts.append(body.add("Pad", x, mode="constant", pads=tuple(pads)) if n else x)
        body.mark_output(body.add("Concat", *parts, axis=len(shape) - 1))
        return {"body": body}

    return Sample(inputs, {"composite": "ConcatShifts"}, regions)


CONCAT_SHIFTS = register_composite(
    "ConcatShifts",
    title="shifted copies of a tensor, concatenated",
    unsupported="no tactic here shifts and concatenates in one kernel",
    samples=[
        concat_shifts_sample((1, 5, 4, 3, 16), (1, 0, -1)),
        concat_shifts_sample((2, 7, 6, 8), (2, -3)),
        concat_shifts_sample((2, 3, 9, 5), (1, 0, -1, -2), axis=2),
    ],
)


def shift_of(pad: Layer) -> tuple[int, int] | None:
    """(axis, positions added in front) of a Pad with zeros that keeps the shape and changes one axis, or None."""
    pads = pad.attrs.get("pads")
    if pad.attrs.get("mode", "constant") != "constant" or pads is None or any(t is not None for t in pad.inputs[1:]):
        return None
    rank = len(pads) // 2
    moved = [k for k in range(rank) if pads[k] or pads[rank + k]]
    return (moved[0], int(pads[moved[0]])) if len(moved) == 1 and pads[moved[0]] == -pads[rank + moved[0]] else None


@CONCAT_SHIFTS.matcher("Concat", level=2)
def fuse_concat_shifts(g: Graph, layer: Layer) -> Tensor | Skip | None:
    rank = layer.output.type.rank
    if int(layer.attrs["axis"]) % rank != rank - 1 or not layer.output.type.static or layer.output.dtype not in _FLOATS:
        return None
    makers = [g.maker(t) for t in layer.inputs]
    pads = list(dict.fromkeys(m for m in makers if m is not None and m.op == "Pad" and shift_of(m) is not None))
    if not pads or len({shift[0] for m in pads if (shift := shift_of(m))} | {rank - 1}) != 2:
        return None
    if len(layer.inputs) > MOST_PARTS or any(t is None or t.is_constant for t in (*layer.inputs, *(m.inputs[0] for m in pads))):
        return None
    reason = next((r for m in pads if (r := g.escapes(m.output, layer))), None)
    return Skip(reason) if reason else fuse_flat(g, CONCAT_SHIFTS.kind, *sorted(pads, key=g.position), layer)


def list_parts(layer: Layer) -> list[tuple[int, int, int]] | None:
    """(index of the input, axis, shift) of each part of a fused layer; None for another body."""
    body = layer.regions["body"]
    last = body.layers[-1]
    if last.op != "Concat" or body.outputs != [last.outputs[0]] or any(x.op != "Pad" for x in body.layers[:-1]):
        return None
    places, padded = {t: i for i, t in enumerate(body.inputs)}, {x.outputs[0]: x for x in body.layers[:-1]}
    parts = []
    for t in last.inputs:
        pad = None if t is None else padded.get(t)
        source = t if pad is None else pad.inputs[0]
        shift = (0, 0) if pad is None else shift_of(pad)
        if source not in places or shift is None:
            return None
        parts.append((places[source], *shift))
    shifted = {axis for _, axis, n in parts if n}
    rank = last.output.type.rank
    if int(last.attrs["axis"]) % rank != rank - 1 or len(shifted) > 1 or rank - 1 in shifted or len(static_shape(last.output.shape)) != rank:
        return None
    axis = next(iter(shifted), 0)
    return [(i, axis, n) for i, _, n in parts]
