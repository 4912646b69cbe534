"""Attention of 16-bit tensors in one launch on Hopper (wgmma and TMA).

It takes masks, causal masks and soft caps, any number of rows and keys, and heads of 8 to 256 elements, a multiple of 8.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.backends.cuda.launch import GpuWork
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._attention import Heads, View, match_attention, why_not_aligned, without_period
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Float32, Int32, Int64, Pointer, SharedMemory, TensorMap, UInt32
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    TYPE,
    GpuKernel,
    all_static,
    compile_ahead,
    count_blocks,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda._device.quantized_store import PLAIN_RESULT, QuantizedStore
from whet.tactics.cuda._device.source import emit_kernel_source

SHARED = 227 * 1024  # bytes of shared memory per block, and per multiprocessor less 1 KiB for each resident block
NO_MASK, KEYS, ROWS, TILES = range(4)  # MASK of attention_fused.cu
LARGEST = 256  # elements of a row
MOST_MASK_BYTES = 8192  # a row of keys that is copied to shared memory


@dataclass(frozen=True)
class Tile:
    """One configuration: keys per step, warpgroups, warpgroups and blocks that share the keys of the same rows, stages of the ring, resident blocks
    per multiprocessor, products that overlap with the softmax, alternating warpgroups, and row tiles that a warpgroup processes per
    unit."""

    bn: int
    wgs: int
    split: int = 1
    cluster: int = 1
    stages: int = 2
    blocks: int = 1
    overlap: int = 0
    pingpong: int = 0
    turns: int = 1

    @property
    def groups(self) -> int:
        """Row tiles that a block processes at the same time."""
        return self.wgs // self.split

    @property
    def parts(self) -> int:
        """Shares of the keys."""
        return self.split * self.cluster

    @property
    def config(self) -> Config:
        """The tile as a point of the tuning space."""
        return tuple(vars(self).items())


@dataclass(frozen=True)
class MaskForm:
    """How the kernel reads the mask: MASK and MASK_TYPE of attention_fused.cu, bytes of a row of keys (KEYS), keys per load (ROWS)."""

    kind: int = NO_MASK
    type: int = 0
    bytes: int = 0
    pairs: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionFusedArguments(Arguments, kernel="attention_fused.cu"):
    """Arguments of attention_fused.cu. `by_...` are the reciprocals of divisors (`reciprocal`)."""

    q: TensorMap  # (D, rows or keys, heads, batch)
    k: TensorMap
    v: TensorMap
    out: Pointer
    mask: ConstPointer
    out_batch: Int64  # strides in elements
    out_head: Int64
    out_row: Int64
    mask_batch: Int64  # strides in elements; MASK 3: in tiles of 64 x BN, `mask_row` from row tile to row tile
    mask_head: Int64
    mask_row: Int64
    mask_key: Int64
    mask_period: Int32  # batch items after which the mask repeats
    heads: Int32
    units: Int32
    row_blocks: Int32
    pairs: Int32  # batch items times heads
    row_turns: Int32
    rows: Int32
    keys: Int32
    by_heads: UInt32
    by_row_blocks: UInt32
    by_pairs: UInt32
    by_k_group: UInt32  # of query heads per head of k
    by_v_group: UInt32
    k_batch: Int32  # 0: one batch item of k for all, else 1
    v_batch: Int32
    diagonal: Int32  # CAUSAL: row i sees keys 0 .. i + diagonal
    mask_bytes: Int32  # MASK 1: bytes of a row of keys, a multiple of 16
    scale: Float32  # of scores, or of their tanh, above 0, times log2(e)
    mask_scale: Float32  # of the mask: 1 / (scale without log2(e))
    cap_scale: Float32  # CAPPED: of scores before tanh
    per_step: Float32  # STORED: of the result, steps per unit
    zero: Float32


class AttentionTactic(Tactic):
    """Attention of 16-bit tensors, with a mask in their type or in f32."""

    ops = ("*",)
    composites = ("Attention",)
    what = "attention"

    @abstractmethod
    def why_not_sizes(self, heads: Heads) -> str | None:
        """Reason why the kernel does not take these heads, or None."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if not all_static(layer):
            return None
        heads = match_attention(layer)
        return heads if isinstance(heads, str) else self.why_not_sizes(heads)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        heads = match_attention(layer) if all_static(layer) else ""
        if isinstance(heads, str) or self.why_not_sizes(heads):
            return []
        read = {v.place for v in (heads.q, heads.k, heads.v)}
        mask = heads.mask.place if heads.mask is not None and not layer.needs(heads.mask.place).is_constant else None
        signatures = []
        for t in list_float_types([*(layer.inputs[i] for i in read), layer.outputs[0]], FLOAT16_TYPES):
            stored = {i: Operand("linear", t) for i in read}
            if mask is None:
                signatures.append(make_stored_signature(layer, stored, Operand("linear", t)))
                continue
            for kind in (t, F32) if layer.needs(mask).dtype == F32 else (t,):
                signatures.append(make_stored_signature(layer, {**stored, mask: Operand("linear", kind)}, Operand("linear", t)))
        return signatures


