"""Softmax attention, MatMul(Softmax(scale * MatMul(q, k) + mask), v), becomes one layer, including transposes around it.

Scale (Mul or Div by a constant) and mask (Add) are optional. k is the second operand of its MatMul, that is transposed.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.ops._reduce import list_reduced_axes
from whet.ops._strided import REARRANGING, RESHAPES, View, find_views_after, make_plain_view
from whet.rewrite.constants import scalar_value
from whet.rewrite.fusing import find_root_op, fuse_flat, list_epilogue_steps, outer_tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Phase, Skip

_MOST_LAYERS = 6  # between the two products, searched for a reason


def make_attention_sample(
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
    guard: str = "",
    repeats: int = 1,
    cap: float = 0.0,
    value_size: int = 0,
    factor: float = 0.0,
) -> Sample:
    """softmax(q @ k^T / sqrt(size) + mask) @ v. `layout`: "heads" (q, k, v as the MatMuls read them), "rows" (heads within a row, as a
    projection writes them; the body has the transposes, the result's too), "stacked" (q, k and v in one tensor of rows), "merged" (the result of
    one projection, which the body splits). `causal`: the mask is a constant that adds this value to the keys after the row (the last row sees all
    keys). `group` ("rows" only): heads of q that share a head of k and v, which the body expands. `guard`: the first row of the constant mask hides
    every key, and rows of probabilities become 0: those of NaN ("nan"), or those of which the mask hides every key ("hidden"). `repeats`: the mask
    repeats along the batch. `cap`: the scaled scores s become cap * tanh(s / cap) before the mask.
    `value_size`: elements of a row of v ("heads" and "rows"; 0: `size`). `factor`: the constant of `scale`, instead of the one above."""
    value_size = value_size or size
    stacked: list[str | np.ndarray] = [f"f32[{batch},{rows},3,{heads},{size}]", np.array(0), np.array(1), np.array(2)]
    own_sizes = (rows, heads, size), (keys, heads // group, size), (keys, heads // group, value_size)
    separate: list[str | np.ndarray] = [f"f32[{batch},{n},{h},{elements}]" for n, h, elements in own_sizes]
    plain: list[str | np.ndarray] = [f"f32[{batch},{heads},{a},{b}]" for a, b in ((rows, size), (size, keys), (keys, value_size))]
    projected: list[str | np.ndarray] = [f"f32[{batch},{rows},{3 * heads * size}]", np.array([batch, rows, heads, size])]
    inputs: list[str | np.ndarray | None] = [*{"heads": plain, "rows": separate, "stacked": stacked, "merged": projected}[layout]]
    factor = factor or (size**0.5 if scale == "Div" else size**-0.5)
    inputs += [np.array(factor, np.float32)] if scale else []
    inputs += [np.array(cap, np.float32)] if cap else []
    inputs += [f"{'const ' if constant else ''}f32[{','.join(map(str, mask))}]"] if mask else []
    if guard:
        hidden = np.zeros((rows, keys), np.float32)
        hidden[0], hidden[1:, -3:] = -np.inf, -np.inf
        inputs.append(hidden)
    if causal is not None:
        inputs.append(np.where(np.arange(keys) > np.arange(rows)[:, None] + keys - rows, np.float32(causal), np.float32(0)))
    shapes = [np.array([2]), np.array([batch, heads // group, group, keys, size]), np.array([batch, heads, keys, size])] if group > 1 else []
    inputs += shapes
    inputs += [np.array(x, np.float32) for x in ((-np.inf, 0) if guard == "hidden" else (0,) if guard else ())]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        rest = own[{"stacked": 4, "merged": 2}.get(layout, 3) :]
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
        elif layout == "merged":
            own[1].shape_value = (batch, rows, heads, size)
            parts = body.add("Split", own[0], axis=-1, split=(heads * size,) * 3)
            order = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
            q, k, v = (body.add("Transpose", body.add("Reshape", t, own[1]), perm=perm) for t, perm in zip(parts, order, strict=True))
        else:
            x = body.add("Transpose", own[0], perm=(2, 0, 3, 1, 4))
            q, k, v = (body.add("Gather", x, i, axis=0) for i in own[1:4])
            k = body.add("Transpose", k, perm=(0, 1, 3, 2))
        x = body.add("MatMul", q, k)
        if scale:
            x = body.add(scale, x, rest[0])
        if cap:
            limit = rest[1 if scale else 0]
            x = body.add("Mul", body.add("Tanh", body.add("Div", x, limit)), limit)
        added: Tensor | None = None
        if mask or guard or causal is not None:
            added = rest[bool(scale) + bool(cap)]
            x = body.add("Add", x, added if repeats == 1 else body.add("Tile", added, repeats=(repeats, *[1] * (added.type.rank - 1))))
        p = body.add("Softmax", x, axis=-1)
        if guard == "nan":
            p = body.add("Where", body.add("IsNaN", p), rest[-1], p)
        elif guard:
            p = body.add("Where", body.add("Equal", body.add("ReduceMax", added, axes=(-1,), keepdims=1), rest[-2]), rest[-1], p)
        y = body.add("MatMul", p, v)
        body.mark_output(y if layout == "heads" else body.add("Transpose", y, perm=(0, 2, 1, 3)))
        return {"body": body}

    return Sample(inputs, {"composite": "Attention"}, build_regions)


ATTENTION = register_composite(
    "Attention",
    title="attention",
    unsupported="no tactic here computes attention in one kernel",
    layer_type="kgen_mha",
    samples=[
        make_attention_sample(2, 3, 24, 40, 64, mask=(2, 1, 1, 40)),
        make_attention_sample(1, 2, 33, 33, 64, layout="rows", scale="Mul", mask=(1, 1, 33, 33)),
        make_attention_sample(2, 2, 50, 50, 32, layout="stacked", scale="Mul"),
        make_attention_sample(4, 3, 49, 49, 32, layout="stacked", mask=(1, 3, 49, 49), constant=True),
        make_attention_sample(2, 3, 40, 40, 64, layout="merged", scale="Mul"),
        make_attention_sample(1, 2, 20, 150, 80, layout="rows", scale=""),
        make_attention_sample(1, 1, 70, 9, 128, layout="rows", mask=(9,)),
        make_attention_sample(1, 2, 90, 150, 64, layout="rows"),
        make_attention_sample(2, 2, 130, 130, 64, layout="rows", causal=-np.inf),
        make_attention_sample(1, 6, 40, 70, 128, layout="rows", causal=float(np.finfo(np.float32).min), group=3),
        make_attention_sample(2, 4, 30, 100, 96, layout="rows", mask=(2, 1, 1, 100), group=2),
        make_attention_sample(2, 2, 18, 32, 16, mask=(2, 1, 18, 32)),
        make_attention_sample(2, 2, 20, 32, 64, layout="rows", guard="nan"),
        make_attention_sample(2, 3, 17, 21, 32, layout="rows", guard="nan", scale=""),
        make_attention_sample(2, 2, 20, 32, 64, layout="rows", guard="hidden"),
        make_attention_sample(1, 3, 17, 21, 32, layout="rows", guard="hidden", scale=""),
        make_attention_sample(6, 2, 16, 16, 32, layout="stacked", mask=(3, 2, 16, 16), constant=True, repeats=2),
        make_attention_sample(2, 2, 20, 37, 32, layout="rows", mask=(2, 1, 1, 37), cap=0.5),
        make_attention_sample(1, 2, 18, 18, 64, layout="rows", causal=-np.inf, scale="", cap=5.0),
        make_attention_sample(2, 2, 32, 32, 36, layout="stacked", scale="Mul"),
        make_attention_sample(1, 3, 20, 30, 21, layout="rows", mask=(1, 3, 20, 30)),
        make_attention_sample(1, 2, 20, 30, 40, layout="rows"),
        make_attention_sample(1, 2, 20, 30, 16, layout="rows", value_size=32),
        make_attention_sample(1, 2, 18, 18, 256, layout="rows", causal=-np.inf, cap=2.0),
    ],
)


@ATTENTION.matcher("MatMul", phase=Phase.FUSE, level=2)
def recognize_attention(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Softmax attention, MatMul(Softmax(scale * MatMul(q, k) + mask), v), becomes one layer; rows without visible keys may be 0.

    Before the mask, cap * tanh(scores / cap) may limit the scores (Gemma 2).
    """
    weights, guard, condition, guarded_mask = _match_guard(g, layer.inputs[0])
    softmax = find_maker_of_op(g, weights, "Softmax")
    if softmax is None or not layer.output.dtype.is_float:
        return None
    x = softmax.inputs[0]
    if softmax.attrs["axis"] not in (-1, softmax.output.type.rank - 1):
        return Skip(f"the softmax is over axis {softmax.attrs['axis']}, not the last one")
    members = [*condition, softmax, *guard]
    masked = _match_mask(g, x)
    if masked is not None:
        members.insert(0, masked[0])
        x = masked[1]
    found = _find_scores(g, x)
    if found is None:
        return _why_not_fused(g, softmax.inputs[0])
    scores, scales = found
    members[:0] = scales
    if condition and not any(m.op == "Add" and guarded_mask in m.inputs for m in members):
        return Skip(f"'{condition[0].name}' looks for hidden keys in %{guarded_mask.name if guarded_mask else ''}, which is not the mask")
    if reason := find_interior_escape(g, layer, [scores, *(m for m in members if m not in condition)]):  # layers share the condition
        return Skip(reason)
    return fuse_flat(g, ATTENTION.kind, scores, *members, layer)


