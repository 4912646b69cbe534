"""Base of the cuBLASLt tactics: convolutions (windows as rows, a few samples at a time) and products with constant weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.launch import GpuWork, Launch
from whet.network import Layer
from whet.network.types import DType
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_operand_indices, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    RTOL,
    TYPE,
    Epilogue,
    GpuKernel,
    all_static,
    count_blocks,
    launch,
    list_float_types,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv.conv import get_conv_shape, list_conv_signatures
from whet.tactics.cuda.conv.patch_embedding import Im2colArguments
from whet.tactics.cuda.elementwise.elementwise import WHOLE, ElementwiseArguments, format_number, get_index_type, make_operands
from whet.tactics.cuda.gemm.gemm import get_gemm_shape, why_not_product
from whet.tactics.cuda.library import _cublaslt
from whet.tactics.cuda.library._cublaslt import WORKSPACE, LtLaunch, Product

ROWS_BYTES = 32 << 20  # bytes of windows expanded at once, which fit the L2 cache together with weights and results
TF32_RTOL = 2e-3  # operands are rounded to 10 bits of mantissa, accumulators are f32: as for f16
ALGORITHMS = 3  # of the library's proposals that are timed


@dataclass(frozen=True)
class _Work:
    """A layer as products: samples of `each` rows of `k` elements, `chunk` samples per product."""

    images: int
    each: int
    k: int
    padded: int  # k, padded so that rows begin at 16 bytes
    n: int
    chunk: int
    plain: bool  # the input is already the matrix


class LibraryProduct(Tactic):
    """Base of the tactics: `kinds` are the storage types, `math` is the library's precision."""

    library = "cuBLASLt"
    ops: tuple[str, ...] = ("Conv", "Gemm", "MatMul")
    kinds: tuple[DType, ...] = ()
    math = "f32"
    windows = True  # lays windows out; else 1x1 convolutions only

    def library_version(self) -> str:
        return _cublaslt.get_version()

    def why_not(self, layer: Layer) -> str | None:
        groups = "takes convolutions of one group" if get_root_layer(layer).attrs.get("group", 1) != 1 else None
        return super().why_not(layer) or why_not_product(layer) or groups

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        if get_root_layer(layer).op == "Conv":
            return list_conv_signatures(layer, "nhwc", self.kinds)
        head, steps = get_root_layer(layer), find_epilogue_steps(layer)
        x = get_operand_indices(layer)[0]
        others = [p.other for p in steps or () if p.other is not None and not layer.needs(p.other).is_constant]
        signatures = []
        for t in list_float_types([head.inputs[0], layer.outputs[0]], self.kinds):
            signatures.append(make_stored_signature(layer, {i: Operand("linear", t) for i in (*others, x)}, Operand("linear", t)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if backend.capabilities.executes and _cublaslt.load_library() is None:
            return "libcublasLt is not installed: pip install nvidia-cublas"
        return self.why_not_shape(layer, signature)

    def why_not_shape(self, layer: Layer, signature: Signature) -> str | None:
        """Why the library's products do not fit the layer, or None."""
        epilogue = _match_epilogue(layer)
        if isinstance(epilogue, str):
            return epilogue
        if epilogue.post_ops.residual == 2:
            return "takes a residual before the activation, not after it"
        if get_root_layer(layer).op == "Conv" and not self.windows and not get_conv_shape(layer).plain:
            return "expands no windows in this type, which other kernels read in place"
        work = _to_work(layer, signature.outputs[0].dtype)
        size = signature.outputs[0].dtype.bits // 8
        return "the windows of one sample exceed 256 MiB" if work.each * work.padded * size > 256 << 20 else None

    def launch_of(self, product: Product, x: int, w: int, bias: int, residual: int, out: int, workspace: int) -> GpuWork:
        """The library's launch of one product."""
        return LtLaunch(product, x, w, bias, residual, out, workspace)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        return [(("algo", i), ("math", self.math)) for i in range(ALGORITHMS)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = _match_epilogue(layer)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        fields = dict(config)
        algo = fields.get("algo")
        if fields.get("math") != self.math or not isinstance(algo, int) or not 0 <= algo < 16:
            raise PlanRefused(f"this tactic computes in {self.math} by one of the library's first 16 proposals, not {fields}")
        head, dtype = get_root_layer(layer), signature.outputs[0].dtype
        size, work = dtype.bits // 8, _to_work(layer, dtype)
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        transposed = head.op == "MatMul" or (head.op == "Gemm" and not head.attrs.get("transB"))

        def rows() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            flat = given.transpose(0, 2, 3, 1).reshape(work.n, -1) if head.op == "Conv" else given.T if transposed else given
            return np.pad(flat, ((0, 0), (0, work.padded - work.k))).astype(dtype.numpy)

        packed = (
            make_packed_array(
                f"{weights.constant().digest}|library rows {head.op} {transposed} {work.padded} {dtype}", work.n * work.padded * size, rows
            ),
            make_packed_array(
                f"bias {own.constant().digest if own is not None else ''} {epilogue.key} {work.n} {dtype}",
                work.n * size,
                lambda: epilogue.bias(own, work.n).astype(dtype.numpy),
            ),
        )
        kind, low, high = epilogue.post_ops.activation
        relu = (kind, low, high) == ("clip", 0.0, float("inf"))
        nothing = (kind, low, high) == ("clip", -float("inf"), float("inf"))
        laid_out = 0 if work.plain else -(-work.chunk * work.each * work.padded * size // 256) * 256  # the workspace begins at this offset
        step = work.chunk * work.each * work.n * size if work.images > work.chunk else 16

        def make(args: Args) -> list:
            start = -(-args.scratch // 256) * 256
            launches: list[Any] = []
            for first in range(0, work.images, work.chunk):
                count = min(work.chunk, work.images - first)
                source = args.inputs[x] + first * (work.each * work.k * size if work.plain else _count_image_bytes(layer, size))
                if not work.plain:
                    launches.append(_make_windows_launch(layer, work, size, source, start, count))
                    source = start
                adds = epilogue.residual is not None
                product = Product(count * work.each, work.n, work.padded, dtype.name, self.math, relu, adds, algo, gcd(16, step))
                at = first * work.each * work.n * size
                residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual] + at
                addresses = (source, args.packed[0], args.packed[1], residual, args.outputs[0] + at, start + laid_out)
                launches.append(self.launch_of(product, *addresses))
            if not relu and not nothing:
                launches.append(_make_activation_launch(args.outputs[0], work.images * work.each * work.n, dtype.name, kind, low, high))
            return launches

        rtol = TF32_RTOL if self.math == "tf32" else RTOL[dtype.name]
        name = f"{self.library} {self.math} algo {algo}" + ("" if work.plain else f", windows of {work.chunk} images")
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, scratch=256 + laid_out + WORKSPACE, rtol=rtol)


def _match_epilogue(layer: Layer) -> Epilogue | str:
    return match_epilogue(layer, find_epilogue_steps(layer), 1 if get_root_layer(layer).op == "Conv" else layer.outputs[0].type.rank - 1)


def _to_work(layer: Layer, dtype: DType) -> _Work:
    conv = get_root_layer(layer).op == "Conv"
    s = get_conv_shape(layer) if conv else get_gemm_shape(layer)
    size = dtype.bits // 8
    k, fill = s.r * s.s * s.c, 16 // size
    plain = s.plain
    padded = k if plain else -(-k // fill) * fill
    images, each = (s.n, s.p * s.q) if conv and not plain else (1, s.m)
    chunk = 1 if plain else max(1, min(images, ROWS_BYTES // max(each * padded * size, 1)))
    return _Work(images, each, k, padded, s.k, chunk, plain)


def _count_image_bytes(layer: Layer, size: int) -> int:
    s = get_conv_shape(layer)
    return s.h * s.w * s.c * size


def _make_windows_launch(layer: Layer, work: _Work, size: int, source: int, target: int, images: int) -> Launch:
    """Expands the windows of `chunk` samples into rows."""
    s = get_conv_shape(layer)
    unit = next(u for u in (16, 8, 4, 2) if (s.c * size) % u == 0)
    c, width = s.c * size // unit, work.padded * size // unit
    count = images * work.each * width
    arguments = Im2colArguments.of(s, source, target, count=count, channels=c, width=width)
    return launch("im2col", arguments, {"UNIT": unit}, (count_blocks(count, 256), 1, 1), 256)


def _make_activation_launch(address: int, count: int, dtype: str, kind: str, low: float, high: float) -> Launch:
    """An activation that the library has not, in place."""
    steps = f"for (int e = 0; e < 8; ++e) x.v[e] = activate<{ACTIVATIONS[kind]}>(x.v[e], Act{{{format_number(low)}, {format_number(high)}}});"
    constants = {"TYPE": TYPE[dtype], "INDEX": get_index_type(count), "STEPS": steps}
    arguments = ElementwiseArguments(out=address, input=make_operands((address, TYPE[dtype], WHOLE)), count=count)
    return launch("pointwise", arguments, constants, (count_blocks(count, 2048), 1, 1), 256)
