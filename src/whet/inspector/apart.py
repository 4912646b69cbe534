"""Operations and bytes of fused layers, counted per original layer: a measure that does not depend on fusion."""

from __future__ import annotations

from collections.abc import Collection

from whet.composites import composite_of
from whet.inspector.facts import LayerFacts
from whet.network import DTYPES, Layer, Tensor, TensorType, evaluate
from whet.ops._cost import operations

_IN_PLACE = ("Reshape", "Slice")


def apart(facts: LayerFacts, also: Collection[str] = ()) -> list[tuple[int, int]]:
    """(operations, bytes) of a layer, or of each layer in its body where it was made around several that compute: convolutions in a row.

    What lies between them counts as written and read in the layer's own storage type. `also` are composites of others to take apart ("Moves"), of
    whose bodies the layers that need move nothing (a Reshape, a Slice: what follows reads there) don't count.
    """
    layer, choice = facts.layer, facts.choice
    if not _counts_parts(layer) and layer.composite not in also:
        return [(facts.flops, facts.bytes)]
    body = layer.regions["body"]
    narrow = next(o[1] for o in (*choice.inputs, *choice.outputs) if o is not None)
    stored = {t: o[1] for t, o in (*zip(body.inputs, choice.inputs, strict=True), *zip(body.outputs, choice.outputs, strict=True)) if o is not None}

    def nbytes(t: Tensor) -> int:
        kind = DTYPES[stored.get(t, narrow)]
        return evaluate(TensorType(kind if t.dtype.is_float and kind.is_float else t.dtype, t.shape).nbytes, {})

    def counted(x: Layer) -> list[tuple[int, int]]:
        if x.composite in also:
            return [n for y in x.regions["body"].layers if y.op not in _IN_PLACE for n in counted(y)]
        if _counts_parts(x):
            return [n for y in x.regions["body"].layers for n in counted(y)]
        return [(operations(x), sum(nbytes(t) for t in (*x.inputs, *x.outputs) if t is not None))]

    if layer.composite in also:
        return counted(layer)
    return [n for x in body.layers for n in counted(x)]


def _counts_parts(layer: Layer) -> bool:
    """Whether each layer in the body computes and counts; a Concat that is read in place costs nothing."""
    described = composite_of(layer)
    return described is not None and described.counts_parts
