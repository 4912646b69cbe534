"""Operations and bytes of fused layers, counted per original layer: a measure that does not depend on fusion."""

from __future__ import annotations

from collections.abc import Collection

from whet.composites import find_composite
from whet.inspector.facts import LayerFacts
from whet.network import DTYPES, Layer, Tensor, TensorType, evaluate
from whet.ops._cost import count_operations
from whet.ops._strided import RESHAPES

_IN_PLACE = ("Gather", *RESHAPES, "Slice")


def count_unfused(facts: LayerFacts, also: Collection[str] = ()) -> list[tuple[int, int]]:
    """(operations, bytes) of a layer, or of each compute layer in the body of a composite such as consecutive convolutions.

    Intermediate tensors count as written and read in the layer's own storage type. `also` lists further composites to split ("Moves"); their
    Reshape and Slice layers do not count, since consumers can read their input in place.
    """
    layer, choice = facts.layer, facts.choice
    if not _counts_parts(layer) and layer.composite not in also:
        return [(facts.flops, facts.bytes)]
    body = layer.regions["body"]
    storage = next(o[1] for o in (*choice.inputs, *choice.outputs) if o is not None)
    stored = {t: o[1] for t, o in (*zip(body.inputs, choice.inputs, strict=True), *zip(body.outputs, choice.outputs, strict=True)) if o is not None}

    def count_bytes(t: Tensor) -> int:
        kind = DTYPES[stored.get(t, storage)]
        return evaluate(TensorType(kind if t.dtype.is_float and kind.is_float else t.dtype, t.shape).nbytes, {})

    def count(x: Layer) -> list[tuple[int, int]]:
        if x.composite in also:
            return [n for y in x.regions["body"].layers if y.op not in _IN_PLACE for n in count(y)]
        if _counts_parts(x):
            return [n for y in x.regions["body"].layers for n in count(y)]
        return [(count_operations(x), sum(count_bytes(t) for t in (*x.inputs, *x.outputs) if t is not None))]

    if layer.composite in also:
        return count(layer)
    return [n for x in body.layers for n in count(x)]


def _counts_parts(layer: Layer) -> bool:
    """True if the layers of the body are counted one by one; a Concat that is read in place costs nothing."""
    described = find_composite(layer)
    return described is not None and described.counts_parts
