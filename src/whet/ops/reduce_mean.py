"""ReduceMean: the mean over axes."""

from whet.network import Layer
from whet.ops._base import Couple
from whet.ops._reduce import list_reduced_axes, register_reduction


def _means(layer: Layer) -> list[Couple]:
    """The reduced axes if each sample has one value per channel and all of them are averaged (global response normalization of ConvNeXt V2).

    A mean over the activations of one position belongs to a norm: its channels are cut as statistics, since a factor would split the fused norm.
    """
    x, axes = layer.needs(0), list_reduced_axes(layer)
    pooled = x.type.rank > 2 and 0 not in axes and all(x.shape[i] == 1 for i in range(1, x.type.rank) if i not in axes)
    return [Couple(x, i, x, i, summed=True) for i in axes] if pooled else []


register_reduction(
    "ReduceMean",
    lambda x, axes, keep: x.mean(axis=axes, keepdims=keep),
    statistics=lambda layer: [Couple(layer.inputs[0], i, layer.inputs[0], i) for i in list_reduced_axes(layer)],
    means=_means,
)
