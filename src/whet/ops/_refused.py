"""ONNX ops without a layer in whet: refused with a reason and an alternative, or read as other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops._base import op


def refuse(name: str, reason: str, onnx_ops: tuple[str, ...] | None = None):
    """Registers an op whose every use raises UnsupportedError with `reason`."""

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    def read(node, g):
        raise node.unsupported(reason)

    def compute_reference(layer, *arrays):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    return op(name, infer, compute_reference, onnx=read, onnx_ops=onnx_ops, pure=False)


def read_as_others(name: str, read: Callable[..., Any], instead: str, onnx_ops: tuple[str, ...] | None = None, *, sequences: bool = False):
    """Registers an ONNX op whose reader creates layers of other ops (listed in `instead`). `onnx_ops`: its ONNX names, if not `name`.

    `sequences`: the reader takes sequences of tensors and optional values, too.
    """

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}' is not a layer of whet: it is read as {instead}")

    return op(name, infer, lambda layer, *arrays: infer(layer), onnx=read, onnx_ops=onnx_ops, pure=False, reads_sequences=sequences)
