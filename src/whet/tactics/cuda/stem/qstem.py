"""Quantized stem convolutions (at most 4 input channels) that read an integer image directly, on tensor cores.

Separate from stem.cu's float tactic because products of integers need half the K steps: 89 us instead of 141 for 128 images (predicted 85).
For coverage: images that are integers already (a model whose first layer is quantized). `qstem_image` and `qstem_overlap` quantize a float image,
which networks of the zoo have.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import Epilogue, GpuKernel, compile_ahead, launch, machine_has, make_packed_array
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import TYPES, ConvShape, PostOps, count_bias_floats, pack_weights8
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Factors,
    Output,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    make_key,
    match_parts,
    match_quantized_epilogue,
    pack_factors,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic
from whet.tactics.cuda.stem.stem import TILES, PooledFields, StemArguments, StemSizes, count_integer_taps, count_shared_bytes, make_stem_constants


@tactic
class QStem(QuantizedTactic):
    """Up to 4 input channels, filter rows up to 16 taps, up to 128 output channels, no dilation, no residual; integers in and out."""

    ops = ("Conv",)

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        head = parts.head
        if head.needs(0).type.rank != 4 or head.attrs["group"] != 1 or head.needs(0).shape[1] not in (1, 2, 3, 4):
            return "takes convolutions of at most 4 input channels and one group"
        if parts.stores is None or parts.stores.dtype.name not in INT8_TYPES:
            return "stores integers"
        return why_not_weighted(parts)

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        if parts.stores is None:
            return []
        x, epilogue = parts.source_index(), match_quantized_epilogue(parts)
        if isinstance(epilogue, str) or epilogue.residual is not None:
            return []
        signatures = []
        for form in ("linear", "nhwc"):
            ins = tuple(Operand(form, parts.reads[i].dtype) if i == x else None for i in range(len(layer.inputs)))
            signatures.append(Signature(ins, (Operand("nhwc", parts.stores.dtype),)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        return why_not_integer_stem(get_quantized_conv_shape(parts), backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        assert isinstance(parts, Parts)
        assert not isinstance(epilogue, str)
        configs, stores = list_integer_stem_configs(get_quantized_conv_shape(parts)), signature.outputs[0].dtype.name
        source = signature.inputs[parts.source_index()]
        tiles = ({k: int(v) for k, v in c} for c in configs)
        compile_ahead(
            backend,
            [text("stem.cu", make_integer_stem_constants(parts, epilogue, get_quantized_conv_shape(parts), t, source, stores)) for t in tiles],
        )
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str):
            raise PlanRefused(str(epilogue))
        x = parts.source_index()
        return make_integer_stem_kernel(layer, parts, epilogue, signature, config, backend, x)


def list_integer_stem_configs(s: ConvShape) -> list[Config]:
    """Tiles that fit a multiprocessor."""
    configs: list[Config] = []
    for th, tw in TILES:
        for blocks in (1, 2, 3, 4):
            threads = th * tw * 2
            pixels = -(-((th - 1) * s.stride[0] + s.r) * ((tw - 1) * s.stride[1] + count_integer_taps(s)) // threads) * s.c
            registers = _count_columns(s) + pixels + 48
            if blocks * threads <= 1024 and registers <= 65536 // (blocks * threads) and count_integer_shared_bytes(s, th, tw) * blocks < 220 * 1024:
                configs.append((("th", th), ("tw", tw), ("blocks", blocks)))
    return configs


def why_not_integer_stem(s: ConvShape, backend: Backend) -> str | None:
    """The reason why the kernel cannot compute a convolution of these sizes, or None."""
    if not machine_has(backend, "wgmma"):
        return "needs Hopper's tensor cores (sm_90a)"
    if s.c > 4 or s.k > 128 or s.k % 8 or s.s > 16 or s.r > 16 or s.dilation != (1, 1):
        return f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}; takes 4, a multiple of 8 up to 128, 16 x 16, no dilation"
    return None


def make_integer_stem_kernel(
    layer: Layer, parts: Parts, epilogue: Epilogue, signature: Signature, config: Config, backend: Backend, image: int, step: float | None = None
) -> GpuKernel:
    """The kernel that reads input `image`: integers, or floats that it quantizes with this `step`."""
    s, tile, stored = get_quantized_conv_shape(parts), {k: int(v) for k, v in config}, signature.outputs[0].dtype.name
    packed, out, post_ops = pack_integer_stem(parts, epilogue, s, stored)
    row = count_integer_row_bytes(s)
    constants = make_integer_stem_constants(parts, epilogue, s, tile, signature.inputs[image], stored, floats=step is not None)
    tiles_h, tiles_w = -(-s.p // tile["th"]), -(-s.q // tile["tw"])
    tiles = s.n * tiles_h * tiles_w

    def make(args: Args) -> list:
        box = tensormap.make_tiled_map(args.packed[0], "u8", (row, constants["BN"]), (row,), (128, constants["BN"]))
        arguments = make_integer_arguments(parts, post_ops, s, out, args, args.inputs[image], StemSizes.of(s, tiles_h, tiles_w), box, step)
        grid, shared = min(tiles, backend.capabilities.multiprocessors * tile["blocks"]), count_integer_shared_bytes(s, tile["th"], tile["tw"])
        return [launch("stem", arguments, constants, (grid, 1, 1), tile["th"] * tile["tw"] * 2, shared=shared, label=layer.name)]

    name = f"first of integers{' from floats' if step is not None else ''} {tile['th']}x{tile['tw']} b{tile['blocks']}"
    return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=0.0)


def count_integer_row_bytes(s: ConvShape) -> int:
    """Bytes of a packed filter: whole rows of 128."""
    return _count_chunks(s) * 128


def count_integer_shared_bytes(s: ConvShape, th: int, tw: int) -> int:
    """Bytes of shared memory for tiles of th x tw results; mirrors stem.cu."""
    return count_shared_bytes(_pad_output_channels(s), th, tw, count_integer_taps(s))


def pack_integer_stem(parts: Parts, epilogue: Epilogue, s: ConvShape, stored: str) -> tuple[tuple[Packed, Packed], Output, PostOps]:
    """Filters and factors as stem.cu reads them, the output's quantization, and the activation."""
    weights = parts.view.inputs[parts.operand_indices()[1]]
    assert weights is not None
    row, filters = count_integer_row_bytes(s), _count_columns(s)

    def permute_filters() -> np.ndarray:
        given = np.asarray(weights.array(), np.int8)  # [k, c, r, s]
        side = np.zeros((s.k, s.r, count_integer_taps(s), 4), np.int8)
        side[:, :, : s.s, : s.c] = given.transpose(0, 2, 3, 1)
        out = np.zeros((s.k, row), np.int8)
        out[:, : side[0].size] = side.reshape(s.k, -1)
        return pack_weights8(out[:, :, None, None], row)

    numbers, out, post_ops = make_stem_factors(parts, epilogue, s, stored)
    return (
        (make_packed_array(f"{weights.constant().digest}|first 8 bits {count_integer_taps(s)} {row}", filters * row, permute_filters), numbers),
        out,
        post_ops,
    )


