"""The sum of two convolutions as one product on Hopper's tensor cores: a block's last convolution and its projection shortcut in one launch.

The channels of both inputs are consecutive in K, so the accumulators hold the sum: the shortcut is neither stored nor read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_operand_indices, get_root_layer
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, SecondInput, View, pack_bias, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs_of_steps, pick_varied, step_channels
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv.conv import as_config, count_bias_floats, from_config, get_conv_shape, why_not_packable

MAX_CONFIGS = 24


@dataclass(frozen=True)
class _Part:
    """One of the two convolutions: its layer with the outer inputs, sizes, weights, bias and epilogue."""

    layer: Layer
    shape: ConvShape
    x: int  # among the inputs of the whole
    weights: Tensor
    bias: Tensor | None
    epilogue: Epilogue


@tactic
class ConvSum(Tactic):
    """Layers of the pass fuse_conv_sum: two convolutions of one group, at least one of them 1x1 without padding, an Add, an activation."""

    ops = ("*",)
    composites = ("ConvSum",)
    what = "the sum of two convolutions"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        parts = _match_parts(layer)
        if not all_static(layer) or isinstance(parts, str):
            return []
        return [
            make_stored_signature(layer, {p.x: Operand("nhwc", dtype) for p in parts}, Operand("nhwc", dtype))
            for dtype in list_float_types([layer.inputs[parts[0].x], layer.outputs[0]], FLOAT16_TYPES)
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        parts = _match_parts(layer)
        return parts if isinstance(parts, str) else refuses(parts[0].shape) or refuses(parts[1].shape)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        parts = _match_parts(layer)
        if isinstance(parts, str):
            return []
        a, b = parts
        bk = step_channels(max(a.shape.c, b.shape.c), 2)
        m, k, steps, processors = a.shape.m, a.shape.k, a.shape.steps(bk) + b.shape.steps(bk), backend.capabilities.multiprocessors
        order = pick_varied(list_configs_of_steps(m, k, steps, bk, processors), MAX_CONFIGS)
        bf16, kind = signature.outputs[0].dtype.name == "bf16", SecondInput.kind(b.shape)
        compile_ahead(
            backend, [emit_conv_source(c, Features(not a.shape.plain, _make_post_ops(parts).activation[0], bf16, pair=kind)) for c in order]
        )
        return [as_config(c) for c in order]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts, tile = _match_parts(layer), from_config(config)
        if isinstance(parts, str):
            raise PlanRefused(parts)
        a, b = parts
        steps, dtype = a.shape.steps(tile.bk) + b.shape.steps(tile.bk), signature.outputs[0].dtype
        if tile.halo or tile.hold not in (0, steps):
            raise PlanRefused(f"{tile} is no tile of {steps} steps over two inputs")

        def weights() -> np.ndarray:
            rows = [pack_weights(np.asarray(p.weights.array(), np.float32), tile.bk, dtype.numpy).reshape(a.shape.k, -1) for p in parts]
            return np.concatenate(rows, axis=1)

        def bias() -> np.ndarray:
            return pack_bias(a.epilogue.bias(a.bias, a.shape.k) + b.epilogue.bias(b.bias, a.shape.k), a.shape.k)

        key = "+".join(p.weights.constant().digest for p in parts)
        biases = "+".join(t.constant().digest for p in parts for t in (p.bias, *p.epilogue.biases) if t is not None)
        packed = (
            make_packed_array(f"{key}|pair krsc {tile.bk} {dtype}", a.shape.k * steps * tile.bk * 2, weights),
            make_packed_array(f"bias {biases} {a.shape.k}", count_bias_floats(a.shape.k) * 4, bias),
        )

        def make(args: Args) -> list:
            return [
                make_conv_launch(
                    tile,
                    ConvProblem(
                        shape=a.shape,
                        input=View(args.inputs[a.x], a.shape.c),
                        weights=args.packed[0],
                        bias=args.packed[1],
                        output=View(args.outputs[0], a.shape.k),
                        post_ops=_make_post_ops(parts),
                        bf16=dtype.name == "bf16",
                        second=SecondInput(b.shape, View(args.inputs[b.x], b.shape.c)),
                    ),
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            ]

        return GpuKernel(layer, signature, make, implementation=f"wgmma pair {tile}", packed=packed)


def _make_post_ops(parts: tuple[_Part, _Part]) -> PostOps:
    """The activation after the sum: that of the adding convolution."""
    return PostOps(next((p.epilogue.post_ops.activation for p in parts if p.epilogue.residual is not None), parts[0].epilogue.post_ops.activation))


def _match_parts(layer: Layer) -> tuple[_Part, _Part] | str:
    """The two convolutions, the one that must be 1x1 without padding last; or the reason why the kernel cannot compute them."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or body.outputs != [body.layers[1].outputs[0]]:
        return "the body is not a pair of convolutions"
    views = [with_outer_inputs(x, outer) for x in body.layers]
    parts = []
    for view in views:
        head = get_root_layer(view)
        if head.op != "Conv" or head.attrs["group"] != 1 or head.needs(0).type.rank != 4:
            return "takes convolutions of one group and two spatial axes"
        if reason := why_not_packable(view, head):
            return reason
        epilogue = match_epilogue(view, find_epilogue_steps(view))
        if isinstance(epilogue, str):
            return epilogue
        x, w, b = get_operand_indices(view)
        fed = next((i for i, t in enumerate(layer.inputs) if t is view.inputs[x]), None)
        if fed is None:
            return "one convolution reads the other"
        parts.append(_Part(view, get_conv_shape(view), fed, view.needs(w), None if b is None else view.inputs[b], epilogue))
    first, last = parts
    added = last.epilogue.residual
    has_epilogue = first.epilogue.residual is not None or first.epilogue.post_ops != PostOps()
    if has_epilogue or added is None or last.layer.inputs[added] is not views[0].outputs[0]:
        return "the second convolution does not add the first one's result"
    if last.epilogue.post_ops.residual != 1:
        return "the sum follows the activation"
    for order in ((first, last), (last, first)):
        if (order[1].shape.r, order[1].shape.s, *order[1].shape.pad) == (1, 1, 0, 0, 0, 0):
            return order
    return "neither convolution is 1x1 without padding"
