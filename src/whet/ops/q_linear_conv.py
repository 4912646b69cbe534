"""QLinearConv: an integer convolution with scales. Read as Conv between DequantizeLinear and QuantizeLinear, which passes fuse."""

import numpy as np

from whet.ops._qlinear import DOMAIN, read_channels_last
from whet.ops._refused import read_as_others
from whet.ops._window import resolve_auto_pad


def read(node, g):
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *rest = node.inputs
    name, sources = node.name, (node.name,)
    xf = g.add("DequantizeLinear", x, x_scale, x_zero, name=f"{name}_x", sources=sources)
    wf = g.add("DequantizeLinear", w, w_scale, w_zero, axis=0, name=f"{name}_w", sources=sources)
    bias = rest[0] if rest else None
    if bias is not None:
        if not (x_scale.is_constant and w_scale.is_constant):
            raise node.unsupported("it has a bias and computed scales; the scales must be constant")
        scale = g.constant(np.broadcast_to(x_scale.array() * w_scale.array(), bias.shape).copy(), f"{name}.bias_scale")
        bias = g.add("DequantizeLinear", bias, scale, axis=0, name=f"{name}_b", sources=sources)
    y = g.add("Conv", xf, wf, bias, name=f"{name}_conv", sources=sources, **resolve_auto_pad(node, x.shape[2:], w.shape[2:]))
    return node.add(g, "QuantizeLinear", y, y_scale, y_zero)


read_as_others("QLinearConv", read_channels_last(read), "DequantizeLinear, Conv and QuantizeLinear", ("QLinearConv", f"{DOMAIN}QLinearConv"))
