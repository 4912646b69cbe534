"""Attention of 16-bit tensors in one launch, on tensor cores (mma.sync): products, softmax, and the transposes around them, which become strides.

For coverage: GPUs before Hopper, and rows that attention_fused does not take: of any number of elements up to 256, at any even address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._attention import Heads, View, match_attention
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, CType, Float32, Int32, Pointer
from whet.tactics.cuda._device.kernel import (
    TYPE,
    GpuKernel,
    compile_ahead,
    count_blocks,
    get_shared_limit,
    launch,
    machine_has,
    make_packed_array,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.attention.attention_fused import AttentionTactic, why_not_heads

SHAPES = ((1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))  # warps along rows, warps along keys
MOST = 14  # tiles that are tried
SHARED = 200 * 1024  # bytes of a block at most; less on GPUs with less
LARGEST = 256  # elements of a row


Place = Annotated[tuple[int, int, int], CType("Place", "3q", 8)]  # elements from batch to batch, head to head, row to row


@dataclass(frozen=True)
class AttentionArguments(Arguments, kernel="attention.cu"):
    q: ConstPointer
    k: ConstPointer
    v: ConstPointer
    out: Pointer
    mask: ConstPointer
    q_at: Place
    k_at: Place
    v_at: Place
    out_at: Place
    mask_at: Place
    mask_key: Int32
    mask_period: Int32  # batch items after which the mask repeats
    k_group: Int32  # heads of q per head of k
    v_group: Int32
    heads: Int32
    rows: Int32
    keys: Int32
    scale: Float32
    cap: Float32  # CAPPED: a score becomes cap * tanh(scale * score)


@tactic
class Attention(AttentionTactic):
    """Layers of recognize_attention and fuse_attention_transposes: 1 to 256 elements per head, an added mask of any shape that broadcasts."""

    def why_not_sizes(self, heads: Heads) -> str | None:
        return why_not_sizes(heads)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        heads = match_attention(layer)
        if isinstance(heads, str) or (reason := why_not_sizes(heads)):
            return heads if isinstance(heads, str) else reason
        is_slower = machine_has(backend, "wgmma") and why_not_heads(heads) is None
        return "attention_fused was faster in every case measured on Hopper" if is_slower else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        heads = match_attention(layer)
        if isinstance(heads, str):
            return []
        configs = list_tiles(heads, backend.capabilities.multiprocessors, machine_has(backend, "sm_90"), get_shared_limit(backend))
        compile_ahead(backend, [emit_kernel_source("attention.cu", _make_constants(heads, c, layer, signature)) for c in configs])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        heads = match_attention(layer)
        if isinstance(heads, str) or (reason := why_not_sizes(heads)):
            raise PlanRefused(heads if isinstance(heads, str) else str(reason))
        fields = {k: int(v) for k, v in config}
        known = set(fields) == {"wr", "wk", "mi", "kc", "stages"} and (fields["wr"], fields["wk"]) in SHAPES
        if not known or fields["kc"] not in (16, 32, 64) or fields["stages"] not in (1, 2) or fields["mi"] not in (1, 2):
            raise PlanRefused(f"the kernel has no tile {config}")
        shared = count_shared_bytes(heads, config)
        if shared > min(SHARED, get_shared_limit(backend)) or not _fits_registers(heads, fields["wr"], fields["mi"], fields["kc"]):
            raise PlanRefused(f"a multiprocessor cannot hold {config} for heads of {heads.size}")
        constants = _make_constants(heads, config, layer, signature)
        grid = (count_blocks(heads.rows, 16 * fields["wr"] * fields["mi"]), heads.batch * heads.heads, 1)
        packed: list[Packed] = []
        t = None if heads.mask is None else layer.needs(heads.mask.place)
        constant = t is not None and t.is_constant
        if t is not None and t.is_constant:
            values = t.array()
            packed.append(make_packed_array(f"{t.constant().digest}|mask f32", values.size * 4, lambda: np.asarray(values, np.float32)))

        def make(args: Args) -> list:
            at = [args.inputs[v.place] + v.offset * 2 for v in (heads.q, heads.k, heads.v)]
            mask, steps, key = 0, (0, 0, 0), 0
            if heads.mask is not None:
                size = signature.inputs[heads.mask.place]
                mask = args.packed[0] if constant else args.inputs[heads.mask.place]
                mask += heads.mask.offset * (4 if size is None or size.dtype == F32 else 2)
                steps, key = get_view_strides(heads.mask, -2), heads.mask.strides[-1]
            k = get_view_strides(heads.k, -2 if heads.turned else -1)
            arguments = AttentionArguments(
                q=at[0],
                k=at[1],
                v=at[2],
                out=args.outputs[0] + heads.out.offset * 2,
                mask=mask,
                q_at=get_view_strides(heads.q, -2),
                k_at=k,
                v_at=get_view_strides(heads.v, -2),
                out_at=get_view_strides(heads.out, -2),
                mask_at=steps,
                mask_key=key,
                mask_period=heads.mask.period or heads.batch if heads.mask is not None else heads.batch,
                k_group=heads.k.group,
                v_group=heads.v.group,
                heads=heads.heads,
                rows=heads.rows,
                keys=heads.keys,
                scale=heads.scale,
                cap=heads.cap,
            )
            return [launch("attention", arguments, constants, grid, 32 * fields["wr"] * fields["wk"], shared=shared, label=layer.name)]

        name = f"attention {fields['wr'] * fields['mi'] * 16}x{fields['kc'] * fields['wk']}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed)


def why_not_sizes(heads: Heads) -> str | None:
    """Why the kernel does not take heads of these sizes."""
    if max(heads.size, heads.value_size) > LARGEST:
        return f"heads of {heads.size} and {heads.value_size} elements: the kernel takes up to {LARGEST}"
    if heads.scale <= 0 and heads.mask is None and not heads.cap:
        return "a scale that is not above 0"
    return None


def get_view_strides(view: View, axis: int) -> tuple[int, int, int]:
    """Elements from batch to batch, head to head of the input, row to row."""
    return (*view.steps(), view.strides[axis])


def list_tiles(heads: Heads, multiprocessors: int, hopper: bool = True, shared: int = SHARED) -> list[Config]:
    """Tiles, the most promising first: for few rows warps share keys, for many rows a warp takes 32 (its
    registers were only counted on Hopper). `shared`: bytes that a block of this GPU can have (99 KiB on compute capability 8.6 and 8.9)."""
    candidates: list[tuple[float, Config]] = []
    for (wr, wk), mi, kc in product(SHAPES, (1, 2) if hopper else (1,), (16, 32, 64)):
        rows = 16 * wr * mi
        blocks = count_blocks(heads.rows, rows) * heads.batch * heads.heads
        chunks = count_blocks(heads.keys, kc * wk)
        if (kc * wk >= 2 * max(heads.keys, 32) and (wk > 1 or kc > 32)) or rows >= heads.rows + 48 or (wk > 2 and blocks > 8 * multiprocessors):
            continue
        for stages in (1, 2) if chunks > 1 else (1,):
            config: Config = (("wr", wr), ("wk", wk), ("mi", mi), ("kc", kc), ("stages", stages))
            if count_shared_bytes(heads, config) <= min(SHARED, shared) and _fits_registers(heads, wr, mi, kc):
                turns = count_blocks(blocks * wr * wk, multiprocessors * (12 if mi == 1 else 8))
                step = 0.4 + kc / 32 * (0.5 + 0.5 * mi)
                candidates.append((turns * chunks * step * (1.4 if stages == 1 and chunks > 1 else 1) * (1 + 0.05 * wk), config))
    return [c for _, c in sorted(candidates)][:MOST]


def _keeps_q_in_registers(heads: Heads) -> bool:
    """True if the rows of q of a warp stay in registers; else they are read from shared memory for every step."""
    return heads.size <= 128 and _pad_size(heads.size) // 4 + _pad_size(heads.value_size) // 2 <= 100


def _fits_registers(heads: Heads, wr: int, mi: int, kc: int) -> bool:
    """True if accumulators, scores and q of a warp stay in registers, according to the compiler's report."""
    masked, each_row = heads.mask is not None, heads.mask is not None and heads.mask.strides[-2] != 0
    if wr == 8 and each_row:
        return False
    size, value_size = _pad_size(heads.size), _pad_size(heads.value_size)
    if mi == 1:
        return value_size // 2 + kc // 2 + (size // 4 if _keeps_q_in_registers(heads) else 0) + 100 <= 250
    largest = max(size, value_size)
    return largest <= 96 and kc <= (32 if largest > 64 or masked or heads.cap else 64) and not (largest > 64 and (masked or heads.cap))