def _match_guard(g: Graph, t: Tensor | None) -> tuple[Tensor | None, list[Layer], list[Layer], Tensor | None]:
    """(p, layers on the way of p, layers that compute the condition, the mask that it is computed from) for the guards that exporters write for
    rows of which every key is hidden: t = Where(IsNaN(p), 0, p), or Where(ReduceMax(mask) == -infinity, 0, p); else (t, [], [], None)."""
    where = find_maker_of_op(g, t, "Where")
    if where is None or scalar_value(where.inputs[1]) != 0 or where.inputs[2] is None or where.inputs[2].type != where.output.type:
        return t, [], [], None
    p = where.inputs[2]
    is_nan, equal = find_maker_of_op(g, where.inputs[0], "IsNaN"), find_maker_of_op(g, where.inputs[0], "Equal")
    if is_nan is not None and is_nan.inputs[0] is p:
        return p, [is_nan, where], [], None
    if equal is None:
        return t, [], [], None
    largest = next((find_maker_of_op(g, a, "ReduceMax") for a, b in (equal.inputs, equal.inputs[::-1]) if scalar_value(b) == -np.inf), None)
    mask = None if largest is None else largest.inputs[0]
    if largest is None or mask is None or list_reduced_axes(largest) != (mask.type.rank - 1,) or not largest.attrs["keepdims"]:
        return t, [], [], None
    return p, [where], [largest, equal], mask


