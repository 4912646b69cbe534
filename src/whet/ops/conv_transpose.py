"""ConvTranspose: the gradient of a convolution: x [N, C, *spatial] scattered by w [C, K/group, *kernel], plus a bias [K].

`auto_pad` and `output_shape` are resolved into `pads` and `output_padding` by the reader.
"""

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops._base import INTS, Couple, op
from whet.ops._products import Window, accumulate_matmul, convolve_elsewhere, round_accumulator
from whet.ops._types import may_equal, require_one_float_type
from whet.ops._window import check_window


def get_window_attributes(layer: Layer):
    """strides, dilations, pads, output_padding with defaults filled in."""
    r = layer.needs(1).type.rank - 2
    a = layer.attrs
    one, zero = (1,) * r, (0,) * r
    return (
        tuple(a.get("strides") or one),
        tuple(a.get("dilations") or one),
        tuple(a.get("pads") or zero + zero),
        tuple(a.get("output_padding") or zero),
    )


def infer(layer: Layer) -> TensorType:
    x, w, b = layer.needs(0), layer.needs(1), layer.input(2)
    r, group = w.type.rank - 2, layer.attrs["group"]
    strides, dilations, pads, extra = get_window_attributes(layer)
    require_one_float_type(layer, 1, 2)
    if group < 1:
        raise NetworkError(f"ConvTranspose '{layer.name}': group is {group}; it starts at 1")
    if x.type.rank != r + 2 or not may_equal((x.shape[1],), (w.shape[0],)) or (isinstance(w.shape[0], int) and w.shape[0] % group):
        raise NetworkError(f"ConvTranspose '{layer.name}': x {x.type} does not match w {w.type} in {group} group(s)")
    if b is not None and not may_equal(b.shape, (w.shape[1] * group,)):
        raise NetworkError(f"ConvTranspose '{layer.name}': the bias is {b.type}, w makes {w.shape[1] * group} channels")
    if [len(v) for v in (strides, dilations, pads, extra)] != [r, r, 2 * r, r] or min(*pads, *extra) < 0 or min(*strides, *dilations) < 1:
        raise NetworkError(f"ConvTranspose '{layer.name}': strides {strides}, dilations {dilations}, pads {pads}, output_padding {extra} are invalid")
    out = []
    for i in range(r):
        n = (x.shape[2 + i] - 1) * strides[i] + dilations[i] * (w.shape[2 + i] - 1) + 1 + extra[i] - pads[i] - pads[r + i]
        if isinstance(n, int) and n < 1:
            raise NetworkError(f"ConvTranspose '{layer.name}': pads {pads} leave nothing of spatial axis {i}")
        out.append(n)
    shape = (x.shape[0], w.shape[1] * group, *out)
    check_window(w.shape[2:], shape, (*shape[:2], *(n + pads[i] + pads[r + i] for i, n in enumerate(out))))
    return TensorType(x.dtype, shape)


def compute_reference(layer: Layer, x, w, b=None):
    strides, dilations, pads, extra = get_window_attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    full = [(x.shape[2 + i] - 1) * strides[i] + dilations[i] * (w.shape[2 + i] - 1) + 1 + extra[i] for i in range(r)]
    sizes = tuple(full[i] - pads[i] - pads[r + i] for i in range(r))
    y = convolve_elsewhere(x, w, Window(sizes, strides, dilations, pads[:r], group, transposed=True))
    if y is None:
        y = _scatter_columns(x, w, strides, dilations, group, full)
        y = y[(slice(None), slice(None), *(slice(pads[i], full[i] - pads[r + i]) for i in range(r)))]
    return round_accumulator(y if b is None else y + b.reshape(1, -1, *(1,) * r), x.dtype)


