"""Launches of conv.cu: the text of an instance, its tensor maps, and the arguments for one shape, configuration and addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import MAX_SHARED, Kernel, Launch, Module
from whet.errors import BackendError
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstPointer,
    Fields,
    Float32,
    Int32,
    Pointer,
    TensorMap,
    When,
)
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import (
    NO_POST_OPS,
    Between,
    ConvShape,
    EightBitTypes,
    Groups,
    PostOps,
    RowNorm,
    Scales,
    SecondInput,
    SecondOutput,
    View,
)
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_tiles import Halo
from whet.tactics.cuda.conv._window_map import make_window_map


@dataclass(frozen=True)
class LayerFields(Fields):
    """Sizes and epilogue of a layer, for conv.cu and conv_tf32.cu."""

    res_pitch: Int32  # elements
    out_pitch: Int32
    m: Int32  # pixels
    n: Int32  # output channels
    steps: Int32  # K steps in all
    csteps: Int32  # K steps of one filter tap
    taps_w: Int32  # filter width
    pixels: Int32  # output pixels of an image
    width: Int32  # output width
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    tiles: Int32
    tiles_n: Int32
    has_residual: Int32  # 1: added before the activation, 2: after it
    act: ActivationParameters

    @classmethod
    def of(cls, shape: ConvShape, out: View, residual: View | None, post_ops: PostOps, steps: tuple[int, int], tiles: tuple[int, int]) -> LayerFields:
        """`steps`: K steps in all, and those of this shape (a second input has the others). `tiles`: in all, and along the output channels."""
        return cls(
            res_pitch=0 if residual is None else residual.pitch,
            out_pitch=out.pitch,
            m=shape.m,
            n=shape.k,
            steps=steps[0],
            csteps=steps[1] // (shape.r * shape.s),
            pixels=shape.p * shape.q,
            width=shape.q,
            **shape.window,
            tiles=tiles[0],
            tiles_n=tiles[1],
            has_residual=0 if residual is None else post_ops.residual or 1,
            act=post_ops.activation[1:],
        )


@dataclass(frozen=True)
class GroupFields(Fields):
    """A convolution of several groups."""

    group_k: Int32  # output channels of a group
    group_c: Int32  # input channels of a group


@dataclass(frozen=True)
class SecondInputFields(Fields):
    """A second input; its K steps come last."""

    second: TensorMap
    first_steps: Int32
    second_stride_h: Int32
    second_stride_w: Int32


@dataclass(frozen=True)
class DepthwiseFields(Fields):
    """The depthwise convolution that computes the input."""

    depthwise: ConstFloatPointer  # [K steps][taps and a bias][BK]
    dw_act: ActivationParameters
    slot_wide: Int32  # pixels from row to row in an input tile (`wide`: from row to row of its results)


@dataclass(frozen=True)
class SecondOutputFields(Fields):
    """The second output."""

    fork: TensorMap  # as `d`
    second_out: Pointer  # SK > 1 or DIRECT, as `out`
    second_from: Int32  # its first output channel
    second_pitch: Int32  # elements from pixel to pixel


@dataclass(frozen=True)
class NormFields(Fields):
    """The normalization of the rows of the input."""

    column_sums: ConstFloatPointer  # [tiles_n * BN]: of the weights
    per_channel: Float32  # 1 / number of channels
    epsilon: Float32


@dataclass(frozen=True)
class ConvArguments(Arguments, kernel="conv.cu"):
    a: TensorMap  # input
    b: TensorMap  # weights
    d: TensorMap  # output
    r: TensorMap  # residual
    bias: ConstFloatPointer  # [tiles_n * BN]
    residual: ConstPointer  # SK > 1 only: plain addresses, pitches in elements
    out: Pointer
    layer: LayerFields
    wide: Int32  # HALO: pixels from row to row in a tile
    rows: Int32  # HALO: output rows of a tile
    height: Int32  # HALO: output height
    slot_bytes: Int32  # HALO: bytes of an input slot
    box_bytes: Int32  # HALO: bytes that a copy fills
    groups: Annotated[GroupFields | None, When("GROUPED")] = None
    scales: Annotated[Scales | None, When("IN8")] = None
    second: Annotated[SecondInputFields | None, When("SECOND_INPUT")] = None
    between: Annotated[Between | None, When("BETWEEN")] = None
    depthwise: Annotated[DepthwiseFields | None, When("DW")] = None
    fork: Annotated[SecondOutputFields | None, When("DUAL_OUTPUT")] = None
    norm: Annotated[NormFields | None, When("NORM")] = None


@dataclass(frozen=True)
class Features:
    """Macros of an instance of conv.cu in addition to those of its configuration."""

    im2col: bool = False
    activation: str = "clip"
    bf16: bool = False
    out_f32: bool = False
    odd: bool = False  # any number of output channels
    types8: EightBitTypes | None = None
    grouped: bool = False
    pair: int = 0  # a second input: 1 of stride 1, 2 of any stride
    between: bool = False
    fork: int = 0  # channels of a panel of two outputs
    norm: int = 0  # rows of the input are normalized: 1 layer norm, 2 root mean square
    gated: bool = False  # the residual after the activation is multiplied

    def shared(self, config: ConvConfig) -> int:
        """Bytes of dynamic shared memory of an instance without input tiles of all taps."""
        staged = config.sk == 1 and not config.direct and self.types8 is not None
        wider = config.outs * config.bm * config.bn * (self.types8.result_bytes - config.size) if staged and self.types8 is not None else 0
        return config.shared + wider + (config.wgs * config.bn * 4 + (config.bm * 8 if config.sk > 1 else 0) + 16 if self.norm else 0)


def emit_conv_source(config: ConvConfig, features: Features) -> str:
    """The kernel's complete text."""
    f = features
    constants = config.constants(im2col=f.im2col, act=ACTIVATIONS[f.activation], bf16=f.bf16, out_f32=f.out_f32, odd=f.odd)
    more = {"GROUPED": int(f.grouped), "SECOND_INPUT": f.pair, "BETWEEN": int(f.between), "DUAL_OUTPUT": f.fork}
    more |= {"NORM": f.norm, "GATED": int(f.gated)}
    if f.between:
        constants["CHAINS"] = 1  # both accumulators are in registers at once
    return emit_kernel_source("conv.cu", {**constants, **({} if f.types8 is None else f.types8.constants()), **{k: v for k, v in more.items() if v}})


