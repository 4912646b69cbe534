"""1x1 convolutions with SiLU behind them, f32 in blocks of 16 channels, by a kernel of our own: convolution and activation in registers.

oneDNN's SiLU behind a convolution costs about thirty instructions for 16 numbers, this one about fifteen; with few input channels, where the
activation is most of the work, that shows: 16 to 96 channels, 112x112: 0.56 to 0.33 ms.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from whet.backends.cpu import threads
from whet.network import F32, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, Tactic, anchor, epilogue, operand_bytes, outer_input, tactic
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._kernel import f32_of, static
from whet.tactics.cpu._pointwise_kernel import STEP, TILES, pointwise_ir
from whet.tactics.cpu._silu_kernel import WIDE

_STORED = Operand("nChw16c", F32)
_SMALL = 1 << 18  # multiplications that one thread has done before the others are there


class PointwiseKernel:
    """A planned convolution; its packed operand holds weights and biases in groups of `blocks` of 16 output channels."""

    scratch, rtol, deterministic = 0, 1e-5, True

    def __init__(self, layer: Layer, signature: Signature, blocks: int, tile: int, count: int) -> None:
        head = anchor(layer)
        places = [outer_input(layer, t) for t in (*head.inputs, None)[:3]]
        self.x = places[0]
        weights, bias = (None if p is None else layer.inputs[p] for p in places[1:])
        assert weights is not None
        self.inputs = tuple(0 if t is None else operand_bytes(t, o) for t, o in zip(layer.inputs, signature.inputs, strict=True))
        self.outputs = (operand_bytes(layer.outputs[0], signature.outputs[0]),)
        images, channels, *sides = static_shape(layer.outputs[0].shape)
        pixels, taps = prod(sides), static_shape(weights.shape)[1]
        tiles, groups = -(-pixels // tile), channels // (blocks * WIDE)
        items = images * groups * tiles
        self.threads = min(count, items) if images * channels * pixels * taps > _SMALL else 1
        self.sizes = [pixels, -(-taps // WIDE), channels // WIDE, taps, tiles, groups, items, -(-items // self.threads)]
        key = f"{digest(weights)}|{'' if bias is None else digest(bias)}|pointwise {blocks}"
        self.packed = (Packed(key, groups * (taps + 1) * blocks * WIDE * 4, lambda: packed(weights, bias, blocks).view(np.uint8)),)
        self.ir = pointwise_ir(blocks, tile, _jit.has("avx512f"))
        self.implementation = f"own:{blocks * WIDE} channels x {tile} pixels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        ask = threads.address("omp_get_thread_num") if self.threads > 1 else _jit.address(self.ir, "first")
        assert self.x is not None
        context = [args.inputs[self.x], args.packed[0], args.outputs[0], *self.sizes, ask]
        operands = {("input", self.x): 0, ("output", 0): 2}
        stream.record(_jit.ParallelCall(_jit.address(self.ir, "pointwise"), context, operands, self.threads, self.implementation))


@tactic
class Pointwise(Tactic):
    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
        if said:
            return said
        head = anchor(layer)
        if any(not layer.inputs[i].is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if not ends_in_silu(layer):
            return "is for convolutions with SiLU behind them, and nothing else: oneDNN has the others at the peak"
        a = head.attrs
        plain = a["group"] == 1 and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or (0,))
        if head.inputs[0].type.rank != 4 or tuple(head.inputs[1].shape[2:]) != (1, 1) or not plain:
            return "is for 1x1 convolutions of images: one group, no strides, no pads"
        k, c = head.inputs[1].shape[:2]
        if k % WIDE or c % STEP:
            return f"{c} to {k} channels: it takes multiples of {STEP} and gives multiples of {WIDE}"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer):
            return []
        x = outer_input(layer, anchor(layer).inputs[0])
        return [Signature(tuple(_STORED if i == x else None for i in range(len(layer.inputs))), (_STORED,))]

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        if not _jit.has("avx512f"):
            return "its tile of 24 sums needs the 32 registers of AVX-512"
        return None if self.configs(layer, signature, machine) else "the image has fewer pixels than the smallest tile"

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> list[Config]:
        _, channels, *sides = static_shape(layer.outputs[0].shape)
        return [(("blocks", b), ("pixels", p)) for b, p in TILES if channels % (b * WIDE) == 0 and prod(sides) >= p]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> PointwiseKernel:
        chosen = dict(config)
        return PointwiseKernel(layer, signature, int(chosen["blocks"]), int(chosen["pixels"]), machine.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing: NaN and infinities give what the ops give."""
        return [{}]

    def library_version(self) -> str:
        return _jit.version()


def packed(weights: Tensor, bias: Tensor | None, blocks: int) -> np.ndarray:
    """Per group of `blocks`: for each input channel 16 output channels of each block, then the biases. f32, flat."""
    w = f32_of(weights)
    channels, taps, group = w.shape[0], w.shape[1], blocks * WIDE
    b = np.zeros(channels, np.float32) if bias is None else f32_of(bias).reshape(channels)
    rows = np.concatenate([w.reshape(channels, taps).T, b[None]])  # [taps + 1, channels]
    return np.ascontiguousarray(rows.reshape(taps + 1, channels // group, group).transpose(1, 0, 2)).reshape(-1)


def ends_in_silu(layer: Layer) -> bool:
    """Whether SiLU is all that is fused behind the convolution."""
    steps = epilogue(layer)
    if steps is None or len(steps) != 1 or steps[0].other is not None:
        return False
    return steps[0].op == "Silu" or (steps[0].op == "Swish" and float(steps[0].attrs.get("alpha", 1.0)) == 1.0)


def digest(tensor: Tensor) -> str:
    """What a constant is known by."""
    assert tensor.weight is not None
    return tensor.weight.digest