def _pad_size(size: int) -> int:
    """Elements of a row in the products."""
    return 16 * count_blocks(size, 16)


def count_shared_bytes(heads: Heads, config: Config) -> int:
    """Bytes of dynamic shared memory; mirrors attention.cu."""
    fields = {k: int(v) for k, v in config}
    chunk, size, value_size = fields["kc"] * fields["wk"], _pad_size(heads.size), _pad_size(heads.value_size)
    keys = size * (chunk + 8) if heads.turned else chunk * (size + 8)
    rows = 0 if _keeps_q_in_registers(heads) else 16 * fields["wr"] * fields["mi"] * (size + 8)
    parts = fields["wr"] * fields["wk"] * fields["mi"] * 16 * (value_size + 4 + 2) * 4 if fields["wk"] > 1 else 0
    return max((fields["stages"] * (keys + chunk * (value_size + 8)) + rows) * 2, parts)


def _make_constants(heads: Heads, config: Config, layer: Layer, signature: Signature) -> dict[str, int]:
    fields = {k: int(v) for k, v in config}
    kind = signature.outputs[0].dtype
    mask, same_rows = -1, 1
    if heads.mask is not None:
        stored = signature.inputs[heads.mask.place]
        mask = 0 if stored is None else TYPE[stored.dtype.name]
        same_rows = int(heads.mask.strides[-2] == 0)
    names = {name.upper(): fields[name] for name in ("kc", "wr", "wk", "mi", "stages")}
    names |= {"TYPE": TYPE[kind.name], "BF16": int(kind.name == "bf16"), "SIZE": heads.size, "VALUE_SIZE": heads.value_size}
    names |= {f"{x.upper()}_UNIT": heads.unit(x) for x in "qkv"} | {"OUT_UNIT": heads.unit("the output")}
    names |= {"Q_SHARED": int(not _keeps_q_in_registers(heads)), "CAPPED": int(heads.cap > 0)}
    return {**names, "TRANSPOSED": int(heads.turned), "MASK": mask, "SAME": same_rows, "GUARDED": int(heads.guard)}
