"""Reshapes, transposes, splits, slices, Concats and the arithmetic between them become one layer: a detector's heads, from channels to boxes, or
rotary position embeddings.

Each operation would read and write all values; one layer reads each value where it is stored, computes and writes it to its final position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.composites.rearrange import REARRANGE
from whet.network import BF16, F16, F32, Layer, Network, Tensor
from whet.ops import Sample
from whet.ops._strided import RESHAPES
from whet.ops.slice import slice_ranges
from whet.rewrite.fusing import ACTIVATIONS, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

MOVES_OPS = ("Concat", "Gather", *RESHAPES, "Slice", "Split", "Transpose")
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
UNARY = (*(a for a in ACTIVATIONS if a != "PRelu"), "Abs", "Exp", "Neg", "Sqrt")
_NOT_LAST = ("Flatten", "Gather", "Slice", "Squeeze", "Unsqueeze")  # several may read a layer; they do not end with it
_FLOATS = (F16, BF16, F32)  # models that are exported in half precision have heads too
_MAX_SOURCES = 4  # tensors that are computed at run time and read from outside


def make_detector_head_sample(images: int, anchors: int, classes: int, *sides: tuple[int, int], padding: int = 0) -> Sample:
    """Boxes of a detector: channels of each level, ordered (anchor, x y w h score classes...), become rows after the pixels, are decoded, and
    all levels are concatenated. `padding` channels at the end of each level are unused."""
    width, rng = 5 + classes, np.random.default_rng(3)
    inputs: list[Any] = []
    for h, w in sides:
        inputs += [f"f32[{images},{anchors * width + padding},{h},{w}]", rng.standard_normal((1, anchors, h, w, 2)).astype(np.float32)]
        inputs += [rng.random((1, anchors, 1, 1, 2)).astype(np.float32) + 1]
    inputs += [np.asarray(2.0, np.float32)]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        two, parts = own[-1], []
        for level, (h, w) in enumerate(sides):
            x, grid, sizes = own[3 * level : 3 * level + 3]
            split_shape = body.constant(np.array([images, anchors, width, h, w]), "split_shape")
            if padding:
                x = body.add("Slice", x, *(body.constant(np.array([n]), "bound") for n in (0, anchors * width, 1)))
            values = body.add("Sigmoid", body.add("Transpose", body.add("Reshape", x, split_shape), perm=(0, 1, 3, 4, 2)))
            at, size, rest = body.add_layer("Split", [values, body.constant(np.array([2, 2, width - 4]), "parts")], {"axis": 4}).outputs
            at = body.add("Mul", body.add("Add", body.add("Mul", at, two), grid), two)
            size = body.add("Mul", body.add("Pow", body.add("Mul", size, two), two), sizes)
            rows = body.constant(np.array([images, anchors * h * w, width]), "rows")
            parts.append(body.add("Reshape", body.add("Concat", at, size, rest, axis=4), rows))
        body.mark_output(body.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0])
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_channel_shuffle_sample(images: int, groups: int, group_size: int, h: int, w: int) -> Sample:
    """Two halves concatenated, scaled per channel, and their channels shuffled between the groups (ShuffleNet)."""
    c = groups * group_size
    inputs = [f"f32[{images},{c // 2},{h},{w}]", f"f32[{images},{c - c // 2},{h},{w}]", f"const f32[1,{c},1,1]"]

    def build_regions() -> Regions:
        body, (a, b, scale) = make_body(inputs, "abs")
        joined = body.add("Relu", body.add("Mul", body.add("Concat", a, b, axis=1), scale))
        split_shape = body.constant(np.array([images, groups, group_size, h, w]), "split_shape")
        transposed = body.add("Transpose", body.add("Reshape", joined, split_shape), perm=(0, 2, 1, 3, 4))
        body.mark_output(body.add("Reshape", transposed, body.constant(np.array([images, c, h, w]), "whole")))
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_shuffled_sample(images: int, parts: tuple[int, ...], groups: int, h: int, w: int, part: tuple[int, int] | None = None) -> Sample:
    """Tensors of `parts` channels concatenated, and their channels shuffled between the groups; of the result the channels `part`."""
    c = sum(parts)
    inputs = [f"f32[{images},{n},{h},{w}]" for n in parts]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        split_shape = body.constant(np.array([images, groups, c // groups, h, w]), "split_shape")
        transposed = body.add("Transpose", body.add("Reshape", body.add("Concat", *own, axis=1), split_shape), perm=(0, 2, 1, 3, 4))
        y = body.add("Reshape", transposed, body.constant(np.array([images, c, h, w]), "whole"))
        body.mark_output(body.add("Slice", y, starts=part[:1], ends=part[1:], axes=(1,), steps=(1,)) if part else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_rotary_sample(images: int, heads: int, positions: int, size: int, rotated: int) -> Sample:
    """Rows of all heads become one image of rows per head, whose first `rotated` features are rotated by the angles of their positions."""
    rng = np.random.default_rng(5)
    tables = [rng.uniform(-1, 1, (1, 1, positions, rotated)).astype(np.float32) for _ in range(2)]
    inputs: list[Any] = [f"f32[{images},{positions},{heads * size}]", *tables]

    def build_regions() -> Regions:
        body, (rows, cos, sin) = make_body(inputs, "relu")
        split_shape = body.constant(np.array([images, positions, heads, size]), "split_shape")
        x = body.add("Transpose", body.add("Reshape", rows, split_shape), perm=(0, 2, 1, 3))
        first, second = _slice(body, x, 0, rotated // 2), _slice(body, x, rotated // 2, rotated)
        turned = body.add("Mul", body.add("Concat", body.add("Neg", second), first, axis=-1), sin)
        y = body.add("Add", body.add("Mul", _slice(body, x, 0, rotated) if rotated < size else x, cos), turned)
        body.mark_output(body.add("Concat", y, _slice(body, x, rotated, size), axis=-1) if rotated < size else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_interleaved_sample(images: int, heads: int, positions: int, size: int, *, sliced: bool) -> Sample:
    """Pairs of adjacent features rotated by the angles of their positions, in rows; the pairs are separated by a Reshape and indices, or by
    Slices with steps."""
    rng = np.random.default_rng(6)
    tables = [rng.uniform(-1, 1, (1, positions, 1, size // 2)).astype(np.float32) for _ in range(2)]
    inputs: list[Any] = [f"f32[{images},{positions},{heads * size}]", *tables]

    def build_regions() -> Regions:
        body, (rows, cos, sin) = make_body(inputs, "relu")
        shape = (images, positions, heads, size) if sliced else (images, positions, heads, size // 2, 2)
        x = body.add("Reshape", rows, body.constant(np.array(shape), "split_shape"))
        if sliced:
            a, b = (body.add("Slice", x, starts=(k,), ends=(size,), axes=(3,), steps=(2,)) for k in (0, 1))
        else:
            a, b = (body.add("Gather", x, body.constant(np.array(k), "part"), axis=4) for k in (0, 1))
        first = body.add("Sub", body.add("Mul", a, cos), body.add("Mul", b, sin))
        second = body.add("Add", body.add("Mul", a, sin), body.add("Mul", b, cos))
        joined = body.add("Concat", *(body.add("Unsqueeze", t, axes=(4,)) for t in (first, second)), axis=-1)
        body.mark_output(body.add("Reshape", joined, body.constant(np.array([images, positions, heads, size]), "rows_shape")))
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_packed_gate_sample(rows: tuple[int, ...], half: int, activation: str) -> Sample:
    """The first half of each row, activated, times the second half (GLU of one product)."""
    inputs = [f"f32[{','.join(map(str, (*rows, 2 * half)))}]"]

    def build_regions() -> Regions:
        body, (x,) = make_body(inputs)
        first, second = (body.add("Slice", x, starts=(at,), ends=(at + half,), axes=(len(rows),), steps=(1,)) for at in (0, half))
        body.mark_output(body.add("Mul", body.add(activation, first), second))
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def make_relative_scores_sample(heads: int, rows: int) -> Sample:
    """Scores of relative positions of queries and keys, each row of them shifted by one element more than the row before, and a mask
    (shift_relative_scores)."""
    columns = 2 * rows
    inputs: list[Any] = [f"f32[{heads},{rows},{columns}]", f"f32[{heads},{rows},{columns}]", f"f32[1,{rows},{rows}]", np.array(8, np.float32)]

    def build_regions() -> Regions:
        body, (queries, keys, mask, scale) = make_body(inputs)
        flat, shifted = (body.constant(np.array(s), "shape") for s in ((heads, rows * columns), (heads, rows, columns - 1)))
        parts = []
        for x in (queries, keys):
            part = _slice(body, body.add("Reshape", x, flat), rows - 1, rows * columns - 1)
            parts.append(_slice(body, body.add("Reshape", part, shifted), 0, rows))
        turned = body.add("Transpose", parts[1], perm=(0, 2, 1))
        y = body.add("Add", body.add("Div", parts[0], scale), body.add("Div", turned, scale))
        body.mark_output(body.add("Add", y, mask))
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, build_regions)


def _slice(body: Network, x: Tensor, start: int, end: int) -> Tensor:
    """The part of the last axis of x from start to end."""
    return body.add("Slice", x, starts=(start,), ends=(end,), axes=(x.type.rank - 1,), steps=(1,))


MOVES = register_composite(
    "Moves",
    title="data movement with arithmetic",
    unsupported="no tactic here moves values and computes with them in one kernel",
    samples=[
        make_detector_head_sample(2, 3, 2, (4, 6), (2, 3)),
        make_detector_head_sample(1, 2, 80, (20, 20), (10, 10), (5, 5)),
        make_detector_head_sample(3, 1, 1, (7, 5)),
        make_detector_head_sample(2, 3, 80, (8, 8), (4, 4)),
        make_channel_shuffle_sample(2, 2, 8, 5, 3),
        make_channel_shuffle_sample(1, 3, 4, 1, 9),
        make_channel_shuffle_sample(1, 2, 4, 2, 150),
        make_shuffled_sample(2, (6, 6), 2, 5, 3),
        make_shuffled_sample(1, (29, 29), 2, 14, 9, part=(29, 58)),
        make_shuffled_sample(2, (5, 3, 4), 3, 4, 6, part=(2, 9)),
        make_rotary_sample(2, 3, 5, 8, 8),
        make_rotary_sample(1, 4, 33, 64, 64),
        make_rotary_sample(1, 2, 7, 24, 16),
        make_interleaved_sample(2, 3, 5, 8, sliced=False),
        make_interleaved_sample(1, 2, 33, 64, sliced=True),
        make_relative_scores_sample(2, 5),
        make_relative_scores_sample(3, 32),
        make_packed_gate_sample((2, 3, 4), 24, "Sigmoid"),
        make_packed_gate_sample((1, 2, 3), 5, "Relu"),
    ],
)


@MOVES.matcher("Concat", "Fused", "Reshape", "Transpose", *ARITHMETIC, *UNARY, after=["fuse_pointwise", "fuse_rearrange"])
def fuse_moves(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Reshapes, transposes, splits, slices, Concats and the arithmetic between them become one layer, from its last layer backwards.

    It needs a Concat and arithmetic, and a Transpose or two parts of one tensor; or it multiplies two parts of one tensor (the gate of a packed
    product), or computes with rows that are shifted against each other (scores of relative positions). Otherwise there is little to gain.
    """
    if len(layer.outputs) > 1 or layer.composite == MOVES.kind or not _is_member(layer):
        return None
    if any(_is_member(r) and r.op not in _NOT_LAST for r in g.readers(layer.output)):
        return None
    members = _collect_members(g, layer)
    ops = [x.op for m in members for x in (m.regions["body"].layers if m.op == "Fused" else [m])]
    joins = "Concat" in ops and ("Transpose" in ops or _takes_parts(members))
    if not set(ops) - set(MOVES_OPS) or not (joins or _is_gate(layer, members) or _shifts_rows(g, members)):
        return None
    inside = {t for m in members for t in m.outputs}
    sources = {t: None for m in members for t in m.inputs if t is not None and t not in inside and not t.is_constant}
    if not 0 < len(sources) <= _MAX_SOURCES:
        return Skip(f"it reads {len(sources)} tensors, at most {_MAX_SOURCES} can be moved by one kernel")
    wrong = next((t for t in (*sources, *inside) if t.dtype != layer.output.dtype or t.dtype not in _FLOATS), None)
    if wrong is not None:
        return Skip(f"%{wrong.name} is {wrong.dtype}: all values must have one float type")
    unknown = next((t for t in sources if g.maker(t) is None), None)
    if unknown is not None:
        return Skip(f"%{unknown.name} is an input of the network, which is row-major already")
    return fuse_flat(g, MOVES.kind, *members)


