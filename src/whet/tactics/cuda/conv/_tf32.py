"""f32 tensors on Hopper's tensor cores: the tuning space of `conv_tf32.cu`, how its weights are packed, and the launch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated, Any

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import Kernel, Launch, Module
from whet.tactics._base import Config, PlanRefused
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, Fields, FloatPointer, Int32, TensorMap, When
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, Groups, PostOps, SecondInput, SecondOutput, View
from whet.tactics.cuda.conv._conv_config import SHARED_LIMIT
from whet.tactics.cuda.conv._conv_launch import LayerFields
from whet.tactics.cuda.conv._window_map import make_window_map

PLAIN = PostOps()
PROMOTE = 4  # K steps after which the accumulators of three products go into f32 registers


@dataclass(frozen=True)
class SecondOutputFields(Fields):
    """The second result, of channels from `fork` on."""

    other: FloatPointer
    fork: Int32
    other_pitch: Int32


@dataclass(frozen=True)
class Tf32ConvArguments(Arguments, kernel="conv_tf32.cu"):
    a: TensorMap  # input, weights (with TERMS 3 the small parts begin at row `low`)
    b: TensorMap
    bias: ConstFloatPointer  # [tiles_n * BN]
    residual: ConstFloatPointer
    out: FloatPointer
    layer: LayerFields
    low: Int32  # TERMS 3: rows of the large parts of the weights
    group_k: Int32  # GROUPED: output and input channels of a group
    group_c: Int32
    second: Annotated[TensorMap | None, When("CONCAT_INPUT")] = None  # the second image, read from step `csteps` on
    second_output: Annotated[SecondOutputFields | None, When("DUAL_OUTPUT")] = None


@dataclass(frozen=True, order=True)
class Tf32Config:
    """One instance of the kernel, less activation and how the input is read. `terms`: 1 TF32, 3 f32 by three products."""

    wgs: int  # warpgroups that multiply, 64 pixels each
    bn: int  # output channels of a tile
    bk: int = 32  # channels of a K step
    stages: int = 4
    sk: int = 1  # blocks that share K
    blocks: int = 1  # resident blocks a multiprocessor
    terms: int = 1

    @property
    def bm(self) -> int:
        """Pixels of a tile."""
        return 64 * self.wgs

    @property
    def parts(self) -> int:
        """Values that represent one weight."""
        return 2 if self.terms == 3 else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.wgs * 128 + 32

    @property
    def step_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return self.bm * self.bk * 4 + self.parts * (-(-self.bn * self.bk * 4 // 1024) * 1024)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, alignment slack included; mirrors the layout in conv_tf32.cu."""
        return 1024 + self.stages * (self.step_bytes + 16) + (self.bm * (self.bn + 8) * 4 if self.sk > 1 else 0) + 16

    @property
    def limit(self) -> int:
        """Registers a thread can have. Warps are allocated to four register files of 512 per lane, in units of eight."""
        warps = -(-self.threads // 32 * self.blocks // 4)
        return min(255, 512 // warps // 8 * 8)

    @property
    def single(self) -> bool:
        """True if registers hold the inputs of one K step, not of two alternating ones."""
        return self.terms == 1 and self.limit < 80 + self.bn // 2 + self.bn // 128 * 2

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs, from the compiler's results at the register limit."""
        return (46 if self.single else 80) + self.bn // 2 if self.terms == 1 else 132 + self.bn

    def valid(self) -> bool:
        """True if a Hopper multiprocessor can hold `blocks` of these."""
        known = self.wgs in (1, 2, 3) and self.terms in (1, 3) and self.bk in (8, 16, 32) and 1 <= self.sk <= 16 and 2 <= self.stages <= 12
        fits = self.blocks * (self.shared + 1024) <= SHARED_LIMIT + 1024
        return known and fits and self.registers <= self.limit and self.bn % 16 == 0 and self.bn <= 256 and self.bm % self.sk == 0

    def constants(self, *, im2col: bool, act: int, odd: bool, grouped: bool, joined: bool = False, fork: bool = False) -> dict[str, int]:
        """The macros that make the instance."""
        names = {key.upper(): value for key, value in asdict(self).items()}
        more = {key: 1 for key, on in (("CONCAT_INPUT", joined), ("DUAL_OUTPUT", fork), ("SINGLE", self.single)) if on}
        promote = PROMOTE * 32 // self.bk if self.terms == 3 else 0
        return {**names, "PROMOTE": promote, "IM2COL": int(im2col), "ACT": act, "ODD": int(odd), "GROUPED": int(grouped), **more}

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}_k{self.sk}_b{self.blocks}" + "_three" * (self.terms == 3)


def step_channels(c: int) -> int:
    """Channels of a K step: 128 bytes of a pixel, fewer if the pixel has fewer."""
    return 32 if c > 16 else 16 if c > 8 else 8


def refuses(shape: ConvShape) -> str | None:
    """Why the kernel cannot take the shape, or None."""
    if shape.c % 4:
        return f"{shape.c} input channels; takes a multiple of 4 (16 bytes, for the copy engine)"
    if max(*shape.pad, (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1]) > 127:
        return "padding or filter extent above 127 pixels, which the copy engine cannot express"
    if max(shape.stride) > 8:
        return "stride above 8, which the copy engine cannot express"
    return None


def estimate_us(c: Tf32Config, m: int, k: int, steps: int, multiprocessors: int) -> float:
    """A rough time in us on an H200, which only orders candidates. See _conv_config.estimate_us."""
    tiles = -(-m // c.bm) * -(-k // c.bn)
    each = -(-steps // c.sk)
    taken = (c.bm + c.parts * c.bn) * c.bk * 4
    resident = min(c.blocks, -(-tiles * c.sk // multiprocessors))
    turns = -(-tiles * c.sk // multiprocessors)
    share = max(taken / 83, taken * min(tiles * c.sk, multiprocessors) / 8000)
    mma = 2 * c.bm * c.bn * c.bk * c.terms / 2800 * max(1.0, 128 / c.bn / 1.5)
    step_ns = max(share, mma, 700 / c.stages / resident, 250 / c.wgs / resident)
    store_ns = c.bm * c.bn * 4 / (30 * resident)
    ending = 300 if c.sk == 1 else 900 + c.bm * c.bn * 4 / 25
    return (900 + turns * (each * step_ns + store_ns) + ending) / 1000


def list_configs(m: int, k: int, c: int, taps: int, terms: int, multiprocessors: int) -> list[Tf32Config]:
    """Candidates for m pixels, k output and c input channels of `taps` filter taps, the most promising first."""
    bk = step_channels(c)
    return list_configs_of_steps(m, k, taps * -(-c // bk), bk, terms, multiprocessors)


def list_configs_of_steps(m: int, k: int, steps: int, bk: int, terms: int, multiprocessors: int) -> list[Tf32Config]:
    """Candidates for m pixels and k output channels, `steps` K steps of `bk` channels."""
    configs: set[Tf32Config] = set()
    for wgs, bn, sk in product((1, 2, 3), (16, 32, 64, 96, 128, 192, 256), (1, 2, 4, 8, 16)):
        grid = -(-m // (64 * wgs)) * -(-k // bn) * sk
        if (bn >= 2 * k and bn > 16) or sk > steps or (sk > 1 and (grid > 2 * multiprocessors or wgs * bn > 128)):
            continue
        if grid * 6 < multiprocessors and 2 * sk <= min(steps, 16) and bn > 16:
            continue  # a larger split exists and keeps more multiprocessors busy
        if grid > 40 * multiprocessors and wgs * bn < 64 and bn < k:
            continue  # larger tiles exist
        small = grid <= 2 * multiprocessors
        able: list[Tf32Config] = []  # the deepest ring for each number of resident blocks that there are tiles for
        for blocks in range(1, 2 if sk > 1 else min(5, -(-grid // multiprocessors)) + 1):
            every = (Tf32Config(wgs, bn, bk, stages, sk, blocks, terms) for stages in (8, 6, 4, 3, 2))
            fit = (c for c in every if c.valid() and not (small and c.stages > 2 and (c.shared > 112 * 1024 or c.stages > max(2, -(-steps // sk)))))
            able += [c for c in (next(fit, None),) if c is not None]
        configs.update(able[-3:])
    return sorted(configs, key=lambda config: (estimate_us(config, m, k, steps, multiprocessors), config))


def read_config_fields(config: Config) -> dict[str, int]:
    """The fields of a TF32 configuration. Raises PlanRefused for a configuration of another tactic."""
    fields = dict(config)
    if fields.pop("math", None) != "tf32":
        raise PlanRefused("this tactic computes in tf32")
    return {k: int(v) for k, v in fields.items()}


def cut_to_tf32(a: np.ndarray) -> np.ndarray:
    """f32 values with 10 bits of mantissa, rounded to nearest; the largest are truncated, so that they stay finite."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    near = np.abs(a) < np.float32(3.4026186e38)
    return ((bits + np.where(near, np.uint32(0x1000), np.uint32(0))) & np.uint32(0xFFFFE000)).view(np.float32)


def compute_channel_order(bk: int) -> np.ndarray:
    """The channel (of bk) at each index of a K step: conv_tf32.cu reads eight adjacent elements per thread."""
    p = np.arange(bk)
    step, place = p // 8, p % 8
    return bk // 4 * (place % 4) + step + place // 4 * (bk // 8)


def count_padded_filters(k: int) -> int:
    """Rows of packed weights for k output channels."""
    return -(-k // 16) * 16


def permute_by_16(rows: np.ndarray) -> np.ndarray:
    """Rows (a multiple of 16) in another order, so that lane q of a quad, which sums columns 8j + 2q + e, has channels 4q + 2j + e of every 16."""
    parts = rows.reshape(-1, 4, 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(rows.shape)


def pack(rows: np.ndarray, bk: int, terms: int) -> np.ndarray:
    """Filters as rows [k, ...] of whole K steps, f32: channels permuted, rounded to TF32, rows padded with zeros to a multiple of 16 and permuted.

    For three products the small parts follow, from row `filters(k)` on. The large part is cut off there, and the small one has its sign and is
    zero only if the weight is: an infinite input times both parts is then the same infinity as times the weight.
    """
    given, k = rows.shape[0], count_padded_filters(rows.shape[0])
    rows = np.pad(rows.reshape(given, -1), ((0, k - given), (0, 0)))
    transposed = permute_by_16(rows.reshape(k, -1, bk)[:, :, compute_channel_order(bk)].astype(np.float32).reshape(k, -1))
    if terms == 1:
        return cut_to_tf32(transposed)
    whole = np.isfinite(transposed)
    high = np.where(whole, (transposed.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), transposed)
    low = cut_to_tf32(np.where(whole, transposed - np.where(whole, high, 0), 0).astype(np.float32))
    return np.concatenate([high, np.where((low == 0) & (high != 0) & whole, np.copysign(np.finfo(np.float32).tiny, high), low)])


def emit_tf32_source(
    config: Tf32Config, im2col: bool, activation: str, odd: bool, grouped: bool = False, joined: bool = False, fork: bool = False
) -> str:
    """The kernel's complete text."""
    how = {"im2col": im2col, "odd": odd, "grouped": grouped, "joined": joined, "fork": fork}
    return emit_kernel_source("conv_tf32.cu", config.constants(act=ACTIVATIONS[activation], **how))


@per_device
def load_tf32_kernel(config: Tf32Config, *how: Any) -> Kernel:
    """The loaded kernel of `emit_tf32_source(config, *how)`; compiled on first use, then kept."""
    code = compile_cubin(emit_tf32_source(config, *how), name=f"tf32_{config}.cu")
    return Module(code).kernel("conv", config.shared)


def launch(
    config: Tf32Config,
    shape: ConvShape,
    x: View,
    weights: int,
    bias: int,
    out: View,
    *,
    residual: View | None = None,
    post_ops: PostOps = PLAIN,
    groups: Groups | None = None,
    input_map: bytes | None = None,
    second: SecondInput | None = None,
    fork: SecondOutput | None = None,
    multiprocessors: int,
    label: str = "",
) -> Launch:
    """The launch of `shape` with addresses filled in; weights are packed by `pack`. With `groups` the shape's input channels are a tile's window.

    With `second` (1x1) each row has the weights of both inputs, one after the other; with `fork` the last output channels are a second result.
    """
    first_steps = shape.steps(config.bk)
    steps = first_steps + (0 if second is None else second.shape.steps(config.bk))
    whole = shape if groups is None else replace(shape, c=groups.channels)
    row = steps * config.bk
    a = make_window_map(whole, x, "f32", config.bk, config.bm) if input_map is None else input_map
    b = tensormap.make_tiled_map(weights, "f32", (row, config.parts * count_padded_filters(shape.k)), (row * 4,), (config.bk, config.bn))
    tiles_n = -(-shape.k // config.bn)
    tiles = tiles_n * -(-shape.m // config.bm)
    arguments = Tf32ConvArguments(
        a,
        b,
        bias,
        0 if residual is None else residual.address,
        out.address,
        LayerFields.of(shape, out, residual, post_ops, (steps, first_steps), (tiles, tiles_n)),
        low=count_padded_filters(shape.k),
        group_k=0 if groups is None else groups.k,
        group_c=0 if groups is None else groups.c,
        second=None if second is None else make_window_map(second.shape, second.x, "f32", config.bk, config.bm),
        second_output=None if fork is None else SecondOutputFields(fork.out.address, fork.at, fork.out.pitch),
    )
    grid = tiles * config.sk if config.sk > 1 else min(tiles, multiprocessors * config.blocks)
    im2col, odd = input_map is not None or not shape.plain, shape.k % 4 != 0
    instance = load_tf32_kernel(config, im2col, post_ops.activation[0], odd, groups is not None, second is not None, fork is not None)
    return Launch(instance, (grid, 1, 1), config.threads, arguments.pack(), cluster=config.sk, label=label)
