"""Attention of 16-bit tensors in one launch, on tensor cores (mma.sync): products, softmax, and the transposes around them, which become strides."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from whet.backends.cuda.launch import Launch
from whet.network import Layer, Tensor, static_shape
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._kernel import HALF, TYPE, GpuKernel, ahead, all_static, blocks_of, float_types, loaded, packed_array, same
from whet.tactics.cuda._source import source

SHAPES = ((1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))  # warps along rows, warps along keys
SHARED = 200 * 1024


@dataclass(frozen=True)
class View:
    """A tensor of the body as it lies in an input (or the output) of the layer: its shape, offset and strides in elements."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def turned(self, perm: Sequence[int]) -> View:
        """After a Transpose."""
        return replace(self, shape=tuple(self.shape[i] for i in perm), strides=tuple(self.strides[i] for i in perm))

    def taken(self, axis: int, index: int) -> View:
        """After a Gather of one index, which drops the axis."""
        axis, index = axis % len(self.shape), index % self.shape[axis]
        kept = [i for i in range(len(self.shape)) if i != axis]
        return replace(self.turned(kept), offset=self.offset + index * self.strides[axis])

    def leading(self, batch: int, heads: int) -> tuple[int, int] | None:
        """Strides of batch and head; 0 where the axis repeats. None when the leading axes are others."""
        shape, strides = (1, 1, *self.shape[:-2])[-2:], (0, 0, *self.strides[:-2])[-2:]
        if len(self.shape) > 4 or any(d not in (1, n) for d, n in zip(shape, (batch, heads), strict=True)):
            return None
        return strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0


@dataclass(frozen=True)
class Heads:
    """An attention taken apart: views of q, k (one row a key), v, mask and the output, and its sizes."""

    q: View
    k: View
    v: View
    mask: View | None
    out: View
    turned: bool  # keys are columns of k in memory
    batch: int
    heads: int
    rows: int
    keys: int
    size: int
    scale: float


