"""Gemm and MatMul with constant 2:4 weights on the sparse tensor cores of GPUs before Hopper.

For coverage: Hopper has faster kernels of its own.
"""

from whet.tactics._base import tactic
from whet.tactics.cuda.sparse._mma_tactic import SparseMmaTactic
from whet.tactics.cuda.sparse.sparse_gemm import SparseGemm


@tactic
class SparseMmaGemm(SparseMmaTactic, SparseGemm):
    """As `sparse_gemm`: row-major 16-bit operands and results; weights are 2:4 along the inner dimension."""
