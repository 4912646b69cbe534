"""Convolution with 2:4 weights on the sparse tensor cores of GPUs before Hopper.

For coverage: Hopper has faster kernels of its own.
"""

from whet.tactics._base import tactic
from whet.tactics.cuda.sparse._mma_tactic import SparseMmaTactic
from whet.tactics.cuda.sparse.sparse_conv import SparseConv


@tactic
class SparseMmaConv(SparseMmaTactic, SparseConv):
    """As `sparse_conv`: two spatial axes, one group; any kernel, stride, padding and dilation."""
