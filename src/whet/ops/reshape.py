"""Reshape: the same elements in another shape (input 1, or attribute `shape`): -1 is inferred, 0 copies x's dimension."""

import numpy as np

from whet.errors import NetworkError
from whet.network import I64, product
from whet.ops._axes import block_couples, make_attribute_exporter
from whet.ops._base import INTS, find_given_dims, keep_dims, op, replace_given, to_ints


def infer(layer):
    x = layer.inputs[0]
    target = find_given_dims(layer, "shape", 1)
    if target is None:
        raise NetworkError("needs a shape: input 1, or the attribute shape")
    if layer.input(1) is not None and (layer.input(1).dtype != I64 or layer.input(1).type.rank != 1):
        raise NetworkError(f"takes its shape as i64 of rank 1, not {layer.input(1).type}")
    shape = [x.shape[i] if d == 0 and not layer.attrs["allowzero"] else d for i, d in enumerate(target)]
    if any(isinstance(d, int) and d < -1 for d in shape):
        raise NetworkError(f"sizes must be non-negative or -1, not {list(target)}")
    if shape.count(-1) > 1:
        raise NetworkError(f"only one dimension may be -1, not {list(target)}")
    if -1 in shape:
        rest = product(d for d in shape if d != -1)
        if rest == 0:
            raise NetworkError(f"-1 in {list(target)} is ambiguous if another dimension is 0")
        left = x.type.elements // rest
        shape[shape.index(-1)] = left
    total = product(shape)
    if isinstance(total, int) and isinstance(x.type.elements, int) and total != x.type.elements:
        raise NetworkError(f"{x.type} has {x.type.elements} elements, the shape {list(map(str, shape))} {total}")
    return x.type.with_shape(shape)


def compute_reference(layer, x, shape=None):
    target = layer.attrs.get("shape")
    if target is None:
        target = to_ints(shape)
    if not layer.attrs.get("allowzero"):
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    return x.reshape([int(d) for d in target])


def recut(layer, kept_indices):
    """Updates numeric sizes of the target; -1 and 0 need no change."""
    y, target = layer.output, list(find_given_dims(layer, "shape", 1))
    computed = layer.input(1) is not None and not layer.input(1).is_constant
    cut = {axis: len(at) for (t, axis), at in kept_indices.items() if t is y}
    if not cut or (not computed and all(target[a] in (-1, 0) for a in cut)):
        return {}
    if computed:
        target = list(y.shape)
    for axis, n in cut.items():
        target[axis] = n if target[axis] not in (-1, 0) else target[axis]
    return replace_given(layer, "shape", 1, target)


def to_onnx(layer, w):
    """Symbolic sizes as 0 (x's size of this axis) and -1, which need no nodes that compute them."""
    shape, known = layer.attrs.get("shape"), layer.inputs[0].shape
    if shape is None or layer.attrs["allowzero"] or all(isinstance(d, int) for d in shape):
        make_attribute_exporter("shape")(layer, w)
        return
    target = [0 if i < len(known) and d == known[i] and not isinstance(d, int) else d for i, d in enumerate(shape)]
    unknown = [i for i, d in enumerate(target) if not isinstance(d, int)]
    if len(unknown) == 1 and -1 not in target:
        target[unknown[0]] = -1
    w.node("Reshape", [w.name(layer.inputs[0]), w.dims(target, f"{layer.name}.shape")], [w.name(layer.output)], name=layer.name)


op(
    "Reshape",
    infer,
    compute_reference,
    attrs={"allowzero": 0, "shape": INTS},
    couples=lambda layer: block_couples(layer.inputs[0], layer.output),
    inner=lambda layer, level: block_couples(layer.inputs[0], layer.output, level),
    zeros=(),
    recut=recut,
    shape_value=keep_dims,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,6,4]", np.array([2, -1])], {}),
        (["f32[2,6,4]", np.array([0, 3, 2, 4])], {}),
        (["f32[2,17,1,1]", np.array([2, 17])], {}),
        (["f32[2,12]", np.array([2, 3, 4])], {}),
        (["f32[2,12,5,3]", np.array([2, 3, 4, 5, 3])], {}),
        (["f32[1,8,6]", np.array([4, 12])], {}),
        (["f32[6,4]", np.array([4, 6])], {}),
        (["f32[0,3]", np.array([3, 0])], {"allowzero": 1}),
        (["f32[24]"], {"shape": (2, -1, 4)}),
        (["extreme f32[4,6]", np.array([-1])], {}),
        (["i64[4]", np.array([2, 2])], {}),
    ],
)
