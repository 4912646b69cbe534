"""Products and 1x1 convolutions with 2:4 weights in f16 and bf16 by cuSPARSELt: the referee of whet's own, on by --tacticSources=+CUSPARSELT."""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.launch import GpuWork
from whet.network import Layer
from whet.network.types import BF16, F16
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics._two_four import why_not_two_four
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.gemm.gemm import get_gemm_shape
from whet.tactics.cuda.library import _cusparselt
from whet.tactics.cuda.library._cublaslt import WORKSPACE, Product
from whet.tactics.cuda.library._cusparselt import SparseLtLaunch
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CusparseltHalf(LibraryProduct):
    """F32 accumulators. The library compresses the weights on the GPU when an engine is loaded, into memory of its own."""

    library = "cuSPARSELt"
    kinds = (F16, BF16)
    windows = False
    opt_in = True

    def library_version(self) -> str:
        return _cusparselt.get_version()

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or why_not_two_four(
            get_weight_and_bias(layer)[0], f"{self.name} {get_root_layer(layer).op}", lambda: _get_filters(layer)
        )

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if backend.capabilities.executes and _cusparselt.load_library() is None:
            return "libcusparseLt is not installed: pip install nvidia-cusparselt-cu13"
        return self.why_not_shape(layer, signature) or _why_not_sizes(
            get_conv_shape(layer) if get_root_layer(layer).op == "Conv" else get_gemm_shape(layer)
        )

    def launch_of(self, product: Product, x: int, w: int, bias: int, residual: int, out: int, workspace: int) -> GpuWork:
        return SparseLtLaunch(product, x, w, bias, residual, out, workspace, WORKSPACE)


def _why_not_sizes(s: ConvShape) -> str | None:
    if s.c % 32 or s.k % 32 or s.m % 16:
        return f"takes multiples of 32 input and output channels and of 16 rows, not {s.c}, {s.k} and {s.m}"
    return None


def _get_filters(layer: Layer) -> np.ndarray:
    head, weights = get_root_layer(layer), np.asarray(get_weight_and_bias(layer)[0].array(), np.float32)
    if head.op == "Conv":
        return weights
    return (weights.T if head.op == "MatMul" or not head.attrs.get("transB") else weights)[:, :, None, None]
