"""ONNX ops without a layer in whet: refused with a reason and an alternative, or read as other ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops._base import OPS, known_array, op


def refuse(name: str, reason: str, onnx_ops: tuple[str, ...] | None = None):
    """Registers an op whose every use raises UnsupportedError with `reason`."""

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    def read(node, g):
        raise node.unsupported(reason)

    def reference(layer, *arrays):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    return op(name, infer, reference, onnx=read, onnx_ops=onnx_ops, pure=False)


def compute_or_refuse(name: str, reason: str, compute: Callable[..., Sequence[np.ndarray]]):
    """Registers an op whose output shapes depend on the data: `compute(node, *arrays)` of known inputs becomes constants, others are refused."""

    def read(node, g):
        arrays = [None if t is None else t.array() if t.is_constant else known_array(t) for t in node.inputs]
        if any(t is not None and (a is None or a.dtype == object) for t, a in zip(node.inputs, arrays, strict=True)):
            raise node.unsupported(reason)
        results = compute(node, *arrays)
        return [g.constant(a, f"{node.name}.{i}") for i, a in enumerate(results)]

    o = refuse(name, reason)
    OPS[name] = replace(o, onnx=read)
    return OPS[name]


def read_as_others(name: str, read: Callable[..., Any], instead: str, onnx_ops: tuple[str, ...] | None = None, *, sequences: bool = False):
    """Registers an ONNX op whose reader creates layers of other ops (listed in `instead`). `onnx_ops`: its ONNX names, if not `name`.

    `sequences`: the reader takes sequences of tensors and optional values, too.
    """

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}' is not a layer of whet: it is read as {instead}")

    return op(name, infer, lambda layer, *arrays: infer(layer), onnx=read, onnx_ops=onnx_ops, pure=False, reads_sequences=sequences)
