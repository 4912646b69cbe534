"""InstanceNormalization: normalizes each channel of each sample to mean 0 and variance 1, then scale and bias per channel."""

import numpy as np

from whet.ops._base import op
from whet.ops._channels import infer_channels, list_channel_couples, reshape_per_channel


def compute_reference(layer, x, scale, bias):
    axes = tuple(range(2, x.ndim))
    d = x - x.mean(axis=axes, keepdims=True)
    y = d / np.sqrt((d * d).mean(axis=axes, keepdims=True) + x.dtype.type(layer.attrs["epsilon"]))
    return y * reshape_per_channel(scale, x.ndim) + reshape_per_channel(bias, x.ndim)


op(
    "InstanceNormalization",
    lambda layer: infer_channels(layer, 3),
    compute_reference,
    attrs={"epsilon": 1e-5},
    couples=list_channel_couples,
    zeros=(2,),
    samples=[
        (["f32[2,16,5,5]", "const f32[16]", "const f32[16]"], {}),
        (["f32[2,3,9]", "const f32[3]", "const f32[3]"], {"epsilon": 1e-3}),
        (["extreme f32[2,7,4,4]", "const f32[7]", "const f32[7]"], {}),
    ],
)
