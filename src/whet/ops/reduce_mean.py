"""ReduceMean: the mean over axes."""

from whet.ops._base import Couple
from whet.ops._reduce import reduced_axes, reduction

reduction(
    "ReduceMean",
    lambda x, axes, keep: x.mean(axis=axes, keepdims=keep),
    statistics=lambda layer: [Couple(layer.inputs[0], i, layer.inputs[0], i) for i in reduced_axes(layer)],
)
