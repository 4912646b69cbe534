"""Shared by reductions: axes as input 1 or attribute, keepdims, coupled axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from whet.network import Dim, Layer, TensorType
from whet.ops._axes import convert_attributes_to_inputs, find_given_axes, make_attribute_exporter, map_axes, needs_opset
from whet.ops._base import INTS, Couple, find_known_values, op, to_ints
from whet.ops._types import require_numeric_input


def list_reduced_axes(layer: Layer) -> tuple[int, ...]:
    """The reduced axes as non-negative indices."""
    rank = layer.needs(0).type.rank
    if axes := find_given_axes(layer, rank):
        return axes
    return () if layer.attrs["noop_with_empty_axes"] else tuple(range(rank))


def infer(layer: Layer, logical: bool = False) -> TensorType:
    """x's type without the reduced axes; also bool if `logical`."""
    x, axes = layer.needs(0).type if logical else require_numeric_input(layer), list_reduced_axes(layer)
    kept = layer.attrs["keepdims"]
    return x.with_shape(1 if i in axes else d for i, d in enumerate(x.shape) if kept or i not in axes)


def list_kept_couples(layer: Layer, axes: tuple[int, ...]) -> list[Couple]:
    """Couples of the axes that are not reduced."""
    x, y = layer.needs(0), layer.output
    rest = [i for i in range(x.type.rank) if i not in axes]
    return map_axes(x, y, {a: a if layer.attrs["keepdims"] else b for b, a in enumerate(rest)})


def shape_value_by(pick: Callable[[Dim, Dim], Dim]) -> Callable[[Layer], list[tuple[Dim, ...] | None]]:
    """`shape_value` of a reduction of all elements of a vector of dims with `pick`."""

    def shape_value(layer: Layer) -> list[tuple[Dim, ...] | None]:
        values = find_known_values(layer.inputs[0])
        whole = layer.needs(0).type.rank == 1 and list_reduced_axes(layer) == (0,)
        return [(reduce(pick, values),) if values and whole else None]

    return shape_value


def read(node, g):
    """Axes were an attribute before opset 18 (ReduceSum: 13)."""
    attrs = {k: v for k, v in node.attrs.items() if k != "axes"}
    return node.add(g, node.op, *convert_attributes_to_inputs(node, g, ["axes"]), **attrs)


def to_onnx(layer: Layer, w) -> None:
    """Axes are an attribute before opset 18 (ReduceSum: 13)."""
    if w.opset >= 18 or layer.op == "ReduceSum":
        make_attribute_exporter("axes")(layer, w)
        return
    axes, keep = list_reduced_axes(layer), layer.attrs["keepdims"]
    if not axes:
        needs_opset(layer, w, 18, "a reduction over no axes")
    w.node(layer.op, [w.name(layer.inputs[0])], [w.name(layer.output)], name=layer.name, axes=axes, keepdims=keep)


def register_reduction(
    name: str,
    f: Callable[..., Any],
    *,
    zeros_add_nothing: bool = False,
    zeros: tuple[int, ...] | None = (),
    positive: bool = False,
    logical: bool = False,
    **options: Any,
):
    """Registers y = f(x, axes, keepdims). `zeros_add_nothing`: zeros do not change the result, so they may be pruned from a reduced axis.
    `zeros` None: the result of zeros is not zero. `positive`: samples are above 0. `logical`: accepts bool too."""

    def compute_reference(layer, x, axes=None):
        axes = layer.attrs.get("axes", axes)
        axes = None if axes is None else to_ints(axes)
        if not axes:  # with noop_with_empty_axes each element is reduced by itself: ReduceL1 gives |x|
            axes = () if layer.attrs["noop_with_empty_axes"] else range(x.ndim)
        axes = tuple(a % x.ndim for a in axes)
        return np.asarray(f(x, axes, bool(layer.attrs["keepdims"]))).astype(x.dtype, copy=False)

    def list_couples(layer):
        axes, x = list_reduced_axes(layer), layer.inputs[0]
        return list_kept_couples(layer, axes) + ([Couple(x, a, x, a, summed=True) for a in axes] if zeros_add_nothing else [])

    kind = "positive " if positive else ""
    return op(
        name,
        lambda layer: infer(layer, logical),
        compute_reference,
        attrs={"keepdims": 1, "noop_with_empty_axes": 0, "axes": INTS},
        couples=list_couples,
        zeros=zeros,
        onnx=read,
        to_onnx=to_onnx,
        samples=[
            ([f"{kind}f32[2,3,4,5]", np.array([2, 3])], {}),
            ([f"{kind}f32[2,3,17]", np.array([-1])], {"keepdims": 0}),
            ([f"{kind}f32[2,3,4,5]", np.array([1])], {"keepdims": 0}),
            ([f"{kind}f32[3,5]"], {}),
            ([f"{kind}f32[3,5]"], {"axes": (0,)}),
            ([f"{kind}f32[3,5]"], {"noop_with_empty_axes": 1}),
            (["extreme f32[12,16]", np.array([1])], {}),
            ([f"{kind}f16[3,7]", np.array([1])], {}),
            *([(["i64[3,4,2,5]"], {"axes": (1, 2)})] if "shape_value" in options else []),  # those of dims
        ],
        **options,
    )


def get_lowest_value(dtype: np.dtype) -> Any:
    """The lowest value of a type."""
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def get_highest_value(dtype: np.dtype) -> Any:
    """The highest value of a type."""
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max