def _why_not_fused(g: Graph, x: Tensor | None) -> Skip | None:
    """Why scores that go through other layers than a scale and a mask are not fused; None where there is no product of two activations."""
    passed: list[Layer] = []
    for _ in range(_MOST_LAYERS):
        layer = g.maker(x)
        if layer is None or not layer.inputs:
            return None
        if find_root_op(layer, ("MatMul",)):
            if any(t is None or t.is_constant for t in layer.inputs[:2]):
                return None
            epilogue = layer.regions["body"].layers[1:] if layer.op == "Fused" else []
            between = passed[::-1] or epilogue
            return Skip("between the products are also " + ", ".join(f"{m.composite or m.op} '{m.name}'" for m in between)) if between else None
        passed.append(layer)
        x = next((t for t in layer.inputs if t is not None and not t.is_constant and t.type == layer.outputs[0].type), layer.inputs[0])
    return None


def _find_scores(g: Graph, x: Tensor | None) -> tuple[Layer, list[Layer]] | None:
    """(the MatMul of queries and keys, the layers from it to `x`): a scale, which may be in its epilogue, or a soft cap between two scales."""
    passed: list[Layer] = []
    while (layer := g.maker(x)) is not None:
        if find_root_op(layer, ("MatMul",)) and list_epilogue_steps(layer) in ([], ["scale"]):
            return layer, passed
        scaled = _match_scale(g, x)
        if layer.op == "Tanh" and all(p.op != "Tanh" for p in passed):
            x = layer.inputs[0]
        elif scaled is not None:
            x = scaled[1]
        else:
            return None
        passed.insert(0, layer)
    return None


def _match_mask(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Add, the scores), when `x` is scores + mask."""
    add = find_maker_of_op(g, x, "Add")
    if add is None or x is None:
        return None
    return next(((add, v) for v in add.inputs if v is not None and v.type == x.type and _find_scores(g, v) is not None), None)


def _match_scale(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Mul or Div, the scores), when `x` is scores times a constant."""
    layer = g.maker(x)
    if layer is None or x is None or layer.op not in ("Mul", "Div"):
        return None
    pairs = (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,)
    return next(((layer, v) for v, factor in pairs if v is not None and scalar_value(factor) is not None and v.type == x.type), None)