def make_stem_factors(parts: Parts, epilogue: Epilogue, s: ConvShape, stored: str) -> tuple[Packed, Output, PostOps]:
    """Biases and factors (count_bias_floats(k) floats each), the output's quantization, and the activation. Pixels outside the image are the zero
    point."""
    x, w, b = parts.operand_indices()
    weights, bias = parts.view.inputs[w], None if b is None else parts.view.inputs[b]
    assert weights is not None
    zero = parts.reads[x].zero

    def make_factors() -> Factors:  # all taps count, for every pixel
        factor = np.broadcast_to(parts.reads[w].scale.astype(np.float64) * parts.reads[x].number, (s.k,))
        taken = zero * factor * np.asarray(weights.array(), np.float64).sum(axis=(1, 2, 3))
        found = Factors(factor.astype(np.float32), (epilogue.bias(bias, s.k) - taken)[None], np.zeros(0, np.uint16))
        return found.times(per, shift)

    out, per, shift, post_ops = Output.of(parts, epilogue), 1.0, 0.0, epilogue.post_ops
    if folds(epilogue, stored):
        per, shift, out, post_ops = fold_into_range(out, epilogue, stored)
    return pack_factors(f"{make_key(parts, epilogue)}|first {s} {per} {shift}", s, 1, False, make_factors)[0], out, post_ops


def make_integer_arguments(
    parts: Parts,
    post_ops: PostOps,
    s: ConvShape,
    out: Output,
    args: Args,
    image: int,
    sizes: StemSizes,
    box: bytes,
    step: float | None,
    pooled: PooledFields | None = None,
) -> StemArguments:
    """The kernel's arguments; `step` is the scale with which the kernel quantizes a float image, None for an image of integers."""
    return StemArguments(
        box,
        args.packed[1],
        image,
        args.outputs[0],
        sizes,
        act=post_ops.activation[1:],
        per_step=out.per_step,
        zero=out.zero,
        in_zero=parts.reads[parts.source_index()].zero,
        factor=args.packed[1] + count_bias_floats(s.k) * 4,
        pooled=pooled,
        image_per_step=None if step is None else 1.0 / step,
    )


def _count_columns(s: ConvShape) -> int:
    return -(-s.k // 32) * 32


def _pad_output_channels(s: ConvShape) -> ConvShape:
    """The shape with output channels padded to a multiple of 32, as in shared memory."""
    return ConvShape(s.n, s.h, s.w, s.c, _count_columns(s), s.r, s.s, s.stride, s.pad, s.dilation)


def make_integer_stem_constants(
    parts: Parts, epilogue: Epilogue, s: ConvShape, tile: dict[str, int], source: Operand | None, stores: str, *, floats: bool = False
) -> dict[str, int]:
    """The macros of an instance; `floats`: the kernel quantizes a float image."""
    kind = TYPES[parts.reads[parts.source_index()].dtype.name]
    fixed = {
        "BN": _count_columns(s),
        "TAPS": count_integer_taps(s),
        "PAIRS": 0,
        "FROM": kind,
        "TO": TYPES[stores],
        "FOLD": int(folds(epilogue, stores)),
        "IN8": kind,
    }
    if floats:
        assert source is not None, "the kernel quantizes the image, so the image is stored"
        fixed |= {"FROM": TYPES[source.dtype.name], "QUANT": 1}
    return {**make_stem_constants(s, tile, epilogue.post_ops.activation[0], source, "f16"), **fixed}


def _count_chunks(s: ConvShape) -> int:
    """Rows of 128 bytes of K. Filter rows are padded to a multiple of 4 taps of 4 bytes each."""
    steps = -(-s.r * count_integer_taps(s) // 8)
    return -(-steps // 4)
