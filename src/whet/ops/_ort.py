"""Shared by the readers of ONNX Runtime's fused ops (domain com.microsoft), which its optimizer and exporters write: read as ONNX's ops.

Their definitions: docs/ContribOperators.md of microsoft/onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.network import F32, Network, Tensor
from whet.ops._qlinear import DOMAIN
from whet.ops._refused import read_as_others


def register_fused(name: str, read: Callable[..., Any], instead: str) -> None:
    """Registers the reader of com.microsoft's op `name`, which creates the layers listed in `instead`."""
    read_as_others(DOMAIN + name, read, instead, (DOMAIN + name,))


def make_adder(node, g: Network) -> Callable[..., Any]:
    """`add(op, *inputs, **attrs)`: adds a layer that is named after the node; returns its output, or a tuple of several. Trailing None are absent."""

    def add(op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        return g.add(op, *given, name=f"{node.name}_{op.lower()}", sources=(node.name,), **attrs)

    return add


def add_scalar(node, g: Network, value: float, like: Tensor, subject: str) -> Tensor:
    """A constant scalar of `like`'s type."""
    return g.constant(np.array(value, like.dtype.numpy), f"{node.name}.{subject}")


def add_integer_product(add: Callable[..., Any], a: Tensor, b: Tensor, a_scale, b_scale, a_zero, b_zero) -> Tensor:
    """The product of 8-bit matrices as f32, times both scales."""
    return add("Mul", add("Cast", add("MatMulInteger", a, b, a_zero, b_zero), to=F32), add("Mul", a_scale, b_scale))


def apply_activation(node, g: Network, y: Tensor, parameters: tuple[float, ...]) -> Tensor:
    """The node's output: the function named by its attribute `activation` of `y`. `parameters` as in ONNX Runtime's fusions."""
    name = node.attrs.get("activation") or "Identity"
    match name:
        case "Identity" | "Relu" | "Tanh" | "Sigmoid" | "Softplus" | "Softsign" | "Gelu":
            return node.add(g, name, y)
        case "LeakyRelu":
            return node.add(g, name, y, alpha=parameters[0] if parameters else 0.01)
        case "HardSigmoid":
            alpha, beta = parameters[:2] if len(parameters) > 1 else (0.2, 0.5)
            return node.add(g, name, y, alpha=alpha, beta=beta)
        case "Clip" if len(parameters) > 1:
            return node.add(g, name, y, *(add_scalar(node, g, v, y, w) for v, w in zip(parameters, ("min", "max"), strict=False)))
    raise node.unsupported(f"its activation {name!r} is unknown. Save the model with ONNX Runtime's graph optimization level 'basic'")


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """The values of the last axis; the first value of a byte has its lowest bits."""
    parts = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)
