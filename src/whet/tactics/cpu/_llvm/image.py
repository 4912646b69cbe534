"""Kernels that read images of two to four channels as f32 planes and write their pixels with interleaved channels, in any stored type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Args, Signature, Stream
from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, CompiledKernel
from whet.tactics.cpu._llvm.packing import interleave
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

CHANNELS = (2, 3, 4)
_WORDS = ("source", "target", "samples", "pixels", *LAST_WORDS)
Convert = Callable[[Function, Value], Value]


def why_not_image(x: Tensor) -> str | None:
    """The reason why these kernels do not take a tensor, or None."""
    if x.type.rank < 3 or not isinstance(x.shape[1], int) or x.shape[1] not in CHANNELS:
        return f"takes images of {', '.join(map(str, CHANNELS))} channels"
    return None


class ImageKernel(CompiledKernel):
    """A planned launch over the pixels of all samples. Subclasses have the code."""

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.needs(0).shape)
        super().__init__(layer, signature, prod(shape), count)
        self.samples, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        self.implementation = f"{self.channels} channels"

    def launch_pixels(self, stream: Stream, ir: str, name: str, args: Args) -> None:
        """Records a launch of the function `name` of `emit_image_ir`."""
        words = (("input", 0), ("output", 0), self.samples, self.pixels)
        self.launch(stream, ir, name, args, words, self.pixels, LANES)


def emit_image_ir(name: str, channels: int, stored: Type, make_convert: Callable[[Function, Pointer], Convert]) -> str:
    """`name(context)` for so many channels: 16 pixels at a time, the rest of a thread's share pixel by pixel. `make_convert`, called at the start of
    the function with the address of the packed operand, returns the conversion of loaded values to the `stored` type."""
    module = Module()
    with parallel_kernel(module, name, _WORDS, "pixels") as (f, w):
        end_of_vectors = w.end - (LANES - 1)
        size = w.pixels * channels
        source, target = w.source.as_pointer(FLOAT), w.target.as_pointer(stored)
        convert = make_convert(f, w.packed.as_pointer(FLOAT))
        with f.loop(0, w.samples) as samples:
            x, y = source.at(samples.index * size), target.at(samples.index * size)

            def emit_planes(pixel: Value, lanes: int, x: Pointer = x) -> Sequence[Value]:
                """The stored values of the pixels from `pixel` on, for each channel."""
                return [convert(f, x.load(w.pixels * c + pixel, lanes)) for c in range(channels)]

            with f.loop(w.begin, end_of_vectors, step=LANES) as vectors:
                y.store(interleave(f, emit_planes(vectors.index, LANES)), vectors.index * channels)
            with f.loop(vectors.index, w.end) as rest:
                for c, value in enumerate(emit_planes(rest.index, 1)):
                    y.store(value, rest.index * channels + c)
    return str(module)
