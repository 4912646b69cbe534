"""Slice: starts, ends, axes and steps as inputs 1 to 4 (i64 or i32), or as attributes. Of starts or ends that are known only at run time, the sizes
depend on the data."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Expr, Tensor, ceildiv, maximum, minimum
from whet.ops._axes import convert_attributes_to_inputs, make_attribute_exporter
from whet.ops._base import INTS, Couple, find_given_dims, find_known_values, fold_dims, op, replace_given, require_known_ints, to_ints
from whet.ops._data_sized import make_size_symbol
from whet.ops._types import normalize_axis

FAR = 2**31 - 1  # ends from this value on mean "to the end"


def slice_ranges(layer):
    """{axis: (start, length, step)} with a non-negative start (a dim, or None if only a reversal is known)."""
    x = layer.inputs[0]
    if has_unknown_bounds(layer):
        return _find_partial_ranges(layer)
    starts, ends = find_given_dims(layer, "starts", 1), find_given_dims(layer, "ends", 2)
    if starts is None or ends is None or len(starts) != len(ends):
        raise NetworkError(f"Slice '{layer.name}' needs as many starts as ends")
    axes = find_given_dims(layer, "axes", 3)
    steps = find_given_dims(layer, "steps", 4)
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    result = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = normalize_axis(axis, x.type.rank)
        if not isinstance(step, int) or step == 0:
            raise NetworkError(f"Slice '{layer.name}' needs known, nonzero steps")
        if axis in result:
            raise NetworkError(f"Slice '{layer.name}' repeats axis {axis}")
        result[axis] = _compute_range(layer, x.shape[axis], start, end, step)
    return result


def has_unknown_bounds(layer) -> bool:
    """True if a start or an end is known only at run time."""
    given = [layer.input(i) for i, name in ((1, "starts"), (2, "ends")) if layer.attrs.get(name) is None]
    return any(t is not None and find_known_values(t) is None for t in given)


def _find_partial_ranges(layer):
    """As `slice_ranges`, with a symbol for each length. Raises UnsupportedError if the axes are unknown, too."""
    x, bounds = layer.inputs[0], layer.input(1)
    axes, steps = find_given_dims(layer, "axes", 3), find_given_dims(layer, "steps", 4)
    if axes is None:
        if bounds is None or bounds.type.rank != 1 or not isinstance(bounds.shape[0], int):
            require_known_ints(layer, 1, "starts")
        axes = tuple(range(bounds.shape[0]))
    axes = [normalize_axis(axis, x.type.rank) for axis in axes]
    steps = (1,) * len(axes) if steps is None else steps
    if any(not isinstance(step, int) or step == 0 for step in steps):
        raise NetworkError(f"Slice '{layer.name}' needs known, nonzero steps")
    return {axis: (None, make_size_symbol(layer, axis), step) for axis, step in zip(axes, steps, strict=True)}


def _compute_range(layer, n, start, end, step):
    if all(isinstance(v, int) for v in (n, start, end)):
        r = range(*slice(start, end, step).indices(n))
        return r.start, len(r), step
    if step < 0:
        if isinstance(end, int) and end <= -FAR and (start in (-1, n - 1) or (isinstance(start, int) and start >= FAR)):
            return None, ceildiv(n, -step), step
        raise UnsupportedError(f"Slice '{layer.name}': a backward slice of the dynamic dimension {n} must cover all of it")
    first, last = _place(start, n), _place(end, n)
    span = last - first
    if first != 0 and not isinstance(span, int) and not (isinstance(first, int) and first == 1 and last == n):
        span = maximum(span, 0)
    return first, ceildiv(span, step), step


def _place(v, n):
    """A bound as non-negative index, clamped to 0..n."""
    if isinstance(v, int):
        if v >= FAR:
            return n
        if v <= -FAR:
            return 0
        if v < 0:
            return n + v if v == -1 else maximum(n + v, 0)
        return v if v <= 1 else minimum(v, n)
    return v if v == n or isinstance(n, Expr) else minimum(v, n)


def infer(layer):
    x = layer.inputs[0]
    shape = list(x.shape)
    for axis, (_, length, _) in slice_ranges(layer).items():
        shape[axis] = length
    return x.type.with_shape(shape)


def compute_reference(layer, x, starts=None, ends=None, axes=None, steps=None):
    given_ = [layer.attrs.get(k, a) for k, a in (("starts", starts), ("ends", ends), ("axes", axes), ("steps", steps))]
    starts, ends = (to_ints(part) for part in given_[:2])
    axes = range(len(starts)) if given_[2] is None else to_ints(given_[2])
    steps = [1] * len(starts) if given_[3] is None else to_ints(given_[3])
    where = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        r = range(*slice(start, end, step).indices(x.shape[axis]))
        where[axis] = slice(r.start, None if r.stop < 0 else r.stop, step)
    return x[tuple(where)]


def list_couples(layer):
    """Couples axes that are not sliced one to one; along an axis sliced with step 1, y is a range of x and the rest of x is free."""
    x, y = layer.inputs[0], layer.output
    sliced = slice_ranges(layer)
    result = [Couple(x, i, y, i) for i in range(x.type.rank) if i not in sliced]
    for axis, (start, length, step) in sliced.items():
        if length == x.shape[axis] and step == 1:
            result.append(Couple(x, axis, y, axis))
        elif step == 1 and isinstance(start, int) and isinstance(length, int) and length:
            result.append(Couple(x, axis, y, axis, a_at=start, count=length))
    return result


def recut(layer, kept_indices):
    """Updates the bounds to kept units."""
    x = layer.inputs[0]
    starts, ends, axes = (find_given_dims(layer, k, i) for i, k in ((1, "starts"), (2, "ends"), (3, "axes")))
    axes = tuple(range(len(starts))) if axes is None else axes
    starts, ends, sliced, changed = list(starts), list(ends), slice_ranges(layer), False
    for i, axis in enumerate(axes):
        axis = normalize_axis(axis, x.type.rank)
        start, length, _ = sliced[axis]
        if (x, axis) in kept_indices and isinstance(start, int) and isinstance(length, int) and length != x.shape[axis]:
            at = kept_indices[x, axis]
            starts[i], ends[i], changed = int(np.sum(at < start)), int(np.sum(at < start + length)), True
        elif (x, axis) in kept_indices and isinstance(ends[i], int) and 0 < ends[i] < FAR:
            ends[i], changed = FAR, True
    return {**replace_given(layer, "starts", 1, starts), **replace_given(layer, "ends", 2, ends)} if changed else {}


def read(node, g):
    """A slice of one entry at the counter of a loop is a Gather, whose size is known: the counter is at least 0."""
    axis = _find_counted_axis(node)
    if axis is None:
        return node.add(g, "Slice", *convert_attributes_to_inputs(node, g, ["starts", "ends", "axes"]))
    return node.add(g, "Gather", node.inputs[0], node.inputs[1], axis=axis)


def _find_counted_axis(node) -> int | None:
    """The axis that x[i : i + 1] takes an entry of, if `i` of shape [1] is a loop's counter plus a constant of at least 0; else None."""
    starts, ends, axes, steps = (node.input(i) for i in range(1, 5))
    if not node.counters or starts is None or ends is None or tuple(starts.shape) != (1,) or tuple(ends.shape) != (1,):
        return None
    axes, steps = (0,) if axes is None else find_known_values(axes), (1,) if steps is None else find_known_values(steps)
    (first, low), (last, high) = _split_offset(starts), _split_offset(ends)
    if first not in node.counters or last is not first or low < 0 or high != low + 1 or axes is None or steps != (1,):
        return None
    return normalize_axis(axes[0], node.inputs[0].type.rank)


