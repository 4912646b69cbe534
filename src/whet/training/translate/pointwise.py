"""Elementwise ops in PyTorch: activations, arithmetic, comparisons, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from whet.network import Layer
from whet.training.translate._base import Compute, get_torch_dtype, torch_op


def _register(functions: dict[str, Callable[..., torch.Tensor]]) -> None:
    for name, f in functions.items():
        torch_op(name)(_ignore_layer(f))


def _ignore_layer(f: Callable[..., torch.Tensor]) -> Callable[[Layer], Compute]:
    return lambda layer: f


_register(
    {
        "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan,
        "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp,
        "Floor": torch.floor, "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not,
        "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
        "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
        "HardSwish": F.hardswish, "Mish": F.mish,
        "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul,
        "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
        "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
        "Where": lambda c, x, y: torch.where(c, x, y),
        "Max": lambda *xs: functools.reduce(torch.maximum, xs),
        "Min": lambda *xs: functools.reduce(torch.minimum, xs),
        "Sum": lambda *xs: functools.reduce(torch.add, xs),
        "Mean": lambda *xs: functools.reduce(torch.add, xs) / len(xs),
        "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    }
)  # fmt: skip


def _pass_attribute(f: Callable[..., torch.Tensor], attribute: str, parameter: str) -> Callable[[Layer], Compute]:
    return lambda layer: functools.partial(f, **{parameter: layer.attrs[attribute]})


for _name, *_how in (
    ("LeakyRelu", F.leaky_relu, "alpha", "negative_slope"), ("Elu", F.elu, "alpha", "alpha"), ("Celu", F.celu, "alpha", "alpha"),
    ("Gelu", F.gelu, "approximate", "approximate"), ("Softmax", torch.softmax, "axis", "dim"), ("LogSoftmax", torch.log_softmax, "axis", "dim"),
):  # fmt: skip
    torch_op(_name)(_pass_attribute(*_how))


@torch_op("Div")
def _translate_div(layer: Layer) -> Compute:
    if layer.output.dtype.is_float:
        return torch.div
    return lambda a, b: torch.div(a, b, rounding_mode="trunc")


@torch_op("Pow")
def _translate_pow(layer: Layer) -> Compute:
    made = get_torch_dtype(layer.output.dtype)
    exponent = layer.inputs[1]
    if exponent is not None and exponent.is_constant and exponent.array().size == 1:
        n = exponent.array().reshape(-1)[0].item()  # a Python scalar: its gradient needs no log(x)
        return lambda x, _: torch.pow(x, int(n) if float(n).is_integer() else n).to(made)
    return lambda x, y: torch.pow(x, y).to(made)


@torch_op("Mod")
def _translate_mod(layer: Layer) -> Compute:
    return torch.fmod if layer.attrs["fmod"] else torch.remainder


@torch_op("Clip")
def _translate_clip(layer: Layer) -> Compute:
    bounds = []
    for i, name in ((1, "min"), (2, "max")):
        t, given = layer.input(i), layer.attrs.get(name)
        bounds.append(None if t is None and given is None else given if t is None else t.array().reshape(-1)[0].item() if t.is_constant else i)
    low, high = bounds
    if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
        return lambda x, low=None, high=None: torch.clamp(x, low, high)
    return lambda x, *_: torch.clamp(x, low, high) if low is not None or high is not None else x


@torch_op("Selu")
def _translate_selu(layer: Layer) -> Compute:
    a, g = layer.attrs["alpha"], layer.attrs["gamma"]
    return lambda x: g * torch.where(x > 0, x, a * torch.expm1(torch.minimum(x, torch.zeros_like(x))))


@torch_op("HardSigmoid")
def _translate_hard_sigmoid(layer: Layer) -> Compute:
    a, b = layer.attrs["alpha"], layer.attrs["beta"]
    return lambda x: torch.clamp(a * x + b, 0, 1)


@torch_op("Swish")
def _translate_swish(layer: Layer) -> Compute:
    alpha = layer.attrs.get("alpha", 1.0)
    return F.silu if alpha == 1 else lambda x: x * torch.sigmoid(alpha * x)


@torch_op("ThresholdedRelu")
def _translate_thresholded_relu(layer: Layer) -> Compute:
    alpha = layer.attrs["alpha"]
    return lambda x: torch.where(x > alpha, x, torch.zeros_like(x))


@torch_op("Shrink")
def _translate_shrink(layer: Layer) -> Compute:
    bias, lambd = layer.attrs["bias"], layer.attrs["lambd"]
    return lambda x: torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@torch_op("IsInf")
def _translate_is_inf(layer: Layer) -> Compute:
    positive, negative = layer.attrs["detect_positive"], layer.attrs["detect_negative"]
    return lambda x: (torch.isposinf(x) if positive else torch.zeros_like(x, dtype=torch.bool)) | (
        torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)
    )


@torch_op("Cast", "CastLike")
def _translate_cast(layer: Layer) -> Compute:
    dtype = get_torch_dtype(layer.output.dtype)
    return lambda x, *_: x.to(dtype)


@torch_op("Dropout")
def _translate_dropout(layer: Layer) -> Compute:
    return lambda x: x  # the drop rate of training is not stored in an inference graph


@torch_op("BitShift")
def _translate_bit_shift(layer: Layer) -> Compute:
    return torch.bitwise_left_shift if layer.attrs["direction"] == "LEFT" else torch.bitwise_right_shift


