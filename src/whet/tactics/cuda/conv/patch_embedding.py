"""Convolutions with large windows over few channels (a vision transformer's patches): windows laid out as rows, then a product on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import RTOL, GpuKernel, compile_ahead, count_blocks, launch, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda.conv._conv import TYPES, ConvShape, View, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs, pick_varied
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import Conv, as_config, from_config, get_conv_shape, launch_with_epilogue, list_conv_signatures, make_packed_bias

MAX_CONFIGS = 12
_MOST_BYTES = 256 << 20  # of windows laid out


@dataclass(frozen=True)
class Im2colArguments(Arguments, kernel="im2col.cu"):
    input: ConstPointer
    out: Pointer
    count: Int64  # units of the result
    h: Int32  # c in units, of planes in elements; taps = rows * columns of the filter
    w: Int32
    c: Int32
    p: Int32
    q: Int32
    s: Int32
    taps: Int32
    stride_h: Int32  # width: units of a row of the result
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    width: Int32

    @classmethod
    def of(cls, s: ConvShape, source: int, target: int, *, count: int, channels: int, width: int) -> Im2colArguments:
        """The arguments for the windows of a convolution; `count`, `channels` and `width` in units."""
        return cls(source, target, count, s.h, s.w, channels, s.p, s.q, s.s, s.r * s.s, *s.stride, s.pad[0], s.pad[1], *s.dilation, width)


@tactic
class PatchEmbedding(Conv):
    """Windows above 7 x 7 with a channel count that is not a multiple of eight, which no other tensor-core kernel takes.

    The image has channels last, or is row-major in f32 or 16 bits.
    """

    version = 2

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        others = super().signatures(layer, backend)
        return [*list_plane_signatures(layer), *others] if others else []

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if s.c % 8 == 0 or s.r * s.s <= 49:
            return "other kernels read these windows in place"
        product = get_product_shape(s)
        if product.m * product.c * 2 > _MOST_BYTES:
            return "the windows are more than 256 MiB"
        return refuses(product)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s = get_product_shape(get_conv_shape(layer))
        configs = pick_varied(list_configs(s.m, s.k, s.c, 1, backend.capabilities.multiprocessors), MAX_CONFIGS, each=5)
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if not isinstance(epilogue, str):
            features = Features(activation=epilogue.post_ops.activation[0], bf16=signature.outputs[0].dtype.name == "bf16")
            compile_ahead(backend, [emit_conv_source(c, features) for c in configs])
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), from_config(config)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        shape, dtype = get_product_shape(s), signature.outputs[0].dtype
        x = get_source_index(layer)
        source = signature.needs(x)
        planes = source.format == "linear"
        weights, own = get_weight_and_bias(layer)

        def rows() -> np.ndarray:
            flat = np.asarray(weights.array(), np.float32).transpose(0, *((1, 2, 3) if planes else (2, 3, 1))).reshape(s.k, -1)
            return pack_weights(np.pad(flat, ((0, 0), (0, shape.c - flat.shape[1])))[:, :, None, None], tile.bk, dtype.numpy)

        key = f"{weights.constant().digest}|patches{' of planes' * planes} {tile.bk} {dtype}"
        packed = (
            make_packed_array(key, shape.k * shape.steps(tile.bk) * tile.bk * 2, rows),
            make_packed_bias(epilogue, own, shape.k),
        )
        moved = 8 if planes and _has_aligned_runs(s) else 1 if planes else next(n for n in (8, 4, 2, 1) if s.c % n == 0)  # elements
        constants = {"FROM": TYPES[source.dtype.name], "TO": TYPES[dtype.name], "RUN": moved} if planes else {"UNIT": moved * 2}
        entry, width, channels = ("patches", shape.c // moved, s.c) if planes else ("im2col", shape.c // moved, s.c // moved)
        count = shape.m * width

        def make(args: Args) -> list:
            at = -(-args.scratch // 128) * 128
            product = launch_with_epilogue(tile, shape, View(at, shape.c), args, epilogue, dtype, backend, layer.name)
            arguments = Im2colArguments.of(s, args.inputs[x], at, count=count, channels=channels, width=width)
            return [launch(entry, arguments, constants, (count_blocks(count, 256), 1, 1), 256), product]

        scratch, rtol = shape.m * shape.c * 2 + 128, RTOL[dtype.name]
        return GpuKernel(layer, signature, make, implementation=f"{entry}, wgmma {tile}", packed=packed, scratch=scratch, rtol=rtol)


def list_plane_signatures(layer: Layer) -> list[Signature]:
    """Channels last for the result, as the other signatures; the image is row-major."""
    x = get_source_index(layer)
    return [
        Signature((*s.inputs[:x], Operand("linear", dtype), *s.inputs[x + 1 :]), s.outputs)
        for s in list_conv_signatures(layer, "nhwc")
        for dtype in dict.fromkeys((layer.needs(x).dtype, s.outputs[0].dtype))
    ]


def get_product_shape(s: ConvShape) -> ConvShape:
    """Windows as rows, padded to a multiple of 16 bytes."""
    return ConvShape(1, 1, s.m, -(-s.r * s.s * s.c // 8) * 8, s.k)


def _has_aligned_runs(s: ConvShape) -> bool:
    """True if eight adjacent columns of a window, from a multiple of eight on, are at a multiple of eight of the image, inside it or outside."""
    return s.dilation[1] == 1 and all(n % 8 == 0 for n in (s.s, s.w, s.stride[1], s.pad[1]))
