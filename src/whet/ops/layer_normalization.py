"""LayerNormalization: normalizes the axes from `axis` on to mean 0 and variance 1, then scale and bias (inputs 1 and 2, of those axes)."""

import numpy as np

from whet.errors import NetworkError
from whet.network import BF16, F16, F32
from whet.ops._base import Couple, op
from whet.ops._normalized import list_normalized_couples
from whet.ops._types import may_broadcast_to, normalize_axis, require_float_input, require_one_float_type


def infer(layer):
    t = require_float_input(layer)
    require_one_float_type(layer, 1, 2)
    axis = normalize_axis(layer.attrs["axis"], t.rank)
    for p in layer.inputs[1:]:
        if p is not None and not may_broadcast_to(t.shape[axis:], p.shape):
            raise NetworkError(f"LayerNormalization '{layer.name}': {p} does not broadcast to {t.shape[axis:]}, the normalized axes of {t}")
    return t


def compute_reference(layer, x, scale=None, bias=None):
    axes = tuple(range(layer.attrs["axis"] % x.ndim, x.ndim))
    d = x - x.mean(axis=axes, keepdims=True)
    y = d / np.sqrt((d * d).mean(axis=axes, keepdims=True) + x.dtype.type(layer.attrs["epsilon"]))
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def list_couples(layer):
    """Couples all axes but the normalized ones."""
    x, y = layer.inputs[0], layer.output
    return [Couple(x, i, y, i) for i in range(normalize_axis(layer.attrs["axis"], x.type.rank))]


def list_statistics_couples(layer):
    """The normalized axes, with those of scale and bias."""
    return list_normalized_couples(layer, normalize_axis(layer.attrs["axis"], layer.inputs[0].type.rank))


def read(node, g):
    """The outputs of mean and 1 / deviation become layers of their own."""
    if not any(node.outputs[1:]):
        return node.add(g, "LayerNormalization", *node.inputs, **node.attrs)

    def add(op, *inputs, **attrs):
        return g.add(op, *inputs, name=f"{node.name}_{op.lower()}", sources=(node.name,), **attrs)

    x = node.inputs[0]
    wide = add("Cast", x, to=F32) if x.dtype in (F16, BF16) else x
    axes = tuple(range(normalize_axis(node.attrs.get("axis", -1), x.type.rank), x.type.rank))
    mean = add("ReduceMean", wide, axes=axes, keepdims=1)
    d = add("Sub", wide, mean)
    epsilon = g.constant(np.array(node.attrs.get("epsilon", 1e-5), wide.dtype.numpy), f"{node.name}_epsilon")
    deviation = add("Sqrt", add("Add", add("ReduceMean", add("Mul", d, d), axes=axes, keepdims=1), epsilon))
    y = g.add("LayerNormalization", *node.inputs, name=node.name, sources=(node.name,), **node.attrs)
    return y, mean, add("Reciprocal", deviation)


op(
    "LayerNormalization",
    infer,
    compute_reference,
    attrs={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    couples=list_couples,
    statistics=list_statistics_couples,
    onnx=read,
    samples=[
        (["f32[2,5,16]", "const f32[16]", "const f32[16]"], {}),
        (["f32[2,5,17]", "const f32[17]", None], {"epsilon": 1e-6}),
        (["f32[2,3,4,5]", "const f32[4,5]", "const f32[4,5]"], {"axis": 2}),
        (["f32[7,96]", "const f32[96]", "const f32[96]"], {}),
        (["f32[3,13,192]", "const f32[192]", None], {}),
        (["f32[5,768]", "const f32[768]", "const f32[768]"], {}),
        (["extreme f32[4,16]", "const f32[16]", "const f32[16]"], {}),
        (["f16[3,8]", "f16[8]", "f16[8]"], {}),
    ],
)
