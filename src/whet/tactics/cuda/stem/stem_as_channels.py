"""Stem convolutions (few input channels) on tensor cores: the taps of a filter row are adjacent and count as channels.

A small kernel copies the image first (zero padding, channels padded to 4 or 8, type and layout converted); the windows of a
filter row are then contiguous and overlap, and the copy engine reads them as a tensor of overlapping strides.

For coverage: 5 to 8 input channels, filters above 16 x 16 and more than 128 output channels; the other stem kernels are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int32, Pointer
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    RTOL,
    TYPE,
    GpuKernel,
    all_static,
    compile_ahead,
    count_blocks,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, View, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv._window_map import make_row_window_map
from whet.tactics.cuda.conv.conv import as_config, from_config, get_conv_shape, launch_with_epilogue, make_packed_bias, why_not_conv

MAX_CONFIGS = 12


@dataclass(frozen=True)
class StemAsChannelsArguments(Arguments, kernel="stem_as_channels.cu"):
    input: ConstPointer
    out: Pointer
    n: Int32  # wide: pixels of a padded row
    c: Int32
    h: Int32
    w: Int32
    wide: Int32
    left: Int32


@dataclass(frozen=True)
class TapsAsChannels:
    """The padded image: channels of a pixel, pixels of a row, and the convolution over it as the tensor-core kernel computes it."""

    channels: int
    row: int
    shape: ConvShape

    @staticmethod
    def of(s: ConvShape) -> TapsAsChannels:
        """For the convolution `s`. Overlapping windows must start at multiples of 16 bytes."""
        channels = 4 if s.c <= 4 and s.stride[1] % 2 == 0 else 8
        row = max(s.pad[1] + s.w, (s.q - 1) * s.stride[1] + s.s)
        row += row % 2
        seen = ConvShape(s.n, s.h, s.q, s.s * channels, s.k, s.r, 1, (s.stride[0], 1), (s.pad[0], 0, s.pad[2], 0), (s.dilation[0], 1))
        return TapsAsChannels(channels, row, seen)

    def nbytes(self) -> int:
        """Bytes of the padded image in 16-bit floats."""
        return self.shape.n * self.shape.h * self.row * self.channels * 2


class FirstLayer(Tactic):
    """Base of the stem tactics: the layers that they take, and the formats of the image."""

    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if reason := super().why_not(layer) or why_not_conv(layer, head):
            return reason
        if head.attrs["group"] != 1:
            return "takes convolutions of one group"
        if not isinstance(head.needs(0).shape[1], int) or head.needs(0).shape[1] > 8:
            return "takes convolutions of at most 8 input channels"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        head, steps = get_root_layer(layer), find_epilogue_steps(layer)
        x = get_source_index(layer)
        if any(p.other is not None and not layer.needs(p.other).is_constant for p in steps or ()):
            return []
        signatures = []
        for dtype in list_float_types([head.inputs[0], layer.outputs[0]], FLOAT16_TYPES):
            for source in dict.fromkeys((head.needs(0).dtype, dtype)):
                for form in ("linear", "nhwc"):
                    signatures.append(make_stored_signature(layer, {x: Operand(form, source)}, Operand("nhwc", dtype)))
        return signatures


@tactic
class StemAsChannels(FirstLayer):
    """Convolutions of up to 8 input channels and one group; the image is f32 or 16-bit, channels first or last."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, shape = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if shape.dilation[1] != 1:
            return "takes no dilation along rows"
        if shape.k % 8:
            return f"{shape.k} output channels; takes a multiple of 8 (16 bytes)"
        return refuses(replace(TapsAsChannels.of(shape).shape, c=8))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s, epilogue = TapsAsChannels.of(get_conv_shape(layer)).shape, match_epilogue(layer, find_epilogue_steps(layer))
        configs = list_configs(s.m, s.k, s.c, s.r, backend.capabilities.multiprocessors)[:MAX_CONFIGS]
        if not isinstance(epilogue, str):
            how = Features(True, epilogue.post_ops.activation[0], signature.outputs[0].dtype.name == "bf16", odd=s.k % 8 != 0)
            compile_ahead(backend, [emit_conv_source(c, how) for c in configs])
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        shape, tile = get_conv_shape(layer), from_config(config)
        wide = TapsAsChannels.of(shape)
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        source, dtype = signature.inputs[x], signature.outputs[0].dtype
        assert source is not None
        assert weights is not None
        rows = wide.shape.steps(tile.bk) * tile.bk

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)  # [k, c, r, s]
            side = np.zeros((shape.k, shape.s, wide.channels, shape.r), np.float32)
            side[:, :, : shape.c] = given.transpose(0, 3, 1, 2)
            return pack_weights(side.reshape(shape.k, shape.s * wide.channels, shape.r, 1), tile.bk, dtype.numpy)

        packed = (
            make_packed_array(f"{weights.constant().digest}|stem {wide.channels} {tile.bk} {dtype}", shape.k * rows * 2, filters),
            make_packed_bias(epilogue, own, shape.k),
        )
        constants = {"FROM": TYPE[source.dtype.name], "TO": TYPE[dtype.name], "CP": wide.channels, "NHWC": int(source.format == "nhwc")}
        pixels = shape.n * shape.h * wide.row

        def make(args: Args) -> list:
            line = wide.row * wide.channels * 2
            seen = wide.shape
            windows = make_row_window_map(seen, args.scratch, dtype.name, shape.stride[1] * wide.channels * 2, line, tile.bk, tile.bm)
            grid = (min(count_blocks(pixels, 256), 16 * backend.capabilities.multiprocessors), 1, 1)
            image = StemAsChannelsArguments(args.inputs[x], args.scratch, shape.n, shape.c, shape.h, shape.w, wide=wide.row, left=shape.pad[1])
            return [
                launch("widen", image, constants, grid, 256),
                launch_with_epilogue(tile, seen, View(args.scratch, wide.channels), args, epilogue, dtype, backend, layer.name, input_map=windows),
            ]

        rtol = RTOL[dtype.name] * (1.5 if source.dtype == F32 else 1)  # the image is rounded as well
        return GpuKernel(layer, signature, make, implementation=f"stem wgmma {tile}", packed=packed, scratch=wide.nbytes(), rtol=rtol)
