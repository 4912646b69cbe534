"""Pooling, channels last, eight channels per thread: windows, and means over whole images."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Fields, Float32, Int32, Pointer
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch, list_float_types, make_stored_signature
from whet.tactics.cuda._device.plain_layer import UnfusedTactic
from whet.tactics.cuda.conv._conv import TYPES


@dataclass(frozen=True)
class PoolSizes(Fields):
    """Sizes of a pooling layer."""

    n: Int32
    h: Int32
    w: Int32
    c: Int32
    p: Int32
    q: Int32
    r: Int32
    s: Int32
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    whole: Int32  # average: divide by the whole window, padding included
    end_h: Int32  # limit that includes the padding: h + pad, w + pad
    end_w: Int32


@dataclass(frozen=True)
class PoolArguments(Arguments, kernel="pool.cu"):
    input: ConstPointer
    out: Pointer
    sizes: PoolSizes
    in_zero: Float32 = 0.0
    per_step: Float32 = 1.0
    zero: Float32 = 0.0


@tactic
class Pool(UnfusedTactic):
    """MaxPool, AveragePool, GlobalAveragePool, and ReduceMean over height and width."""

    ops = ("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if len(layer.outputs) != 1 or layer.needs(0).type.rank != 4:
            return "takes two spatial axes and returns no indices"
        if layer.op == "ReduceMean" and _list_axes(layer) != (2, 3):
            return "takes means over height and width"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        outs: tuple[str, ...] = ("nhwc",)
        if _is_global(layer):  # one value a channel: both formats are the same bytes
            outs = ("linear", "nhwc") if layer.outputs[0].type.rank == 4 else ("linear",)
        types = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        if layer.op == "MaxPool" and layer.outputs[0].dtype.name in ("i8", "u8", "f8e4m3"):
            types = [layer.outputs[0].dtype]
        return [make_stored_signature(layer, {0: Operand("nhwc", t)}, Operand(f, t)) for t in types for f in outs]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        channels = layer.needs(0).shape[1]
        if channels % 8:
            return f"{channels} channels; takes a multiple of 8"
        if prod(static_shape(layer.outputs[0].shape)) // 8 >= 2**31:
            return "more than 2**31 groups of eight values"
        return "ceil_mode adds padding, which the kernel does not count" if not _is_global(layer) and counts_ceil_padding(layer) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        n, c, h, w = static_shape(layer.needs(0).shape)
        stored = TYPES[signature.outputs[0].dtype.name]
        entry, constants, grid, sizes = pool_launch(layer, (n, c, h, w), static_shape(layer.outputs[0].shape), stored, stored)

        def make(args: Args) -> list:
            return [launch(entry, PoolArguments(args.inputs[0], args.outputs[0], sizes), constants, grid, 256)]

        return GpuKernel(layer, signature, make, implementation=f"{entry}", rtol=0.0 if layer.op == "MaxPool" else None)


_SIZES = (4, 2, 2, 1, 1, 1)  # bytes of the types of vector.cuh


def pool_launch(
    layer: Layer, source: tuple[int, ...], target: tuple[int, ...], reads: int, stores: int
) -> tuple[str, dict[str, int], tuple[int, int, int], PoolSizes]:
    """Entry, constants, grid and sizes of the launch of a pooling layer between these shapes (nchw) and types (as in vector.cuh)."""
    n, c, h, w = source
    constants = {"TYPE": reads, "TO": stores, "MAX": int(layer.op == "MaxPool"), "R": 0, "S": 0}
    if _is_global(layer):
        return "global_average", constants, (count_blocks(c, 64), n, 1), PoolSizes(n, h, w, c, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, h, w)
    a, (p, q) = layer.attrs, target[2:]
    kernel, strides = a["kernel_shape"], a.get("strides") or (1, 1)
    pads, dilations = a.get("pads") or (0, 0, 0, 0), a.get("dilations") or (1, 1)
    whole = int(bool(a.get("count_include_pad")))
    sizes = PoolSizes(
        n, h, w, c, p, q, kernel[0], kernel[1], strides[0], strides[1], pads[0], pads[1], dilations[0], dilations[1], whole, h + pads[2], w + pads[3]
    )
    constants |= {"R": int(kernel[0]), "S": int(kernel[1])} if kernel[0] * kernel[1] <= 25 else {}
    each = 16 // _SIZES[reads]
    if layer.op == "MaxPool" and reads in (1, 2, 3, 4) and kernel[0] * kernel[1] <= 25 and c % each == 0:
        return "packed_max", constants, (count_blocks(n * p * q * (c // each), 256), 1, 1), sizes
    return "pool", constants, (count_blocks(n * p * q * (c // 8), 256), 1, 1), sizes


def _list_axes(layer: Layer) -> tuple[int, ...]:
    given = layer.attrs.get("axes")
    if given is None and layer.input(1) is not None and layer.needs(1).is_constant:
        given = layer.needs(1).array().reshape(-1).tolist()
    return tuple(sorted(int(a) % 4 for a in given or ()))


def _is_global(layer: Layer) -> bool:
    return layer.op in ("GlobalAveragePool", "ReduceMean")


def counts_ceil_padding(layer: Layer) -> bool:
    """True if an average counts padding that ceil_mode adds."""
    return layer.op == "AveragePool" and bool(layer.attrs.get("ceil_mode")) and bool(layer.attrs.get("count_include_pad"))
