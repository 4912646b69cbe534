"""Attention, QAttention and MultiHeadAttention (ONNX Runtime): read as products, masks and Softmax, which passes recognize as attention."""

import math

import numpy as np

from whet.network import I64
from whet.ops._ort import add_integer_product, add_scalar, make_adder, register_fused


def _split_heads(add, x, heads):
    """[B, S, D] as [B, heads, S, D / heads]."""
    return add("Transpose", add("Reshape", x, shape=(0, 0, heads, -1)), perm=(0, 2, 1, 3))


def _attend(node, g, q, k, v, masks):
    """Attention of [B, H, S, D] tensors with additive masks, as [B, S, H * D] under the node's name."""
    add = make_adder(node, g)
    scale = node.attrs.get("scale", 0.0) or 1 / math.sqrt(int(q.shape[-1]))
    scores = add("MatMul", q, add("Transpose", k, perm=(0, 1, 3, 2)))
    scores = add("Mul", scores, add_scalar(node, g, scale, scores, "scale"))
    if node.attrs.get("unidirectional", 0):
        ones = add("Expand", add_scalar(node, g, 1.0, q, "one"), shape=(q.shape[2], k.shape[2]))
        masks = [*masks, _mask_to_addend(node, g, add, add("Trilu", ones, upper=0))]
    for mask in masks:
        scores = add("Add", scores, mask)
    y = add("MatMul", add("Softmax", scores, axis=-1), v)
    return node.add(g, "Reshape", add("Transpose", y, perm=(0, 2, 1, 3)), shape=(0, 0, -1))


def _mask_to_addend(node, g, add, visible):
    """0 where `visible` is 1, mask_filter_value where it is 0."""
    value = add_scalar(node, g, node.attrs.get("mask_filter_value", -10000.0), visible, "filter")
    return add("Mul", add("Sub", add_scalar(node, g, 1.0, visible, "kept"), visible), value)


def _list_places(node, g, keys):
    """0, 1, 2, ... for the keys, axis 2 of a tensor, as i64."""
    count = keys.shape[2]
    if isinstance(count, int):
        return g.constant(np.arange(count), f"{node.name}.places")
    add = make_adder(node, g)
    size = add("Squeeze", add("Shape", keys, start=2, end=3), axes=(0,))
    return add("Range", g.constant(np.array(0), f"{node.name}.first"), size, g.constant(np.array(1), f"{node.name}.step"))


def _mask(node, g, mask, q, keys):
    """The additive mask of an integer mask: [B] lengths, [B, L] or [B, rows, L] with 1 for a visible key. `keys` are [B, H, L, D]."""
    add = make_adder(node, g)
    if mask.type.rank == 1:
        if mask.shape != (q.shape[0],):
            raise node.unsupported(f"its mask has the shape {list(mask.shape)}; only one length per sequence or masks of 2 and 3 axes are read")
        mask = add("Less", _list_places(node, g, keys), add("Cast", add("Unsqueeze", mask, axes=(1,)), to=I64))
    if mask.type.rank not in (2, 3):
        raise node.unsupported(f"its mask has {mask.type.rank} axes; masks of 1 to 3 axes are read")
    axes = (1, 2) if mask.type.rank == 2 else (1,)
    return _mask_to_addend(node, g, add, add("Cast", add("Unsqueeze", mask, axes=axes), to=q.dtype))


def _no_cache(node, inputs, outputs=(1, 2)):
    if any(node.input(i) is not None for i in inputs) or any(node.outputs[i] for i in outputs if i < len(node.outputs)):
        raise node.unsupported("it keeps keys and values of former tokens (past, present). Export the model without cache")


def read_attention(node, g):
    """Inputs: x [B, S, D], weights [D, q + k + v], bias, mask, past, attention bias."""
    _no_cache(node, (4,), (1,))
    add = make_adder(node, g)
    x, weights, bias, mask, extra = (node.input(i) for i in (0, 1, 2, 3, 5))
    packed = add("MatMul", x, weights)
    return _attend_packed(node, g, packed if bias is None else add("Add", packed, bias), mask, extra)


def read_q_attention(node, g):
    """Inputs: x (8 bits), weights (8 bits), bias, their scales, mask, their zero points, past."""
    _no_cache(node, (8,), (1,))
    x, weights, bias, x_scale, weight_scale, mask, x_zero, weight_zero = (node.input(i) for i in range(8))
    packed = add_integer_product(make_adder(node, g), x, weights, x_scale, weight_scale, x_zero, weight_zero)
    return _attend_packed(node, g, make_adder(node, g)("Add", packed, bias), mask, None)


def _attend_packed(node, g, packed, mask, extra):
    """Attention of queries, keys and values that are one tensor [B, S, q + k + v]."""
    if node.attrs.get("do_rotary", 0):
        raise node.unsupported("it rotates queries and keys (do_rotary=1). Export the model without ONNX Runtime's attention fusion")
    add, heads = make_adder(node, g), node.attrs["num_heads"]
    sizes = node.attrs.get("qkv_hidden_sizes") or (int(packed.shape[-1]) // 3,) * 3
    q, k, v = (_split_heads(add, t, heads) for t in add("Split", packed, axis=-1, split=tuple(sizes)))
    masks = [] if mask is None else [_mask(node, g, mask, q, k)]
    return _attend(node, g, q, k, v, [*masks, *(() if extra is None else (extra,))])


def _unpack(add, x, count):
    """The parts [B, H, L, D] of [B, L, H, count, D]."""
    parts = add("Split", add("Transpose", x, perm=(3, 0, 2, 1, 4)), axis=0, split=(1,) * count)
    return [add("Squeeze", part, axes=(0,)) for part in parts]


def read_multi_head_attention(node, g):
    """Inputs: q [B, S, D], k and v [B, L, D] or [B, H, L, D / H], bias of the three, key padding mask, attention bias, past k and v. Packed: q, k and
    v [B, L, H, 3, D / H], or k and v [B, L, H, 2, D / H]."""
    _no_cache(node, (6, 7, 8, 9))
    add, heads = make_adder(node, g), node.attrs["num_heads"]
    q, k, v, bias, mask, extra = (node.input(i) for i in range(6))
    packed = q.type.rank == 5 or (k is not None and k.type.rank == 5)
    if q.type.rank == 5 and k is None and v is None:
        q, k, v = _unpack(add, q, 3)
    elif q.type.rank == 3 and packed and v is None:
        k, v = _unpack(add, k, 2)
    if k is None or v is None or any(t.type.rank not in (3, 4) for t in (q, k, v)) or (packed and bias is not None):
        kinds = ", ".join("none" if t is None else str(t.type) for t in (q, k, v, bias))
        raise node.unsupported(f"its queries, keys, values and bias are {kinds}; packed ones have five axes, and no bias")
    if bias is not None:
        sizes = tuple(int(t.shape[-1]) if t.type.rank == 3 else heads * int(t.shape[-1]) for t in (q, k, v))
        parts = add("Split", bias, axis=0, split=sizes)
        q, k, v = (t if t.type.rank == 4 else add("Add", t, b) for t, b in zip((q, k, v), parts, strict=True))
    q, k, v = (t if t.type.rank == 4 else _split_heads(add, t, heads) for t in (q, k, v))
    masks = [] if mask is None else [_mask(node, g, mask, q, k)]
    return _attend(node, g, q, k, v, [*masks, *(() if extra is None else (extra,))])


register_fused("Attention", read_attention, "MatMul and Softmax")
register_fused("QAttention", read_q_attention, "MatMulInteger and Softmax")
register_fused("MultiHeadAttention", read_multi_head_attention, "MatMul and Softmax")
