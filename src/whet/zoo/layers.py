"""The layers shared by the families, as PyTorch's exporter writes them, with initial values that keep activations bounded.

Sizes of random weights: a convolution's output variance is gain * E[x^2], so gain 2 keeps the variance after a ReLU
(He et al. 2015). Running statistics are near 0 and 1 with jitter, so that folding a batch norm changes every weight.
"""

import math
from collections.abc import Sequence

import numpy as np

from whet.zoo.writer import GraphWriter, Init, make_normal_init

RELU_GAIN = 2.0
SILU_GAIN = 2.8                       # 1 / E[silu(x)^2] of a standard normal x


def make_he_init(fan_in: int, gain: float = RELU_GAIN) -> Init:
    """Normal values with variance gain / fan_in."""
    return make_normal_init(math.sqrt(gain / fan_in))


def make_pair(value: int | Sequence[int]) -> list[int]:
    """[v, v] for an int v, or the two given values."""
    return [value, value] if isinstance(value, int) else list(value)


def conv(g: GraphWriter, x: str, name: str, cin: int, cout: int, kernel: int | Sequence[int], *, stride: int = 1,
         padding: int = 0, groups: int = 1, bias: bool = False, gain: float = RELU_GAIN, bias_init: Init | None = None) -> str:
    """A 2-D convolution in the child module `name`: x[N,cin,H,W] -> [N,cout,H',W']."""
    kh, kw = make_pair(kernel)
    with g.scope(name):
        inputs = [x, g.weight("weight", (cout, cin // groups, kh, kw), make_he_init(cin // groups * kh * kw, gain))]
        if bias:
            inputs.append(g.weight("bias", (cout,), bias_init or make_normal_init(0.02)))
        return g.op("Conv", *inputs, dilations=[1, 1], group=groups, kernel_shape=[kh, kw], pads=make_pair(padding) * 2,
                    strides=make_pair(stride))


def batch_norm(g: GraphWriter, x: str, name: str, channels: int, *, eps: float = 1e-5, scale: float = 1.0) -> str:
    """An inference batch norm in the child module `name`. `scale` is the mean of gamma: below 1 it damps a residual branch."""
    def draw_variance(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.exp(0.1 * rng.standard_normal(shape, np.float32))

    with g.scope(name):
        weights = [g.weight("weight", (channels,), make_normal_init(0.1 * scale, scale)),
                   g.weight("bias", (channels,), make_normal_init(0.1 * scale)),
                   g.weight("running_mean", (channels,), make_normal_init(0.1), trainable=False),
                   g.weight("running_var", (channels,), draw_variance, trainable=False)]
        return g.op("BatchNormalization", x, *weights, epsilon=eps, momentum=0.9)


def relu(g: GraphWriter, x: str, name: str = "relu") -> str:
    """ReLU in the child module `name`."""
    with g.scope(name):
        return g.op("Relu", x)


def relu6(g: GraphWriter, x: str, name: str) -> str:
    """ReLU6 in the child module `name`: Clip with its bounds as Constant nodes."""
    with g.scope(name):
        return g.op("Clip", x, g.const(0.0, "float32"), g.const(6.0, "float32"))


def silu(g: GraphWriter, x: str, name: str = "act") -> str:
    """SiLU in the child module `name`, as Sigmoid and Mul: ONNX has no SiLU before opset 24."""
    with g.scope(name):
        return g.op("Mul", x, g.op("Sigmoid", x))


def hard_swish(g: GraphWriter, x: str, name: str) -> str:
    """Hard swish, x * clip(x + 3, 0, 6) / 6, in the child module `name`: one HardSwish from opset 14 on."""
    with g.scope(name):
        if g.opset >= 14:
            return g.op("HardSwish", x)
        clipped = g.op("Clip", g.op("Add", x, g.const(3.0, "float32")), g.const(0.0, "float32"), g.const(6.0, "float32"))
        return g.op("Div", g.op("Mul", x, clipped), g.const(6.0, "float32"))


def squeeze_excite(g: GraphWriter, x: str, channels: int, squeezed: int, *, hard: bool = True) -> str:
    """Squeeze and excitation in the current scope: x[N,C,H,W] times a gate[N,C,1,1] of its channel means.

    hard: ReLU and hard sigmoid (MobileNetV3), else SiLU and sigmoid (EfficientNet).
    """
    with g.scope("avgpool"):
        y = g.op("GlobalAveragePool", x)
    y = conv(g, y, "fc1", channels, squeezed, 1, bias=True)
    y = relu(g, y, "activation") if hard else silu(g, y, "activation")
    y = conv(g, y, "fc2", squeezed, channels, 1, bias=True)
    with g.scope("scale_activation"):
        y = g.op("HardSigmoid", y, alpha=1 / 6, beta=0.5) if hard else g.op("Sigmoid", y)
    return g.op("Mul", y, x)


def gelu(g: GraphWriter, x: str) -> str:
    """The exact GELU, x * (1 + erf(x / sqrt 2)) / 2, as five nodes in the current scope."""
    e = g.op("Erf", g.op("Div", x, g.const(math.sqrt(2.0), "float32")))
    return g.op("Mul", g.op("Mul", x, g.op("Add", e, g.const(1.0, "float32"))), g.const(0.5, "float32"))


def max_pool(g: GraphWriter, x: str, kernel: int, *, stride: int, padding: int = 0, ceil: bool = False) -> str:
    """A max pooling in the current scope."""
    return g.op("MaxPool", x, kernel_shape=make_pair(kernel), strides=make_pair(stride), pads=make_pair(padding) * 2, ceil_mode=int(ceil),
                dilations=[1, 1])


def gemm(g: GraphWriter, x: str, name: str, cin: int, cout: int, *, gain: float = 1.0) -> str:
    """A linear layer on a matrix in the child module `name`: x[N,cin] -> [N,cout] as one Gemm."""
    with g.scope(name):
        return g.op("Gemm", x, g.weight("weight", (cout, cin), make_he_init(cin, gain)), g.weight("bias", (cout,), make_normal_init(0.02)),
                    alpha=1.0, beta=1.0, transB=1)


def linear(g: GraphWriter, x: str, name: str, cin: int, cout: int, *, std: float) -> str:
    """A linear layer on [..., cin] in the child module `name`: MatMul with the transposed weight, then Add(bias, product)."""
    with g.scope(name):
        bias = g.weight("bias", (cout,), make_normal_init(0.02))
        return g.op("Add", bias, g.op("MatMul", x, g.anonymous_weight("MatMul", "weight", (cin, cout), make_normal_init(std))))


def layer_norm(g: GraphWriter, x: str, name: str, size: int, *, eps: float, decomposed: bool = False) -> str:
    """A layer norm over the last axis in the child module `name`.

    One LayerNormalization from opset 17 on; decomposed, or before, the nine nodes of older exporters.
    """
    with g.scope(name):
        gamma, beta = g.weight("weight", (size,), make_normal_init(0.1, 1.0)), g.weight("bias", (size,), make_normal_init(0.05))
        if g.opset >= 17 and not decomposed:
            return g.op("LayerNormalization", x, gamma, beta, axis=-1, epsilon=eps)
        centred = g.op("Sub", x, _build_mean_last(g, x))
        variance = _build_mean_last(g, g.op("Pow", centred, g.const(2.0, "float32")))
        deviation = g.op("Sqrt", g.op("Add", variance, g.const(eps, "float32")))
        return g.op("Add", g.op("Mul", g.op("Div", centred, deviation), gamma), beta)


def _build_mean_last(g: GraphWriter, x: str) -> str:
    if g.opset >= 18:                 # axes became an input
        return g.op("ReduceMean", x, g.const([-1]), keepdims=1)
    return g.op("ReduceMean", x, axes=[-1], keepdims=1)


def flatten_head(g: GraphWriter, x: str) -> str:
    """Global average pooling ("avgpool") and Flatten: x[N,C,H,W] -> [N,C]."""
    with g.scope("avgpool"):
        x = g.op("GlobalAveragePool", x)
    return g.op("Flatten", x, axis=1)
