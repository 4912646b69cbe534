"""BatchNormalization at inference: y = (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel."""

import numpy as np

from whet.ops._base import op
from whet.ops._channels import channel_couples, infer_channels, per_channel


def reference(layer, x, scale, bias, mean, variance):
    factor = scale / np.sqrt(variance + x.dtype.type(layer.attrs["epsilon"]))
    return (x - per_channel(mean, x.ndim)) * per_channel(factor, x.ndim) + per_channel(bias, x.ndim)


def read(node, g):
    if node.attrs.get("training_mode"):
        raise node.unsupported("it is in training mode; export the model in evaluation mode (model.eval())")
    if any(node.outputs[1:]):
        raise node.unsupported("it outputs running statistics, as in training; export the model in evaluation mode (model.eval())")
    if node.attrs.get("spatial", 1) != 1:
        raise node.unsupported("spatial=0 (opset 7) normalizes every position separately; export with opset 9 or newer")
    attrs = {k: v for k, v in node.attrs.items() if k not in ("training_mode", "spatial")}
    return node.add(g, "BatchNormalization", *node.inputs[:5], **attrs)


op(
    "BatchNormalization",
    infer_channels,
    reference,
    attrs={"epsilon": 1e-5, "momentum": 0.9},
    couples=channel_couples,
    zeros=(2, 3),
    onnx=read,
    samples=[
        (["f32[2,16,5,5]", "const f32[16]", "const f32[16]", "const f32[16]", "const positive f32[16]"], {}),
        (["f32[3,17]", "const f32[17]", "const f32[17]", "const f32[17]", "const positive f32[17]"], {"epsilon": 1e-3}),
        (["f32[2,6,1,1]", "const f32[6]", "const f32[6]", "const f32[6]", "const positive f32[6]"], {}),  # wrong in one layout with oneDNN 3.2
        (["extreme f32[1,16,4]", "const f32[16]", "const f32[16]", "const f32[16]", "const positive f32[16]"], {}),
    ],
)
