"""A Concat along the last axis of a tensor's shifted copies, with zeros at the ends, becomes one layer: the depth taps of 3-D convolutions.

conv_3d_to_2d writes each tap as a Pad that adds positions at one end of an axis and crops as many at the other. All taps are then copied once more by
the Concat. One layer reads each value where it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.network import BF16, F16, F32, Layer, Tensor
from whet.ops import Sample
from whet.ops.pad import find_shift
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


@CONCAT_SHIFTS.matcher("Concat", level=2)
def fuse_concat_shifts(g: Graph, layer: Layer) -> Tensor | Skip | None:
    rank = layer.output.type.rank
    if int(layer.attrs["axis"]) % rank != rank - 1 or not layer.output.type.static or layer.output.dtype not in _FLOATS:
        return None
    makers = [g.maker(t) for t in layer.inputs]
    pads = list(dict.fromkeys(m for m in makers if m is not None and m.op == "Pad" and find_shift(m) is not None))
    if not pads or len({shift[0] for m in pads if (shift := find_shift(m))} | {rank - 1}) != 2:
        return None
    if len(layer.inputs) > MOST_PARTS or any(t is None or t.is_constant for t in (*layer.inputs, *(m.inputs[0] for m in pads))):
        return None
    reason = next((r for m in pads if (r := g.escapes(m.output, layer))), None)
    return Skip(reason) if reason else fuse_flat(g, CONCAT_SHIFTS.kind, *sorted(pads, key=g.position), layer)
