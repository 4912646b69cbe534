"""A residual branch that moves the rows of its input and moves them back keeps them moved: attention over windows (Swin).

`x + back(f(move(norm(x))))` becomes `back(moved + f(norm(moved)))` with `moved = move(x)`: the norm meets the product that reads it, and the sum
becomes the epilogue of the product before it. A following branch that works on each row alone, `y + mlp(norm(y))` with `y = back(s)`, is computed on
`s`. The move back then meets the next block's move, and both become one.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.passes._row_moves import RowMove, add_row_move, match_row_move
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_NORMS = ("LayerNormalization", "RMSNormalization")
_UNARY = frozenset({"Clip", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Sigmoid", "Silu", "Swish", "Tanh"})
_MOST_LAYERS = 32  # of a branch that works on each row alone


@rule("Add", phase=Phase.FOLD, after=["gather_moves"], level=2)
def keep_windows(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Tensor | Skip | None:
    if not layer.output.type.static or layer.output.type.rank < 2 or any(t is None or t.type != layer.output.type for t in layer.inputs):
        return None
    for i in range(2):
        branch, x = layer.needs(i), layer.needs(1 - i)
        if branch is x or branch.is_constant or x.is_constant:
            continue
        back = match_row_move(g, branch, layer)
        if back is not None:
            return _keep_moved_input(g, layer, x, back)
        moved = _match_moved_back(g, x)
        if moved is not None and (body := _list_row_layers(g, branch, x, layer)) is not None:
            return _compute_on_moved(g, layer, x, moved, body, i)
    return None


def _keep_moved_input(g: Graph, layer: Layer, x: Tensor, back: RowMove) -> dict[Tensor, Tensor] | Skip | None:
    """The block of attention: x is read by this sum and by a norm, whose result alone is moved."""
    readers = [r for r in g.readers(x) if r is not layer]
    norm = readers[0] if len(readers) == 1 else None
    if norm is None or norm.op not in _NORMS or len(norm.outputs) != 1 or not _normalizes_rows(norm) or g.is_output(x):
        return None
    move = _follow_moves(g, norm.output, back.source.type.rank)
    if move is None or move.source is not norm.output:
        return None
    if not np.array_equal(move.rows, back.inverse):
        return Skip(f"%{x.name} is moved to other rows than those from which {layer.name!r} takes the result")
    moved_norm = move.layers[0].output
    shape = static_shape(back.source.shape)
    if static_shape(moved_norm.shape)[-1] != shape[-1]:
        return None
    before = match_row_move(g, x, norm, layer)
    source, rows = (x, move.rows) if before is None else (before.source, before.rows[move.rows])
    moved = add_row_move(g, source, rows, shape, f"{norm.name}.moved")
    attrs = {**norm.attrs, "axis": -1}
    normed = g.add(norm.op, moved, *norm.inputs[1:], name=norm.name, sources=norm.sources, **attrs)
    if normed.type != moved_norm.type:
        normed = g.add("Reshape", normed, shape=static_shape(moved_norm.shape), sources=())
    total = g.add("Add", back.source, moved, name=layer.name, sources=layer.sources)
    result = add_row_move(g, total, back.rows, static_shape(layer.output.shape), f"{layer.name}.back")
    return {moved_norm: normed, layer.output: result}


def _follow_moves(g: Graph, t: Tensor, rank: int) -> RowMove | None:
    """The move of rows that begins at `t` and ends before the first other layer."""
    end, found = t, None
    for _ in range(_MOST_LAYERS):
        readers = g.readers(end)
        if len(readers) != 1 or g.is_output(end) or len(readers[0].outputs) != 1:
            break
        following = match_row_move(g, readers[0].output, *g.readers(readers[0].output))
        if following is None or following.layers[0] is not readers[0]:
            break
        end, found = readers[0].output, following
    return found if found is not None and found.source is t else None


def _match_moved_back(g: Graph, x: Tensor) -> RowMove | None:
    """The move that makes `x`, which two layers may read."""
    found = match_row_move(g, x, *g.readers(x))
    return found if found is not None and not found.keeps_order and len(g.readers(x)) == 2 and not g.is_output(x) else None


def _list_row_layers(g: Graph, branch: Tensor, x: Tensor, layer: Layer) -> list[Layer] | None:
    """The chain from `x` to `branch`, in order, if each layer computes every row from the same row; begins with a norm."""
    chain: list[Layer] = []
    t, reader = branch, layer
    while t is not x:
        maker = g.maker(t)
        if maker is None or len(chain) == _MOST_LAYERS or g.escapes(t, reader) or not _is_row_wise(maker):
            return None
        chain.append(maker)
        inner = [v for v in maker.inputs if v is not None and not v.is_constant]
        t, reader = inner[0], maker
    chain.reverse()
    return chain if chain and chain[0].op in _NORMS else None


def _is_row_wise(layer: Layer) -> bool:
    """True if each row of the result depends on the same row of the one input that is computed at run time."""
    inner = [t for t in layer.inputs if t is not None and not t.is_constant]
    if len(inner) != 1 or len(layer.outputs) != 1 or layer.regions:
        return False
    if layer.op in _NORMS:
        return inner[0] is layer.input(0) and _normalizes_rows(layer)
    if layer.op == "MatMul":
        return inner[0] is layer.input(0) and layer.needs(1).type.rank == 2
    if layer.op in ("Add", "Div", "Mul", "Pow", "Sub"):
        return layer.output.type == inner[0].type and all(t is inner[0] or (t is not None and t.type.rank <= 1) for t in layer.inputs)
    return layer.op in _UNARY and inner[0] is layer.input(0)


def _normalizes_rows(norm: Layer) -> bool:
    """True for a norm along the last axis with constant scale and shift."""
    rank = norm.needs(0).type.rank
    return int(norm.attrs["axis"]) % rank == rank - 1 and all(t is None or t.is_constant for t in norm.inputs[1:])


def _compute_on_moved(g: Graph, layer: Layer, x: Tensor, moved: RowMove, body: list[Layer], branch: int) -> Tensor:
    """The branch and its sum on the rows before they are moved back; then the move."""
    t = moved.source
    for member in body:
        inputs = [t if v is not None and not v.is_constant else v for v in member.inputs]
        attrs = {**member.attrs, "axis": -1} if member.op in _NORMS else member.attrs
        t = g.add(member.op, *inputs, name=member.name, sources=member.sources, **attrs)
    pair = (t, moved.source) if branch == 0 else (moved.source, t)
    total = g.add("Add", *pair, name=layer.name, sources=layer.sources)
    return add_row_move(g, total, moved.rows, static_shape(layer.output.shape), f"{layer.name}.back")
