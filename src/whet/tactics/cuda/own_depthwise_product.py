"""A depthwise convolution and the 1x1 convolution behind it in one launch: what lies between them never leaves the multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.network import Layer, Tensor
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, anchor, epilogue, outer_input, tactic
from whet.tactics.cuda._body import seen
from whet.tactics.cuda._conv import ConvShape, pack_weights
from whet.tactics.cuda._depthwise_product import configs_of, depthwise_launch, pack_depthwise, source_of, unfit
from whet.tactics.cuda._kernel import HALF, Ending, GpuKernel, ahead, all_static, ending, float_types, machine_has, packed_array, same
from whet.tactics.cuda.own_conv import as_config, constant_weights, conv_shape, from_config, packed_bias

MAX_CONFIGS = 24
_MOST_TAPS = 25


@dataclass(frozen=True)
class _Both:
    """The two convolutions as layers of their own, their sizes, what ends them, and where the whole's operands are."""

    depthwise: Layer
    product: Layer
    shape: ConvShape
    k: int
    inner: Ending
    made: Ending
    x: int
    residual: int | None


@tactic
class OwnDepthwiseProduct(Tactic):
    """What the pass fuse_depthwise_product makes: as many groups as channels, stride 1 or 2, no dilation; 16-bit numbers."""

    ops = ("*",)
    hints = ("DepthwiseProduct",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.hint not in self.hints:
            return f"computes a depthwise convolution and the product behind it, not {layer.hint or layer.op}"
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
        s = both.shape
        if s.c % 8 or both.k % 8:
            return f"{s.c} channels inside and {both.k} out: they come in eights"
        if s.stride not in ((1, 1), (2, 2)) or s.dilation != (1, 1) or s.r * s.s > _MOST_TAPS:
            return f"stride {s.stride}, dilation {s.dilation}, filter {s.r} x {s.s}: 1 or 2, none, at most {_MOST_TAPS} taps"
        return None

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> Sequence[Config]:
        both = _both(layer)
        if isinstance(both, str):
            return []
        found = configs_of(both.shape, both.k, machine.multiprocessors)[:MAX_CONFIGS]
        kinds, bf16 = (both.inner.finish.activation[0], both.made.finish.activation[0]), signature.outputs[0].dtype.name == "bf16"
        ahead(machine, [source_of(c, both.shape, both.k, *kinds, bf16) for c in found])
        return [as_config(c) for c in found]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        both, tile = _both(layer), from_config(config)
        if isinstance(both, str):
            raise PlanRefused(both)
        if reason := unfit(tile, both.shape, both.k):
            raise PlanRefused(reason)
        s, k, dtype = both.shape, both.k, signature.outputs[0].dtype
        taps, own_inner = _constants(both.depthwise)
        weights, own = _constants(both.product)
        steps = -(-s.c // tile.bk)
        inner_key = f"{taps.weight.digest} {own_inner.weight.digest if own_inner else ''} {both.inner.key}"  # type: ignore[union-attr]
        packed = (
            packed_array(
                f"{inner_key}|depthwise steps {tile.bk}",
                steps * (s.r * s.s + 1) * tile.bk * 4,
                lambda: pack_depthwise(np.asarray(taps.array(), np.float32), both.inner.bias(own_inner, s.c), tile.bk),
            ),
            packed_array(
                f"{weights.weight.digest}|conv krsc {tile.bk} {dtype}",  # type: ignore[union-attr]
                k * steps * tile.bk * 2,
                lambda: pack_weights(np.asarray(weights.array(), np.float32), tile.bk, dtype.numpy),
            ),
            packed_bias(both.made, own, k),
        )

        def make(args: Args) -> list:
            addresses = (args.inputs[both.x], *args.packed, args.outputs[0])
            residual = 0 if both.residual is None else args.inputs[both.residual]
            endings = (both.inner.finish.activation, both.made.finish)
            return [depthwise_launch(tile, s, k, addresses, residual, *endings, dtype.name == "bf16", machine.multiprocessors, layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"own depthwise and wgmma {tile}", packed=packed)


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
    depthwise, product = (seen(x, outer) for x in body.layers)
    for view in (depthwise, product):
        if anchor(view).op != "Conv" or anchor(view).inputs[0].type.rank != 4:  # type: ignore[union-attr]
            return "the kernel takes convolutions of two spatial axes"
        if reason := constant_weights(view, anchor(view)):
            return reason
    inner, made = ending(depthwise, epilogue(depthwise)), ending(product, epilogue(product))
    if isinstance(inner, str):
        return inner
    if isinstance(made, str):
        return made
    s, behind = conv_shape(depthwise), conv_shape(product)
    if inner.residual is not None or anchor(depthwise).attrs["group"] != s.c or s.k != s.c or not behind.plain or anchor(product).attrs["group"] != 1:
        return "no depthwise convolution with a 1x1 one behind it"
    fed = {t: i for i, t in enumerate(layer.inputs)}
    x = depthwise.inputs[outer_input(depthwise, anchor(depthwise).inputs[0])]  # type: ignore[index]
    added = None if made.residual is None else product.inputs[made.residual]
    if product.inputs[outer_input(product, anchor(product).inputs[0])] is not depthwise.outputs[0] or x not in fed or (added and added not in fed):  # type: ignore[index]
        return "the second convolution does not read the first alone"
    return _Both(depthwise, product, s, behind.k, inner, made, fed[x], None if added is None else fed[added])
