"""NhwcConv, GroupNorm, SkipGroupNorm, BiasSplitGelu and BiasAdd (ONNX Runtime), as its optimizer writes them for diffusion models."""

from whet.ops._ort import make_adder, register_fused
from whet.ops._qlinear import compute_in_floats


def read_nhwc_conv(node, g):
    """Inputs: x [N, H, W, C], weights [M, kH, kW, C / group], bias."""
    add, given = make_adder(node, g), list(node.inputs)
    given[:2] = [_to_channels_first(add, t) for t in given[:2]]
    return _to_channels_last(node, g, compute_in_floats(node, g, "Conv", given))


def _to_channels_first(add, x):
    axes = range(1, x.type.rank - 1)
    return add("Transpose", x, perm=(0, x.type.rank - 1, *axes))


def _to_channels_last(node, g, y):
    return node.add(g, "Transpose", y, perm=(0, *range(2, y.type.rank), 1))


def _normalize_groups(node, g, x):
    """The node's first output: x, with channels last by default, normalized in groups."""
    add, a = make_adder(node, g), node.attrs
    scale, bias = (t if t.dtype == x.dtype else add("Cast", t, to=x.dtype) for t in node.inputs[1:3])
    is_last = a.get("channels_last", 1)
    y = add("GroupNormalization", _to_channels_first(add, x) if is_last else x, scale, bias, num_groups=a["groups"], epsilon=a.get("epsilon", 1e-5))
    if a["activation"]:
        y = add("Swish", y)
    return _to_channels_last(node, g, y) if is_last else node.add(g, "Identity", y)


def read_skip_group_norm(node, g):
    """Inputs: x [N, H, W, C], scale, bias, a tensor [N, H, W, C], [N, 1, 1, C] or [N, C], and channels [C], both of which are added first. The second
    output is the sum."""
    add = make_adder(node, g)
    if not node.attrs.get("channels_last", 1):
        raise node.unsupported("its channels are not last (channels_last=0). Save the model without ONNX Runtime's fusion of SkipGroupNorm")
    x, skip, extra = node.inputs[0], node.inputs[3], node.input(4)
    total = add("Add", x, add("Unsqueeze", skip, axes=(1, 2)) if skip.type.rank == 2 else skip)
    total = total if extra is None else add("Add", total, extra)
    y = _normalize_groups(node, g, total)
    return [y, total][: len(node.outputs)]


def read_bias_split_gelu(node, g):
    """(x + bias) in halves [a, b] of the last axis: a * gelu(b)."""
    add = make_adder(node, g)
    a, b = add("Split", add("Add", *node.inputs[:2]), axis=-1, num_outputs=2)
    return node.add(g, "Mul", a, add("Gelu", b))


def read_bias_add(node, g):
    """x + bias + skip"""
    x, bias, skip = node.inputs
    return node.add(g, "Add", make_adder(node, g)("Add", x, bias), skip)


register_fused("NhwcConv", read_nhwc_conv, "Transpose and Conv")
register_fused("GroupNorm", lambda node, g: _normalize_groups(node, g, node.inputs[0]), "GroupNormalization and Swish")
register_fused("SkipGroupNorm", read_skip_group_norm, "Add, GroupNormalization and Swish")
register_fused("BiasSplitGelu", read_bias_split_gelu, "Add, Split, Gelu and Mul")
register_fused("BiasAdd", read_bias_add, "Add")
