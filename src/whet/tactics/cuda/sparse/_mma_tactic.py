"""Layers with 2:4 weights on sparse tensor cores by `mma.sp`, in 16-bit floats: from compute capability 8.0 to 8.9, on Hopper for few pixels."""

from __future__ import annotations

from collections.abc import Sequence

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Signature
from whet.tactics._fused import get_source_index
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, get_shared_limit, machine_has
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import PostOps, View
from whet.tactics.cuda.sparse._launch import Packed24
from whet.tactics.cuda.sparse._mma_launch import count_partial_bytes, list_mma_tiles, make_mma_constants, make_mma_launches, tile_of
from whet.tactics.cuda.sparse.sparse_conv import SparseTactic

FEW_PIXELS = 1024  # on Hopper; its wgmma kernels do not split K
MAX_CONFIGS = 8
_CAPABILITIES = ("sm_80", "sm_86", "sm_87", "sm_89")


class SparseMmaTactic(SparseTactic):
    """`mma.sp` in place of Hopper's `wgmma.mma_async.sp`; the same layers and packed operands."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if machine_has(backend, "wgmma"):
            if self.shape(layer).m > FEW_PIXELS:
                return f"Hopper (sm_90a) has faster 2:4 kernels for more than {FEW_PIXELS} pixels"
        elif not any(machine_has(backend, c) for c in _CAPABILITIES):
            return f"needs the sparse tensor cores of {', '.join(_CAPABILITIES)}"
        return self.why_not_sizes(layer, signature)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        end = self.match_epilogue(layer)
        if isinstance(end, str):
            return []
        tiles = list_mma_tiles(self.shape(layer), backend.capabilities.multiprocessors, get_shared_limit(backend))[:MAX_CONFIGS]
        post_ops = end.post_ops if end.residual is not None else PostOps(end.post_ops.activation)
        compile_ahead(backend, [emit_kernel_source("sparse_mma.cu", make_mma_constants(t, signature.outputs[0].dtype.name, post_ops)) for t in tiles])
        return [t.config for t in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        end, shape, types = self.match_problem(layer, signature)
        tile, x = tile_of(config, get_shared_limit(backend)), get_source_index(layer)
        post_ops = end.post_ops if end.residual is not None else PostOps(end.post_ops.activation)

        def make(args: Args) -> list:
            residual = 0 if end.residual is None else args.inputs[end.residual]
            source_view, out = View(args.inputs[x], shape.c), View(args.outputs[0], shape.k)
            packed24, partial = Packed24(*args.packed), -(-args.scratch // 256) * 256
            return make_mma_launches(tile, shape, source_view, packed24, out, types.result, post_ops, residual, partial, layer.name)

        partial = count_partial_bytes(tile, shape)
        packed = self.pack_operands(layer, signature, end, tile)
        return GpuKernel(layer, signature, make, implementation=f"sparse mma {tile}", packed=packed, scratch=256 + partial if partial else 0)
