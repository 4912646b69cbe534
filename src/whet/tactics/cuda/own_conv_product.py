"""A convolution of several taps and the 1x1 one behind it in one launch, for few pixels: what lies between stays in a cluster's shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.network import Layer, Tensor
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, anchor, epilogue, outer_input, tactic
from whet.tactics.cuda._body import seen
from whet.tactics.cuda._conv import ConvShape, pack_weights, refuses
from whet.tactics.cuda._conv_product import Tile, product_launch, product_source, tiles_of, unfit
from whet.tactics.cuda._kernel import HALF, Ending, GpuKernel, ahead, all_static, ending, float_types, machine_has, packed_array, same
from whet.tactics.cuda.own_conv import constant_weights, conv_shape, packed_bias

MAX_CONFIGS = 24


@dataclass(frozen=True)
class _Both:
    """The two convolutions as layers of their own, their sizes, what ends them, and where the whole's operands are."""

    first: Layer
    product: Layer
    shape: ConvShape
    k: int
    inner: Ending
    made: Ending
    x: int
    residual: int | None


@tactic
class OwnConvProduct(Tactic):
    """What the pass fuse_conv_product makes: stride 1, no dilation, one group; channels of both in multiples of 64; 16-bit numbers."""

    ops = ("*",)
    hints = ("ConvProduct",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.hint not in self.hints:
            return f"computes a convolution and the product behind it, not {layer.hint or layer.op}"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if not all_static(layer):
            return []
        both = _both(layer)
        if isinstance(both, str):
            return []
        places = [i for i in (both.x, both.residual) if i is not None]
        types = float_types([layer.inputs[both.x], layer.outputs[0]], HALF)
        return [same(layer, {i: Operand("nhwc", t) for i in places}, Operand("nhwc", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        if not machine_has(machine, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        both = _both(layer)
        if isinstance(both, str):
            return both
        if reason := refuses(both.shape):
            return reason
        if not tiles_of(both.shape, both.k, machine.multiprocessors):
            return f"no cluster of blocks shares out {both.shape.m} pixels, {both.shape.c}, {both.shape.k} and {both.k} channels"
        return None

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> Sequence[Config]:
        both = _both(layer)
        if isinstance(both, str):
            return []
        found = tiles_of(both.shape, both.k, machine.multiprocessors)[:MAX_CONFIGS]
        kinds, bf16 = (both.inner.finish.activation[0], both.made.finish.activation[0]), signature.outputs[0].dtype.name == "bf16"
        ahead(machine, [product_source(t, both.shape, *kinds, bf16) for t in found])
        return [_as_config(t) for t in found]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        both, tile = _both(layer), Tile(**{k: int(v) for k, v in config})
        if isinstance(both, str):
            raise PlanRefused(both)
        s, k, dtype = both.shape, both.k, signature.outputs[0].dtype
        if reason := unfit(tile, s, k):
            raise PlanRefused(reason)
        (filters, own_inner), (weights, own) = _constants(both.first), _constants(both.product)

        def packed_weights(t: Tensor, nbytes: int) -> Any:
            digest = t.weight.digest  # type: ignore[union-attr]
            key = f"{digest}|conv krsc 16 {dtype}"
            return packed_array(key, nbytes, lambda: pack_weights(np.asarray(t.array(), np.float32), 16, dtype.numpy))

        packed = (
            packed_weights(filters, s.k * s.r * s.s * s.c * 2),
            packed_bias(both.inner, own_inner, s.k),
            packed_weights(weights, k * s.k * 2),
            packed_bias(both.made, own, k),
        )

        def make(args: Args) -> list:
            addresses = (args.inputs[both.x], *args.packed, args.outputs[0])
            residual = 0 if both.residual is None else args.inputs[both.residual]
            return [product_launch(tile, s, k, addresses, residual, both.inner.finish.activation, both.made.finish, dtype.name == "bf16", layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"own wgmma then wgmma {tile}", packed=packed)


def _as_config(t: Tile) -> Config:
    return (("pixels", t.pixels), ("sk", t.sk), ("groups", t.groups), ("mi", t.mi), ("bk", t.bk), ("stages", t.stages))


def _constants(conv: Layer) -> tuple[Tensor, Tensor | None]:
    """Weights and bias of a convolution that stands alone or is fused."""
    head = anchor(conv)
    w, b = (outer_input(conv, t) for t in (*head.inputs, None)[1:3])
    return conv.inputs[w], None if b is None else conv.inputs[b]  # type: ignore[index,return-value]


def _both(layer: Layer) -> _Both | str:
    """The two convolutions, or why they are none that the kernel takes."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or body.outputs != [body.layers[1].outputs[0]]:
        return "the body is no pair of convolutions"
    first, product = (seen(x, outer) for x in body.layers)
    for view in (first, product):
        head = anchor(view)
        if head.op != "Conv" or head.attrs["group"] != 1 or head.inputs[0].type.rank != 4:  # type: ignore[union-attr]
            return "the kernel takes convolutions of one group over two spatial axes"
        if reason := constant_weights(view, head):
            return reason
    inner, made = ending(first, epilogue(first)), ending(product, epilogue(product))
    if isinstance(inner, str):
        return inner
    if isinstance(made, str):
        return made
    s, behind = conv_shape(first), conv_shape(product)
    if inner.residual is not None or not behind.plain:
        return "the second is not 1x1 without stride and padding, or the first adds something"
    fed = {t: i for i, t in enumerate(layer.inputs)}
    x = first.inputs[outer_input(first, anchor(first).inputs[0])]  # type: ignore[index]
    added = None if made.residual is None else product.inputs[made.residual]
    read = product.inputs[outer_input(product, anchor(product).inputs[0])]  # type: ignore[index]
    if read is not first.outputs[0] or x not in fed or (added and added not in fed):
        return "the second convolution does not read the first alone"
    return _Both(first, product, s, behind.k, inner, made, fed[x], None if added is None else fed[added])
