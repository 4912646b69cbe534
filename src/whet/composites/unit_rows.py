"""Rows divided by their Euclidean norms become one layer (torch.nn.functional.normalize, as in cosine attention), with a factor per row.

    ReduceL2 over the last axis, Clip or Max by a small number, Div, and a Mul by a constant with values for the leading axes (temperatures of heads)

Written out each operation is a launch of its own, and the rows are read twice.
"""

from __future__ import annotations

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body, parse_dims
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.constants import scalar_value
from whet.rewrite.fusing import find_fusion_obstacle, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Skip


def make_unit_rows_sample(x: str, least: float = 0.0, op: str = "Clip", factor: tuple[int, ...] = ()) -> Sample:
    """The rows of `x` divided by their norms, which are at least `least` (0: no limit), times constants of the shape `factor`."""
    inputs: list[str | np.ndarray | None] = [x]
    inputs += [np.array(least, np.float32)] if least else []
    inputs += [f"const f32[{','.join(map(str, factor))}]"] if factor else []
    last = len(parse_dims(x)) - 1

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        norms = body.add("ReduceL2", own[0], body.constant(np.array([last]), "axis"), keepdims=1)
        y = body.add("Div", own[0], body.add(op, norms, own[1]) if least else norms)
        body.mark_output(body.add("Mul", y, own[-1]) if factor else y)
        return {"body": body}

    return Sample(inputs, {"composite": "UnitRows"}, build_regions)


UNIT_ROWS = register_composite(
    "UnitRows",
    title="rows divided by their norms",
    unsupported="no tactic here divides rows by their norms in one kernel",
    samples=[
        make_unit_rows_sample("f32[6,3,17,32]", 1e-12, factor=(3, 1, 1)),
        make_unit_rows_sample("f32[2,4,16,49]", 1e-3),
        make_unit_rows_sample("f32[5,300]", 20.0, "Max"),
        make_unit_rows_sample("f32[2,3,1200]"),
        make_unit_rows_sample("f32[3,5000]", 1e-6, factor=(3, 1)),
    ],
)


@UNIT_ROWS.matcher("Div")
def fuse_unit_rows(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Rows divided by their Euclidean norms, which may be limited from below, become one layer."""
    x, divisor = layer.inputs
    limit = g.maker(divisor)
    limits = [] if limit is None or limit.op not in ("Clip", "Max") else [limit]
    norms = find_maker_of_op(g, limits[0].inputs[0] if limits else divisor, "ReduceL2")
    if norms is None or x is None or norms.inputs[0] is not x or not layer.output.dtype.is_float:
        return None
    if not norms.attrs["keepdims"] or list_reduced_axes(norms) != (x.type.rank - 1,):
        return Skip(f"its norms are over axes {list_reduced_axes(norms)}, not over rows")
    bounds = [t for m in limits for t in m.inputs[1:] if t is not None]
    if limits and (len(bounds) != 1 or limits[0].input(1) is None or scalar_value(bounds[0]) is None):
        return Skip(f"'{limits[0].name}' is no limit from below by a constant")
    if reason := find_interior_escape(g, layer, [norms, *limits]):
        return Skip(reason)
    return fuse_flat(g, UNIT_ROWS.kind, norms, *limits, layer)


@UNIT_ROWS.matcher("Mul", after=["fuse_unit_rows"])
def fuse_unit_rows_factor(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A Mul of rows that are divided by their norms by a constant with one value per row goes into their layer."""
    for value, factor in (layer.inputs, layer.inputs[::-1]):
        head = g.maker(value)
        if head is None or value is None or factor is None or head.composite != UNIT_ROWS.kind or not factor.is_constant:
            continue
        if head.regions["body"].layers[-1].op == "Mul":
            return Skip(f"'{head.name}' has a factor already")
        if layer.output.type != value.type or (factor.type.rank and factor.shape[-1] != 1):
            return Skip(f"%{factor.name}: {factor.type} is not one value per row")
        reason = find_fusion_obstacle(g, value, layer)
        return Skip(reason) if reason else fuse_flat(g, UNIT_ROWS.kind, head, layer)
    return None
