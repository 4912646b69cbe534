"""SkipLayerNormalization, SkipSimplifiedLayerNormalization and EmbedLayerNormalization (ONNX Runtime): sums, then a normalization."""

import numpy as np

from whet.network import I32
from whet.ops._ort import make_adder, register_fused
from whet.ops._refused import read_as_others


def read_skip(node, g):
    """Inputs: x, skip, gamma, beta, bias. Outputs: the normalized sum, mean, deviation (both for training), the sum."""
    return _read_normalized_sum(node, g, "LayerNormalization", (node.inputs[2], node.input(3)), node.input(4))


def read_skip_simplified(node, g):
    """Inputs: x, skip, gamma, bias."""
    return _read_normalized_sum(node, g, "RMSNormalization", (node.inputs[2],), node.input(3))


def _read_normalized_sum(node, g, op, scales, bias):
    if any(node.outputs[1:3]):
        raise node.unsupported("its outputs 1 and 2 (mean and deviation) serve training. Save the model for inference")
    add = make_adder(node, g)
    total = node.inputs[0] if bias is None else add("Add", node.inputs[0], bias)
    total = add("Add", total, node.inputs[1])
    y = add(op, total, *scales, axis=-1, epsilon=node.attrs.get("epsilon", 1e-12 if op == "LayerNormalization" else 1e-5))
    return y, y, y, total


def read_embed(node, g):
    """Inputs: word ids, segment ids, embeddings of words, positions and segments, gamma, beta, mask, position ids.
    Outputs: the normalized sum, the valid tokens of each sequence, the sum."""
    add = make_adder(node, g)
    ids, segments, words, positions, segment_table, gamma, beta = (node.input(i) for i in range(7))
    mask, position_ids = node.input(7), node.input(8)
    length = ids.shape[1]
    if position_ids is None:
        where = add("Slice", positions, starts=(0,), ends=(length,), axes=(0,))
    else:
        where = add("Gather", positions, position_ids, axis=0)
    total = add("Add", add("Gather", words, ids, axis=0), where)
    if segments is not None and segment_table is not None:
        total = add("Add", total, add("Gather", segment_table, segments, axis=0))
    y = add("LayerNormalization", total, gamma, beta, axis=-1, epsilon=node.attrs.get("epsilon", 1e-12))
    if len(node.outputs) < 2 or not node.outputs[1]:
        return y, y, total
    counted = mask if mask is not None else add("Mul", ids, g.constant(np.array(0, ids.dtype.numpy), f"{node.name}.none"))
    return y, add("Cast", add("ReduceSum", counted, axes=(1,), keepdims=0), to=I32), total


def read_simplified(node, g):
    """Inputs: x, gamma. ONNX Runtime writes this op in ONNX's own domain."""
    if any(node.outputs[1:]):
        raise node.unsupported("its output 1 (the deviation) serves training. Save the model for inference")
    return node.add(g, "RMSNormalization", *node.inputs, axis=node.attrs.get("axis", -1), epsilon=node.attrs.get("epsilon", 1e-5))


read_as_others("SimplifiedLayerNormalization", read_simplified, "RMSNormalization")
register_fused("SkipLayerNormalization", read_skip, "Add and LayerNormalization")
register_fused("SkipSimplifiedLayerNormalization", read_skip_simplified, "Add and RMSNormalization")
register_fused("EmbedLayerNormalization", read_embed, "Gather, Add and LayerNormalization")
