"""Layers that move windows over spatial axes: convolution, pooling, padding, resize, grid sample; and channel-wise ones: LRN, scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import I64, Layer, Tensor
from whet.trt.enums import (
    InterpolationMode,
    LayerType,
    PaddingMode,
    PoolingType,
    ResizeCoordinateTransformation,
    ResizeRoundMode,
    ResizeSelector,
    SampleMode,
    ScaleMode,
)
from whet.trt.layers import Emission, ILayer, Option
from whet.trt.weights import get_array


def _repeat_per_axis(value: Any, rank: int, default: int) -> tuple[int, ...]:
    """One integer per spatial axis; a single integer counts for all."""
    if value is None:
        return (default,) * rank
    return (int(value),) * rank if isinstance(value, int | np.integer) else tuple(int(v) for v in value)


class _Windowed(ILayer):
    """Padding and stride of convolutions and pooling."""

    pre_padding = Option()
    post_padding = Option()
    padding_nd = Option(also=("pre_padding", "post_padding"))
    padding = Option(also=("pre_padding", "post_padding"))
    padding_mode = Option(PaddingMode.EXPLICIT_ROUND_DOWN)
    stride_nd = Option()
    stride = Option(also=("stride_nd",))

    def pads(self, x: Tensor, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]) -> tuple[int, ...]:
        """The pads (begins, then ends). Raises UnsupportedError for a padding mode that needs the size of a dynamic axis."""
        rank = len(kernel)
        before, after = list(_repeat_per_axis(self.pre_padding, rank, 0)), list(_repeat_per_axis(self.post_padding, rank, 0))
        mode = PaddingMode(self.padding_mode)
        if mode == PaddingMode.EXPLICIT_ROUND_DOWN:
            return (*before, *after)
        for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
            n, span = x.shape[x.type.rank - rank + i], d * (k - 1) + 1
            if not isinstance(n, int):
                raise UnsupportedError(f"{mode} needs a static spatial size, {x} has {n}")
            if mode == PaddingMode.EXPLICIT_ROUND_UP:
                after[i] += -(n + before[i] + after[i] - span) % s
            else:
                total = max((-(-n // s) - 1) * s + span - n, 0)
                small, large = total // 2, total - total // 2
                before[i], after[i] = (small, large) if mode == PaddingMode.SAME_UPPER else (large, small)
        return (*before, *after)

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        attrs = layer.attrs
        pads = tuple(attrs.get("pads") or ())
        half = len(pads) // 2
        options = {"pre_padding": pads[:half], "post_padding": pads[half:], "stride_nd": attrs.get("strides"), "num_groups": attrs.get("group", 1)}
        options |= {"dilation_nd": attrs.get("dilations"), "window_size_nd": attrs.get("kernel_shape")}
        if layer.op in ("Conv", "ConvTranspose") and (w := layer.needs(1)).is_constant:
            options |= {"kernel": w.array(), "kernel_size_nd": w.shape[2:], "num_output_maps": w.shape[0] if layer.op == "Conv" else w.shape[1]}
            b = layer.input(2)
            options |= {"bias": None if b is None or not b.is_constant else b.array()}
        return options


class IConvolutionLayer(_Windowed):
    """A convolution. The kernel is [output maps, input maps / groups, *kernel size], or input 1; the bias [output maps], or input 2."""

    layer_type = LayerType.CONVOLUTION
    num_output_maps = Option()
    kernel_size_nd = Option()
    kernel_size = Option(also=("kernel_size_nd",))
    dilation_nd = Option()
    dilation = Option(also=("dilation_nd",))
    num_groups = Option(1)
    kernel = Option()
    bias = Option()

    def emit(self, e: Emission, x: Tensor, kernel: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        rank = x.type.rank - 2
        size = _repeat_per_axis(self.kernel_size_nd, rank, 1)
        strides, dilations = _repeat_per_axis(self.stride_nd, rank, 1), _repeat_per_axis(self.dilation_nd, rank, 1)
        w = kernel if kernel is not None else e.constant(get_array(self.kernel).reshape(self._kernel_shape(x, size)))
        b = bias
        if b is None and self.bias is not None and get_array(self.bias).size:
            b = e.constant(get_array(self.bias).reshape(-1))
        return self._convolve(e, x, w, b, size, strides, dilations)

    def _kernel_shape(self, x: Tensor, size: tuple[int, ...]) -> tuple[Any, ...]:
        return (self.num_output_maps, x.shape[1] // self.num_groups, *size)

    def _convolve(self, e: Emission, x: Tensor, w: Tensor, b: Tensor | None, size: Any, strides: Any, dilations: Any) -> Tensor:
        pads = self.pads(x, size, strides, dilations)
        return e("Conv", x, w, *([] if b is None else [b]), group=self.num_groups, strides=strides, dilations=dilations, pads=pads)


class IDeconvolutionLayer(IConvolutionLayer):
    """A transposed convolution. The kernel is [input maps, output maps / groups, *kernel size], or input 1."""

    layer_type = LayerType.DECONVOLUTION

    def _kernel_shape(self, x: Tensor, size: tuple[int, ...]) -> tuple[Any, ...]:
        return (x.shape[1], self.num_output_maps // self.num_groups, *size)

    def _convolve(self, e: Emission, x: Tensor, w: Tensor, b: Tensor | None, size: Any, strides: Any, dilations: Any) -> Tensor:
        rank = len(size)
        mode = PaddingMode(self.padding_mode)
        before, after = _repeat_per_axis(self.pre_padding, rank, 0), _repeat_per_axis(self.post_padding, rank, 0)
        if mode in (PaddingMode.SAME_UPPER, PaddingMode.SAME_LOWER):  # output size = input size * stride
            totals = [max(d * (k - 1) + 1 - s, 0) for k, s, d in zip(size, strides, dilations, strict=True)]
            small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
            before, after = (small, large) if mode == PaddingMode.SAME_UPPER else (large, small)
        inputs = [] if b is None else [b]
        return e("ConvTranspose", x, w, *inputs, group=self.num_groups, strides=strides, dilations=dilations, pads=(*before, *after))


class IPoolingLayer(_Windowed):
    """Maximum, mean, or (1 - blend_factor) * maximum + blend_factor * mean of windows."""

    layer_type = LayerType.POOLING
    type = Option(PoolingType.MAX)
    window_size_nd = Option()
    window_size = Option(also=("window_size_nd",))
    blend_factor = Option(0.0)
    average_count_excludes_padding = Option(True)

    def emit(self, e: Emission, x: Tensor) -> Any:
        rank = len(_repeat_per_axis(self.window_size_nd, x.type.rank - 2, 1))
        size, strides = _repeat_per_axis(self.window_size_nd, rank, 1), _repeat_per_axis(self.stride_nd, rank, 1)
        if self.stride_nd is None:
            strides = size
        mode = PaddingMode(self.padding_mode)
        if mode == PaddingMode.EXPLICIT_ROUND_UP:
            pads = (*_repeat_per_axis(self.pre_padding, rank, 0), *_repeat_per_axis(self.post_padding, rank, 0))
        else:
            pads = self.pads(x, size, strides, (1,) * rank)
        attrs = {"kernel_shape": size, "strides": strides, "pads": pads, "ceil_mode": int(mode == PaddingMode.EXPLICIT_ROUND_UP)}
        kind = PoolingType(self.type)
        if kind == PoolingType.MAX:
            return e("MaxPool", x, **attrs)
        mean = e("AveragePool", x, **attrs, count_include_pad=int(not self.average_count_excludes_padding))
        if kind == PoolingType.AVERAGE:
            return mean
        return e("Add", e("Mul", e("MaxPool", x, **attrs), e.like(1 - self.blend_factor, x)), e("Mul", mean, e.like(self.blend_factor, x)))

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        kind = PoolingType.AVERAGE if "Average" in layer.op else PoolingType.MAX
        excludes = not layer.attrs.get("count_include_pad", 0)
        return _Windowed.read_options(layer) | {"type": kind, "average_count_excludes_padding": excludes}


class ILRNLayer(ILayer):
    """x / (k + alpha / window_size * sum of squares over adjacent channels) ** beta."""

    layer_type = LayerType.LRN
    window_size = Option(5)
    alpha = Option(1e-4)
    beta = Option(0.75)
    k = Option(1.0)

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e("LRN", x, size=int(self.window_size), alpha=float(self.alpha), beta=float(self.beta), bias=float(self.k))

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        a = layer.attrs
        return {"window_size": a["size"], "alpha": a["alpha"], "beta": a["beta"], "k": a["bias"]}


class IScaleLayer(ILayer):
    """(x * scale + shift) ** power, with one coefficient (UNIFORM), one per channel, or one per element from the channel axis on."""

    layer_type = LayerType.SCALE
    mode = Option(ScaleMode.UNIFORM)
    shift = Option()
    scale = Option()
    power = Option()
    channel_axis = Option(1)

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        axis, rank, y = int(self.channel_axis), x.type.rank, x
        for op, weights, neutral in (("Mul", self.scale, 1), ("Add", self.shift, 0), ("Pow", self.power, 1)):
            if weights is None or not get_array(weights).size:
                continue
            a = get_array(weights).astype(x.dtype.numpy)
            if np.all(a == neutral):
                continue
            if self.mode == ScaleMode.UNIFORM:
                a = a.reshape(())
            elif self.mode == ScaleMode.CHANNEL:
                a = a.reshape((-1,) + (1,) * (rank - 1 - axis))
            else:
                a = a.reshape(x.shape[axis:])
            y = e(op, y, e.constant(a))
        return y


class IPaddingLayer(ILayer):
    """Zeros around the last two axes; negative padding crops."""

    layer_type = LayerType.PADDING
    pre_padding_nd = Option((0, 0))
    post_padding_nd = Option((0, 0))

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e("Pad", x, pads=(*map(int, self.pre_padding_nd), *map(int, self.post_padding_nd)), axes=(x.type.rank - 2, x.type.rank - 1))


_COORDINATES = {
    ResizeCoordinateTransformation.ALIGN_CORNERS: "align_corners", ResizeCoordinateTransformation.ASYMMETRIC: "asymmetric",
    ResizeCoordinateTransformation.HALF_PIXEL: "half_pixel",
}  # fmt: skip
_ROUNDING = {
    ResizeRoundMode.HALF_UP: "round_prefer_ceil", ResizeRoundMode.HALF_DOWN: "round_prefer_floor", ResizeRoundMode.FLOOR: "floor",
    ResizeRoundMode.CEIL: "ceil",
}  # fmt: skip


class IResizeLayer(ILayer):
    """A resize to `shape` (or input 1) or by `scales`, of all axes."""

    layer_type = LayerType.RESIZE
    shape = Option()
    scales = Option()
    resize_mode = Option(InterpolationMode.NEAREST)
    coordinate_transformation = Option(ResizeCoordinateTransformation.ASYMMETRIC)
    selector_for_single_pixel = Option(ResizeSelector.FORMULA)
    nearest_rounding = Option(ResizeRoundMode.FLOOR)
    cubic_coeff = Option(-0.75)
    exclude_outside = Option(False)

    def emit(self, e: Emission, x: Tensor, shape: Tensor | None = None) -> Tensor:
        where = _COORDINATES[ResizeCoordinateTransformation(self.coordinate_transformation)]
        if self.selector_for_single_pixel == ResizeSelector.UPPER and where == "half_pixel":
            where = "pytorch_half_pixel"  # coordinate 0 for an axis of size 1
        attrs = {
            "mode": InterpolationMode(self.resize_mode).name.lower(), "coordinate_transformation_mode": where,
            "nearest_mode": _ROUNDING[ResizeRoundMode(self.nearest_rounding)], "cubic_coeff_a": float(self.cubic_coeff),
            "exclude_outside": int(self.exclude_outside),
        }  # fmt: skip
        if shape is not None:
            return e("Resize", x, None, None, e("Cast", shape, to=I64), **attrs)
        if self.scales is not None:
            return e("Resize", x, scales=tuple(map(float, self.scales)), **attrs)
        if self.shape is None:
            raise NetworkError("a resize needs a shape or scales")
        return e("Resize", x, sizes=tuple(map(int, self.shape)), **attrs)

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        where = {name: value for value, name in _COORDINATES.items()}
        return {
            "resize_mode": InterpolationMode[layer.attrs["mode"].upper()], "shape": layer.output.shape,
            "coordinate_transformation": where.get(layer.attrs["coordinate_transformation_mode"], ResizeCoordinateTransformation.HALF_PIXEL),
        }  # fmt: skip


class IGridSampleLayer(ILayer):
    """x sampled at the coordinates of a grid."""

    layer_type = LayerType.GRID_SAMPLE
    interpolation_mode = Option(InterpolationMode.LINEAR)
    align_corners = Option(False)
    sample_mode = Option(SampleMode.FILL)

    def emit(self, e: Emission, x: Tensor, grid: Tensor) -> Tensor:
        outside = {SampleMode.FILL: "zeros", SampleMode.CLAMP: "border", SampleMode.REFLECT: "reflection"}
        if self.sample_mode not in outside:
            raise UnsupportedError(f"a grid sample with {SampleMode(self.sample_mode)} has no op here; FILL, CLAMP and REFLECT have")
        mode = InterpolationMode(self.interpolation_mode).name.lower()
        return e("GridSample", x, grid, mode=mode, padding_mode=outside[self.sample_mode], align_corners=int(self.align_corners))
