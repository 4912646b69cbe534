"""Tensor maps through which kernels read the windows of a convolution's input."""

from __future__ import annotations

from whet.backends.cuda import tensormap
from whet.tactics.cuda.conv._conv import ConvShape, View


def make_window_map(shape: ConvShape, x: View, dtype: str, channels: int, pixels: int) -> bytes:
    """The map for copies of `channels` channels of `pixels` windows; `dtype` is a type of tensor maps."""
    pixel = x.pitch * tensormap.SIZES[dtype]
    if shape.plain:
        return tensormap.make_tiled_map(x.address, dtype, (shape.c, shape.m), (pixel,), (channels, pixels))
    return tensormap.make_im2col_map(
        x.address,
        dtype,
        (shape.c, shape.w, shape.h, shape.n),
        (pixel, pixel * shape.w, pixel * shape.w * shape.h),
        lower=(-shape.pad[1], -shape.pad[0]),
        upper=(shape.pad[3] - (shape.s - 1) * shape.dilation[1], shape.pad[2] - (shape.r - 1) * shape.dilation[0]),
        step=(shape.stride[1], shape.stride[0]),
        channels=channels,
        pixels=pixels,
    )


def make_row_window_map(shape: ConvShape, address: int, dtype: str, window_bytes: int, row_bytes: int, channels: int, pixels: int) -> bytes:
    """The map of a tensor whose channels are whole filter rows: its pixels overlap, since windows start every `window_bytes`; image rows have
    `row_bytes`."""
    return tensormap.make_im2col_map(
        address,
        dtype,
        (shape.c, shape.w, shape.h, shape.n),
        (window_bytes, row_bytes, row_bytes * shape.h),
        lower=(0, -shape.pad[0]),
        upper=(0, shape.pad[2] - (shape.r - 1) * shape.dilation[0]),
        step=(1, shape.stride[0]),
        channels=channels,
        pixels=pixels,
    )