@per_device
def load_conv_kernel(config: ConvConfig, features: Features) -> Kernel:
    """The loaded kernel of `emit_conv_source`; compiled on first use, then kept."""
    code = compile_cubin(emit_conv_source(config, features), name=f"conv_{config}.cu")
    return Module(code).kernel("conv", MAX_SHARED if config.halo else features.shared(config))


@dataclass(frozen=True, kw_only=True)
class ConvProblem:
    """A convolution with its addresses; parts that are None or 0 are not computed. Weights and bias are packed (pack_weights, pack_bias).

    16-bit floats unless `types8` names the types of 8-bit operands; their weights are packed by pack_weights8 and `scales` belongs to them.
    With `second` each row has the weights of both convolutions, one after the other, and the bias is the sum of both.
    """

    shape: ConvShape
    input: View
    weights: int
    bias: int
    output: View
    residual: View | None = None
    post_ops: PostOps = NO_POST_OPS
    bf16: bool = False
    out_f32: bool = False
    input_map: bytes | None = None  # replaces the tensor map of the input; its window positions must be those of `shape`
    types8: EightBitTypes | None = None
    scales: Scales | None = None
    groups: Groups | None = None  # weights packed by group_conv
    second: SecondInput | None = None
    fork: SecondOutput | None = None  # the last output channels are a second output (1x1, 16-bit floats)
    norm: RowNorm | None = None  # of the rows of a plain input (16-bit floats)
    gated: bool = False  # the residual, which follows the activation, is multiplied (16-bit floats)

    def features(self, config: ConvConfig) -> Features:
        """The macros of the instance that computes this with a configuration."""
        return Features(
            im2col=not config.halo and (self.input_map is not None or not self.shape.plain),
            activation=self.post_ops.activation[0],
            bf16=self.bf16,
            out_f32=self.out_f32,
            odd=self.shape.k % 8 != 0,
            types8=self.types8,
            grouped=self.groups is not None,
            pair=0 if self.second is None else SecondInput.kind(self.second.shape),
            between=self.second is not None and self.second.between is not None,
            fork=0 if self.fork is None else SecondOutput.panel(self.fork.at, config),
            norm=0 if self.norm is None else self.norm.kind,
            gated=self.gated,
        )

    def steps(self, config: ConvConfig) -> tuple[int, int]:
        """K steps in all, and those of the first input."""
        first = self.shape.steps(config.bk)
        return first + (0 if self.second is None else self.second.shape.steps(config.bk)), first


