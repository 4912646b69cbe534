"""Connected components of a large graph given as two index arrays, without a loop over its edges."""

from __future__ import annotations

import numpy as np


def find_components(n: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smallest node of each node's component: int64 [n], for nodes 0..n-1 and edges a[i]-b[i].

    Each round hooks the roots of both ends of every edge to the smaller root and compresses all paths. The number of components at least
    halves per round, so there are about log2(n) rounds.
    """
    root = np.arange(n, dtype=np.int64)
    while len(a):
        ra, rb = root[a], root[b]
        apart = ra != rb
        if not apart.any():
            break
        a, b, ra, rb = a[apart], b[apart], ra[apart], rb[apart]
        np.minimum.at(root, np.maximum(ra, rb), np.minimum(ra, rb))
        while True:
            shorter = root[root]
            if np.array_equal(shorter, root):
                break
            root = shorter
    return root
