"""Base of the tactics of f32 products on tensor cores: convolutions of any groups, stem convolutions, products with a constant matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import (
    TYPE,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    count_blocks,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv import _tf32
from whet.tactics.cuda.conv._conv import ConvShape, Groups, View
from whet.tactics.cuda.conv._tf32 import Tf32Config
from whet.tactics.cuda.conv._window_map import make_row_window_map
from whet.tactics.cuda.conv.conv import get_conv_shape, make_packed_bias
from whet.tactics.cuda.conv.group_conv import get_groups, pack_groups, tile_shape
from whet.tactics.cuda.gemm.gemm import get_gemm_shape, why_not_product
from whet.tactics.cuda.stem.stem_as_channels import StemAsChannelsArguments

MAX_CONFIGS = 24
_FEW = 4  # input channels of a stem convolution: the taps of a filter row are adjacent and count as channels


@dataclass(frozen=True)
class Work:
    """A layer as the kernel computes it: its sizes, its groups if it has several, and pixels of a row of the padded image (0: unpadded)."""

    shape: ConvShape
    groups: Groups | None
    given: ConvShape  # of the layer itself
    row: int = 0

    @staticmethod
    def of(layer: Layer) -> Work:
        """For a Conv, Gemm or MatMul."""
        if get_root_layer(layer).op != "Conv":
            s = get_gemm_shape(layer)
            return Work(s, None, s)
        s = get_conv_shape(layer)
        if get_root_layer(layer).attrs["group"] != 1:
            return Work(s, get_groups(layer), s)
        if s.c > _FEW or s.c % 4 == 0 or s.dilation[1] != 1:
            return Work(s, None, s)
        row = max(s.pad[1] + s.w, (s.q - 1) * s.stride[1] + s.s)
        seen = ConvShape(s.n, s.h, s.q, s.s * _FEW, s.k, s.r, 1, (s.stride[0], 1), (s.pad[0], 0, s.pad[2], 0), (s.dilation[0], 1))
        return Work(seen, None, s, row)

    @property
    def scratch(self) -> int:
        """Bytes of the padded image."""
        return self.given.n * self.given.h * self.row * _FEW * 4

    def tile(self, bn: int) -> ConvShape:
        """The shape that tiles of `bn` output channels see."""
        return self.shape if self.groups is None else tile_shape(self.shape, self.groups, bn)


class F32Product(Tactic):
    """Base of the tactics; `terms` as in _tf32.Tf32Config, `math` names the precision in the config, `rtol` bounds the error of a layer."""

    ops: tuple[str, ...] = ("Conv", "Gemm", "MatMul")
    terms = 1
    math = "tf32"
    rtol = 0.0

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or why_not_product(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        head, steps = get_root_layer(layer), find_epilogue_steps(layer)
        x = get_source_index(layer)
        if F32 not in list_float_types([head.inputs[0], layer.outputs[0]], (F32,)):
            return []
        conv, rank = head.op == "Conv", layer.outputs[0].type.rank
        form = Operand("nhwc" if conv else "linear", F32)
        others = [p.other for p in steps or () if p.other is not None and not layer.needs(p.other).is_constant]
        if any(layer.needs(i).type.rank != rank for i in others):
            return []
        sources = [form] if not conv or not Work.of(layer).row else [Operand("linear", F32), form]
        return [make_stored_signature(layer, {**dict.fromkeys(others, form), x: source}, form) for source in sources]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, work = _match_epilogue(layer), Work.of(layer)
        if isinstance(epilogue, str):
            return epilogue
        if work.groups is not None and work.groups.c == work.groups.k == 1:
            return "takes several channels per group; depthwise tactics take one"
        return _tf32.refuses(work.shape)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        epilogue, configs = _match_epilogue(layer), list_tiles(Work.of(layer), self.terms, backend.capabilities.multiprocessors)[:MAX_CONFIGS]
        if not isinstance(epilogue, str):
            work, kind = Work.of(layer), epilogue.post_ops.activation[0]
            wide = work.row > 0 or not work.shape.plain
            compile_ahead(backend, [_tf32.emit_tf32_source(c, wide, kind, work.shape.k % 4 != 0, work.groups is not None) for c in configs])
        return [as_config(c, self.math) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, work, tile = _match_epilogue(layer), Work.of(layer), self._tile(config)
        shape = work.tile(tile.bn)
        reason = epilogue if isinstance(epilogue, str) else _tf32.refuses(work.shape)
        if reason or isinstance(epilogue, str):
            raise PlanRefused(str(reason))
        if tile.bk != _tf32.step_channels(shape.c):
            raise PlanRefused(f"{shape.c} channels need steps of {_tf32.step_channels(shape.c)}, not {tile.bk}")
        head = get_root_layer(layer)
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        rows = shape.steps(tile.bk) * tile.bk
        layout = f"{self.terms} {work} {tile.bn if work.groups else 0} {tile.bk} {head.op} {head.attrs.get('transB')}"
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|tf32 permuted {layout}",
                tile.parts * _tf32.count_padded_filters(shape.k) * rows * 4,
                lambda: _tf32.pack(_pack_rows(head, work, np.asarray(weights.array(), np.float32), tile).reshape(shape.k, rows), tile.bk, tile.terms),
            ),
            make_packed_bias(epilogue, own, shape.k),
        )
        source = signature.needs(x)
        post_ops, residual_at = epilogue.post_ops, epilogue.residual

        def make(args: Args) -> list:
            at, launches = View(args.inputs[x], work.given.c), []
            windows = None
            if work.row:
                start = -(-args.scratch // 16) * 16
                launches.append(_widen(work, args.inputs[x], start, source.format == "nhwc", backend))
                windows = _make_row_windows(work, start, tile)
            launches.append(
                _tf32.launch(
                    tile,
                    shape,
                    at,
                    args.packed[0],
                    args.packed[1],
                    View(args.outputs[0], shape.k),
                    residual=None if residual_at is None else View(args.inputs[residual_at], shape.k),
                    post_ops=post_ops,
                    groups=work.groups,
                    input_map=windows,
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            )
            return launches

        scratch = work.scratch + 16 if work.row else 0
        return GpuKernel(layer, signature, make, implementation=f"wgmma {self.math} {tile}", packed=packed, scratch=scratch, rtol=self.rtol)

    def _tile(self, config: Config) -> Tf32Config:
        fields = dict(config)
        if fields.pop("math", None) != self.math:
            raise PlanRefused(f"this tactic computes in {self.math}")
        tile = Tf32Config(**{k: int(v) for k, v in fields.items()}, terms=self.terms)
        if not tile.valid():
            raise PlanRefused(f"a multiprocessor cannot hold {tile}")
        return tile


def list_tiles(work: Work, terms: int, multiprocessors: int) -> list[Tf32Config]:
    """Tiles for a layer, the most promising first; with groups, those of all widths interleaved."""
    s = work.shape
    if work.groups is None:
        return _tf32.list_configs(s.m, s.k, s.c, s.r * s.s, terms, multiprocessors)
    widths = (16, 32, 64, 128)
    products = {bn: work.tile(bn).c * -(-s.k // bn) * bn for bn in widths}
    turns: list[list[Tf32Config]] = []
    for bn in widths:
        if products[bn] <= 4 * min(products.values()):
            turns.append([c for c in _tf32.list_configs(s.m, s.k, work.tile(bn).c, s.r * s.s, terms, multiprocessors) if c.bn == bn])
    return [found[i] for i in range(max(map(len, turns), default=0)) for found in turns if i < len(found)]


def as_config(c: Tf32Config, math: str) -> Config:
    """A tile as a tactic's config."""
    return (("wgs", c.wgs), ("bn", c.bn), ("bk", c.bk), ("stages", c.stages), ("sk", c.sk), ("blocks", c.blocks), ("math", math))