def make_conv_launch(config: ConvConfig, problem: ConvProblem, *, multiprocessors: int, label: str = "") -> Launch:
    """The launch of a problem. Raises BackendError for a configuration that cannot run it."""
    p, shape, features, (steps, first_steps) = problem, problem.shape, problem.features(config), problem.steps(config)
    halo = Halo.of(shape, config) if config.halo else Halo(1, 1, 0, 0)
    if isinstance(halo, str):
        raise BackendError(f"{config} cannot run {shape}: {halo}. This is a mistake in whet: please report it.")
    if config.once and config.once * config.sk != steps:
        raise BackendError(f"{config} has not {steps} steps. This is a mistake in whet: please report it.")
    tiles_n = -(-shape.k // config.bn)
    tiles = tiles_n * (shape.n * -(-shape.p // halo.rows) if config.halo else -(-shape.m // config.bm))
    a, b, d, r = _make_maps(config, problem, halo, steps)
    arguments = ConvArguments(
        a,
        b,
        d,
        r,
        bias=p.bias,
        residual=0 if p.residual is None else p.residual.address,
        out=p.output.address,
        layer=LayerFields.of(shape, p.output, p.residual, p.post_ops, (steps, first_steps), (tiles, tiles_n)),
        wide=halo.wide,
        rows=halo.rows,
        height=shape.p,
        slot_bytes=halo.slot,
        box_bytes=halo.box,
        groups=None if p.groups is None else GroupFields(p.groups.k, p.groups.c),
        scales=p.scales,
        second=None if p.second is None else _make_second_fields(config, p.second, first_steps, _get_tensor_map_type(problem)),
        between=None if p.second is None else p.second.between,
        fork=None if p.fork is None else _fork_fields(config, problem, p.fork),
        norm=None if p.norm is None else NormFields(p.norm.column_sums, 1 / shape.c, p.norm.epsilon),
    )
    grid = tiles * config.sk if config.sk > 1 or config.once else min(tiles, multiprocessors * config.blocks)
    if config.hold:  # a block's tiles have the same output channels
        grid = max(1, grid // tiles_n) * tiles_n
    shared = config.shared_with(halo.slot) if config.halo else -1
    kernel = load_conv_kernel(config, features)
    return Launch(kernel, (grid, 1, 1), config.threads, arguments.pack(), cluster=config.sk, label=label, shared=shared)


def _make_maps(config: ConvConfig, problem: ConvProblem, halo: Halo, steps: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Tensor maps of input, weights, output and residual."""
    p, shape, row = problem, problem.shape, steps * config.bk
    dtype = _get_tensor_map_type(problem)
    whole = shape if p.groups is None else replace(shape, c=p.groups.channels)
    if p.input_map is not None:
        a = p.input_map
    elif config.halo:
        pixel, size = p.input.pitch * config.size, (whole.c, shape.w, shape.h, shape.n)
        strides = (pixel, pixel * shape.w, pixel * shape.w * shape.h)
        a = tensormap.make_tiled_map(p.input.address, dtype, size, strides, (config.bk, halo.wide, halo.rows + shape.r - 1, 1))
    else:
        a = make_window_map(whole, p.input, dtype, config.bk, config.bm)
    filters = -(-shape.k // 32) * 32 if p.types8 else shape.k
    b = tensormap.make_tiled_map(p.weights, dtype, (row, filters), (row * config.size,), (config.bk, config.bn))
    if config.sk > 1 or config.direct:
        return a, b, bytes(128), bytes(128)  # the kernel uses plain addresses
    own, box = shape.k if p.fork is None else p.fork.at, _get_output_box(config, problem)
    stored, each = (dtype, config.size) if p.types8 is None or p.types8.result_bytes == 1 else (p.types8.result, p.types8.result_bytes)
    d = tensormap.make_tiled_map(p.output.address, stored, (own, shape.m), (p.output.pitch * each,), box)
    if p.residual is None:
        return a, b, d, d
    return a, b, d, tensormap.make_tiled_map(p.residual.address, stored, (shape.k, shape.m), (p.residual.pitch * each,), box)


def _get_tensor_map_type(problem: ConvProblem) -> str:
    """The type of the operands in tensor maps."""
    return "u8" if problem.types8 else "bf16" if problem.bf16 else "f16"


def _get_output_box(config: ConvConfig, problem: ConvProblem) -> tuple[int, int]:
    """Channels and rows of a panel of the output tile."""
    size = config.size if problem.types8 is None else problem.types8.result_bytes
    return (problem.features(config).fork or _count_panel_columns(config, size), 64)


def _make_second_fields(config: ConvConfig, second: SecondInput, first_steps: int, dtype: str) -> SecondInputFields:
    return SecondInputFields(make_window_map(second.shape, second.x, dtype, config.bk, config.bm), first_steps, *second.shape.stride)


def _fork_fields(config: ConvConfig, problem: ConvProblem, fork: SecondOutput) -> SecondOutputFields:
    shape, box = problem.shape, _get_output_box(config, problem)
    map_ = tensormap.make_tiled_map(
        fork.out.address, _get_tensor_map_type(problem), (shape.k - fork.at, shape.m), (fork.out.pitch * config.size,), box
    )
    return SecondOutputFields(map_, fork.out.address, fork.at, fork.out.pitch)


def _count_panel_columns(config: ConvConfig, size: int) -> int:
    """Columns of a panel of the output tile with results of `size` bytes; as PW in conv.cu."""
    widest = 128 // size
    return next(w for w in (widest, widest // 2, widest // 4) if config.bn % w == 0)
