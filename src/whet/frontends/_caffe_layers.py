"""Converters of Caffe's layers with weights, of pooling, normalization and activations. Semantics: BVLC Caffe 1.0's layer sources."""

from __future__ import annotations

from math import e as euler
from math import log

import numpy as np

from whet.frontends._caffe_layer import Layer, caffe_layer
from whet.network import F32, I64, Tensor

# layers with weights


def _get_window(layer: Layer, p, rank: int) -> dict[str, tuple[int, ...]]:
    """kernel_shape, strides, dilations and pads of a convolution_param."""

    def get_sizes(repeated, h: str, w: str, default: int) -> tuple[int, ...]:
        if p.HasField(h) or p.HasField(w):
            return (getattr(p, h), getattr(p, w))
        if len(repeated) not in (0, 1, rank):
            raise layer.unsupported(f"it has {len(repeated)} sizes for {rank} spatial axes")
        return tuple(repeated) if len(repeated) == rank else (repeated[0] if repeated else default,) * rank

    kernel = get_sizes(p.kernel_size, "kernel_h", "kernel_w", 0)
    pads = get_sizes(p.pad, "pad_h", "pad_w", 0)
    dilations = tuple(p.dilation) if len(p.dilation) == rank else (p.dilation[0] if p.dilation else 1,) * rank
    return {"kernel_shape": kernel, "strides": get_sizes(p.stride, "stride_h", "stride_w", 1), "dilations": dilations, "pads": pads + pads}


