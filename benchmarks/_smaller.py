"""Weights with a shorter mantissa: model files compress better, at an error far below the noise of training."""

from __future__ import annotations

import numpy as np

from whet.network import Network, Weight


def rounded(net: Network, bits: int = 12) -> Network:
    """`net`, its float32 weights rounded to `bits` of the mantissa's 23 (relative error at most 2^-(bits+1)), half away from zero."""
    for t in net.constants.values():
        if t.weight is not None and t.array().dtype == np.float32 and t.array().size > 64:
            whole = t.array().view(np.int32)
            step = 1 << (23 - bits)
            t.weight = Weight(((whole + step // 2) & ~np.int32(step - 1)).view(np.float32).copy(), t.weight.origin)
    return net
