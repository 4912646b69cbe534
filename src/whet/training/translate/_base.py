"""The registry of translations: op name -> function of a bound layer -> function of its input tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from whet.errors import NetworkError, UnsupportedError
from whet.network import DType, Layer

Compute = Callable[..., Any]
TRANSLATIONS: dict[str, Callable[[Layer], Compute]] = {}
#: Translations whose function takes `training` (bool) before the tensors.
TRAINING: set[str] = set()

_REASONS = {
    "If": "a branch that depends on data has no trainable form here; give fixed shapes, or export without the branch",
    "Loop": "loops have no trainable form here; export the model unrolled",
    "Scan": "loops have no trainable form here; export the model unrolled",
    "NonMaxSuppression": "it selects boxes after the network: cut it off before training",
    "Fused": "the network is lowered; train the source network and build again",
    "Reformat": "the network is lowered; train the source network and build again",
    "MatMulInteger": "it computes in integers, which have no gradient; use the floating-point model, or one with Q/DQ",
    "ConvInteger": "it computes in integers, which have no gradient; use the floating-point model, or one with Q/DQ",
    "QLinearConv": "it computes in integers, which have no gradient; use the floating-point model, or one with Q/DQ",
    "QLinearMatMul": "it computes in integers, which have no gradient; use the floating-point model, or one with Q/DQ",
    "DynamicQuantizeLinear": "it computes in integers, which have no gradient; use the floating-point model, or one with Q/DQ",
}

_TORCH = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def torch_op(*names: str, training: bool = False) -> Callable[[Callable[[Layer], Compute]], Callable[[Layer], Compute]]:
    """Registers a translation: a function of a layer with static dims that returns `f(*tensors) -> tensor(s)`, or `f(training, *tensors)` with
    `training`. Raises NetworkError for a second registration."""

    def register(make: Callable[[Layer], Compute]) -> Callable[[Layer], Compute]:
        for name in names:
            if name in TRANSLATIONS:
                raise NetworkError(f"the translation of {name} has two owners")
            TRANSLATIONS[name] = make
            if training:
                TRAINING.add(name)
        return make

    return register


def why_not(layer: Layer) -> str | None:
    """The reason why a layer cannot be trained, or None."""
    if layer.op in TRANSLATIONS:
        return None
    reason = _REASONS.get(layer.op, "no translation of this op is written yet: add one to src/whet/training/translate/")
    return f"{layer.op} '{layer.name}': {reason}"


def translate_layer(layer: Layer) -> Compute:
    """The torch function of a layer. Raises UnsupportedError naming the layer."""
    reason = why_not(layer)
    if reason is not None:
        raise UnsupportedError(f"the network cannot be trained: {reason}")
    return TRANSLATIONS[layer.op](layer)


def get_torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype. Raises UnsupportedError when there is none."""
    if dtype.name not in _TORCH:
        raise UnsupportedError(f"tensors of type {dtype} cannot be trained with; there are {', '.join(_TORCH)}")
    return _TORCH[dtype.name]


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of an array as a tensor (bfloat16 too)."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))  # a copy: weights are read-only


class Fixed:
    """A constant tensor, cached per device and dtype."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._made: dict[tuple[torch.device, torch.dtype | None], torch.Tensor] = {}

    def like(self, x: torch.Tensor, *, dtype: bool = True) -> torch.Tensor:
        """The constant on x's device, in x's type unless `dtype` is False."""
        key = (x.device, x.dtype if dtype else None)
        if key not in self._made:
            t = to_tensor(self.array).to(x.device)
            self._made[key] = t.to(x.dtype) if dtype else t
        return self._made[key]
