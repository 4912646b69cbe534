"""What the tactics of ConvTranspose share: which layers they take, sizes, and the launch of `conv_transpose.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import DType
from whet.ops.conv_transpose import attributes
from whet.tactics._base import Signature, Tactic
from whet.tactics._fused import anchor, epilogue
from whet.tactics.cuda._device.kernel import ACTIVATIONS, TYPE, Ending, all_static, blocks_of, ending, launch
from whet.tactics.cuda.conv.conv import conv_reason, conv_signatures


@dataclass(frozen=True)
class Transposed:
    """Sizes of a transposed convolution: n images of h x w x c to p x q x k, filters of r x s."""

    n: int
    c: int
    h: int
    w: int
    k: int
    p: int
    q: int
    r: int
    s: int
    group: int
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]

    @staticmethod
    def of(layer: Layer) -> Transposed:
        """For a ConvTranspose of two spatial axes."""
        head = anchor(layer)
        n, c, h, w = static_shape(head.inputs[0].shape)
        _, k, p, q = static_shape(head.outputs[0].shape)
        r, s = static_shape(head.inputs[1].shape)[2:]
        strides, dilations, pads, _ = attributes(head)
        return Transposed(n, c, h, w, k, p, q, r, s, head.attrs["group"], strides, pads[:2], dilations)


class TransposedTactic(Tactic):
    """Base of the tactics; `kinds` are the storage types."""

    ops: tuple[str, ...] = ("ConvTranspose",)
    kinds: tuple[DType, ...] = ()

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        head = anchor(layer)
        return conv_reason(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return conv_signatures(layer, "nhwc", self.kinds)


def end_of(layer: Layer) -> Ending | str:
    """The epilogue, or why it cannot be computed."""
    return ending(layer, epilogue(layer))


def transposed_launch(
    entry: str, t: Transposed, source: int, weights: int, bias: int, residual: int, out: int, made: Ending, kind: DType, label: str
) -> Launch:
    """`entry` ("gather" or "direct") with addresses filled in."""
    vec = 8 if entry == "gather" and t.k % 8 == 0 else 1
    act, low, high = made.finish.activation
    count = t.n * t.p * t.q * t.k // vec
    sizes = (t.h, t.w, t.p, t.q, t.k, t.r, t.s, *t.stride, *t.pad, *t.dilation, t.c, t.c // t.group, t.k // t.group)
    values = (source, weights, bias, residual, out, count, *sizes, made.finish.residual if residual else 0, low, high)
    constants = {"TYPE": TYPE[kind.name], "VEC": vec, "ACT": ACTIVATIONS[act]}
    made_launch = launch("conv_transpose.cu", entry, constants, (blocks_of(count, 256), 1, 1), 256, "<5Qq17i2f", *values)
    made_launch.label = label
    return made_launch
