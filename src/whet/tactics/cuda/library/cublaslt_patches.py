"""Convolutions in f16 and bf16 with large windows over few channels (a vision transformer's patches) by cuBLASLt."""

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import BF16, F16
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import root_layer
from whet.tactics.cuda.conv.conv import conv_shape
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CublasltPatches(LibraryProduct):
    """Windows above 7 x 7 with a channel count that is not a multiple of eight, which no tensor-core kernel of whet takes."""

    ops = ("Conv",)
    kinds = (F16, BF16)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        s = conv_shape(layer) if root_layer(layer).op == "Conv" else None
        if s is None or s.c % 8 == 0 or s.r * s.s <= 49:
            return "whet's tensor-core kernels take this"
        return super().refuses(layer, signature, backend)