@caffe_layer("Convolution", "Deconvolution", "ConvolutionDepthwise", "DepthwiseConvolution")
def convert_convolution(layer: Layer) -> Tensor | list[Tensor]:
    p, x = layer.param.convolution_param, layer.x
    if p.axis != 1:
        raise layer.unsupported(f"its channel axis is {p.axis}; only 1 is supported")
    (channels,) = layer.require_static(x.shape[1:2], "the number of channels")
    window = _get_window(layer, p, x.type.rank - 2)
    group = channels if "Depthwise" in layer.type else p.group
    if not group or channels % group or p.num_output % group:
        raise layer.unsupported(f"{channels} input and {p.num_output} output channels cannot be split into {group} groups")
    transposed = layer.type == "Deconvolution"
    shape = (channels, p.num_output // group) if transposed else (p.num_output, channels // group)
    w = layer.weight(layer.blob(0, (*shape, *window["kernel_shape"]), "weights"), "weights")
    b = layer.weight(layer.blob(1, (p.num_output,), "bias"), "bias") if p.bias_term else None
    op = "ConvTranspose" if transposed else "Conv"
    outs = [layer.add(op, t, w, b, group=group, **window) for t in layer.bottoms]
    return outs[0] if len(outs) == 1 else outs


@caffe_layer("InnerProduct")
def convert_inner_product(layer: Layer) -> Tensor:
    p, x = layer.param.inner_product_param, layer.x
    axis = layer.axis(p.axis)
    columns = int(np.prod(layer.require_static(x.shape[axis:], "the inputs of the inner product")))
    w = layer.weight(layer.blob(0, (columns, p.num_output) if p.transpose else (p.num_output, columns), "weights"), "weights")
    b = layer.weight(layer.blob(1, (p.num_output,), "bias"), "bias") if p.bias_term else None
    flat = x if (x.type.rank, axis) == (2, 1) else layer.add("Flatten", x, axis=axis)
    y = layer.add("Gemm", flat, w, b, transB=0 if p.transpose else 1)
    return layer.reshape(y, (*x.shape[:axis], p.num_output))


@caffe_layer("Embed")
def convert_embed(layer: Layer) -> Tensor:
    p = layer.param.embed_param
    w = layer.weight(layer.blob(0, (p.input_dim, p.num_output), "weights"), "weights")
    y = layer.add("Gather", w, layer.add("Cast", layer.x, to=I64), axis=0)
    return layer.add("Add", y, layer.weight(layer.blob(1, (p.num_output,), "bias"), "bias")) if p.bias_term else y


@caffe_layer("Scale", "Bias")
def convert_scale(layer: Layer) -> Tensor:
    """y = x * scale (+ bias), the factors broadcast from `axis` on. A Scale of a BatchNorm becomes the gamma and beta of that layer."""
    is_scale = layer.type == "Scale"
    p = layer.param.scale_param if is_scale else layer.param.bias_param
    x = layer.x
    axis = layer.axis(p.axis)
    if len(layer.bottoms) > 1:
        other = layer.bottoms[1]
        lead, count = other, other.type.rank
        shape = tuple(other.shape)
    else:
        count = x.type.rank - axis if p.num_axes == -1 else p.num_axes
        shape = layer.require_static(x.shape[axis : axis + count], "the scaled axes")
        values = layer.blob(0, shape, "scale" if is_scale else "bias")
        bias = layer.blob(1, shape, "bias") if is_scale and p.bias_term else None
        norm = x.maker
        if is_scale and axis == count == 1 and norm is not None and norm.op == "BatchNormalization" and len(norm.sources) == 1:
            mean, variance = norm.inputs[3], norm.inputs[4]
            beta = np.zeros(shape, np.float32) if bias is None else bias
            sources = (*norm.sources, layer.name)
            return layer.net.add(
                "BatchNormalization", norm.inputs[0], layer.weight(values, "scale"), layer.weight(beta, "bias"), mean, variance,
                name=layer.name, sources=sources, epsilon=norm.attrs["epsilon"],
            )  # fmt: skip
        lead = layer.weight(values, "scale" if is_scale else "bias")
    tail = (1,) * (x.type.rank - axis - count)
    y = layer.add("Mul" if is_scale else "Add", x, layer.reshape(lead, (*shape, *tail)))
    if is_scale and p.bias_term:
        at = 0 if len(layer.bottoms) > 1 else 1
        y = layer.add("Add", y, layer.weight(layer.blob(at, layer.require_static(shape, "the bias"), "bias").reshape(*shape, *tail), "bias"))
    return y


@caffe_layer("BatchNorm")
def convert_batch_norm(layer: Layer) -> Tensor:
    p = layer.param.batch_norm_param
    if p.HasField("use_global_stats") and not p.use_global_stats:
        raise layer.unsupported("use_global_stats is false, so it normalizes with the statistics of each batch; set it to true")
    (channels,) = layer.require_static(layer.x.shape[1:2], "the number of channels")
    if layer.weights.blobs is None:
        mean, variance = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    else:
        factor = float(layer.blob(2, (1,), "moving average factor")[0])
        factor = 1 / factor if factor else 0.0
        mean, variance = (layer.blob(i, (channels,), what) * np.float32(factor) for i, what in enumerate(("mean", "variance")))
    one, zero = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    parts = {"scale": one, "bias": zero, "mean": mean, "variance": variance}
    return layer.add("BatchNormalization", layer.x, *(layer.weight(a, n) for n, a in parts.items()), epsilon=float(p.eps))


@caffe_layer("PReLU")
def convert_prelu(layer: Layer) -> Tensor:
    shared = layer.param.prelu_param.channel_shared
    channels = () if shared else layer.require_static(layer.x.shape[1:2], "the number of channels")
    slope = layer.blob(0, (1,) if shared else channels, "slopes")
    return layer.add("PRelu", layer.x, layer.weight(slope if shared else slope.reshape(-1, *(1,) * (layer.x.type.rank - 2)), "slopes"))


# pooling and normalization


@caffe_layer("Pooling")
def convert_pooling(layer: Layer) -> Tensor:
    """Caffe rounds output sizes up, and an average counts padding, but not what rounding up adds."""
    p = layer.param.pooling_param
    method = p.DESCRIPTOR.fields_by_name["pool"].enum_type.values_by_number[p.pool].name
    if method == "STOCHASTIC":
        raise layer.unsupported("stochastic pooling is for training; use AVE")
    if p.global_pooling:
        return layer.add("GlobalMaxPool" if method == "MAX" else "GlobalAveragePool", layer.x)

    def get_pair(h: str, w: str, both: str) -> tuple[int, int]:
        return (getattr(p, h), getattr(p, w)) if p.HasField(h) or p.HasField(w) else (getattr(p, both),) * 2

    kernel, pads = get_pair("kernel_h", "kernel_w", "kernel_size"), get_pair("pad_h", "pad_w", "pad")
    if not all(kernel):
        raise layer.unsupported("it has no kernel_size")
    ceil = p.ceil_mode and not p.round_mode  # ceil_mode: of some forks
    attrs = {"kernel_shape": kernel, "strides": get_pair("stride_h", "stride_w", "stride"), "pads": pads + pads, "ceil_mode": int(ceil)}
    return layer.add("MaxPool", layer.x, **attrs) if method == "MAX" else layer.add("AveragePool", layer.x, count_include_pad=1, **attrs)


@caffe_layer("LRN")
def convert_lrn(layer: Layer) -> Tensor:
    p, x = layer.param.lrn_param, layer.x
    if not p.local_size % 2:
        raise layer.unsupported(f"its local_size {p.local_size} is even; Caffe needs an odd one")
    if not p.norm_region:
        return layer.add("LRN", x, size=p.local_size, alpha=float(p.alpha), beta=float(p.beta), bias=float(p.k))
    pad = (p.local_size - 1) // 2
    square = layer.add("Mul", x, x)
    mean = layer.add("AveragePool", square, kernel_shape=(p.local_size,) * 2, strides=(1, 1), pads=(pad,) * 4, count_include_pad=1)
    base = layer.add("Add", layer.add("Mul", mean, layer.scalar(p.alpha)), layer.scalar(1.0))
    return layer.add("Mul", x, layer.add("Pow", base, layer.scalar(-p.beta)))


@caffe_layer("MVN")
def convert_mvn(layer: Layer) -> Tensor:
    p, x = layer.param.mvn_param, layer.x
    axes = layer.ints(*range(1 if p.across_channels else 2, x.type.rank))
    centred = layer.add("Sub", x, layer.add("ReduceMean", x, axes, keepdims=1))
    if not p.normalize_variance:
        return centred
    variance = layer.add("ReduceMean", layer.add("Mul", centred, centred), axes, keepdims=1)
    return layer.add("Div", centred, layer.add("Add", layer.add("Sqrt", variance), layer.scalar(p.eps)))


@caffe_layer("Normalize")
def convert_normalize(layer: Layer) -> Tensor:
    """SSD's L2 normalization with a learned scale."""
    p, x = layer.param.norm_param, layer.x
    axes = layer.ints(*range(1, x.type.rank)) if p.across_spatial else layer.ints(1)
    total = layer.add("ReduceSum", layer.add("Mul", x, x), axes, keepdims=1)
    y = layer.add("Div", x, layer.add("Sqrt", layer.add("Add", total, layer.scalar(p.eps))))
    (channels,) = layer.require_static(x.shape[1:2], "the number of channels")
    values = layer.blob(0, (1,) if p.channel_shared else (channels,), "scale")
    return layer.add("Mul", y, layer.weight(values.reshape(-1, *(1,) * (x.type.rank - 2)), "scale"))


@caffe_layer("Softmax")
def convert_softmax(layer: Layer) -> Tensor:
    return layer.add("Softmax", layer.x, axis=layer.axis(layer.param.softmax_param.axis))


# activations and arithmetic


@caffe_layer("ReLU")
def convert_relu(layer: Layer) -> Tensor:
    slope = float(layer.param.relu_param.negative_slope)
    return layer.add("LeakyRelu", layer.x, alpha=slope) if slope else layer.add("Relu", layer.x)


@caffe_layer("ReLU6", "Clip")
def convert_clip(layer: Layer) -> Tensor:
    p = layer.param.clip_param
    low, high = (0.0, layer.param.relu6_param.threshold) if layer.type == "ReLU6" else (p.min, p.max)
    return layer.add("Clip", layer.x, layer.scalar(low), layer.scalar(high))


@caffe_layer("ELU")
def convert_elu(layer: Layer) -> Tensor:
    return layer.add("Elu", layer.x, alpha=float(layer.param.elu_param.alpha))


@caffe_layer("Swish")
def convert_swish(layer: Layer) -> Tensor:
    beta = layer.param.swish_param.beta
    gate = layer.x if beta == 1 else layer.add("Mul", layer.x, layer.scalar(beta))
    return layer.add("Mul", layer.x, layer.add("Sigmoid", gate))


_UNARY = {"AbsVal": "Abs", "BNLL": "Softplus", "Sigmoid": "Sigmoid", "TanH": "Tanh"}


@caffe_layer(*_UNARY)
def convert_unary(layer: Layer) -> Tensor:
    return layer.add(_UNARY[layer.type], layer.x)


@caffe_layer("Threshold")
def convert_threshold(layer: Layer) -> Tensor:
    above = layer.add("Greater", layer.x, layer.scalar(layer.param.threshold_param.threshold))
    return layer.add("Cast", above, to=F32)


def _add_affine(layer: Layer, factor: float, shift: float) -> Tensor:
    y = layer.x if factor == 1 else layer.add("Mul", layer.x, layer.scalar(factor))
    return layer.add("Add", y, layer.scalar(shift)) if shift else y


@caffe_layer("Power")
def convert_power(layer: Layer) -> Tensor:
    p = layer.param.power_param
    y = _add_affine(layer, p.scale, p.shift)
    return y if p.power == 1 else layer.add("Pow", y, layer.scalar(p.power))


@caffe_layer("Exp")
def convert_exp(layer: Layer) -> Tensor:
    p = layer.param.exp_param
    factor = log(euler if p.base == -1 else p.base)
    return layer.add("Exp", _add_affine(layer, p.scale * factor, p.shift * factor))


@caffe_layer("Log")
def convert_log(layer: Layer) -> Tensor:
    p = layer.param.log_param
    y = layer.add("Log", _add_affine(layer, p.scale, p.shift))
    return y if p.base == -1 else layer.add("Mul", y, layer.scalar(1 / log(p.base)))


@caffe_layer("Eltwise")
def convert_eltwise(layer: Layer) -> Tensor:
    p = layer.param.eltwise_param
    operation = p.DESCRIPTOR.fields_by_name["operation"].enum_type.values_by_number[p.operation].name
    terms = list(layer.bottoms)
    if p.coeff:
        if operation != "SUM" or len(p.coeff) != len(terms):
            raise layer.unsupported(f"it has {len(p.coeff)} coeff for {len(terms)} bottoms and {operation}; Caffe takes one per bottom of a SUM")
        terms = [t if c == 1 else layer.add("Mul", t, layer.scalar(c)) for t, c in zip(terms, p.coeff, strict=True)]
    y = terms[0]
    for t in terms[1:]:
        y = layer.add({"SUM": "Add", "PROD": "Mul", "MAX": "Max"}[operation], y, t)
    return y


@caffe_layer("Axpy")
def convert_axpy(layer: Layer) -> Tensor:
    """SENet's a * x + y, with `a` per channel."""
    if len(layer.bottoms) != 3:
        raise layer.unsupported("it needs three bottoms: a, x and y")
    a, x, y = layer.bottoms
    a = layer.reshape(a, (*a.shape[:2], *(1,) * (x.type.rank - 2)))
    return layer.add("Add", layer.add("Mul", x, a), y)
