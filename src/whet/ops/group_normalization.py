"""GroupNormalization: normalizes each of `num_groups` channel groups to mean 0 and variance 1, then scale and bias per channel."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import NEEDS_INT, Couple, op
from whet.ops._channels import infer_channels, reshape_per_channel


def infer(layer):
    t = infer_channels(layer, 3)
    if layer.attrs["num_groups"] < 1:
        raise NetworkError(f"GroupNormalization '{layer.name}': num_groups is {layer.attrs['num_groups']}; it must be at least 1")
    if isinstance(t.shape[1], int) and t.shape[1] % layer.attrs["num_groups"]:
        raise NetworkError(f"GroupNormalization '{layer.name}': {t.shape[1]} channels are not divisible into {layer.attrs['num_groups']} groups")
    return t


def compute_reference(layer, x, scale, bias):
    grouped = x.reshape(x.shape[0], layer.attrs["num_groups"], -1)
    d = grouped - grouped.mean(axis=2, keepdims=True)
    y = d / np.sqrt((d * d).mean(axis=2, keepdims=True) + x.dtype.type(layer.attrs["epsilon"]))
    return y.reshape(x.shape) * reshape_per_channel(scale, x.ndim) + reshape_per_channel(bias, x.ndim)


def list_couples(layer):
    """A channel group is pruned as one unit."""
    x, y, n = layer.inputs[0], layer.output, layer.attrs["num_groups"]
    per = x.shape[1] // n
    return [Couple(x, 0, y, 0)] + [
        Couple(t, axis, y, 1, a_block=per, b_block=per, count=n) for t, axis in ((x, 1), (layer.inputs[1], 0), (layer.inputs[2], 0))
    ]


def recut(layer, kept_indices):
    x = layer.inputs[0]
    return {"num_groups": layer.attrs["num_groups"] * len(kept_indices[x, 1]) // x.shape[1]} if (x, 1) in kept_indices else {}


def read(node, g):
    """Before opset 21 scale and bias are given per group."""
    x, *rest = node.inputs
    attrs = {k: v for k, v in node.attrs.items() if k != "stash_type"}
    if node.opset < 21 and rest[0].shape != (x.shape[1],):
        if not all(t.is_constant for t in rest):
            raise node.unsupported("scale and bias per group (opset 18) must be constants; export with opset 21")
        per = x.shape[1] // attrs["num_groups"]
        rest = [g.constant(np.repeat(t.array(), per), f"{t.name}_per_channel") for t in rest]
    return node.add(g, "GroupNormalization", x, *rest, **attrs)


def to_onnx(layer, w):
    needs_opset(layer, w, 21, "a scale per channel")
    w.node(layer.op, [w.name(t) for t in layer.inputs], [w.name(layer.output)], name=layer.name, **layer.attrs)


op(
    "GroupNormalization",
    infer,
    compute_reference,
    attrs={"num_groups": NEEDS_INT, "epsilon": 1e-5},
    couples=list_couples,
    zeros=(2,),
    recut=recut,
    onnx=read,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,12,5,5]", "const f32[12]", "const f32[12]"], {"num_groups": 3}),
        (["f32[2,6,4]", "const f32[6]", "const f32[6]"], {"num_groups": 6}),
        (["f32[2,8,4,4]", "const f32[8]", "const f32[8]"], {"num_groups": 2, "epsilon": 1e-3}),
    ],
)
