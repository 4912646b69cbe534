"""Shared by the tactics of layers with 2:4 weights: tiles, packed operands and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Packed, PlanRefused
from whet.tactics.cuda._device.kernel import Epilogue, compile_ahead, make_packed_array, make_packed_table
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, View
from whet.tactics.cuda.sparse._compress import ROWS, STEP_BYTES
from whet.tactics.cuda.sparse._kernel_text import emit_sparse_source
from whet.tactics.cuda.sparse._launch import (
    Packed24,
    RowTile,
    Scales,
    Types,
    count_padded_rows,
    make_sparse_constants,
    make_sparse_launch,
    pack_floats,
    pack_sparse,
    step_elements,
)
from whet.tactics.cuda.sparse._tile import SparseTile, list_sparse_tiles, pick_varied_tiles

MAX_CONFIGS = 14


def why_not_shape(shape: ConvShape, types: Types) -> str | None:
    """Why the kernel cannot take a shape with these types, or None."""
    unit = 16 // types.out_size
    if shape.c * types.in_size % 16 or shape.k % unit:
        return f"{shape.c} input and {shape.k} output channels: the kernel takes inputs of 16 bytes and outputs of 16 bytes"
    if max(*shape.pad, (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1]) > 127:
        return "padding or filter extent above 127 pixels, which the copy engine cannot express"
    if max(shape.stride) > 8:
        return "stride above 8, which the copy engine cannot express"
    return None


def list_sparse_configs(shape: ConvShape, types: Types, post_ops: PostOps, backend: Backend) -> Sequence[Config]:
    """Tiles for a shape, the most promising first; a real GPU's backend compiles them in the background."""
    steps = shape.steps(step_elements(types.in_size))
    configs = list_sparse_tiles(shape.m, shape.k, steps, types.in_size, types.out_size, post_ops.residual > 0, backend.capabilities.multiprocessors)
    tiles = pick_varied_tiles(configs, MAX_CONFIGS)
    compile_ahead(backend, [emit_sparse_source(make_sparse_constants(t, types, not shape.plain, post_ops)) for t in tiles])
    return [t.config for t in tiles]


def tile_of(config: Config, types: Types, residual: bool) -> SparseTile:
    """The tile of a config. Raises PlanRefused for one that a multiprocessor cannot hold."""
    tile = SparseTile.of(config)
    reason = tile.why_invalid(types.in_size, types.out_size, residual)
    if reason:
        raise PlanRefused(reason)
    return tile


def pack_sparse_operands(
    key: str,
    tile: RowTile,
    shape: ConvShape,
    types: Types,
    filters: Callable[[], np.ndarray],
    floats_key: str,
    floats: Callable[[], tuple[np.ndarray, np.ndarray | None]],
) -> tuple[Packed, Packed, Packed]:
    """Values, metadata, and biases with factors.

    key, floats_key: equal for equal contents, but for tile and types. filters: gives weights [k, c, r, s] in the type of the products;
    floats: biases [k] and factors [k] or None.
    """
    paired = types.out_size == 1
    rows = -(-shape.k // 16) * 16 if paired else shape.k
    steps, tiles = shape.steps(step_elements(types.in_size)), count_padded_rows(tile, shape.k) // ROWS
    words = steps * tiles * 512 * (2 if types.in_size == 1 else 1)
    return (
        make_packed_array(
            f"{key}|sparse values {paired}", rows * steps * STEP_BYTES // 2, lambda: pack_sparse(filters(), tile, types.in_size, paired)[0]
        ),
        make_packed_table(f"{key}|sparse metadata {paired} {tiles}", words, lambda: pack_sparse(filters(), tile, types.in_size, paired)[1]),
        make_packed_array(f"{floats_key}|sparse floats {tiles}", tiles * ROWS * 8, lambda: pack_floats(tile, *floats())),
    )


def launch_of(
    layer: Layer,
    tile: SparseTile,
    shape: ConvShape,
    types: Types,
    x: int,
    epilogue: Epilogue,
    post_ops: PostOps,
    args: Args,
    backend: Backend,
    scales: Scales | None = None,
) -> list:
    """The launch of a planned layer: input `x`, the operands of `pack_sparse_operands`, the residual of the epilogue."""
    return [
        make_sparse_launch(
            tile,
            shape,
            View(args.inputs[x], shape.c),
            Packed24(*args.packed),
            View(args.outputs[0], shape.k),
            types,
            residual=None if epilogue.residual is None else View(args.inputs[epilogue.residual], shape.k),
            post_ops=post_ops,
            scales=scales,
            multiprocessors=backend.capabilities.multiprocessors,
            label=layer.name,
        )
    ]
