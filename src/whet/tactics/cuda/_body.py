"""Layers in the body of a fused layer as if they stood alone, for fused layers around more than one op."""

from __future__ import annotations

from collections.abc import Mapping

from whet.network import Layer, Tensor


def seen(inner: Layer, outer: Mapping[Tensor, Tensor | None]) -> Layer:
    """A layer of the body with the whole's inputs in the place of the body's: constants have their values."""
    fed = [outer.get(t, t) if t is not None else None for t in inner.inputs]
    view = Layer(inner.op, inner.name, fed, inner.attrs, inner.regions, inner.sources)
    view.outputs = inner.outputs
    return view
