"""Sequences of tensors and optional values of ONNX, as readers see them: no layer takes or returns one. And inputs of a loop's body."""

from __future__ import annotations

from dataclasses import dataclass

from whet.network import Tensor, TensorType


@dataclass(frozen=True)
class TensorSequence:
    """A sequence of tensors whose length is known when the model is read."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Counter:
    """The type of an input of a loop's body that counts iterations from a value of at least 0."""

    type: TensorType


@dataclass(frozen=True)
class NoValue:
    """An optional value that is absent. A present one is its tensor or sequence."""


@dataclass(frozen=True)
class GrowingSequence:
    """A sequence in the body of a loop that appends to it: `appended` are the entries that this iteration has added."""

    appended: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StackedSequence:
    """A sequence of tensors of one shape, one per iteration of a loop: the entries along axis 0 of `stacked`."""

    stacked: Tensor


ReadValue = Tensor | TensorSequence | GrowingSequence | StackedSequence | NoValue
