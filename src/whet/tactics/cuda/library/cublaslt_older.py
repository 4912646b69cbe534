"""Convolutions and products in f16 and bf16 by cuBLASLt on GPUs before Hopper, for which whet has no tensor-core kernels.

For coverage: without it such layers run on one thread per value there.
"""

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import BF16, F16
from whet.tactics._base import Signature, tactic
from whet.tactics.cuda._device.kernel import machine_has
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CublasltOlder(LibraryProduct):
    """Windows of convolutions laid out by a kernel of ours; accumulators in f32."""

    kinds = (F16, BF16)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if machine_has(backend, "wgmma"):
            return "whet's kernels use this GPU's tensor cores"
        return super().refuses(layer, signature, backend)
