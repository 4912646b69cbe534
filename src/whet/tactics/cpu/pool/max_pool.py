"""Max pooling, f32 in blocks of channels: rows first, then columns, or whole windows where these take fewer comparisons.

oneDNN reads every element of every window. 5x5, 104 channels of 20x20: 0.021 to 0.013 ms, 256 channels: 0.043 to 0.021 (Cascade Lake, two threads).
"""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Signature, Stream, tactic
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.onednn._nonfinite import KERNELS, Reference
from whet.tactics.cpu.pool._max_pool_ir import Axis, emit_whole_pool_ir, pool_ir

_WINDOW = 16  # maximum side of a window in pixels, which limits the code size


class PoolKernel(CompiledKernel):
    """A planned pooling; its scratch holds the maxima along rows."""

    serial_work = 1 << 13  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        images, channels, height, width = static_shape(layer.needs(0).shape)
        rows, columns = static_shape(layer.outputs[0].shape)[2:]
        super().__init__(layer, signature, prod((images, channels, rows, columns)), count)
        lanes, (down, across) = get_registers().lanes, make_axes(layer)
        planes = images * -(-channels // lanes)
        is_whole = down.window * across.window <= down.window + down.stride * across.window
        self.implementation = "whole windows" if is_whole else "rows, columns"
        self.items = planes * rows if is_whole else planes
        self.threads = min(self.threads, self.items)
        self.sizes = [height, width, rows, columns]
        self.scratch = 0 if is_whole else planes * height * columns * lanes * 4
        self.ir = (emit_whole_pool_ir if is_whole else pool_ir)(down, across, lanes)

    def enqueue(self, args: Args, stream: Stream) -> None:
        scratch = [args.scratch] if self.scratch else []
        self.launch(stream, self.ir, "pool", args, [("input", 0), ("output", 0), *scratch, *self.sizes, self.items], self.items)


@tactic
class Pool(CompiledTactic):
    ops = ("MaxPool",)
    needs_registers = True

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x, a = layer.inputs[0], layer.attrs
        if layer.op == "Fused" or len(layer.outputs) != 1 or x is None or x.dtype != F32 or x.type.rank != 4:
            return "takes f32 images without an epilogue and without indices"
        if set(a.get("dilations") or (1,)) != {1} or a.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
            return "takes explicit pads and no dilations"
        window = tuple(a["kernel_shape"])
        if max(window) > _WINDOW or any(p >= window[i % 2] for i, p in enumerate(a.get("pads") or (0,) * 4)):
            return f"takes windows of at most {_WINDOW} a side, and pads smaller than the window"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        stored = get_registers().stored
        return [] if self.why_not(layer) or not is_static(layer) else [Signature((stored,), (stored,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        sides = zip(make_axes(layer), static_shape(layer.needs(0).shape)[2:], static_shape(layer.outputs[0].shape)[2:], strict=True)
        return "a window begins after the image" if any((count - 1) * a.stride - a.pad >= side for a, side, count in sides) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> PoolKernel:
        return PoolKernel(layer, signature, backend.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Like oneDNN's kernels: the maximum of NaN and a number is the number."""
        return [{"MaxPool": KERNELS["MaxPool"]}]


def make_axes(layer: Layer) -> tuple[Axis, Axis]:
    """The windows along columns and along rows."""
    a = layer.attrs
    window, strides, pads = a["kernel_shape"], a.get("strides") or (1, 1), a.get("pads") or (0,) * 4
    down, across = (Axis(int(window[i]), int(strides[i]), int(pads[i])) for i in range(2))
    return down, across
