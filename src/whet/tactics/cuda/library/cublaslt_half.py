"""Products and 1x1 convolutions in f16 and bf16 by cuBLASLt: the referee of whet's own, on by --tacticSources=+cublaslt_half."""

from whet.network.types import BF16, F16
from whet.tactics._base import tactic
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CublasltHalf(LibraryProduct):
    """F32 accumulators. Selected by name only: its launches do not overlap with the adjacent ones, which timing it alone does not show."""

    kinds = (F16, BF16)
    windows = False
    opt_in = True
