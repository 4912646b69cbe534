"""Transposed convolutions of lines, images and volumes, of all windows, groups, strides, dilations and pads, f32 channels last: for CPUs without
oneDNN.

With a stride of s, every s-th result along an axis reads the same taps of the window. So there is one convolution without a stride for each position
of a result modulo the strides, with those taps alone, and no product with a zero between pixels is computed.
"""

from __future__ import annotations

from itertools import product
from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import Args, Signature, Stream, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Parts, Places, Problem, Weights, Window, as_image

AxisTaps = tuple[tuple[int, ...], int, int]
"""The taps of a window's axis that some results read, in the order of the pixels; the distance of these pixels; the pixel before the first result."""


class TransposedKernel(CompiledKernel):
    """A planned layer: a launch for each position of a result modulo the strides."""

    serial_work = 1 << 16  # multiplications

    def __init__(self, layer: Layer, signature: Signature, parts: list[IndirectKernel], count: int) -> None:
        super().__init__(layer, signature, 0, count)
        self.parts, self.rtol = parts, parts[0].rtol
        self.packed = tuple(p.packed[0] for p in parts)
        self.scratch = max(p.scratch for p in parts)
        self.threads = max(p.threads for p in parts)
        self.implementation = f"{len(parts)} convolutions, {parts[0].implementation}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        for part, packed in zip(self.parts, args.packed, strict=True):
            part.enqueue(Args(args.inputs, args.outputs, (packed,), args.scratch), stream)


@tactic
class TransposedConv(IndirectTactic):
    ops = ("ConvTranspose",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(not layer.needs(i).is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        return None if head.needs(0).type.rank in (3, 4, 5) else "takes lines, images and volumes"

    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> TransposedKernel:
        layer, head = parts.view, get_root_layer(parts.view)
        a, groups, rank = head.attrs, int(head.attrs["group"]), head.needs(0).type.rank - 2
        samples, taken, *image = static_shape(head.needs(0).shape)
        (_, each, *window), result = static_shape(head.needs(1).shape), static_shape(layer.outputs[0].shape)[2:]
        sides, whole, size = as_image(image), as_image(result), as_image(window)
        strides, dilations = (as_image(a.get(name) or (1,) * rank) for name in ("strides", "dilations"))
        pads = as_image((a.get("pads") or (0,) * rank)[:rank], 0)
        is_depthwise = groups == taken and each == 1
        channels = (1, 1, groups) if is_depthwise else (groups, taken // groups, each)
        weights, bias = get_weight_and_bias(layer)
        kernels = []
        for first in product(*map(range, map(min, strides, whole))):
            axes = [find_axis_taps(*axis) for axis in zip(first, size, strides, dilations, pads, sides, whole, strict=True)]
            taps = tuple(_find_index(t, size) for t in product(*(used for used, _, _ in axes)))
            results = tuple(-(-(n - f) // s) for n, f, s in zip(whole, first, strides, strict=True))
            shape = Window(tuple(len(used) for used, _, _ in axes), (1,) * len(size), tuple(d for _, d, _ in axes), tuple(p for _, _, p in axes))
            problem = Problem(samples, sides, results, *channels, shape, Places(whole, strides, first))
            own = Weights(weights, bias, scattered=groups, taps=taps)
            kind = "channelwise" if is_depthwise else "product"
            kernels.append(IndirectKernel(layer, signature, kind, problem, parts.chain, get_source_index(layer), own, threads))
        return TransposedKernel(layer, signature, kernels, threads)


def find_axis_taps(first: int, size: int, stride: int, dilation: int, pad: int, side: int, whole: int) -> AxisTaps:
    """For the results first, first + stride, ... of an axis: result first + q * stride reads pixel q + (first + pad - tap * dilation) / stride, where
    that is an integer. If no tap is read, the only one of the window is outside of the image."""
    pixels = {(first + pad - tap * dilation) // stride: tap for tap in range(size) if (first + pad - tap * dilation) % stride == 0}
    if not pixels:
        return (0,), 1, side + whole
    offsets = sorted(pixels)
    return tuple(pixels[o] for o in offsets), offsets[1] - offsets[0] if len(offsets) > 1 else 1, -offsets[0]


def _find_index(tap: tuple[int, ...], size: tuple[int, ...]) -> int:
    """The index of a tap in row-major order."""
    return sum(t * prod(size[k + 1 :]) for k, t in enumerate(tap))