def _scatter_columns(x, w, strides, dilations, group, full):
    """Sums [N, K, *full] without pads: the products of each tap are added at its stride."""
    n, c, spatial, kernel, r = x.shape[0], x.shape[1], x.shape[2:], w.shape[2:], w.ndim - 2
    per = w.shape[1]
    columns = accumulate_matmul(w.reshape(group, c // group, -1).transpose(0, 2, 1), x.reshape(n, group, c // group, -1))
    columns = columns.reshape(n, group * per, *kernel, *spatial)
    y = np.zeros((n, group * per, *full), columns.dtype)
    for at in np.ndindex(*kernel):
        places = tuple(slice(at[i] * dilations[i], at[i] * dilations[i] + (spatial[i] - 1) * strides[i] + 1, strides[i]) for i in range(r))
        y[(slice(None), slice(None), *places)] += columns[(slice(None), slice(None), *at)]
    return y


def list_couples(layer: Layer) -> list[Couple]:
    """As Conv's with w's axes swapped; several groups: a group is pruned as one unit."""
    x, w, b, y = layer.needs(0), layer.needs(1), layer.input(2), layer.output
    group, tied = layer.attrs["group"], [Couple(x, 0, y, 0)]
    if group == 1:
        tied += [Couple(x, 1, w, 0, summed=True), Couple(w, 1, y, 1)]
        return tied if b is None else [*tied, Couple(b, 0, y, 1)]
    ins, outs = w.shape[0] // group, w.shape[1]
    tied += [
        Couple(x, 1, w, 0, a_block=ins, b_block=ins, count=group),
        Couple(x, 1, y, 1, a_block=ins, b_block=outs, count=group),
    ]
    return tied if b is None else [*tied, Couple(b, 0, y, 1, a_block=outs, b_block=outs, count=group)]


def couple_in_groups(layer: Layer, level: int) -> list[Couple]:
    """Several groups of several channels, level 0: each group loses the channels of the same indices."""
    x, w, b, y = layer.needs(0), layer.needs(1), layer.input(2), layer.output
    group, outs = layer.attrs["group"], w.shape[1]
    if level or group == 1 or outs == 1 or not isinstance(w.shape[0], int):
        return list_couples(layer)
    within = {"a_repeat": group, "b_repeat": group}
    tied = [Couple(x, 0, y, 0), Couple(x, 1, w, 0, **within, count=w.shape[0] // group, summed=True), Couple(y, 1, w, 1, a_repeat=group, count=outs)]
    return tied if b is None else [*tied, Couple(b, 0, y, 1, **within, count=outs)]


def recut(layer: Layer, kept_indices):
    w, y, group = layer.needs(1), layer.output, layer.attrs["group"]
    if group == 1 or (y, 1) not in kept_indices:
        return {}
    return {"group": len(kept_indices[y, 1]) // (len(kept_indices[w, 1]) if (w, 1) in kept_indices else w.shape[1])}


def read(node, g):
    """Resolves auto_pad and output_shape into pads (and output_padding if pads would be negative)."""
    x, w = node.inputs[0], node.inputs[1]
    r = w.type.rank - 2
    attrs = {k: v for k, v in node.attrs.items() if k not in ("auto_pad", "output_shape")}
    auto, shape = node.attrs.get("auto_pad", "NOTSET"), node.attrs.get("output_shape")
    if shape is None and auto not in ("SAME_UPPER", "SAME_LOWER"):
        return node.add(g, "ConvTranspose", *node.inputs, **attrs)
    strides, dilations = attrs.get("strides") or (1,) * r, attrs.get("dilations") or (1,) * r
    extra = list(attrs.get("output_padding") or (0,) * r)
    before, after = [0] * r, [0] * r
    for i in range(r):
        want = x.shape[2 + i] * strides[i] if shape is None else tuple(shape)[-r:][i]
        total = (x.shape[2 + i] - 1) * strides[i] + dilations[i] * (w.shape[2 + i] - 1) + 1 + extra[i] - want
        if not isinstance(total, int):
            raise node.unsupported("output_shape needs a static height and width; export with fixed H and W, or with pads")
        if total < 0:
            extra[i], total = extra[i] - total, 0
        small, large = total // 2, total - total // 2
        before[i], after[i] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return node.add(g, "ConvTranspose", *node.inputs, **{**attrs, "pads": (*before, *after), "output_padding": tuple(extra)})


op(
    "ConvTranspose",
    infer,
    compute_reference,
    attrs={"group": 1, "strides": INTS, "dilations": INTS, "pads": INTS, "output_padding": INTS, "kernel_shape": INTS},
    couples=list_couples,
    zeros=(2,),
    inner=couple_in_groups,
    recut=recut,
    onnx=read,
    samples=[
        (["f32[1,8,5,5]", "const f32[8,6,2,2]", "const f32[6]"], {"strides": (2, 2)}),
        (["f32[2,3,4,6]", "const f32[3,5,3,3]", None], {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
        (["f32[1,6,4,4]", "const f32[6,2,3,3]", "const f32[4]"], {"group": 2, "dilations": (2, 2)}),
        (["f32[1,5,4,4]", "const f32[5,1,4,4]", None], {"group": 5, "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,4,6]", "const f32[4,3,3]", "const f32[3]"], {"strides": (3,), "pads": (0, 1)}),
        (["nonfinite f32[1,4,5,5]", "const f32[4,3,1,1]", None], {}),
        (["f32[1,6,4,4]", "f32[6,2,3,3]", None], {"group": 2, "strides": (2, 2)}),
        (["f32[2,8,5,5]", "f32[8,6,2,2]", "f32[6]"], {"strides": (2, 2)}),
    ],
)
