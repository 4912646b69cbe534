"""Parameters that an exporter has merged because their values are equal: a vector of ones is the scale of many batch norms of an untrained network.

A merged vector couples unrelated layers: a cut of one changes all, and training ties them. Each reader gets a vector of its own; engines store equal
weights once all the same (merge_equal_weights). Vectors with different values are left alone: they are tied by intent.
"""

from __future__ import annotations

import numpy as np

from whet.network import Network

#: Inputs that are vectors of parameters by the op's definition
_VECTORS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
}


def separate_merged_vectors(net: Network) -> int:
    """Gives each reader of a merged vector its own constant, the first keeps the old one; returns the number of added constants."""
    added = 0
    users = net.users()
    for t in list(net.constants.values()):
        readers = users.get(t, [])
        if len(readers) < 2 or t.type.rank != 1 or not t.dtype.is_float or any(i not in _VECTORS.get(layer.op, ()) for layer, i in readers):
            continue
        values = t.array()
        if values.size < 2 or not np.all(values == values[0]):
            continue
        for layer, i in readers[1:]:
            own = net.constant(t.constant(), f"{layer.name}.{i}")
            layer.inputs = tuple(own if k == i else x for k, x in enumerate(layer.inputs))
            added += 1
    return added
