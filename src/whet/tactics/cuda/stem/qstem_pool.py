"""Quantized stem convolutions with the following max pooling, and the preceding quantization of the image, in one launch.

Covers windows, strides and images that `qstem_overlap` does not take; for small batches it saves two launches.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, launch, machine_has, make_stored_signature
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.quantized._quantized_image import Image, match_image
from whet.tactics.cuda.stem.qstem import (
    count_integer_row_bytes,
    count_integer_shared_bytes,
    make_integer_arguments,
    make_integer_stem_constants,
    pack_integer_stem,
)
from whet.tactics.cuda.stem.stem import PooledFields, StemSizes
from whet.tactics.cuda.stem.stem_pool import TILES, pool_window, tile_of_windows, why_not_window


@tactic
class QStemPool(Tactic):
    """Layers of the pass fuse_quantized_pool: up to 4 input channels, 64 output channels, integers out; square windows and strides."""

    ops = ("*",)
    composites = ("ConvPool",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        image = match_image(layer, "ConvPool")
        return image if isinstance(image, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        image = match_image(layer, "ConvPool")
        if isinstance(image, str) or not all_static(layer) or image.parts.stores is None:
            return []
        dtype = layer.needs(image.image).dtype
        return [
            make_stored_signature(layer, {image.image: Operand(form, dtype)}, Operand("nhwc", image.parts.stores.dtype))
            for form in ("linear", "nhwc")
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        image = match_image(layer, "ConvPool")
        if isinstance(image, str):
            return image
        s = image.shape
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        if s.c > 4 or s.k != 64 or s.s > 16 or s.r > 16 or s.dilation != (1, 1):
            return f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}; takes 4, 64, 16 x 16, no dilation"
        return why_not_window(layer)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        image = match_image(layer, "ConvPool")
        assert isinstance(image, Image)
        s, pool = image.shape, pool_window(layer)
        good: list[Config] = []
        for ph, pw in TILES:
            th, tw, threads = tile_of_windows(pool, ph, pw)
            pixels = -(-((th - 1) * s.stride[0] + s.r) * ((tw - 1) * s.stride[1] + s.s) // threads) * s.c
            for blocks in (1, 2, 3, 4):
                fits = threads <= 1024 and blocks * threads <= 2048 and 100 + pixels <= 65536 // (blocks * threads)
                if fits and _count_shared_bytes(s, pool, ph, pw) * blocks < 220 * 1024:
                    good.append((("ph", ph), ("pw", pw), ("blocks", blocks)))
        compile_ahead(backend, [text("stem.cu", _make_constants(layer, image, signature, c)) for c in good])
        return good

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        image = match_image(layer, "ConvPool")
        if isinstance(image, str):
            raise PlanRefused(image)
        if reason := why_not_window(layer):
            raise PlanRefused(reason)
        s, parts, epilogue = image.shape, image.parts, image.epilogue
        (ph, pw, blocks), pool = (int(v) for _, v in config), pool_window(layer)
        constants, shared, threads = (
            _make_constants(layer, image, signature, config),
            _count_shared_bytes(s, pool, ph, pw),
            tile_of_windows(pool, ph, pw)[2],
        )
        *_, p, q = static_shape(layer.outputs[0].shape)
        tiles_h, tiles_w = -(-p // ph), -(-q // pw)
        tiles, row = s.n * tiles_h * tiles_w, count_integer_row_bytes(s)
        packed, out, post_ops = pack_integer_stem(parts, epilogue, s, signature.outputs[0].dtype.name)

        def make(args: Args) -> list:
            box = tensormap.make_tiled_map(args.packed[0], "u8", (row, constants["BN"]), (row,), (128, constants["BN"]))
            sizes = StemSizes.of(s, tiles_h, tiles_w)
            arguments = make_integer_arguments(parts, post_ops, s, out, args, args.inputs[image.image], sizes, box, image.step, PooledFields(p, q))
            grid = (min(tiles, backend.capabilities.multiprocessors * blocks), 1, 1)
            return [launch("stem", arguments, constants, grid, threads, shared=shared, label=layer.name)]

        name = f"first of integers{' from floats' if image.step is not None else ''} pooled {ph}x{pw} b{blocks}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=0.0)


def _count_shared_bytes(s: ConvShape, pool: tuple[int, int, int], ph: int, pw: int) -> int:
    """Bytes of shared memory; mirrors stem.cu."""
    th, tw, threads = tile_of_windows(pool, ph, pw)
    return count_integer_shared_bytes(s, th, tw) + 128 + threads // 2 * 64


def _make_constants(layer: Layer, image: Image, signature: Signature, config: Config) -> dict[str, int]:
    """The macros of an instance."""
    (ph, pw, blocks), pool = (int(v) for _, v in config), pool_window(layer)
    th, tw, _ = tile_of_windows(pool, ph, pw)
    source, stores, tile = signature.inputs[image.image], signature.outputs[0].dtype.name, {"th": th, "tw": tw, "blocks": blocks}
    own = make_integer_stem_constants(image.parts, image.epilogue, image.shape, tile, source, stores, floats=image.step is not None)
    more = {"POOL": 1, "POOL_H": ph, "POOL_W": pw, "POOL_STRIDE": pool[1], "POOL_PAD": pool[2]}
    return {**own, **more}