def _match_epilogue(layer: Layer) -> Epilogue | str:
    return match_epilogue(layer, find_epilogue_steps(layer), 1 if get_root_layer(layer).op == "Conv" else layer.outputs[0].type.rank - 1)


def _pack_rows(head: Layer, work: Work, filters: np.ndarray, tile: Tf32Config) -> np.ndarray:
    """Filters as rows [k][tap][channel], channels in whole K steps."""
    if head.op != "Conv":
        filters = (filters if head.op == "Gemm" and head.attrs.get("transB") else filters.T)[:, :, None, None]
    if work.groups is not None:
        return pack_groups(filters, work.groups, tile.bn, tile.bk, np.dtype(np.float32))
    if work.row:  # [k, c, r, s] -> taps of a row side by side, each of _FEW channels
        side = np.zeros((filters.shape[0], filters.shape[3], _FEW, filters.shape[2]), np.float32)
        side[:, :, : filters.shape[1]] = filters.transpose(0, 3, 1, 2)
        filters = side.reshape(filters.shape[0], -1, filters.shape[2], 1)
    k, c, r, s = filters.shape
    out = np.zeros((k, r, s, -(-c // tile.bk) * tile.bk), np.float32)
    out[..., :c] = filters.transpose(0, 2, 3, 1)
    return out


def _widen(work: Work, image: int, to: int, channels_last: bool, backend: Backend) -> Any:
    """The launch that pads an image of few channels; see stem_as_channels.cu."""
    s = work.given
    grid = (min(count_blocks(s.n * s.h * work.row, 256), 16 * backend.capabilities.multiprocessors), 1, 1)
    constants = {"FROM": TYPE["f32"], "TO": TYPE["f32"], "CP": _FEW, "NHWC": int(channels_last)}
    arguments = StemAsChannelsArguments(image, to, s.n, s.c, s.h, s.w, wide=work.row, left=s.pad[1])
    return launch("widen", arguments, constants, grid, 256)


def _make_row_windows(work: Work, address: int, tile: Tf32Config) -> bytes:
    """The windows of a filter row as a tensor of overlapping strides."""
    line = work.row * _FEW * 4
    return make_row_window_map(work.shape, address, "f32", work.given.stride[1] * _FEW * 4, line, tile.bk, tile.bm)