@MOVES.matcher("Reshape", "Slice", after=["fuse_moves"], level=2)
def fuse_shuffle(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A Concat of channels and their shuffle between groups (ShuffleNet) become one layer; of Slices of the result each has a layer of its own.

    So the values are read where the Concat's parts are and written once, in any format, instead of three or four times and row-major.
    """
    whole = g.maker(layer.inputs[0]) if layer.op == "Slice" else layer
    if whole is None or whole.op != "Reshape" or not _is_member(layer):
        return None
    sliced = all(r.op == "Slice" and _is_member(r) for r in g.readers(whole.output)) and not g.is_output(whole.output)
    shuffle = _match_shuffle(g, whole)
    if shuffle is None or sliced != (layer is not whole):
        return None
    joined = shuffle[0]
    for value, reader in zip((x.output for x in shuffle), shuffle[1:], strict=False):
        if reason := g.escapes(value, reader):
            return Skip(reason)
    if len(set(joined.inputs)) > _MAX_SOURCES:
        return Skip(f"it reads {len(set(joined.inputs))} tensors, at most {_MAX_SOURCES} can be moved by one kernel")
    wrong = next((t for t in joined.inputs if t is None or t.is_constant or t.dtype not in _FLOATS or g.maker(t) is None), None)
    if wrong is not None:
        return Skip(f"%{wrong.name} is no float tensor that a layer computes")
    return fuse_flat(g, MOVES.kind, *shuffle, *([layer] if sliced else []))


def _match_shuffle(g: Graph, last: Layer) -> list[Layer] | None:
    """[Concat, Reshape, Transpose, `last`] that shuffle the channels of an image between groups, or None."""
    chain = [last]
    for op in ("Transpose", "Reshape", "Concat"):
        maker = g.maker(chain[0].inputs[0])
        if maker is None or maker.op != op:
            return None
        chain.insert(0, maker)
    joined, split, transposed, _ = chain
    shape, groups, rank = tuple(joined.output.shape), tuple(split.output.shape), joined.output.type.rank
    image = rank == 4 and int(joined.attrs["axis"]) % rank == 1 and tuple(last.output.shape) == shape
    halves = len(groups) == 5 and groups[:1] == shape[:1] and groups[3:] == shape[2:]
    return chain if image and halves and tuple(transposed.attrs["perm"]) == (0, 2, 1, 3, 4) else None


def _takes_parts(members: list[Layer]) -> bool:
    """True if two members take parts of one tensor, as rotations of features do."""
    cut = [m.inputs[0] for m in members for _ in m.outputs if m.op in ("Gather", "Slice", "Split")]
    return len(set(cut)) < len(cut)


def _shifts_rows(g: Graph, members: list[Layer]) -> bool:
    """True if a member reshapes a part of a value of fewer axes, so that its rows begin at other elements than before (shift_relative_scores)."""
    for m in members:
        part = g.maker(m.inputs[0]) if m.op in RESHAPES else None
        if part is not None and part.op == "Slice" and part in members and m.output.type.rank > part.output.type.rank:
            return True
    return False


def _is_gate(last: Layer, members: list[Layer]) -> bool:
    """True if members are two parts of one tensor, and a product of them, computed elementwise (GEGLU, SwiGLU)."""
    parts = [m for m in members if m.op in ("Slice", "Split")]
    product = last.regions["body"].layers[-1].op if last.op == "Fused" else last.op
    moved = [m for m in members if m.op in MOVES_OPS or m.composite == REARRANGE.kind]
    return product == "Mul" and moved == parts and len(parts) <= 2 and _takes_parts(members)


def _is_member(layer: Layer) -> bool:
    """True if a layer moves data or computes elementwise, with constant parameters."""
    if layer.op == "Slice":
        known = layer.inputs[0] is not None and all(t is None for t in layer.inputs[1:])
        return known and all(step > 0 and isinstance(start, int) for start, _, step in slice_ranges(layer).values())
    if layer.op == "Gather":
        index = layer.needs(1)
        return index.is_constant and index.type.rank == 0 and not layer.needs(0).is_constant
    if layer.op in MOVES_OPS:
        return layer.op == "Concat" or all(t is None or t.is_constant for t in layer.inputs[1:])
    if layer.composite == REARRANGE.kind:
        return True
    parts = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    if any(x.op not in ARITHMETIC and x.op not in UNARY for x in parts):
        return False
    y = layer.outputs[0]
    return all(t is None or t.is_constant or t.type == y.type or (t.type.rank == y.type.rank and t.maker is not None) for t in layer.inputs)


def _collect_members(g: Graph, last: Layer) -> list[Layer]:
    """The layers that only `last` needs, in execution order."""
    members: set[Layer] = {last}
    waiting = [last]
    while waiting:
        reader = waiting.pop()
        for t in reader.inputs:
            maker = g.maker(t)
            if t is not None and reader.op not in MOVES_OPS and reader.composite != REARRANGE.kind and t.type != reader.outputs[0].type:
                continue  # a value that broadcasts is computed once
            if maker is not None and maker not in members and _is_member(maker):
                members.add(maker)
                waiting.append(maker)
    while True:
        escaping = {x for x in members if x is not last and any(g.is_output(t) or any(r not in members for r in g.readers(t)) for t in x.outputs)}
        if not escaping:
            break
        members -= escaping
    kept, waiting = {last}, [last]  # a member that is left may be reachable only through one that was dropped
    while waiting:
        for t in waiting.pop().inputs:
            maker = g.maker(t)
            if maker is not None and maker in members and maker not in kept:
                kept.add(maker)
                waiting.append(maker)
    return sorted(kept, key=g.position)
