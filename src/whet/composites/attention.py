"""Softmax attention, MatMul(Softmax(scale * MatMul(q, k) + mask), v), becomes one layer, including transposes around it.

Scale (Mul or Div by a constant) and mask (Add) are optional. k is the second operand of its MatMul, that is transposed.
"""

from __future__ import annotations

import numpy as np

from whet.composites._base import composite
from whet.composites._samples import Regions, new_body
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.rewrite.constants import scalar_value
from whet.rewrite.fusing import epilogue_steps, fuse_flat, root_op
from whet.rewrite.graph import Graph
from whet.rewrite.matching import interior_escapes, maker_of_op
from whet.rewrite.rules import Phase, Skip


def attention_sample(
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    size: int,
    *,
    layout: str = "heads",
    scale: str = "Div",
    mask: tuple[int, ...] = (),
    constant: bool = False,
    causal: float | None = None,
    group: int = 1,
) -> Sample:
    """softmax(q @ k^T / sqrt(size) + mask) @ v. `layout`: "heads" (q, k, v as the MatMuls read them), "rows" (heads within a row, as a
    projection writes them; the body has the transposes, the result's too), "stacked" (q, k and v in one tensor of rows). `causal`: the mask is
    a constant that adds this value to the keys after the row (the last row sees all keys). `group` ("rows" only): heads of q that share a head of
    k and v, which the body expands."""
    stacked: list[str | np.ndarray] = [f"f32[{batch},{rows},3,{heads},{size}]", np.array(0), np.array(1), np.array(2)]
    separate: list[str | np.ndarray] = [f"f32[{batch},{n},{h},{size}]" for n, h in ((rows, heads), (keys, heads // group), (keys, heads // group))]
    plain: list[str | np.ndarray] = [f"f32[{batch},{heads},{a},{b}]" for a, b in ((rows, size), (size, keys), (keys, size))]
    inputs: list[str | np.ndarray | None] = [*{"heads": plain, "rows": separate, "stacked": stacked}[layout]]
    factor = size**0.5 if scale == "Div" else size**-0.5
    inputs += [np.array(factor, np.float32)] if scale else []
    inputs += [f"{'const ' if constant else ''}f32[{','.join(map(str, mask))}]"] if mask else []
    if causal is not None:
        inputs.append(np.where(np.arange(keys) > np.arange(rows)[:, None] + keys - rows, np.float32(causal), np.float32(0)))
    shapes = [np.array([2]), np.array([batch, heads // group, group, keys, size]), np.array([batch, heads, keys, size])] if group > 1 else []
    inputs += shapes

    def regions() -> Regions:
        body, own = new_body(inputs)
        rest = own[4 if layout == "stacked" else 3 :]
        if layout == "heads":
            q, k, v = own[:3]
        elif layout == "rows":
            order = ((0, 2, 1, 3), (0, 2, 1, 3) if group > 1 else (0, 2, 3, 1), (0, 2, 1, 3))
            q, k, v = (body.add("Transpose", t, perm=perm) for t, perm in zip(own[:3], order, strict=True))
            if group > 1:
                for t, array in zip(own[-3:], shapes, strict=True):
                    t.shape_value = tuple(array.tolist())
                axis, expanded, merged = own[-3:]
                k, v = (body.add("Reshape", body.add("Expand", body.add("Unsqueeze", t, axis), expanded), merged) for t in (k, v))
                k = body.add("Transpose", k, perm=(0, 1, 3, 2))
        else:
            x = body.add("Transpose", own[0], perm=(2, 0, 3, 1, 4))
            q, k, v = (body.add("Gather", x, i, axis=0) for i in own[1:4])
            k = body.add("Transpose", k, perm=(0, 1, 3, 2))
        x = body.add("MatMul", q, k)
        if scale:
            x = body.add(scale, x, rest[0])
        if mask or causal is not None:
            x = body.add("Add", x, rest[1 if scale else 0])
        y = body.add("MatMul", body.add("Softmax", x, axis=-1), v)
        body.mark_output(y if layout == "heads" else body.add("Transpose", y, perm=(0, 2, 1, 3)))
        return {"body": body}

    return Sample(inputs, {"composite": "Attention"}, regions)


ATTENTION = composite(
    "Attention",
    title="attention",
    unsupported="no tactic here computes attention in one kernel",
    layer_type="kgen_mha",
    samples=[
        attention_sample(2, 3, 24, 40, 64, mask=(2, 1, 1, 40)),
        attention_sample(1, 2, 33, 33, 64, layout="rows", scale="Mul", mask=(1, 1, 33, 33)),
        attention_sample(2, 2, 50, 50, 32, layout="stacked", scale="Mul"),
        attention_sample(4, 3, 49, 49, 32, layout="stacked", mask=(1, 3, 49, 49), constant=True),
        attention_sample(1, 2, 20, 150, 80, layout="rows", scale=""),
        attention_sample(1, 1, 70, 9, 128, layout="rows", mask=(9,)),
        attention_sample(1, 2, 90, 150, 64, layout="rows"),
        attention_sample(2, 2, 130, 130, 64, layout="rows", causal=-np.inf),
        attention_sample(1, 6, 40, 70, 128, layout="rows", causal=float(np.finfo(np.float32).min), group=3),
        attention_sample(2, 4, 30, 100, 96, layout="rows", mask=(2, 1, 1, 100), group=2),
        attention_sample(2, 2, 18, 32, 16, mask=(2, 1, 18, 32)),
    ],
)


@ATTENTION.matcher("MatMul", phase=Phase.FUSE, level=2)
def recognize_attention(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Softmax attention, MatMul(Softmax(scale * MatMul(q, k) + mask), v), becomes one layer."""
    softmax = maker_of_op(g, layer.inputs[0], "Softmax")
    if softmax is None or not layer.output.dtype.is_float:
        return None
    x = softmax.inputs[0]
    if softmax.attrs["axis"] not in (-1, softmax.output.type.rank - 1):
        return Skip(f"the softmax is over axis {softmax.attrs['axis']}, not the last one")
    members = [softmax]
    for match in (_match_mask, _match_scale):
        matched = match(g, x)
        if matched is not None:
            members.insert(0, matched[0])
            x = matched[1]
    scores = _scores(g, x)
    if scores is None:
        return None
    if reason := interior_escapes(g, layer, [scores, *members]):
        return Skip(reason)
    return fuse_flat(g, ATTENTION.kind, scores, *members, layer)


def _scores(g: Graph, x: Tensor | None) -> Layer | None:
    """The MatMul that produces `x`, with or without the scale in its epilogue."""
    layer = g.maker(x)
    return layer if layer is not None and root_op(layer, ("MatMul",)) and epilogue_steps(layer) in ([], ["scale"]) else None


def _match_mask(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Add, the scores), when `x` is scores + mask."""
    add = maker_of_op(g, x, "Add")
    if add is None or x is None:
        return None
    for value in add.inputs:
        scaled = _match_scale(g, value)
        if value is not None and value.type == x.type and _scores(g, scaled[1] if scaled else value):
            return add, value
    return None


def _match_scale(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Mul or Div, the scores), when `x` is scores times a constant."""
    layer = g.maker(x)
    if layer is None or x is None or layer.op not in ("Mul", "Div"):
        return None
    pairs = (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,)
    return next(((layer, v) for v, factor in pairs if v is not None and scalar_value(factor) is not None and v.type == x.type), None)


@ATTENTION.matcher("Fused", "Transpose", phase=Phase.FUSE, after=("recognize_attention",), level=2)
def fuse_attention_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Transposes of attention's operands and result, and slices of a stacked q, k and v, go into it: its kernels read any strides.

    Values that others read too stay outside.
    """
    if layer.op == "Transpose":
        attention = g.maker(layer.inputs[0])
        if attention is None or attention.composite != ATTENTION.kind:
            return None
        reason = g.escapes(attention.output, layer)
        return Skip(reason) if reason else fuse_flat(g, ATTENTION.kind, attention, layer)
    if layer.composite != ATTENTION.kind:
        return None
    members = [layer]
    while (more := _rearranging_producer(g, members)) is not None:
        members.append(more)
    return fuse_flat(g, ATTENTION.kind, *sorted(members, key=g.position)) if len(members) > 1 else None


def _rearranging_producer(g: Graph, members: list[Layer]) -> Layer | None:
    """A Transpose or slice that produces an input of `members` and that nothing else reads."""
    for t in (t for m in members for t in m.inputs):
        maker = g.maker(t)
        if t is None or maker is None or maker in members or g.escapes(t, *(m for m in members if t in m.inputs)) is not None:
            continue
        index = maker.inputs[1] if maker.op == "Gather" else None
        if maker.op == "Transpose" or (index is not None and index.type.rank == 0 and scalar_value(index) is not None):
            return maker
    return None
