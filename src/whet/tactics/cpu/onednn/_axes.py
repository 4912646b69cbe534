"""Axes of reductions: an attribute or a constant input in ONNX."""

from __future__ import annotations

from whet.network import Layer


def find_reduced_axes(head: Layer) -> tuple[int, ...] | None:
    """The axes of a Reduce op, sorted and non-negative; None if they are known only at run time."""
    rank = head.needs(0).type.rank
    axes = head.attrs.get("axes")
    given = head.input(1)
    if axes is None and given is not None:
        if given.shape_value is None:
            return None
        axes = given.shape_value
    if not axes:
        return () if head.attrs.get("noop_with_empty_axes") else tuple(range(rank))
    return tuple(sorted(int(a) % rank for a in axes))
