"""ONNX's ops on sequences of tensors and on optional values: resolved while the model is read, since the lengths are known from the nodes.

An index that is computed at run time selects among tensors of one type with Gather. A sequence to which a loop appends a tensor per iteration
is one tensor, with the entries along axis 0.
"""

import numpy as np

from whet.network import BOOL, I64, Tensor
from whet.ops._base import find_known_values
from whet.ops._refused import read_as_others
from whet.ops._sequences import GrowingSequence, NoValue, StackedSequence, TensorSequence
from whet.ops._types import normalize_axis

LONGEST = 1024  # tensors of a sequence; each is a layer's output


def _get_tensors(node, i=0):
    value = node.inputs[i]
    if not isinstance(value, TensorSequence):
        raise node.unsupported("its input is not a sequence of tensors")
    return value.tensors


def _find_position(node, i, count, end):
    """The known position of input `i` in 0..end-1, negative ones counted from `count`; None if it is computed at run time."""
    values = find_known_values(node.input(i))
    if values is None or not isinstance(values[0], int):
        return None
    at = values[0] + count if values[0] < 0 else values[0]
    if not 0 <= at < end:
        raise node.unsupported(f"its position is {values[0]} in a sequence of {count} tensors")
    return at


def _require_position(node, i, count, end):
    at = _find_position(node, i, count, end)
    if at is None:
        raise node.unsupported("its position is computed at run time; it must be known from constants and shapes")
    return at


def _make_sequence(node, tensors):
    if len(tensors) > LONGEST:
        raise node.unsupported(f"its sequence has {len(tensors)} tensors; the most are {LONGEST}")
    if len({t.dtype for t in tensors}) > 1:
        raise node.unsupported(f"the tensors of a sequence have one type, not {', '.join(sorted({str(t.dtype) for t in tensors}))}")
    return TensorSequence(tuple(tensors))


def read_insert(node, g):
    if isinstance(node.inputs[0], GrowingSequence):
        if node.input(2) is not None:
            raise node.unsupported("it inserts at a position, in a loop whose number of iterations is not known; such a loop may only append")
        return GrowingSequence((*node.inputs[0].appended, node.inputs[1]))
    tensors = _get_tensors(node)
    at = len(tensors) if node.input(2) is None else _require_position(node, 2, len(tensors), len(tensors) + 1)
    return _make_sequence(node, (*tensors[:at], node.inputs[1], *tensors[at:]))


def read_erase(node, g):
    tensors = _get_tensors(node)
    if not tensors:
        raise node.unsupported("its sequence is empty")
    at = len(tensors) - 1 if node.input(1) is None else _require_position(node, 1, len(tensors), len(tensors))
    return TensorSequence((*tensors[:at], *tensors[at + 1 :]))


def read_at(node, g):
    if isinstance(node.inputs[0], StackedSequence):
        position = g.add("Reshape", node.inputs[1], shape=(), name=f"{node.name}_position", sources=(node.name,))
        return node.add(g, "Gather", node.inputs[0].stacked, position, axis=0)
    tensors = _get_tensors(node)
    at = _find_position(node, 1, len(tensors), len(tensors))
    if at is not None:
        return tensors[at]
    if len({t.type for t in tensors}) != 1:
        raise node.unsupported("its position is computed at run time, which needs a sequence of tensors of one shape")
    stacked = _concat(node, g, tensors, 0, True, f"{node.name}_stack")
    return node.add(g, "Gather", stacked, g.add("Reshape", node.inputs[1], shape=(), name=f"{node.name}_position", sources=(node.name,)), axis=0)


def read_length(node, g):
    if isinstance(node.inputs[0], StackedSequence):
        size = g.add("Shape", node.inputs[0].stacked, start=0, end=1, name=f"{node.name}_size", sources=(node.name,))
        return node.add(g, "Reshape", size, shape=())
    return g.constant(np.array(len(_get_tensors(node)), I64.numpy), f"{node.name}.length")


def read_concat(node, g):
    if isinstance(node.inputs[0], StackedSequence):
        return _concat_stacked(node, g, node.inputs[0].stacked, node.attrs["axis"], bool(node.attrs.get("new_axis", 0)))
    return _concat(node, g, _get_tensors(node), node.attrs["axis"], bool(node.attrs.get("new_axis", 0)))


