"""Norms of channels over images relative to the mean of all channels, in two launches: sums of squares of shares of the pixels, then all the rest.

Not measured yet: ConvNeXt V2's row of benchmarks/results/h100/networks.json, with five launches for them, is from before it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.ops._reduce import list_reduced_axes
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import outer_input
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, Float32, Int32, Pointer
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, launch, list_float_types, make_stored_signature
from whet.tactics.cuda.norm.reduce import OPS, ReductionWork, vectorize_walks

_THREADS = 512
_KEPT = 16  # channels of a thread
_LEAST_PIXELS = 32  # of a share


@dataclass(frozen=True)
class ResponseNormArguments(Arguments, kernel="response_norm.cu"):
    parts: ConstFloatPointer  # sums of squares [shares][images][channels]
    out: Pointer
    images: Int32
    channels: Int32
    shares: Int32
    epsilon: Float32


@tactic
class ResponseNorm(Tactic):
    """A multiple of 8 channels up to 8,192, stored next to each other."""

    ops = ("*",)
    composites = ("ResponseNorm",)
    what = "norms of channels relative to their mean"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer) or (form := _find_format(layer)) is None:
            return []
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {0: Operand(form, t)}, Operand(form, t)) for t in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        images, pixels, channels = _count_sizes(layer)
        if channels % 8 or channels > _THREADS * _KEPT:
            return f"{channels} channels; takes a multiple of 8 up to {_THREADS * _KEPT}"
        return None if 0 < images <= 65535 and 0 < images * pixels * channels < 2**31 else f"{images} images of {pixels} pixels"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        work, pixels = _make_sums(layer), _count_sizes(layer)[1]
        most, multiprocessors = max(1, pixels // _LEAST_PIXELS), backend.capabilities.multiprocessors
        return [(("shares", s),) for s in sorted({max(1, min(each * multiprocessors // work.blocks, most)) for each in (1, 2, 4)})]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        images, pixels, channels = _count_sizes(layer)
        work, shares = _make_sums(layer), int(dict(config)["shares"])
        if not 1 <= shares <= min(pixels, 65535):
            raise PlanRefused(f"{shares} shares of {pixels} pixels")
        stored, epsilon = TYPE[signature.outputs[0].dtype.name], _find_epsilon(layer)
        constants = {"TO": stored, "KEPT": -(-channels // _THREADS), "THREADS": _THREADS}

        def make(args: Args) -> list:
            sums = work.launch(args.inputs[0], args.scratch, OPS["ReduceSumSquare"], (stored, TYPE["f32"]), 1, pixels, shares)
            arguments = ResponseNormArguments(args.scratch, args.outputs[0], images, channels, shares, epsilon)
            return [sums, launch("response_norm", arguments, constants, (images, 1, 1), _THREADS, label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"sums, then norms s{shares}", scratch=images * channels * shares * 4)


def _find_channel_axis(layer: Layer) -> int:
    """The axis of the means."""
    return list_reduced_axes(layer.regions["body"].layers[1])[0]


def _find_format(layer: Layer) -> str | None:
    """The format in which the channels of a pixel are next to each other; None if there is none."""
    axis, rank = _find_channel_axis(layer), layer.outputs[0].type.rank
    return "linear" if axis == rank - 1 else "nhwc" if (axis, rank) == (1, 4) else None


def _count_sizes(layer: Layer) -> tuple[int, int, int]:
    """Images, pixels of an image, channels."""
    shape, axis = static_shape(layer.needs(0).shape), _find_channel_axis(layer)
    return shape[0], prod(shape[1:]) // shape[axis], shape[axis]


def _make_sums(layer: Layer) -> ReductionWork:
    """The sums over the pixels for each channel of each image."""
    images, pixels, channels = _count_sizes(layer)
    kept = (1, 1, images, channels), (0, 0, pixels * channels, 1)
    return ReductionWork(*vectorize_walks(kept, ((1, 1, 1, pixels), (0, 0, 0, channels))))


def _find_epsilon(layer: Layer) -> float:
    """What is added to the means."""
    (where,) = (outer_input(layer, t) for t in layer.regions["body"].layers[2].inputs if t is not None and t.maker is None)
    assert where is not None
    return float(layer.needs(where).array().reshape(-1)[0])
