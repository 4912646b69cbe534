"""RotaryEmbedding (ONNX Runtime): pairs of features rotated by the angles of their positions; read as products and sums."""

import numpy as np

from whet.ops._ort import make_adder, register_fused


def read(node, g):
    """Inputs: x [B, S, H * D] or [B, H, S, D], positions [1] (the first one) or [B, S], cosines and sines [positions, D / 2]."""
    add = make_adder(node, g)
    x, positions, cosines, sines = node.inputs
    if node.attrs.get("is_packed_batching", 0) or node.attrs.get("scale", 1.0) != 1.0:
        raise node.unsupported("it has packed batches or a scale. Save the model with ONNX Runtime's graph optimization level 'basic'")
    rotated, flat = 2 * int(cosines.shape[1]), x.type.rank == 3
    if flat:
        heads = node.attrs.get("num_heads", 0) or int(x.shape[2]) // rotated
        x = add("Transpose", add("Reshape", x, shape=(0, 0, heads, -1)), perm=(0, 2, 1, 3))
    length, size = x.shape[2], int(x.shape[3])
    if positions.type.rank == 1:
        if not isinstance(length, int):
            raise node.unsupported("its positions follow from a dynamic length. Give position_ids as [batch, sequence]")
        positions = add("Unsqueeze", add("Add", positions, g.constant(np.arange(length), f"{node.name}.places")), axes=(0,))
    cos, sin = (add("Unsqueeze", add("Gather", t, positions, axis=0), axes=(1,)) for t in (cosines, sines))
    parts = add("Split", x, axis=3, split=(rotated, size - rotated)) if rotated < size else (x,)
    first, second = _split_pairs(node, add, parts[0], rotated)
    one = add("Sub", add("Mul", first, cos), add("Mul", second, sin))
    two = add("Add", add("Mul", first, sin), add("Mul", second, cos))
    if node.attrs.get("interleaved", 0):
        y = add("Reshape", add("Concat", add("Unsqueeze", one, axes=(4,)), add("Unsqueeze", two, axes=(4,)), axis=4), shape=(0, 0, 0, -1))
        y = add("Concat", y, *parts[1:], axis=3)
    else:
        y = add("Concat", one, two, *parts[1:], axis=3)
    return node.add(g, "Reshape", add("Transpose", y, perm=(0, 2, 1, 3)), shape=(0, 0, -1)) if flat else node.add(g, "Identity", y)


def _split_pairs(node, add, x, rotated):
    """The first and the second feature of each pair: neighbors if interleaved, else from both halves."""
    if not node.attrs.get("interleaved", 0):
        return add("Split", x, axis=3, split=(rotated // 2,) * 2)
    pairs = add("Split", add("Reshape", x, shape=(0, 0, 0, -1, 2)), axis=4, split=(1, 1))
    return tuple(add("Squeeze", t, axes=(4,)) for t in pairs)


register_fused("RotaryEmbedding", read, "Gather, Mul, Add and Concat")
