"""Attention of long sequences of 16-bit tensors in one launch on Hopper's tensor cores (wgmma): heads of 64 or 128 elements, no mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer
from whet.tactics._attention import Heads, View, taken_apart
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, Float32, Int32, Int64, Pointer, TensorMap
from whet.tactics.cuda._device.kernel import GpuKernel, ahead, blocks_of, launch, machine_has
from whet.tactics.cuda._device.source import source
from whet.tactics.cuda.attention.attention import Attention, steps_of

SHARED = 227 * 1024  # bytes that a block takes at most
#: keys of a step (at most), warpgroups of 64 rows, slots of the ring, 1 if two warpgroups multiply alternately; the most promising first
TILES = {
    64: ((64, 2, 2, 0), (128, 2, 2, 1), (64, 2, 2, 1), (128, 2, 2, 0), (64, 3, 2, 0), (128, 3, 2, 0), (64, 1, 2, 0), (128, 1, 2, 0)),
    128: ((128, 2, 2, 1), (128, 2, 2, 0), (64, 2, 3, 1), (64, 2, 3, 0), (64, 1, 2, 0)),
}
NAMES = ("bn", "wgs", "stages", "turns")


@dataclass(frozen=True)
class AttentionLongArguments(Arguments, kernel="attention_long.cu"):
    """Arguments of attention_long.cu."""

    q: TensorMap  # (D, rows or keys, heads, batch)
    k: TensorMap
    v: TensorMap
    out: Pointer
    batch_step: Int64  # of `out`, in elements
    head_step: Int64
    row_step: Int64
    heads: Int32
    rows: Int32
    keys: Int32
    scale: Float32  # above 0, times log2(e)


@tactic
class AttentionLong(Attention):
    """The layers of attention that have no mask; keys and values come by bulk copies, so no axis may repeat."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (wgmma, sm_90a)"
        found = taken_apart(layer)
        return found if isinstance(found, str) else _unfit(found)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        found = taken_apart(layer)
        if isinstance(found, str):
            return []
        configs = candidates(found)
        ahead(backend, [source("attention_long.cu", _constants(found, c, signature)) for c in configs])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        found = taken_apart(layer)
        reason = self.refuses(layer, signature, backend)
        if isinstance(found, str) or reason:
            raise PlanRefused(str(reason or found))
        said = {k: int(v) for k, v in config}
        most = [bn for bn, *rest in TILES[found.size] if rest == list(said.values())[1:]]
        if tuple(said) != NAMES or not most or said["bn"] % 16 or not 16 <= said["bn"] <= max(most):
            raise PlanRefused(f"the kernel has no tile {config}")
        kind = signature.outputs[0].dtype.name
        constants, shared = _constants(found, config, signature), shared_bytes(found.size, config)
        grid = (blocks_of(found.rows, 64 * said["wgs"]), found.batch * found.heads, 1)

        def box(view: View, args: Args, axis: int, lines: int, most: int) -> bytes:
            batch, head, row = (2 * step for step in steps_of(view, found, axis))
            dims, steps = (found.size, lines, found.heads, found.batch), (row, head or row * lines, batch or row * lines)
            return tensormap.tiled(args.inputs[view.place] + 2 * view.offset, kind, dims, steps, (64, most, 1, 1))

        def make(args: Args) -> list:
            keys = (found.keys, said["bn"])
            boxes = box(found.q, args, -2, found.rows, 64 * said["wgs"]), box(found.k, args, -1, *keys), box(found.v, args, -2, *keys)
            steps = steps_of(found.out, found, -2)
            out, scale = args.outputs[0] + 2 * found.out.offset, found.scale * math.log2(math.e)
            arguments = AttentionLongArguments(*boxes, out, *steps, heads=found.heads, rows=found.rows, keys=found.keys, scale=scale)
            threads = 128 * said["wgs"] + (128 if _deals(found.size, said) else 32)
            return [launch("attention_long", arguments, constants, grid, threads, shared=shared, label=layer.name)]

        name = f"attention, wgmma {64 * said['wgs']}x{said['bn']}" + (" in turns" if said["turns"] else "")
        return GpuKernel(layer, signature, make, implementation=name)


def candidates(found: Heads) -> list[Config]:
    """Tiles; keys are shared out evenly over the steps, so that the last one has few to leave out."""
    made: dict[Config, None] = {}
    for bn, *rest in TILES[found.size]:
        if 64 * rest[0] < found.rows + 64:
            even = 16 * blocks_of(blocks_of(found.keys, blocks_of(found.keys, bn)), 16)
            made[tuple(zip(NAMES, (even, *rest), strict=True))] = None
    return list(made)


def _unfit(found: Heads) -> str | None:
    """Why the kernel does not take these heads."""
    if found.mask is not None:
        return "takes no mask"
    if found.turned:
        return "takes keys as rows in memory"
    if found.size not in TILES:
        return f"heads of {found.size} elements; takes 64 or 128"
    if found.scale <= 0:
        return "takes a positive scale"
    for view in (found.q, found.k, found.v):
        if any(step == 0 and n > 1 for step, n in zip(view.leading(found.batch, found.heads) or (), (found.batch, found.heads), strict=True)):
            return "takes inputs that do not broadcast"
    return None


def shared_bytes(size: int, config: Config) -> int:
    """Bytes of dynamic shared memory; mirrors attention_long.cu."""
    said = {k: int(v) for k, v in config}
    return 1024 + size // 64 * 128 * (64 * said["wgs"] + 2 * said["stages"] * said["bn"]) + 8 * (1 + 4 * said["stages"])


def _constants(found: Heads, config: Config, signature: Signature) -> dict[str, int]:
    return {**tile_constants(found.size, config), "BF16": int(signature.outputs[0].dtype.name == "bf16")}


def tile_constants(size: int, config: Config) -> dict[str, int]:
    """The constants of a tile, but for the type."""
    said = {k: int(v) for k, v in config}
    return {**{k.upper(): v for k, v in said.items()}, "D": size, "DEAL": int(_deals(size, said))}


def _deals(size: int, said: dict[str, int]) -> bool:
    """True if registers are reallocated: warps share four register files, so of 9 or 13 warps each has 168 or 128. Sums, scores and
    weights of a thread, and the other registers that the compiler reports."""
    need = size // 2 + said["bn"] // 2 + said["bn"] // 4 + 38
    return need > {1: 255, 2: 168, 3: 128}[said["wgs"]]