def _concat(node, g, tensors, axis, new_axis, name=""):
    if not tensors:
        raise node.unsupported("its sequence is empty, so the shape of the result is unknown")
    if new_axis:
        tensors = [g.add("Unsqueeze", t, axes=(axis,), name=f"{node.name}_unsqueeze", sources=(node.name,)) for t in tensors]
    if name:
        return g.add("Concat", *tensors, axis=axis, name=name, sources=(node.name,))
    return node.add(g, "Concat", *tensors, axis=axis)


def _concat_stacked(node, g, x, axis, new_axis):
    """The entries along axis 0 of `x` concatenated along an axis of theirs, or along a new one."""
    axis = normalize_axis(axis, x.type.rank if new_axis else x.type.rank - 1)
    perm = (*range(1, axis + 1), 0, *range(axis + 1, x.type.rank))
    if new_axis:
        return node.add(g, "Transpose", x, perm=perm)
    moved = g.add("Transpose", x, perm=perm, name=f"{node.name}_transpose", sources=(node.name,)) if axis else x
    shape = (*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
    return node.add(g, "Reshape", moved, shape=shape)


def read_split(node, g):
    """Parts of `split` entries (a scalar) or of the sizes `split`; without it single entries, whose axis is dropped if keepdims is 0."""
    x, sizes = node.inputs[0], node.input(1)
    axis = node.attrs.get("axis", 0)
    count = x.shape[axis]
    if not isinstance(count, int):
        raise node.unsupported(f"the length of its sequence, the size of axis {axis} of {x.type}, is not known. Give fixed shapes")
    known = (1,) if sizes is None else find_known_values(sizes)
    if known is None:
        raise node.unsupported("its split is computed at run time; it must be known from constants and shapes")
    if sizes is None or sizes.type.rank == 0:
        if not isinstance(known[0], int) or known[0] < 1:
            raise node.unsupported(f"its parts have {known[0]} entries")
        if count > LONGEST * known[0]:
            raise node.unsupported(f"its sequence has {-(-count // known[0])} tensors; the most are {LONGEST}")
        known = tuple(min(known[0], count - at) for at in range(0, count, known[0]))
    parts = g.add("Split", x, axis=axis, split=tuple(known), name=f"{node.name}_split", sources=(node.name,)) if known else ()
    parts = (parts,) if isinstance(parts, Tensor) else parts
    if sizes is None and not node.attrs.get("keepdims", 1):
        parts = [g.add("Squeeze", t, axes=(axis,), name=f"{node.name}_squeeze", sources=(node.name,)) for t in parts]
    return _make_sequence(node, parts)


def read_map(node, g):
    """Inlines the body for each entry of the first sequence; further tensors are the same for all entries."""
    count = len(_get_tensors(node))
    results = [[] for _ in node.outputs]
    for i in range(count):
        entries = []
        for v in node.inputs:
            if isinstance(v, TensorSequence) and len(v.tensors) != count:
                raise node.unsupported(f"its sequences have {count} and {len(v.tensors)} tensors")
            entries.append(v.tensors[i] if isinstance(v, TensorSequence) else v)
        for part, t in zip(results, node.inline("body", g, entries), strict=True):
            part.append(t)
    return [_make_sequence(node, part) for part in results]


def read_get(node, g):
    if isinstance(node.inputs[0], NoValue):
        raise node.unsupported("its optional input has no value")
    return node.inputs[0]


def read_has(node, g):
    present = node.input(0) is not None and not isinstance(node.inputs[0], NoValue)
    return g.constant(np.array(present, BOOL.numpy), f"{node.name}.present")


def read_optional(node, g):
    return NoValue() if node.input(0) is None else node.inputs[0]


_READERS = {
    "SequenceEmpty": lambda node, g: TensorSequence(()),
    "SequenceConstruct": lambda node, g: _make_sequence(node, node.inputs),
    "SequenceInsert": read_insert,
    "SequenceErase": read_erase,
    "SequenceAt": read_at,
    "SequenceLength": read_length,
    "SequenceMap": read_map,
    "SplitToSequence": read_split,
    "ConcatFromSequence": read_concat,
    "Optional": read_optional,
    "OptionalGetElement": read_get,
    "OptionalHasElement": read_has,
}
for _name, _read in _READERS.items():
    read_as_others(_name, _read, "the tensors of the sequence", sequences=True)
