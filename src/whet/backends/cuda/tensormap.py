"""Tensor maps: 128-byte descriptors of tensors in device memory for the Tensor Memory Accelerator (TMA)."""

from __future__ import annotations

import struct
from typing import Any

from whet.backends.cuda.driver import check_status, load_driver

_TYPES = {"f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32", "u8": "UINT8"}  # all 8-bit types are copied as bytes
SIZES = {"f16": 2, "bf16": 2, "f32": 4, "u8": 1}


def _get_common_arguments(dtype: str, row_bytes: int, plain: bool = False) -> tuple[Any, Any, Any, Any, Any]:
    driver = load_driver()
    swizzle = "NONE" if plain else {16: "NONE", 32: "32B", 64: "64B", 128: "128B"}[row_bytes]
    return (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype]}"),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def _convert_to_bytes(tensor_map: Any) -> bytes:
    return struct.pack("<16Q", *(int(word) for word in tensor_map.opaque))


def make_tiled_map(address: int, dtype: str, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, plain: bool = False) -> bytes:
    """A map for boxes of a plain tensor. dims and box in elements, innermost first; strides in bytes of all dims but the first.

    The box's first dimension times the element size is 16, 32, 64 or 128 bytes and selects the swizzle of shared memory; with `plain`
    rows of any multiple of 16 bytes are contiguous.
    """
    driver = load_driver()
    kind, interleave, swizzle, promotion, fill = _get_common_arguments(dtype, box[0] * SIZES[dtype], plain)
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _convert_to_bytes(
        check_status(
            driver.cuTensorMapEncodeTiled(
                kind,
                len(dims),
                address,
                [wide(d) for d in dims],
                [wide(s) for s in strides],
                [narrow(b) for b in box],
                [narrow(1)] * len(dims),
                interleave,
                swizzle,
                promotion,
                fill,
            )
        )
    )


def make_im2col_map(
    address: int,
    dtype: str,
    dims: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    *,
    lower: tuple[int, int],
    upper: tuple[int, int],
    step: tuple[int, int],
    channels: int,
    pixels: int,
) -> bytes:
    """A map for convolution windows of an NHWC tensor: `pixels` output positions x `channels` channels per copy, padding as zeros.

    dims: (C, W, H, N); strides in bytes of W, H, N; lower, upper, step: (w, h) corners of the positions of a window's first
    element, relative to the tensor's ends (lower = -pad_begin, upper = pad_end - (kernel-1)*dilation), and the stride.
    """
    driver = load_driver()
    kind, interleave, swizzle, promotion, fill = _get_common_arguments(dtype, channels * SIZES[dtype])
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _convert_to_bytes(
        check_status(
            driver.cuTensorMapEncodeIm2col(
                kind,
                4,
                address,
                [wide(d) for d in dims],
                [wide(s) for s in strides],
                list(lower),
                list(upper),
                channels,
                pixels,
                [narrow(1), narrow(step[0]), narrow(step[1]), narrow(1)],
                interleave,
                swizzle,
                promotion,
                fill,
            )
        )
    )
