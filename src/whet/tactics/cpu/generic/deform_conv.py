"""DeformConv in f32. For coverage: otherwise NumPy computes it."""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu.generic._deform_conv_ir import BLOCK, emit_deform_conv_ir
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, Place
from whet.tactics.cpu.generic._pixels_ir import describe_pixels, round_up

_LARGEST = 1 << 31  # elements of a channel
_MOST_THREADS = 64  # with memory of their own
_SAMPLING = 8  # multiplications that take as long as the four reads of a tap


@tactic
class DeformConv(LoopTactic):
    ops = ("DeformConv",)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(layer.inputs) if t is not None)

    def refuses_types(self, layer: Layer) -> str | None:
        return None if all(t is None or t.dtype.name == "f32" for t in layer.inputs) else "computes in f32"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, weights, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
        (batch, channels, height, width), (kernels, _, *kernel), (*_, rows, across) = x, weights, y
        a, taps = layer.attrs, prod(kernel)
        if height * width >= _LARGEST or rows * across >= _LARGEST - BLOCK:
            return f"a channel has {_LARGEST} elements or more"
        strides, dilations, pads = a.get("strides") or (1, 1), a.get("dilations") or (1, 1), a.get("pads") or (0,) * 4
        blocks = -(-rows * across // BLOCK)
        pixel = round_up(channels) + (LANES if a["offset_group"] > 1 else 0)  # a group of channels may end inside of a vector
        items, nbytes = batch * blocks, 4 * (channels * taps * BLOCK + LANES * pixel)
        step = -(-items // _MOST_THREADS)
        has_bias, has_mask = (layer.input(i) is not None for i in (3, 4))
        image = 4 * batch * height * width * pixel
        places: list[Place] = [("scratch", 0), ("input", 1), ("input", 2), ("input", 3) if has_bias else ("table", 0)]
        places += [("input", 4) if has_mask else ("table", 0), ("output", 0), ("scratch", image)]
        numbers = (
            channels, height, width, kernels, rows, across, kernel[1], taps, a["group"], a["offset_group"], *strides, *dilations, *pads[:2], blocks,
            nbytes, pixel,
        )  # fmt: skip
        work = batch * rows * across * channels * taps * (kernels // a["group"] + _SAMPLING)
        ir = emit_deform_conv_ir(has_bias, has_mask)
        launch = Launch("deform_conv", ir, tuple(places), items, numbers, step, work=work)
        pixels = describe_pixels(batch, channels, height * width, pixel, ("scratch", 0))
        return Loops((pixels, launch), (np.zeros(1, np.float32),), image + min(items, _MOST_THREADS) * nbytes, rtol=1e-5)
