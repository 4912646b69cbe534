"""Shared by the tactics of ConvTranspose: the layers they take, sizes, and the launch of `conv_transpose.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import DType
from whet.ops.conv_transpose import get_window_attributes
from whet.tactics._base import Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import ACTIVATIONS, TYPE, Epilogue, all_static, count_blocks, launch, match_epilogue
from whet.tactics.cuda.conv.conv import list_conv_signatures, why_not_conv


@dataclass(frozen=True)
class ConvTransposeArguments(Arguments, kernel="conv_transpose.cu"):
    input: ConstPointer  # gather: columns; direct: the input
    weights: ConstFloatPointer  # direct: [tap][channel of a group][k]
    bias: ConstFloatPointer  # [k]
    residual: ConstPointer
    out: Pointer
    count: Int64  # outputs, in groups of VEC
    h: Int32  # input and output sizes, output channels
    w: Int32
    p: Int32
    q: Int32
    k: Int32
    r: Int32
    s: Int32
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    c: Int32  # direct: input channels, those of a group, output channels of a group
    group_c: Int32
    group_k: Int32
    has_residual: Int32  # 1: added before the activation, 2: after it
    act: ActivationParameters


@dataclass(frozen=True)
class Transposed:
    """Sizes of a transposed convolution: n samples of h x w x c to p x q x k, filters of r x s."""

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
        head = get_root_layer(layer)
        n, c, h, w = static_shape(head.needs(0).shape)
        _, k, p, q = static_shape(head.outputs[0].shape)
        r, s = static_shape(head.needs(1).shape)[2:]
        strides, dilations, pads, _ = get_window_attributes(head)
        return Transposed(n, c, h, w, k, p, q, r, s, head.attrs["group"], strides, pads[:2], dilations)


class TransposedTactic(Tactic):
    """Base of the tactics; `kinds` are the storage types."""

    ops: tuple[str, ...] = ("ConvTranspose",)
    kinds: tuple[DType, ...] = ()

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        return why_not_conv(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return list_conv_signatures(layer, "nhwc", self.kinds)


def match_transposed_epilogue(layer: Layer) -> Epilogue | str:
    """The epilogue, or why it cannot be computed."""
    return match_epilogue(layer, find_epilogue_steps(layer))


def make_transposed_launch(
    entry: str, t: Transposed, source: int, weights: int, bias: int, residual: int, out: int, epilogue: Epilogue, kind: DType, label: str
) -> Launch:
    """`entry` ("gather" or "direct") with addresses filled in."""
    vec = 8 if entry == "gather" and t.k % 8 == 0 else 1
    count = t.n * t.p * t.q * t.k // vec
    sizes = (t.h, t.w, t.p, t.q, t.k, t.r, t.s, *t.stride, *t.pad, *t.dilation, t.c, t.c // t.group, t.k // t.group)
    activation, low, high = epilogue.post_ops.activation
    arguments = ConvTransposeArguments(
        source, weights, bias, residual, out, count, *sizes, has_residual=epilogue.post_ops.residual if residual else 0, act=(low, high)
    )
    constants = {"TYPE": TYPE[kind.name], "VEC": vec, "ACT": ACTIVATIONS[activation]}
    return launch(entry, arguments, constants, (count_blocks(count, 256), 1, 1), 256, label=label)
