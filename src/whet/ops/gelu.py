"""Gelu: y = x * P(X <= x) for a normal X; `approximate` "tanh" is its tanh formula."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._erf import erf
from whet.ops._types import require_float_input
from whet.ops._unary import register_unary


def infer(layer):
    if layer.attrs["approximate"] not in ("none", "tanh"):
        raise NetworkError(f"approximate is 'none' or 'tanh', not {layer.attrs['approximate']!r}")
    return require_float_input(layer)


def gelu(x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x * x.dtype.type(np.sqrt(0.5))))


register_unary("Gelu", gelu, attrs={"approximate": "none"}, samples=[{"approximate": "tanh"}], infer=infer)
