"""BatchNormalization at inference: y = (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel.

In training mode mean and variance are those of the batch; the reader computes them by layers. Of a constant x (weight standardization) they fold.
"""

import numpy as np

from whet.ops._base import op
from whet.ops._channels import infer_channels, list_channel_couples, reshape_per_channel


def compute_reference(layer, x, scale, bias, mean, variance):
    factor = scale / np.sqrt(variance + x.dtype.type(layer.attrs["epsilon"]))
    return (x - reshape_per_channel(mean, x.ndim)) * reshape_per_channel(factor, x.ndim) + reshape_per_channel(bias, x.ndim)


def read(node, g):
    if node.attrs.get("training_mode"):
        return _from_batch(node, g)
    if any(node.outputs[1:]):
        raise node.unsupported("it outputs running statistics, as in training; export the model in evaluation mode (model.eval())")
    if node.attrs.get("spatial", 1) != 1:
        raise node.unsupported("spatial=0 (opset 7) normalizes every position separately; export with opset 9 or newer")
    attrs = {k: v for k, v in node.attrs.items() if k not in ("training_mode", "spatial")}
    return node.add(g, "BatchNormalization", *node.inputs[:5], **attrs)


def _from_batch(node, g):
    """Training mode (opset 14): (y, running mean, running variance) with the mean and variance of the batch."""
    x, scale, bias, mean, variance = node.inputs[:5]
    axes = tuple(i for i in range(x.type.rank) if i != 1)

    def add(op, *inputs, **attrs):
        return g.add(op, *inputs, name=f"{node.name}_{op.lower()}", sources=(node.name,), **attrs)

    def add_channel_reshape(t):
        """[C] as [C, 1, ...]."""
        return add("Reshape", t, shape=(-1, *(1,) * (x.type.rank - 2)))

    def add_constant(value, like):
        return g.constant(np.array(value, like.dtype.numpy), f"{node.name}_{value:g}")

    center = add("ReduceMean", x, axes=axes, keepdims=1)
    d = add("Sub", x, center)
    spread = add("ReduceMean", add("Mul", d, d), axes=axes, keepdims=1)
    inverse = add("Div", add_channel_reshape(scale), add("Sqrt", add("Add", spread, add_constant(node.attrs.get("epsilon", 1e-5), x))))
    y = add("Add", add("Mul", d, inverse), add_channel_reshape(bias))
    momentum = node.attrs.get("momentum", 0.9)
    results = [y]
    for i, (batch, running) in enumerate(((center, mean), (spread, variance)), start=1):
        if i < len(node.outputs) and node.outputs[i]:
            flat = add("Reshape", batch, shape=(-1,))
            kept = add("Mul", running, add_constant(momentum, running))
            results.append(add("Add", kept, add("Mul", flat, add_constant(1 - momentum, running))))
        else:
            results.append(None)
    return results


op(
    "BatchNormalization",
    infer_channels,
    compute_reference,
    attrs={"epsilon": 1e-5, "momentum": 0.9},
    couples=list_channel_couples,
    zeros=(2, 3),
    onnx=read,
    samples=[
        (["f32[2,16,5,5]", "const f32[16]", "const f32[16]", "const f32[16]", "const positive f32[16]"], {}),
        (["f32[3,17]", "const f32[17]", "const f32[17]", "const f32[17]", "const positive f32[17]"], {"epsilon": 1e-3}),
        (["f32[2,6,1,1]", "const f32[6]", "const f32[6]", "const f32[6]", "const positive f32[6]"], {}),  # wrong in one layout with oneDNN 3.2
        (["extreme f32[1,16,4]", "const f32[16]", "const f32[16]", "const f32[16]", "const positive f32[16]"], {}),
    ],
)
