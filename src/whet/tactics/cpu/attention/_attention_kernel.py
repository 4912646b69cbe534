"""Planned launches of _attention_ir.py: tiles, groups and items of queries, and the memory of a thread."""

from __future__ import annotations

import numpy as np

from whet.network import DType, Layer
from whet.tactics._attention import Heads
from whet.tactics._base import Args, Packed, Signature, Stream
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.amx import CONFIG_WORDS, TILE_ROWS, make_config
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu.attention._attention_ir import Form, emit_attention_ir, list_context_words
from whet.tactics.cpu.conv._amx_ir import list_register_shapes
from whet.tactics.cpu.conv._indirect_kernel import count_lanes

_TILES = {16: (12, 2), 8: (6, 2), 4: (6, 4)}  # floats of a vector -> queries and vectors of a tile, whose accumulators stay in registers
_MOST_VECTORS = 8
_FEW_QUERIES = 3  # that multiply keys in the time of packing them
_FIRST_CACHE, _SECOND_CACHE = 1 << 16, 1 << 19  # bytes of a group's scores: usually, and at most for _GROUP tiles
_GROUP = 4
_SHARES = 4  # ranges of items per thread, at least: k and v are packed once for each


class AttentionKernel(CompiledKernel):
    """A planned launch; `dtype` is F32 or BF16. The packed operands are the scale with the limit of scores, and a constant mask."""

    serial_work = 1 << 17  # multiplications

    def __init__(self, layer: Layer, signature: Signature, heads: Heads, dtype: DType, rtol: float, count: int) -> None:
        total = heads.batch * heads.heads
        super().__init__(layer, signature, total * heads.rows * heads.keys * (heads.size + heads.value_size), count)
        self.heads, self.rtol = heads, rtol
        self.packed = pack_scale_and_mask(layer, heads)
        is_bf16 = dtype.name == "bf16"
        self.form, tiles = _choose_form(heads, is_bf16, len(self.packed) > 1)
        groups = -(-tiles // self.form.tiles)
        self.items = total * groups
        self.threads = min(self.threads, self.items)
        # whole heads, if there are enough of them
        self.step = groups if total >= _SHARES * self.threads else max(1, self.items // (_SHARES * self.threads))
        parts = self.form.list_part_bytes()
        offsets = np.cumsum([0, *parts]).tolist()
        self.scratch = offsets[-1] * self.threads
        element, m = 2 if is_bf16 else 4, heads.mask
        self.sizes: dict[str, int] = {
            "k_group": heads.k.group, "v_group": heads.v.group, "rows": heads.rows, "heads": heads.heads, "tiles": tiles, "groups": groups,
            "items": self.items, "thread_bytes": offsets[-1], **{f"part{k}": offset for k, offset in enumerate(offsets[:-1]) if k},
        }  # fmt: skip
        for name, view in (("q", heads.q), ("k", heads.k), ("v", heads.v), ("out", heads.out)):
            places = (view.offset, *view.steps())
            self.sizes |= {f"{name}_{word}": n * element for word, n in zip(("offset", "batch", "head"), places, strict=True)}
        if m is not None:
            steps = zip(("offset", "batch", "head", "row"), (m.offset, *m.strides[:3]), strict=True)
            self.sizes |= {f"mask_{word}": n * 4 for word, n in steps} | {"mask_period": m.period or heads.batch}
        config = make_config(list_register_shapes(self.form.rows, 2 * TILE_ROWS)) if is_bf16 else [0] * CONFIG_WORDS
        self.sizes |= {f"config{k}": word for k, word in enumerate(config)}
        self.implementation = f"{self.form.rows} queries x {self.form.panel} keys, {self.form.tiles} tiles"

    def enqueue(self, args: Args, stream: Stream) -> None:
        heads = self.heads
        operands: dict[str, tuple[str, int] | int] = {"out": ("output", 0), "scratch": args.scratch, **self.sizes}
        operands |= {name: ("input", view.place) for name, view in (("q", heads.q), ("k", heads.k), ("v", heads.v), ("mask", heads.mask)) if view}
        words = [operands[name] for name in list_context_words(self.form) if name not in ("share", "packed", "constant_mask")]
        self.launch(stream, jit.generate_lazily(emit_attention_ir, self.form), "attention", args, words, self.items, self.step)


def pack_scale_and_mask(layer: Layer, heads: Heads) -> tuple[Packed, ...]:
    """The scale and the limit of scaled scores, and the mask if it is constant, as packed f32 operands."""
    scales = np.array([heads.scale, heads.cap][: 2 if heads.cap else 1], np.float32)
    packed = (Packed(f"scale|{scales.tobytes().hex()}", scales.nbytes, lambda: scales.view(np.uint8)),)
    mask = None if heads.mask is None else layer.inputs[heads.mask.place]
    if mask is None or not mask.is_constant:
        return packed
    array = np.ascontiguousarray(mask.array(), np.float32)
    return (*packed, Packed(f"{mask.constant().digest}|f32", array.nbytes, lambda: array.reshape(-1).view(np.uint8)))


def _choose_form(heads: Heads, is_bf16: bool, has_constant_mask: bool) -> tuple[Form, int]:
    """The compile-time parameters, and the number of tiles of queries of a head."""
    lanes = LANES if is_bf16 else count_lanes()
    most, width = (TILE_ROWS, 2) if is_bf16 else _TILES[lanes]
    tiles = -(-heads.rows // (2 * TILE_ROWS)) * 2 if is_bf16 else -(-heads.rows // most)
    rows = -(-heads.rows // tiles)
    group, vectors = 2, (width, width)
    if not is_bf16:
        width = min(_MOST_VECTORS, width * (most // rows))  # few queries read wider panels
        vectors = min(width, -(-heads.keys // lanes)), min(width, -(-heads.value_size // lanes))
        tile_bytes = rows * heads.keys * 4
        group = max(1, min(tiles, max(_FIRST_CACHE // tile_bytes, min(_GROUP, _SECOND_CACHE // tile_bytes))))
    mask = "" if heads.mask is None else "keys" if heads.mask.strides[-1] else "row"
    strides = heads.q.strides[-2], heads.k.strides[-2 if heads.turned else -1], heads.v.strides[-2], heads.out.strides[-2]
    form = Form(
        is_bf16, lanes, rows, group, vectors, heads.keys, heads.size, heads.value_size, strides, heads.turned,
        not is_bf16 and rows == heads.rows <= _FEW_QUERIES and not heads.turned, not is_bf16 and tiles == 1, mask, has_constant_mask, heads.guard,
        bool(heads.cap), heads.causal,
    )  # fmt: skip
    return form, tiles