@tactic
class OwnAttention(Tactic):
    """What recognize_attention and fuse_attention_transposes make: 32 to 128 elements a head, an added mask of any shape that repeats."""

    ops = ("*",)
    hints = ("Attention",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.hint not in self.hints:
            return f"computes attention, not {layer.hint or layer.op}"
        if not all_static(layer):
            return None
        found = taken_apart(layer)
        return found if isinstance(found, str) else None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if not all_static(layer):
            return []
        found = taken_apart(layer)
        if isinstance(found, str):
            return []
        read = {v.place for v in (found.q, found.k, found.v)}
        mask = found.mask.place if found.mask is not None and not layer.inputs[found.mask.place].is_constant else None  # type: ignore[union-attr]
        signatures = []
        for t in float_types([*(layer.inputs[i] for i in read), layer.outputs[0]], HALF):
            stored = {i: Operand("linear", t) for i in read}
            kinds = (t, F32) if mask is not None and layer.inputs[mask].dtype == F32 else (t,)  # type: ignore[union-attr]
            for kind in kinds if mask is not None else (None,):
                operands = stored if kind is None or mask is None else {**stored, mask: Operand("linear", kind)}
                signatures.append(same(layer, operands, Operand("linear", t)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        found = taken_apart(layer)
        return found if isinstance(found, str) else None

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> Sequence[Config]:
        found = taken_apart(layer)
        if isinstance(found, str):
            return []
        configs = candidates(found, machine.multiprocessors)
        ahead(machine, [source("attention.cu", _constants(found, c, layer, signature)) for c in configs])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        found = taken_apart(layer)
        if isinstance(found, str):
            raise PlanRefused(found)
        said = {k: int(v) for k, v in config}
        known = set(said) == {"wr", "wk", "kc", "stages"} and (said["wr"], said["wk"]) in SHAPES
        if not known or said["kc"] not in (16, 32, 64) or said["stages"] not in (1, 2):
            raise PlanRefused(f"no such tile: {config}")
        shared = shared_bytes(found, config)
        if shared > SHARED or not _registers(found.size, said["kc"]):
            raise PlanRefused(f"a multiprocessor cannot hold {config} for heads of {found.size}")
        constants = tuple(sorted(_constants(found, config, layer, signature).items()))
        grid = (blocks_of(found.rows, 16 * said["wr"]), found.batch * found.heads, 1)
        packed: list[Packed] = []
        constant = found.mask is not None and layer.inputs[found.mask.place].is_constant  # type: ignore[union-attr]
        if constant:
            t = layer.inputs[found.mask.place]  # type: ignore[union-attr]
            packed.append(packed_array(f"{t.weight.digest}|mask f32", prod(static_shape(t.shape)) * 4, lambda: np.asarray(t.array(), np.float32)))  # type: ignore[union-attr]

        def make(args: Args) -> list:
            at = [args.inputs[v.place] + v.offset * 2 for v in (found.q, found.k, found.v)]
            mask, steps, key = 0, (0, 0, 0), 0
            if found.mask is not None:
                size = signature.inputs[found.mask.place]
                mask = args.packed[0] if constant else args.inputs[found.mask.place]
                mask += found.mask.offset * (4 if size is None or size.dtype == F32 else 2)
                steps, key = _steps(found.mask, found, -2), found.mask.strides[-1]
            k = _steps(found.k, found, -2 if found.turned else -1)
            strides = (*_steps(found.q, found, -2), *k, *_steps(found.v, found, -2), *_steps(found.out, found, -2), *steps, key)
            numbers = (args.outputs[0] + found.out.offset * 2, mask, *strides, found.heads, found.rows, found.keys, found.scale)
            kernel = loaded("attention.cu", "attention", constants, shared)
            return [Launch(kernel, grid, 32 * said["wr"] * said["wk"], struct.pack("<5Q15q4if", *at, *numbers), label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"own attention {said['wr'] * 16}x{said['kc'] * said['wk']}", packed=packed)


def _steps(view: View, found: Heads, axis: int) -> tuple[int, int, int]:
    """Elements from batch to batch, head to head, row to row."""
    lead = view.leading(found.batch, found.heads)
    assert lead is not None
    return (*lead, view.strides[axis])


def candidates(found: Heads, multiprocessors: int = 132) -> list[Config]:
    """Tiles: keys shared by warps where there are few rows, else a warp for each sixteen rows."""
    made: list[tuple[float, Config]] = []
    for (wr, wk), kc in ((s, kc) for s in SHAPES for kc in (16, 32, 64)):
        blocks = blocks_of(found.rows, 16 * wr) * found.batch * found.heads
        chunks = blocks_of(found.keys, kc * wk)
        if (kc * wk >= 2 * max(found.keys, 32) and (wk > 1 or kc > 32)) or wr * 16 >= found.rows + 48 or (wk > 2 and blocks > 8 * multiprocessors):
            continue
        for stages in (1, 2) if chunks > 1 else (1,):
            config: Config = (("wr", wr), ("wk", wk), ("kc", kc), ("stages", stages))
            if shared_bytes(found, config) <= SHARED and _registers(found.size, kc):
                turns = blocks_of(blocks, 2 * multiprocessors)
                made.append((turns * chunks * (1 + kc / 32) * (1.5 if stages == 1 and chunks > 1 else 1) * (1 + 0.1 * wk), config))
    return [c for _, c in sorted(made)][:12]


def _registers(size: int, kc: int) -> bool:
    """Whether sums, scores and q of a warp fit 255 registers a thread."""
    return size // 2 + kc // 2 + size // 4 + 100 <= 250


def shared_bytes(found: Heads, config: Config) -> int:
    """Bytes of dynamic shared memory; mirrors attention.cu."""
    said = {k: int(v) for k, v in config}
    chunk = said["kc"] * said["wk"]
    keys = found.size * (chunk + 8) if found.turned else chunk * (found.size + 8)
    parts = said["wr"] * said["wk"] * 16 * (found.size + 4 + 2) * 4 if said["wk"] > 1 else 0
    return max(said["stages"] * (keys + chunk * (found.size + 8)) * 2, parts)


def _constants(found: Heads, config: Config, layer: Layer, signature: Signature) -> dict[str, int]:
    said = {k: int(v) for k, v in config}
    kind = signature.outputs[0].dtype
    mask, same_rows = -1, 1
    if found.mask is not None:
        stored = signature.inputs[found.mask.place]
        mask = 0 if stored is None else TYPE[stored.dtype.name]
        same_rows = int(found.mask.strides[-2] == 0)
    names = {"KC": said["kc"], "WR": said["wr"], "WK": said["wk"], "STAGES": said["stages"]}
    names |= {"TYPE": TYPE[kind.name], "BF16": int(kind.name == "bf16"), "D": found.size}
    return {**names, "TURNED": int(found.turned), "MASK": mask, "SAME": same_rows}


def taken_apart(layer: Layer) -> Heads | str:
    """What the body of a layer hinted Attention computes, or why this kernel cannot."""
    body = layer.regions["body"]
    views: dict[Tensor, View] = {t: plain_view(i, static_shape(t.shape)) for i, t in enumerate(body.inputs)}
    waiting, products = [], [x for x in body.layers if x.op == "MatMul"]
    for x in body.layers:  # transposes and parts of what is read become strides
        source_view = None if x.inputs[0] is None else views.get(x.inputs[0])
        if x.op == "Transpose" and source_view is not None:
            views[x.output] = source_view.turned(x.attrs.get("perm") or tuple(range(len(source_view.shape)))[::-1])
        elif x.op == "Gather" and source_view is not None and (index := _index(layer, x)) is not None:
            views[x.output] = source_view.taken(x.attrs.get("axis", 0), index)
        else:
            waiting.append(x)
    if len(products) != 2 or waiting[0] is not products[0]:
        return "is no chain from one product to another"
    q, k = (None if t is None else views.get(t) for t in products[0].inputs)
    running, scale, mask, softmax = products[0].output, 1.0, None, False
    out: View | None = None
    v: View | None = None
    for x in waiting[1:]:
        others = [t for t in x.inputs if t is not None and t is not running]
        number = _one_number(layer, others[0]) if len(others) == 1 else None
        if running not in x.inputs:
            return f"{x.op} does not follow"
        if x.op in ("Mul", "Div") and number is not None and mask is None and not softmax and (x.op == "Mul" or x.inputs[0] is running):
            scale = scale * number if x.op == "Mul" else scale / number
        elif x.op == "Add" and mask is None and not softmax and len(others) == 1 and others[0] in views:
            mask = views[others[0]]
        elif x.op == "Softmax" and not softmax:
            softmax = True
        elif x.op == "MatMul" and softmax and v is None and x.inputs[0] is running and others and others[0] in views:
            v = views[others[0]]
            shape = static_shape(x.output.shape)
            out = plain_view(0, shape)
        elif x.op == "Transpose" and out is not None:
            perm = x.attrs["perm"]
            stored = plain_view(0, static_shape(x.output.shape))
            strides = [0] * len(perm)
            for to, come in enumerate(perm):
                strides[come] = stored.strides[to]
            out = replace(out, strides=tuple(strides))
            if x is not body.layers[-1]:
                return "something follows the last transpose"
        else:
            return f"the kernel has no {x.op} here"
        running = x.output
    if q is None or k is None or v is None or out is None or body.outputs != [running]:
        return "is no chain from one product to another"
    return _heads(q, k, v, mask, out, scale)


def _heads(q: View, k: View, v: View, mask: View | None, out: View, scale: float) -> Heads | str:
    shape = (1, 1, *out.shape)[-4:] if len(out.shape) <= 4 else ()
    if not shape or len(q.shape) < 2:
        return "more than four axes"
    (rows, size), keys = q.shape[-2:], k.shape[-1]
    if size % 16 or not 16 <= size <= 128 or v.shape[-1] != size:
        return f"heads of {size} and {v.shape[-1]} elements: the kernel takes equal ones, 16 to 128 in steps of 16"
    turned = k.strides[-1] == 1
    found = Heads(q, k, v, mask, out, turned, shape[0], shape[1], rows, keys, size, scale)
    for name, view, line in (("q", q, -1), ("k", k, -1 if turned else -2), ("v", v, -1), ("the output", out, -1)):
        lead = view.leading(found.batch, found.heads)
        if lead is None:
            return f"{name} repeats along some of its axes only"
        if view.strides[line] != 1 or any(s % 8 for i, s in enumerate(view.strides) if i - len(view.strides) != line) or view.offset % 8:
            return f"rows of {name} do not lie as whole 16 bytes"
    if mask is not None:
        wide = (1, 1, 1, 1, *mask.shape)[-4:]
        steps = (0, 0, 0, 0, *mask.strides)[-4:]
        if len(mask.shape) > 4 or any(d not in (1, n) for d, n in zip(wide, (*shape[:2], rows, keys), strict=True)):
            return "a mask that repeats along some of its axes only"
        strides = tuple(0 if d == 1 else s for d, s in zip(wide, steps, strict=True))
        found = replace(found, mask=replace(mask, shape=wide, strides=strides))
    if not prod(shape) * keys or shape[0] * shape[1] > 65535:
        return "no heads, or more than 65535 of them"
    return found


def plain_view(place: int, shape: tuple[int, ...]) -> View:
    """A row-major tensor."""
    strides: list[int] = []
    at = 1
    for d in reversed(shape):
        strides.insert(0, at)
        at *= d
    return View(place, shape, tuple(strides))


def _index(layer: Layer, gather: Layer) -> int | None:
    """The one place that a Gather takes, when it is a constant and the axis goes with it."""
    t = gather.inputs[1]
    number = None if t is None or t.type.rank else _one_number(layer, t)
    return None if number is None else int(number)


def _one_number(layer: Layer, t: Tensor) -> float | None:
    """The value of a constant of one number."""
    body = layer.regions["body"]
    outer = next((layer.inputs[i] for i, x in enumerate(body.inputs) if x is t), t)
    if outer is None or not outer.is_constant or prod(static_shape(outer.shape)) != 1:
        return None
    return float(np.asarray(outer.array(), np.float64).reshape(-1)[0])