def _split_offset(t: Tensor) -> tuple[Tensor, int]:
    """(value, offset) such that `t` is their sum: constants that were added, and other shapes of the value, are skipped."""
    offset = 0
    while (maker := t.maker) is not None and t.type.elements == 1:
        if maker.op in ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Cast"):
            t = maker.needs(0)
            continue
        known = [find_known_values(x) for x in maker.inputs] if maker.op == "Add" else []
        added = next((i for i, v in enumerate(known) if v is not None and isinstance(v[0], int)), None)
        if added is None:
            break
        offset += to_ints(known[added])[0]
        t = maker.needs(1 - added)
    return t, offset


op(
    "Slice",
    infer,
    compute_reference,
    attrs={"starts": INTS, "ends": INTS, "axes": INTS, "steps": INTS},
    couples=list_couples,
    zeros=(),
    recut=recut,
    shape_value=lambda layer: [None] if has_unknown_bounds(layer) else fold_dims(layer, 1),
    data_sized=has_unknown_bounds,
    onnx=read,
    to_onnx=make_attribute_exporter("starts", "ends", "axes", "steps"),
    samples=[
        (["f32[2,12,5]", np.array([3]), np.array([9]), np.array([1])], {}),
        (["f32[2,12,5]", np.array([0, -3]), np.array([2**63 - 1, 2**31 - 1]), np.array([0, 2])], {}),
        (["f32[2,3,8,9]", np.array([0, 1]), np.array([8, 100]), np.array([2, 3]), np.array([2, 2])], {}),
        (["f32[4,7]", np.array([-1]), np.array([-(2**63) + 1]), np.array([1]), np.array([-1])], {}),
        (["f32[4,7]", np.array([5]), np.array([1]), np.array([-1]), np.array([-2])], {}),
        (["f32[4,7]", np.array([1, 0]), np.array([-1, 4])], {}),
        (["extreme f32[3,16]"], {"starts": (2,), "ends": (5,), "axes": (1,), "steps": (1,)}),
        (["f32[4,7]", np.array([3]), np.array([3]), np.array([0])], {}),
        (["i64[4]", np.array([1]), np.array([3])], {}),
    ],
)
