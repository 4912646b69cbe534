"""Sequences of tensors and optional values of ONNX, as readers see them: no layer takes or returns one."""

from __future__ import annotations

from dataclasses import dataclass

from whet.network import Tensor


@dataclass(frozen=True)
class TensorSequence:
    """A sequence of tensors whose length is known when the model is read."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class NoValue:
    """An optional value that is absent. A present one is its tensor or sequence."""


ReadValue = Tensor | TensorSequence | NoValue