@tactic
class AttentionFused(AttentionTactic):
    """The layers that recognize_attention and fuse_attention_transposes make. q, k and v come by TMA, so their heads are rows in memory."""

    def why_not_sizes(self, heads: Heads) -> str | None:
        return why_not_heads(heads)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return _why_not_here(match_attention(layer), backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        return self.list_quantized_configs(layer, signature, backend, PLAIN_RESULT)

    def list_quantized_configs(self, layer: Layer, signature: Signature, backend: Backend, stored: QuantizedStore) -> Sequence[Config]:
        """The tuning space with a result that is stored as `stored`."""
        heads = match_attention(layer)
        if isinstance(heads, str):
            return []
        heads = without_period(heads)
        mask = mask_form(heads, layer, signature)
        tiles = list_tiles(heads, mask, backend.capabilities.multiprocessors)
        bf16 = signature.outputs[0].dtype.name == "bf16"
        compile_ahead(backend, [emit_kernel_source("attention_fused.cu", make_constants(heads, mask, t, bf16, stored.kind)) for t in tiles])
        return [t.config for t in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        return self.plan_quantized(layer, signature, config, backend, PLAIN_RESULT)

    def plan_quantized(self, layer: Layer, signature: Signature, config: Config, backend: Backend, stored: QuantizedStore) -> GpuKernel:
        """The kernel that stores the result as `stored`. `signature` has the type in which q, k and v are multiplied as that of the output."""
        if stored.kind and stored.keeps:
            raise PlanRefused("the kernel stores its result once")
        heads = match_attention(layer)
        reason = _why_not_here(heads, backend)
        if isinstance(heads, str) or reason:
            raise PlanRefused(str(reason or heads))
        period = heads.mask.period if heads.mask is not None else 0
        heads = without_period(heads)
        mask, tile = mask_form(heads, layer, signature), tile_of(config)
        if refusal := tile_unfit(heads, mask, tile):
            raise PlanRefused(f"{config}: {refusal}")
        kind, causal = signature.outputs[0].dtype.name, heads.causal is not None
        constants, shared = make_constants(heads, mask, tile, kind == "bf16", stored.kind), count_shared_bytes(heads, mask, tile)
        row_blocks = count_blocks(heads.rows, 64 * tile.groups * tile.turns)
        pairs = heads.batch * heads.heads
        units = row_blocks * pairs
        if units * max(heads.heads, row_blocks, pairs) >= 1 << 32:
            raise PlanRefused(f"{units} row blocks are too many")
        grid = units * tile.cluster if tile.parts > 1 else min(units, backend.capabilities.multiprocessors * tile.blocks)
        packed = [_pack_mask(layer, heads, mask, tile)] if mask.kind == TILES else []

        def tensor_map(view: View, args: Args, lines: int, box: int) -> bytes:
            batches, count, size = view.batches, view.heads, view.shape[-1]
            batch, head, row = (2 * step for step in (*view.steps(), view.strides[-2] if lines > 1 else count_blocks(size, 8) * 8))
            steps = (row, head or row * lines, batch or row * lines)
            address, dims = args.inputs[view.place] + 2 * view.offset, (size, lines, count, batches)
            return tensormap.make_tiled_map(address, kind, dims, steps, (_count_row_bytes(size) // 2, box, 1, 1))

        def make(args: Args) -> list[GpuWork]:
            address = 0
            mask_steps: tuple[int, ...] = (0, 0, 0, 0)
            if mask.kind == TILES:
                assert heads.mask is not None
                address, mask_steps = args.packed[0], count_tile_steps(heads, heads.mask, tile)
            elif heads.mask is not None and mask.kind:
                address = args.inputs[heads.mask.place] + heads.mask.offset * (2 if mask.type else 4)
                mask_steps = heads.mask.strides
            out_batch, out_head = heads.out.steps()
            arguments = AttentionFusedArguments(
                q=tensor_map(heads.q, args, heads.rows, 64),
                k=tensor_map(heads.k.swap_last_axes(), args, heads.keys, tile.bn),
                v=tensor_map(heads.v, args, heads.keys, tile.bn),
                out=args.outputs[0] + (1 if stored.kind else 2) * heads.out.offset,
                mask=address,
                out_batch=out_batch,
                out_head=out_head,
                out_row=heads.out.strides[-2],
                mask_batch=mask_steps[0],
                mask_head=mask_steps[1],
                mask_row=mask_steps[2],
                mask_key=mask_steps[3],
                mask_period=period or heads.batch,
                heads=heads.heads,
                units=units,
                row_blocks=row_blocks,
                pairs=pairs,
                row_turns=tile.turns,
                rows=heads.rows,
                keys=heads.keys,
                by_heads=compute_reciprocal(heads.heads),
                by_row_blocks=compute_reciprocal(row_blocks),
                by_pairs=compute_reciprocal(pairs),
                by_k_group=compute_reciprocal(heads.heads // heads.k.heads),
                by_v_group=compute_reciprocal(heads.heads // heads.v.heads),
                k_batch=int(heads.k.batches > 1),
                v_batch=int(heads.v.batches > 1),
                diagonal=heads.causal or 0,
                mask_bytes=mask.bytes,
                scale=(heads.cap or heads.scale) * math.log2(math.e),
                mask_scale=1 / (heads.cap or heads.scale),
                cap_scale=heads.scale,
                per_step=stored.per_step,
                zero=stored.zero,
            )
            threads = 128 * tile.wgs + (128 if constants["TAKE"] else 32)
            work = launch("attention_fused", arguments, constants, (grid, 1, 1), threads, shared=shared, cluster=tile.cluster, label=layer.name)
            return [work]

        words = [f"attention wgmma {64 * tile.groups * tile.turns}x{tile.bn}"]
        words += [f"keys over {tile.parts} parts"] * (tile.parts > 1) + ["ping-pong"] * tile.pingpong + ["causal"] * causal
        return GpuKernel(layer, signature, make, implementation=", ".join(words), packed=packed)


def compute_reciprocal(divisor: int) -> int:
    """ceil(2^32 / divisor), 0 for 1: the kernel divides n by the upper half of a product (n * divisor below 2^32)."""
    return 0 if divisor == 1 else -(-(1 << 32) // divisor)


def _why_not_here(heads: Heads | str, backend: Backend) -> str | None:
    """Why the kernel cannot compute an attention on this GPU."""
    if not machine_has(backend, "wgmma"):
        return "needs Hopper's tensor cores (wgmma, sm_90a)"
    return heads if isinstance(heads, str) else why_not_heads(heads)


def why_not_heads(heads: Heads) -> str | None:
    """Why the kernel does not take these heads."""
    if heads.turned:
        return "keys are columns in memory: TMA reads them as rows"
    if max(heads.size, heads.value_size) > LARGEST or heads.size % 8 or heads.value_size % 8:
        return f"heads of {heads.size} and {heads.value_size} elements: TMA loads multiples of 8, the kernel up to {LARGEST}"
    if reason := why_not_aligned(heads):
        return reason
    if heads.scale <= 0 and not heads.cap:
        return "a scale that is not above 0"
    if any(n > 1 and step == 0 for n, step in zip((heads.batch, heads.heads), heads.q.steps(), strict=True)):
        return "q is broadcast along batch or heads"
    return None


def mask_form(heads: Heads, layer: Layer, signature: Signature) -> MaskForm:
    """How the kernel reads the mask of these heads."""
    if heads.mask is None or heads.causal is not None:
        return MaskForm()
    view = heads.mask
    t = layer.needs(view.place)
    if t.is_constant:
        array = np.asarray(t.array(), np.float32)
        return MaskForm(TILES, 1 if np.abs(array[np.isfinite(array)]).max(initial=0) < 6e4 else 0)
    kind = TYPE[signature.needs(view.place).dtype.name]
    size = 2 if kind else 4
    batch, head, row, key = view.strides
    whole = all(step * size % 16 == 0 for step in (batch, head, view.offset, heads.keys))
    if row == 0 and key == 1 and whole and heads.keys * size <= MOST_MASK_BYTES:
        return MaskForm(KEYS, kind, heads.keys * size)
    pairs = key == 1 and heads.keys >= 2 and all(step % 2 == 0 for step in (batch, head, row, view.offset, heads.keys))
    return MaskForm(ROWS, kind, 0, 2 if pairs else 1)


def list_tiles(heads: Heads, mask: MaskForm, multiprocessors: int) -> list[Tile]:
    """Tiles to time, the most promising first."""
    tiles = heads.batch * heads.heads * count_blocks(heads.rows, 64)
    if tiles <= 1.25 * multiprocessors:
        listed = _list_tiles_for_few_rows(heads, tiles <= 0.6 * multiprocessors)
    elif heads.keys <= 256:
        listed = _list_tiles_for_few_keys(heads)
    else:
        listed = _list_tiles_for_long_sequences(heads)
    if max(heads.size, heads.value_size) > 128:
        listed += _list_tiles_for_large_heads(heads)
    return list(dict.fromkeys(t for t in listed if tile_unfit(heads, mask, t) is None))


def _list_tiles_for_few_rows(heads: Heads, fewest: bool) -> list[Tile]:
    """Fewer row tiles than multiprocessors: warpgroups, then blocks, share the keys of a row tile."""
    tiles = []
    for most in (128, 96, 64):
        for split in (2, 3, 4):
            bn = _compute_equal_steps(heads.keys, most, split)
            steps = count_blocks(heads.keys, bn)
            tiles.append(Tile(bn, split, split, stages=min(steps, 2 * split), overlap=int(steps > split)))
    bn = _compute_equal_steps(heads.keys, 128)
    stages = min(2, count_blocks(heads.keys, bn))
    clusters = [Tile(64, 1, cluster=2), Tile(bn, 1, cluster=2, overlap=1), Tile(bn, 2, 2, cluster=2, stages=4)]
    wide = [Tile(bn, 1, stages=stages), Tile(64, 2, stages=4, overlap=1), Tile(bn, 2, stages=stages, overlap=stages - 1)]
    return [wide[0], *tiles, *clusters, *wide[1:]] if fewest else [*wide, *clusters, *tiles]


def _list_tiles_for_few_keys(heads: Heads) -> list[Tile]:
    """Many heads of few keys: several blocks per multiprocessor, so that loads, products and softmax of different units overlap."""
    turns = min(8, count_blocks(heads.rows, 64))
    tiles = []
    for bn in dict.fromkeys((_compute_equal_steps(heads.keys, 128), _compute_equal_steps(heads.keys, 64))):
        steps = count_blocks(heads.keys, bn)
        tiles += [Tile(bn, 1, stages=steps, blocks=blocks) for blocks in (3, 4, 2)]
        tiles += [Tile(bn, 1, stages=steps, blocks=3, overlap=int(steps > 1), turns=t) for t in (turns, 1)]
        tiles += [Tile(bn, wgs, stages=min(8, 2 * steps), overlap=int(steps > 1)) for wgs in (4, 2)]
        tiles += [Tile(bn, 2, stages=steps, overlap=int(steps > 1), turns=count_blocks(turns, 2))]
    whole = _compute_equal_steps(heads.keys, 256)
    tiles += [Tile(whole, 1, stages=1, blocks=2, turns=t) for t in (turns, 1)]
    return [*tiles, Tile(whole, 2, stages=1, turns=count_blocks(turns, 2))]


def _list_tiles_for_long_sequences(heads: Heads) -> list[Tile]:
    """Long sequences: the tensor cores of a multiprocessor are kept busy by three or four warpgroups, or by two that overlap products and softmax."""
    rows = count_blocks(heads.rows, 64)
    tiles = []
    for bn in dict.fromkeys(_compute_equal_steps(heads.keys, most) for most in (128, 96, 64)):
        steps = count_blocks(heads.keys, bn)
        stages = min(3, steps)
        tiles += [Tile(bn, 2, stages=2, overlap=1, pingpong=1), Tile(bn, 4, stages=stages), Tile(bn, 3, stages=2, overlap=1)]
        tiles += [Tile(bn, wgs, stages=steps, overlap=1, turns=count_blocks(rows, wgs)) for wgs in (3, 4) if steps <= 8 and wgs < rows]
    tiles += [Tile(_compute_equal_steps(heads.keys, 192), 3, stages=3), Tile(64, 1, blocks=2, overlap=1)]
    return [*tiles, *(Tile(64, wgs, stages=3, overlap=1) for wgs in (3, 2))]


def _list_tiles_for_large_heads(heads: Heads) -> list[Tile]:
    """Heads of more than 128 elements: shared memory holds few rows of q and few keys."""
    tiles = []
    for bn in dict.fromkeys(_compute_equal_steps(heads.keys, most) for most in (64, 32, 16)):
        stages = min(2, count_blocks(heads.keys, bn))
        tiles += [Tile(bn, 2, stages=stages), Tile(bn, 1, stages=stages, overlap=stages - 1), Tile(bn, 1, stages=1)]
    return tiles


def _compute_equal_steps(keys: int, most: int, parts: int = 1) -> int:
    """Keys per step, at most `most`, so that `parts` shares have the same number of steps and the last step has few keys too many."""
    steps = parts * count_blocks(keys, most * parts)
    return 16 * count_blocks(count_blocks(keys, steps), 16)


def tile_of(config: Config) -> Tile:
    """The tile of a configuration. Raises PlanRefused when its names or values are not a tile's."""
    try:
        return Tile(**{k: int(v) for k, v in config})
    except (TypeError, ValueError):
        raise PlanRefused(f"no such tile: {config}") from None


def tile_unfit(heads: Heads, mask: MaskForm, tile: Tile) -> str | None:
    """Why the kernel does not run with this tile."""
    steps, rows = count_blocks(heads.keys, tile.bn), count_blocks(heads.rows, 64)
    listed = tile.bn % 16 == 0 and 16 <= tile.bn <= 256 and 1 <= tile.wgs <= 4 and 1 <= tile.split <= 4 and tile.cluster in (1, 2, 4)
    if not listed or not 1 <= tile.stages <= 8 or not 1 <= tile.blocks <= 4 or tile.overlap not in (0, 1) or tile.pingpong not in (0, 1):
        return "no such tile"
    if tile.wgs % tile.split or not 1 <= tile.turns <= 8:
        return "no such tile"
    if tile.pingpong and (tile.wgs != 2 or tile.parts > 1 or not tile.overlap or tile.turns > 1):
        return "two warpgroups of different rows alternate"
    if tile.turns > 1 and (tile.parts > 1 or steps > tile.stages):
        return "several row tiles need all keys in shared memory"
    if tile.parts > 1 and (tile.stages < tile.split or tile.parts > steps):
        return "more shares of the keys than steps"
    if 64 * tile.groups * tile.turns >= 64 * rows + 64 * tile.groups:
        return "row tiles without rows"
    if count_shared_bytes(heads, mask, tile) > min(SHARED, (228 * 1024) // tile.blocks - 1024):
        return "shared memory"
    launch, take = register_counts(heads, mask, tile)
    accumulators = max(tile.bn, heads.value_size) // 2  # of one instruction: ptxas allocates its operands as launched
    if register_need(heads, mask, tile) > (take or launch) or accumulators + 28 > launch:
        return "registers"
    return None


def register_need(heads: Heads, mask: MaskForm, tile: Tile) -> int:
    """Registers of a multiplying thread: accumulators, scores, weights, mask values, addresses and counters."""
    words = (0, tile.bn // 32, *[tile.bn // (4 if mask.type else 2)] * 2)[mask.kind]
    weights = tile.bn // 4 if tile.overlap else 0
    return heads.value_size // 2 + tile.bn // 2 + weights + words + 28


def register_counts(heads: Heads, mask: MaskForm, tile: Tile) -> tuple[int, int]:
    """(registers of a thread at launch, of a multiplying thread after setmaxnreg; 0: as launched).

    A multiprocessor has four register files of 16,384; a warp's registers are in one of them. For threads that need more, the producer becomes a
    warpgroup of its own and releases its registers.
    """
    plain = min(248, 512 // count_blocks(tile.blocks * (4 * tile.wgs + 1), 4) // 8 * 8)
    if register_need(heads, mask, tile) <= plain:
        return plain, 0
    threads = 128 * (tile.wgs + 1)
    launch = min(248, 65536 // tile.blocks // threads // 8 * 8)
    take = min(240, (launch * threads - 24 * 128) // (128 * tile.wgs) // 8 * 8)
    return (launch, take) if take > plain else (plain, 0)


def count_shared_bytes(heads: Heads, mask: MaskForm, tile: Tile) -> int:
    """Bytes of dynamic shared memory."""
    return make_shared_memory(heads, mask, tile).nbytes


def make_shared_memory(heads: Heads, mask: MaskForm, tile: Tile) -> SharedMemory:
    """Tiles of q, k and v, barriers of 8 bytes, partial results of the shares of the keys with their maxima and sums, rows of the mask."""
    row, value_row = (count_blocks(size, 64) * _count_row_bytes(size) for size in (heads.size, heads.value_size))
    buffers = tile.groups * _count_q_buffers(tile)
    own_rows = tile.parts * tile.groups * 64 // tile.cluster if tile.parts > 1 else 0
    shared = SharedMemory().region("q", buffers * 64 * row).region("k", tile.stages * tile.bn * row).region("v", tile.stages * tile.bn * value_row)
    for operand, count in (("q", buffers), ("k", tile.stages), ("v", tile.stages)):
        shared.region(f"{operand}_full", count * 8).region(f"{operand}_empty", count * 8)
    shared.region("partials", own_rows * (heads.value_size + 8) * 4, alignment=16).region("ends", own_rows * 8)
    return shared.region("mask", buffers * mask.bytes)


def _count_row_bytes(size: int) -> int:
    """Bytes of a row of `size` elements in a slab of shared memory."""
    return 64 if size <= 32 else 128


def _count_q_buffers(tile: Tile) -> int:
    return 1 if tile.parts > 1 else 2


def make_constants(heads: Heads, mask: MaskForm, tile: Tile, bf16: bool, stored: int = 0) -> dict[str, int]:
    """The constants of attention_fused.cu; `stored`: the code of the result's 8-bit type."""
    launch, take = register_counts(heads, mask, tile)
    return {
        "D": 16 * count_blocks(heads.size, 16), "DV": heads.value_size, "BN": tile.bn, "WGS": tile.wgs, "SPLIT": tile.split,
        "CLUSTER": tile.cluster, "STAGES": tile.stages, "QB": _count_q_buffers(tile),
        "OVERLAP": tile.overlap, "PINGPONG": tile.pingpong, "CAUSAL": int(heads.causal is not None),
        "GUARDED": int(heads.guard), "CAPPED": int(heads.cap > 0), "MASK": mask.kind, "MASK_TYPE": mask.type,
        "MASK_PAIRS": mask.pairs, "BF16": int(bf16), "STORED": stored, "REGISTERS": launch, "TAKE": take, **make_shared_memory(heads, mask, tile).constants(),
    }  # fmt: skip


def count_tile_steps(heads: Heads, view: View, tile: Tile) -> tuple[int, int, int, int]:
    """Tiles of 64 rows x bn keys from batch item to batch item, head to head, row tile to row tile of the packed mask."""
    steps = count_blocks(heads.keys, tile.bn)
    tiles = steps * (count_blocks(heads.rows, 64) if view.shape[-2] > 1 else 1)
    batch, head = view.shape[:2]
    return tiles * head if batch > 1 else 0, tiles if head > 1 else 0, steps if view.shape[-2] > 1 else 0, 0


def _pack_mask(layer: Layer, heads: Heads, mask: MaskForm, tile: Tile) -> Packed:
    """A constant mask in the order of the accumulators: [batch, heads, row tiles, steps, warps, vectors, lanes, values]; -inf past the last key."""
    assert heads.mask is not None
    t, view = layer.needs(heads.mask.place), heads.mask
    batch, count, rows, _ = view.shape
    steps, tiles = count_blocks(heads.keys, tile.bn), count_blocks(rows, 64)
    kind, vector = (np.float16, 8) if mask.type else (np.float32, 4)
    shape = (batch, count, tiles, steps, 4, tile.bn // (2 * vector), 32, vector)

    def make() -> np.ndarray:
        given = np.asarray(t.array(), np.float32).reshape(-1)
        at = view.offset + np.tensordot(np.indices(view.shape), view.strides, (0, 0))
        full = np.zeros((batch, count, tiles * 64, steps * tile.bn), np.float32)
        full[..., heads.keys :] = -np.inf
        full[:, :, : rows if rows > 1 else None, : heads.keys] = given[at]
        # row = tile, warp, half, quad; key = step, column tile, lane of a quad, pair; an accumulator is (column tile, half, pair)
        split = full.reshape(batch, count, tiles, 4, 2, 8, steps, tile.bn // 8, 4, 2).transpose(0, 1, 2, 6, 3, 5, 8, 7, 4, 9)
        values = split.reshape(batch, count, tiles, steps, 4, 32, tile.bn // 2 // vector, vector)
        with np.errstate(over="ignore"):
            return values.transpose(0, 1, 2, 3, 4, 6, 5, 7).astype(kind)

    dtype = np.dtype(kind)
    return make_packed_array(f"{t.constant().digest}|attention mask {tile.bn} {dtype.name} {view}", math.prod(shape) * dtype.itemsize, make)
