"""Conv: convolution of x [N, C, *spatial] with w [K, C/group, *kernel], plus a bias [K].

`pads` is (begin..., end...); `auto_pad` is resolved when the op is read, so it does not stand here.
"""

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops._base import Couple, op
from whet.ops._window import out_size, same_pads, windows


def attributes(layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """strides, dilations, pads with defaults filled in."""
    r = layer.inputs[1].type.rank - 2
    a = layer.attrs
    return tuple(a.get("strides") or (1,) * r), tuple(a.get("dilations") or (1,) * r), tuple(a.get("pads") or (0,) * 2 * r)


def infer(layer: Layer) -> TensorType:
    x, w = layer.inputs[0], layer.inputs[1]
    r = w.type.rank - 2
    strides, dilations, pads = attributes(layer)
    if x.type.rank != r + 2:
        raise NetworkError(f"Conv '{layer.name}': x is of rank {x.type.rank}, w of rank {w.type.rank}")
    if x.shape[1] != w.shape[1] * layer.attrs["group"]:
        raise NetworkError(f"Conv '{layer.name}': x has {x.shape[1]} channels, w takes {w.shape[1]} in {layer.attrs['group']} group(s)")
    if layer.attrs.get("kernel_shape") and tuple(layer.attrs["kernel_shape"]) != tuple(w.shape[2:]):
        raise NetworkError(f"Conv '{layer.name}': kernel_shape {layer.attrs['kernel_shape']} is not that of w {w.type}")
    b = layer.input(2)
    if b is not None and b.shape != (w.shape[0],):
        raise NetworkError(f"Conv '{layer.name}': the bias is {b.type}, w makes {w.shape[0]} channels")
    out = [out_size(x.shape[2 + i], w.shape[2 + i], strides[i], dilations[i], pads[i], pads[r + i]) for i in range(r)]
    return TensorType(x.dtype, (x.shape[0], w.shape[0], *out))


def reference(layer: Layer, x, w, b=None):
    strides, dilations, pads = attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    k, per = w.shape[0], w.shape[1]
    v = windows(x, w.shape[2:], strides, dilations, pads, 0)
    n, out = x.shape[0], v.shape[2 : 2 + r]
    v = v.reshape(n, group, per, *out, *w.shape[2:])
    # [N, out..., group, per * kernel] @ [group, per * kernel, K / group]
    order = (0, 1, *range(3, 3 + r), 2, *range(3 + r, 3 + 2 * r))
    cols = v.transpose(order).reshape(n, group, int(np.prod(out)), -1)
    weights = w.reshape(group, k // group, -1).transpose(0, 2, 1)
    y = np.matmul(cols, weights).transpose(0, 1, 3, 2).reshape(n, k, *out)
    return y if b is None else y + b.reshape(1, -1, *(1,) * r)


def couples(layer: Layer) -> list[Couple]:
    """One group: input channels tie x to w, output channels w, b and y. Depthwise: a channel is all of these at once."""
    x, w, b, y = layer.inputs[0], layer.inputs[1], layer.input(2), layer.output
    group = layer.attrs["group"]
    tied = [Couple(x, 0, y, 0), Couple(w, 0, y, 1)]
    if group == 1:
        tied.append(Couple(x, 1, w, 1))
    elif w.shape[1] == 1 and w.shape[0] == group:
        tied.append(Couple(x, 1, w, 0))
    else:
        return [Couple(x, 0, y, 0)]  # a grouped conv keeps its channels: each group would have to lose the same number
    return tied if b is None else [*tied, Couple(b, 0, y, 1)]


def read(node, g):
    """ONNX Conv; auto_pad becomes explicit pads."""
    x, w = node.inputs[0], node.inputs[1]
    r = w.type.rank - 2
    attrs = {k: v for k, v in node.attrs.items() if k != "auto_pad"}
    auto = node.attrs.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = same_pads(x.shape[2:], w.shape[2:], attrs.get("strides", (1,) * r), attrs.get("dilations", (1,) * r), auto == "SAME_UPPER")
        if pads is None:
            raise node.unsupported(
                f"auto_pad={auto} with a stride needs a static height and width; give --optShapes or export with fixed H and W"
            )
        attrs["pads"] = pads
    return node.add(g, "Conv", *node.inputs, **attrs)


op(
    "Conv",
    infer,
    reference,
    attrs={"group": 1, "strides": None, "dilations": None, "pads": None, "kernel_shape": None},
    couples=couples,
    onnx=read,
    samples=[
        (["f32[2,3,9,9]", "const f32[8,3,3,3]", "const f32[8]"], {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,16,8,8]", "const f32[32,16,3,3]", None], {"pads": (1, 1, 1, 1)}),
        (["f32[1,16,7,7]", "const f32[16,1,3,3]", "const f32[16]"], {"group": 16, "pads": (1, 1, 1, 1)}),
        (["f32[2,32,7,7]", "const f32[64,32,1,1]", "const f32[64]"], {}),
        (["f32[1,8,10,10]", "const f32[6,4,3,3]", None], {"group": 2, "dilations": (2, 2)}),
        (["f32[1,4,6,5]", "const f32[5,4,2,3]", "const f32[5]"], {"pads": (0, 1, 1, 1)}),
        (["f32[1,4,12]", "const f32[6,4,3]", "const f32[6]"], {"strides": (2,), "pads": (1, 1)}),
        (["f32[1,17,5,5]", "const f32[19,17,3,3]", "const f32[19]"], {"pads": (1, 1, 1, 1)}),
        (["extreme f32[1,16,6,6]", "const f32[16,16,1,1]", None], {}),
    ],
)
