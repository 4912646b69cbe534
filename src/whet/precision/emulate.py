"""Low precision emulated in FP32: a copy of the network with Q/DQ or casts around the layers to be rounded.

Rounding is identical to that of the kernels. Accumulation is in FP32, which is exact for sums of 8-bit products that fit in 24 bits. So
accuracy can be evaluated on any machine, with or without kernels for the precision.
"""

from __future__ import annotations

from collections.abc import Collection

from whet.errors import CalibrationError, UsageError
from whet.network import BF16, F16, F32, DType, Layer, Network, Tensor
from whet.ops._origin import express
from whet.precision.insert import quantize
from whet.precision.quantization_sites import WEIGHTED, find_quantization_sites
from whet.precision.ranges import Ranges

PRECISIONS = ("int8", "fp8", "fp16", "bf16")
_FLOATS: dict[str, DType] = {"fp16": F16, "bf16": BF16}
#: Layers that only move values or produce no floats: rounding around them has no effect.
_MOVES = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Shape", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip


def list_candidates(net: Network, precision: str) -> list[Layer]:
    """The layers of `net` that could run in `precision`, in order. Raises UsageError for an unknown precision."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown low precision {precision!r}; precisions: {', '.join(PRECISIONS)}")
    if precision in ("int8", "fp8"):
        return find_quantization_sites(net).layers
    return [x for x in net.layers if x.op not in _MOVES and not x.regions and any(t.dtype == F32 for t in x.outputs)]


def emulate_network(net: Network, precision: str, ranges: Ranges | None = None, only: Collection[str] | None = None) -> Network:
    """A copy of `net` (source stage, batch norms folded) in which the layers named in `only` (default: all candidates) run in `precision`.

    int8 and fp8 need `ranges`. Raises UsageError, CalibrationError.
    """
    chosen = {x.name for x in list_candidates(net, precision)} if only is None else set(only)
    if precision in _FLOATS:
        return _round_layers(net, _FLOATS[precision], chosen)
    if ranges is None:
        raise CalibrationError(f"{precision} needs ranges: calibrate first")
    return quantize(net, ranges, skip=lambda x: x.op in WEIGHTED and x.name not in chosen, kind=precision)


def _round_layers(net: Network, dtype: DType, chosen: set[str]) -> Network:
    """Rounds inputs, weights and outputs of the chosen layers to `dtype`, once each. Vectors (biases, statistics) stay FP32, as in the kernels."""
    made = net.clone()
    rounded: dict[Tensor, Tensor] = {}

    def round_once(t: Tensor, at: int) -> Tensor:
        if t not in rounded:
            if t.weight is not None:
                small = express("Cast", express("Cast", t.weight, to=dtype), to=F32)
                rounded[t] = made.constant(small, f"{t.name}.{dtype.name}")
            else:
                y = made.add("Cast", t, to=dtype, name=f"{t.name}.{dtype.name}", at=at)
                rounded[t] = made.add("Cast", y, to=F32, name=f"{t.name}.rounded", at=at + 1)
        return rounded[t]

    for layer in list(made.layers):
        if layer.name not in chosen:
            continue
        at = made.layers.index(layer)
        layer.inputs = tuple(
            round_once(t, at) if t is not None and t.dtype == F32 and not (t.is_constant and t.type.rank < 2) else t for t in layer.inputs
        )
        for t in layer.outputs:
            if t.dtype != F32:
                continue
            readers = [r for r, _ in made.users().get(t, [])]
            y = round_once(t, made.layers.index(layer) + 1)
            for r in readers:
                r.inputs = tuple(y if x is t else x for x in r.inputs)
            if any(t is o for o in made.outputs):
                t.name, y.name = y.name, t.name
                made.outputs = [y if o is t else o for o in made.outputs]
    made.sort()
    return made
