"""Convolution on Hopper's tensor cores (wgmma, TMA), channels last, f16 or bf16, with bias, residual and activation fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import DType
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias, outer_input
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
from whet.tactics.cuda.conv._conv import ConvShape, Groups, RowNorm, View, count_bias_floats, pack_bias, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import ConvConfig, pick_varied
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv._conv_tiles import list_conv_configs, why_not_config

MAX_CONFIGS = 30


def _with_registers(c: ConvConfig) -> ConvConfig | None:
    """The configuration with as many resident blocks as its registers allow; None if not even one fits."""
    return next((fewer for n in range(c.blocks, 0, -1) if (fewer := replace(c, blocks=n)).valid()), None)


@tactic
class Conv(Tactic):
    """One group, two spatial axes, a multiple of 8 channels; any kernel, stride, padding and dilation."""

    ops = ("Conv",)
    version = 1
    channel_alignment = 16

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if head.attrs["group"] != 1:
            return "takes convolutions of one group"
        return why_not_conv(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return list_conv_signatures(layer, "nhwc")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        return epilogue if isinstance(epilogue, str) else refuses(get_conv_shape(layer), epilogue.residual is None)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        shape = get_conv_shape(layer)
        odd = shape.k % 8 != 0
        configs = list_conv_configs(shape, backend.capabilities.multiprocessors)
        if odd:  # only results stored directly from registers can have any address
            plain = [c for c in configs if c.sk == 1 and c.mi == 1 and c.bn <= 128] or [replace(c, sk=1, halo=0, once=0) for c in configs]
            direct = [replace(c, direct=1, outs=1) for c in plain if why_not_config(replace(c, direct=1, outs=1), shape) is None]
            configs = list(dict.fromkeys(c for c in direct if c.valid())) or list(dict.fromkeys(filter(None, map(_with_registers, direct))))
        configs = pick_varied(configs, MAX_CONFIGS)
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if not isinstance(epilogue, str):
            bf16 = signature.outputs[0].dtype.name == "bf16"
            compile_ahead(
                backend,
                [emit_conv_source(c, Features(not shape.plain and not c.halo, epilogue.post_ops.activation[0], bf16, odd=odd)) for c in configs],
            )
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        shape, tile = get_conv_shape(layer), from_config(config)
        reason = epilogue if isinstance(epilogue, str) else refuses(shape, epilogue.residual is None and tile.direct == 1)
        reason = reason or why_not_config(tile, shape)
        if reason or isinstance(epilogue, str):
            raise PlanRefused(str(reason))
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        dtype = signature.outputs[0].dtype
        rows = shape.steps(tile.bk) * tile.bk
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|conv krsc {tile.bk} {dtype}",
                shape.k * rows * 2,
                lambda: pack_weights(np.asarray(weights.array(), np.float32), tile.bk, dtype.numpy),
            ),
            make_packed_bias(epilogue, own, shape.k),
        )

        def make(args: Args) -> list:
            return [launch_with_epilogue(tile, shape, View(args.inputs[x], shape.c), args, epilogue, dtype, backend, layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma {tile}", packed=packed)


def launch_with_epilogue(
    tile: ConvConfig,
    shape: ConvShape,
    x: View,
    args: Args,
    epilogue: Epilogue,
    dtype: DType,
    backend: Backend,
    label: str,
    *,
    out_f32: bool = False,
    input_map: bytes | None = None,
    groups: Groups | None = None,
    norm: RowNorm | None = None,
    gated: bool = False,
) -> Launch:
    """`make_conv_launch` of 16-bit floats with this epilogue; the first packed operands are weights and biases, the result is the first output."""
    problem = ConvProblem(
        shape=shape,
        input=x,
        weights=args.packed[0],
        bias=args.packed[1],
        output=View(args.outputs[0], shape.k),
        residual=None if epilogue.residual is None else View(args.inputs[epilogue.residual], shape.k),
        post_ops=epilogue.post_ops,
        bf16=dtype.name == "bf16",
        out_f32=out_f32,
        input_map=input_map,
        groups=groups,
        norm=norm,
        gated=gated,
    )
    return make_conv_launch(tile, problem, multiprocessors=backend.capabilities.multiprocessors, label=label)


def why_not_packable(layer: Layer, head: Layer) -> str | None:
    """Why weights or bias cannot be packed at build time, or None."""
    places = [outer_input(layer, t) for t in head.inputs[1:3] if t is not None]
    if any(i is None or not layer.needs(i).is_constant for i in places):
        return "the weights are computed at run time"
    return None


def why_not_conv(layer: Layer, head: Layer) -> str | None:
    """Why these kernels cannot compute a convolution, or None: they need two spatial axes, packed weights and an epilogue that is a chain."""
    if head.needs(0).type.rank != 4:
        return "takes convolutions of two spatial axes"
    return why_not_packable(layer, head) or (None if find_epilogue_steps(layer) is not None else "its fused operations do not form a chain")


def list_conv_signatures(layer: Layer, source: str, types: Sequence[DType] = FLOAT16_TYPES) -> list[Signature]:
    """Channels last in `types` for the result and the residual; the input in format `source`."""
    steps, head = find_epilogue_steps(layer), get_root_layer(layer)
    x = get_source_index(layer)
    signatures = []
    for dtype in list_float_types([head.inputs[0], layer.outputs[0]], types):
        stored = {p.other: Operand("nhwc", dtype) for p in steps or () if p.other is not None and not layer.needs(p.other).is_constant}
        if any(layer.needs(i).type.rank != 4 for i in stored) or (x in stored and source != "nhwc"):
            continue
        signatures.append(make_stored_signature(layer, {**stored, x: Operand(source, dtype)}, Operand("nhwc", dtype)))
    return signatures


def get_conv_shape(layer: Layer) -> ConvShape:
    """The sizes of a Conv of two spatial axes."""
    head = get_root_layer(layer)
    n, c, h, w = static_shape(head.needs(0).shape)
    k, _, r, s = static_shape(head.needs(1).shape)
    a = head.attrs
    return ConvShape(
        n, h, w, c, k, r, s, tuple(a.get("strides") or (1, 1)), tuple(a.get("pads") or (0, 0, 0, 0)), tuple(a.get("dilations") or (1, 1))
    )


def make_packed_bias(epilogue: Epilogue, own: Any, channels: int, halved: bool = False) -> Any:
    """The packed bias of a layer: zeros when it has none; with `halved` half of it."""
    digest, scale = own.weight.digest if own is not None else "", np.float32(0.5 if halved else 1)
    key = f"bias {digest} {epilogue.key} {channels}" + " halved" * halved
    return make_packed_array(key, count_bias_floats(channels) * 4, lambda: pack_bias(epilogue.bias(own, channels) * scale, channels))


def as_config(c: ConvConfig) -> Config:
    """A tile as a tactic's config."""
    return (
        ("wgs", c.wgs),
        ("mi", c.mi),
        ("bn", c.bn),
        ("bk", c.bk),
        ("stages", c.stages),
        ("sk", c.sk),
        ("blocks", c.blocks),
        ("direct", c.direct),
        ("halo", c.halo),
        *((("size", 1),) if c.size == 1 else ()),
        *((("outs", c.outs),) if c.outs > 1 else ()),
        *((("hold", c.hold),) if c.hold else ()),
        *((("once", c.once),) if c.once else ()),
    )


def from_config(config: Config) -> ConvConfig:
    """The tile of a config. Raises PlanRefused for one that the hardware cannot hold."""
    tile = ConvConfig(**{k: int(v) for k, v in config})
    if not tile.valid():
        raise PlanRefused(f"a multiprocessor cannot hold {tile}")
    return tile
