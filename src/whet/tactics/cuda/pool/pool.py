"""Pooling, channels last, eight channels per thread: windows, and means over whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Fields, Float32, FloatPointer, Int32, Pointer
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
    parts: FloatPointer = 0  # sums of several shares of the pixels
    shares: Int32 = 1


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

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        return list_pool_configs(layer, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        stored = TYPES[signature.outputs[0].dtype.name]
        work = make_pool_work(layer, static_shape(layer.outputs[0].shape), stored, stored, config)

        def make(args: Args) -> list:
            return work.launches(args.inputs[0], args)

        name = work.entry + (f" s{work.shares}" if work.shares > 1 else "")
        return GpuKernel(layer, signature, make, implementation=name, scratch=work.scratch, rtol=0.0 if layer.op == "MaxPool" else None)


_SIZES = (4, 2, 2, 1, 1, 1)  # bytes of the types of vector.cuh
_LEAST_PIXELS = 128  # of a share: four for each thread


@dataclass(frozen=True)
class PoolWork:
    """The launches of a pooling layer: entry, constants, grid and sizes; with several shares of the pixels, `shares` partial sums of each value."""

    entry: str
    constants: dict[str, int]
    grid: tuple[int, int, int]
    sizes: PoolSizes
    shares: int = 1

    @property
    def scratch(self) -> int:
        """Bytes of the partial sums."""
        return self.sizes.n * self.sizes.c * self.shares * 4 if self.shares > 1 else 0

    def launches(self, source: int, args: Args, in_zero: float = 0.0, per_step: float = 1.0, zero: float = 0.0) -> list[Launch]:
        """The launches for these addresses."""
        arguments = PoolArguments(source, args.outputs[0], self.sizes, in_zero, per_step, zero, args.scratch, self.shares)
        work = [launch(self.entry, arguments, self.constants, self.grid, 256)]
        if self.shares > 1:
            work.append(launch("join_averages", arguments, self.constants, (count_blocks(self.sizes.n * self.sizes.c, 256), 1, 1), 256))
        return work


def list_pool_configs(layer: Layer, backend: Backend) -> list[Config]:
    """One configuration; for means over images with few blocks also shares of the pixels, for about one and four blocks per multiprocessor."""
    n, c, h, w = static_shape(layer.needs(0).shape)
    blocks, most = count_blocks(c, 64) * n, h * w // _LEAST_PIXELS
    shares = {min(each * backend.capabilities.multiprocessors // blocks, most) for each in (1, 4)} if _is_global(layer) else set()
    return [(), *((("shares", s),) for s in sorted(shares) if s > 1)]


def make_pool_work(layer: Layer, target: tuple[int, ...], reads: int, stores: int, config: Config) -> PoolWork:
    """The launches of a pooling layer into this shape (nchw), between these types (as in vector.cuh). Raises PlanRefused for shares that are none."""
    n, c, h, w = static_shape(layer.needs(0).shape)
    constants = {"TYPE": reads, "TO": stores, "MAX": int(layer.op == "MaxPool"), "R": 0, "S": 0}
    shares = int(dict(config).get("shares", 1))
    if not 1 <= shares <= (min(h * w, 65535) if _is_global(layer) else 1):
        raise PlanRefused(f"{shares} shares of {h * w} pixels")
    if _is_global(layer):
        sizes = PoolSizes(n, h, w, c, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, h, w)
        return PoolWork("global_average", constants, (count_blocks(c, 64), n, shares), sizes, shares)
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
        return PoolWork("packed_max", constants, (count_blocks(n * p * q * (c // each), 256), 1, 1), sizes)
    return PoolWork("pool", constants, (count_blocks(n * p * q * (c // 8), 256), 1, 1), sizes)


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