@ATTENTION.matcher("Fused", "Transpose", phase=Phase.FUSE, after=("recognize_attention",), level=2)
def fuse_attention_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Transposes of attention's operands and result, parts of a stacked q, k and v, and repeated heads and masks go into it.

    Its kernels read any strides. Values that others read too stay outside.
    """
    if layer.op == "Transpose":
        attention = g.maker(layer.inputs[0])
        if attention is None or attention.composite != ATTENTION.kind:
            return None
        if layer.attrs["perm"][-1] != layer.output.type.rank - 1:
            return Skip("kernels write the elements of a row next to each other")
        reason = g.escapes(attention.output, layer)
        return Skip(reason) if reason else fuse_flat(g, ATTENTION.kind, attention, layer)
    if layer.composite != ATTENTION.kind:
        return None
    members = [layer]
    while more := _find_rearranging_producers(g, members) or _find_joint_producers(g, members):
        members += more
    return fuse_flat(g, ATTENTION.kind, *sorted(members, key=g.position)) if len(members) > 1 else None


def _find_rearranging_producers(g: Graph, members: list[Layer]) -> list[Layer]:
    """Layers that produce an input of `members` by moving data, that nothing else reads, and that strides replace; a Reshape only before others."""
    for t in (t for m in members for t in m.inputs):
        chain: list[Layer] = []
        while (maker := g.maker(t)) is not None and maker.op in REARRANGING and maker not in members:
            siblings = _find_sibling_reshapes(g, maker, {*members, *chain})
            if siblings is None:
                break
            chain += [*siblings, maker]
            if not all(_are_strides(x, [*members, *chain]) for x in (*siblings, maker)):
                break
            if maker.op not in RESHAPES:
                return chain
            t = maker.inputs[0]
    return []


def _find_joint_producers(g: Graph, members: list[Layer]) -> list[Layer]:
    """Layers that move parts of one value for several operands, if strides replace them together. Alone, the layers next to `members` may not be
    replaceable: a Transpose further up puts the elements of a row next to each other."""
    found: list[Layer] = []
    most: list[Layer] = []
    inputs = [t for m in members for t in m.inputs]
    while inputs:
        maker = g.maker(inputs.pop(0))
        inside = {*members, *found}
        if maker is None or maker.op not in REARRANGING or maker in inside:
            continue
        if any(g.is_output(t) or not set(g.readers(t)) <= inside for t in maker.outputs):
            continue  # its last reader leads here again
        found.append(maker)
        inputs.append(maker.inputs[0])
        sources = [x for x in found if g.maker(x.inputs[0]) not in found]
        if maker.op not in RESHAPES and all(_are_strides(x, [*members, *found]) for x in sources):
            most = list(found)
    return most


def _find_sibling_reshapes(g: Graph, maker: Layer, members: set[Layer]) -> list[Layer] | None:
    """The layers that read `maker` besides `members`, if they all are reshapes for `members` (parts of a Split); None if others read it."""
    if any(g.is_output(t) for t in maker.outputs):
        return None
    siblings = list(dict.fromkeys(r for t in maker.outputs for r in g.readers(t) if r not in members))
    inside = all(x.op in RESHAPES and not g.is_output(x.output) and set(g.readers(x.output)) <= members for x in siblings)
    return siblings if inside else None


def _are_strides(first: Layer, members: list[Layer]) -> bool:
    """True if `first` and the layers after it among `members`, fused bodies included, can be replaced by strides of the input of `first`."""
    x = first.inputs[0]
    if x is None or (x.is_constant and first.op != "Tile"):  # other layers on constants are folded, if their results are small
        return False
    views: dict[Tensor, View] = {x: make_plain_view(0, x.shape)}
    for layer in _sort_members(first, members):
        body = layer.regions["body"] if layer.op == "Fused" else None
        if body is not None:
            views.update({own: views[outer] for own, outer in zip(body.inputs, layer.inputs, strict=True) if outer in views})
        for step in body.layers if body is not None else [layer]:
            if step.op == "Add" and any(t in views and views[t].strides[-1] != 1 for t in step.inputs if t is not None):
                return False  # kernels read the keys of a mask in order
            if step.op == "MatMul":  # kernels read rows with their elements next to each other, and keys also as columns
                first_product = body is not None and step is next(x for x in body.layers if x.op == "MatMul")
                allowed = ((-1,), (-1, -2) if first_product else (-1,))
                if any(t in views and all(views[t].strides[axis] != 1 for axis in axes) for t, axes in zip(step.inputs, allowed, strict=True)):
                    return False
            view = views.get(step.inputs[0]) if step.inputs[0] is not None else None
            if view is None or step.op not in REARRANGING:
                continue
            after = find_views_after(step, view, partial(_find_constant_array, layer))
            if after is None:
                return False
            views.update(zip(step.outputs, after, strict=True))
    return True


def _sort_members(first: Layer, members: list[Layer]) -> list[Layer]:
    """`members` in an order in which values are produced before they are read: the collected ones in reverse, then the fused layer."""
    ordered = members[::-1]
    return ordered[ordered.index(first) :]


def _find_constant_array(layer: Layer, t: Tensor | None) -> np.ndarray | None:
    """The array of a constant that a layer or its body reads; None for other tensors."""
    outer = outer_tensor(layer, t)
    t = outer if outer is not None else t
    return np.asarray(t.array()) if t is not None and t.is_constant else None
