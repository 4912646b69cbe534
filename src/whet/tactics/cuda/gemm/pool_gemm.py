"""The end of a classifier for few samples: global average pooling and the following product with a constant matrix in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstPointer, ConstUint4Pointer, Int32, Pointer
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    GpuKernel,
    all_static,
    compile_ahead,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES

_TILE = 64  # outputs of a cluster
_CLUSTER = 8  # blocks of a cluster at most
_MOST_IMAGES, _MOST_PIXELS = 8, 256


@dataclass(frozen=True)
class PoolGemmArguments(Arguments, kernel="pool_gemm.cu"):
    input: ConstPointer
    out: Pointer
    weights: ConstUint4Pointer  # [tile of 64 outputs][rank][I][256 threads] eight channels each
    bias: ConstFloatPointer  # whole tiles
    c: Int32
    outputs: Int32


@dataclass(frozen=True)
class _Sizes:
    """Samples, channels, pixels of the input, columns of the product; its weights [columns, channels] or, transposed, [channels, columns]."""

    n: int
    c: int
    pixels: int
    columns: int
    weights: Tensor
    transposed: bool
    bias: Tensor | None


@tactic
class PoolGemm(Tactic):
    """Layers of the pass fuse_pool_gemm with at most eight samples."""

    ops = ("*",)
    composites = ("PoolGemm",)
    what = "global pooling with the product behind it"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or layer.outputs[0].type.rank != 2:
            return []
        signatures = []
        for dtype in list_float_types([layer.inputs[0], layer.outputs[0]], FLOAT16_TYPES):
            for to in (F32, dtype) if layer.outputs[0].dtype == F32 else (dtype,):
                signatures.append(make_stored_signature(layer, {0: Operand("nhwc", dtype)}, Operand("linear", to)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's clusters (sm_90)"
        s = _get_sizes(layer)
        if s.n > _MOST_IMAGES or s.pixels > _MOST_PIXELS:
            return f"{s.n} samples of {s.pixels} pixels; takes at most {_MOST_IMAGES} of {_MOST_PIXELS}"
        return None if s.c % 8 == 0 and _list_splits(s) else f"{s.n} samples of {s.c} channels; takes a multiple of 8 up to {_CLUSTER * 256}"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s, ways = _get_sizes(layer), _list_splits(_get_sizes(layer))
        compile_ahead(backend, [emit_kernel_source("pool_gemm.cu", _make_constants(s, signature, i)) for i in ways])
        return [(("i", i),) for i in ways]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        s, i = _get_sizes(layer), int(dict(config)["i"])
        if i not in _list_splits(s):
            raise PlanRefused(f"{s.c} channels are not split into parts of {32 * i}")
        ranks, tiles, dtype = -(-s.c // (32 * i)), -(-s.columns // _TILE), signature.needs(0).dtype
        constants = _make_constants(s, signature, i)

        def weights() -> np.ndarray:
            given = np.asarray(s.weights.array(), np.float32)
            out = np.zeros((tiles * _TILE, ranks * 32 * i), dtype.numpy)
            out[: s.columns, : s.c] = given.T if s.transposed else given
            # [tile, output, rank, i, lane of four, eight channels] -> the order in which threads read
            return out.reshape(tiles, _TILE, ranks, i, 4, 8).transpose(0, 2, 3, 1, 4, 5)

        def bias() -> np.ndarray:
            out = np.zeros(tiles * _TILE, np.float32)
            if s.bias is not None:
                out[: s.columns] = np.asarray(s.bias.array(), np.float32).reshape(-1)
            return out

        digest = s.weights.constant().digest
        own = "" if s.bias is None else s.bias.constant().digest
        packed = (
            make_packed_array(f"{digest}|pool gemm {s.transposed} {i} {dtype}", tiles * _TILE * ranks * 64 * i, weights),
            make_packed_array(f"bias {own} of {tiles * _TILE}", tiles * _TILE * 4, bias),
        )

        def make(args: Args) -> list:
            arguments = PoolGemmArguments(args.inputs[0], args.outputs[0], args.packed[0], args.packed[1], c=s.c, outputs=s.columns)
            return [launch("pool_gemm", arguments, constants, (tiles * ranks, 1, 1), 256, cluster=ranks, label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"pool gemm {32 * i} x {ranks}", packed=packed)


def _make_constants(s: _Sizes, signature: Signature, i: int) -> dict[str, int]:
    """The macros of an instance."""
    reads, stores = signature.needs(0).dtype.name, signature.outputs[0].dtype.name
    return {"TYPE": TYPES[reads], "TO": TYPES[stores], "I": i, "RANKS": -(-s.c // (32 * i)), "IMAGES": s.n, "PIXELS": s.pixels}


def _list_splits(s: _Sizes) -> list[int]:
    """Of how many channels, in 32s, a block may make the means, so that a cluster holds all; the most blocks first."""
    configs = []
    for i in (2, 4, 8):
        ranks = -(-s.c // (32 * i))
        share = -(-_TILE // 2 // ranks) * 2  # outputs that a block computes, a thread each
        if ranks <= _CLUSTER and (i == 2 or s.c > 16 * i) and s.n * share <= 256:
            configs.append(i)
    return configs


def _get_sizes(layer: Layer) -> _Sizes:
    """The sizes of a layer of fuse_pool_gemm: pooling first, the product last."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    pool, product = body.layers[0], body.layers[-1]
    n, c, h, w = static_shape(pool.needs(0).shape)
    weights, b = outer[product.needs(1)], product.input(2)
    assert weights is not None
    transposed = product.op == "MatMul" or not product.attrs.get("transB")
    return _Sizes(n, c, h * w, static_shape(product.outputs[0].shape)[-1], weights, transposed, None if b is None else outer[b])
