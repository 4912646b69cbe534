"""GatherBlockQuantized (ONNX Runtime): rows of a table of 4-bit or 8-bit integers with a scale per block. Read as Gather of dequantized rows."""

import numpy as np

from whet.network import U8
from whet.ops._ort import register_fused, unpack_bits


def read(node, g):
    """Inputs: table, indices, scales, zero points. Along `quantize_axis` a scale holds for `block_size` values."""
    table, indices, scales, zeros = (node.input(i) for i in range(4))
    if not all(t is None or t.is_constant for t in (table, scales, zeros)):
        raise node.unsupported("its table is computed; whet reads a constant one. Save the model with initializers")
    block, bits, factors = node.attrs.get("block_size", 128), node.attrs.get("bits", 4), scales.array()
    axis = node.attrs.get("quantize_axis", 1) % factors.ndim
    values, points = (None if t is None else t.array() for t in (table, zeros))
    if table.dtype == U8:  # packed along the last axis, with half of the range as zero point
        values, points = (None if a is None else unpack_bits(a, bits) for a in (values, points))
        points = np.full(factors.shape, 1 << (bits - 1)) if points is None else points[..., : factors.shape[-1]]
    size = values.shape[axis]

    def spread(a):
        return np.repeat(a.astype(np.float32), block, axis).take(range(size), axis)

    dense = values.astype(np.float32) * spread(factors) if points is None else (values.astype(np.float32) - spread(points)) * spread(factors)
    dense = g.constant(dense.astype(scales.dtype.numpy), f"{node.name}.table")
    return node.add(g, "Gather", dense, indices, axis=node.attrs.get("gather_axis", 0))


register_fused("GatherBlockQuantized", read, "Gather of dequantized rows")
