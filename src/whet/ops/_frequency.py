"""Shared by DFT and STFT: discrete Fourier transforms of values whose last axis holds 1 (real) or 2 (real, imaginary) components."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Dim, Layer
from whet.ops._base import require_known_ints


def find_known_scalar(layer: Layer, i: int, subject: str) -> Dim | None:
    """The value of the optional scalar input `i`.

    Raises NetworkError unless it is one integer, UnsupportedError if it is known only at run time.
    """
    t = layer.input(i)
    if t is None:
        return None
    if t.dtype.kind != "int" or t.type.rank > 1 or t.type.elements != 1:
        raise NetworkError(f"{subject} is one integer, not {t.type}")
    return require_known_ints(layer, i, subject)[0]


def check_length(length: Dim) -> None:
    """Raises NetworkError if a known length of a transform is not positive."""
    if isinstance(length, int) and length <= 0:
        raise NetworkError(f"a transform of {length} values: the length must be positive")


def count_bins(length: Dim, onesided: int) -> Dim:
    """The number of frequencies of a transform of `length` values."""
    return length // 2 + 1 if onesided else length


def convert_to_complex(x: np.ndarray) -> np.ndarray:
    """x [..., 1 or 2] as complex numbers [...]."""
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def convert_from_complex(z: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Complex z [...] as [..., 2]."""
    return np.stack((z.real, z.imag), axis=-1).astype(dtype)


def check_components(layer: Layer) -> None:
    """Raises UnsupportedError unless the last axis of input 0 has 1 or 2 components."""
    shape = layer.needs(0).shape
    if shape[-1] not in (1, 2):
        raise UnsupportedError(f"{layer.op} '{layer.name}': the last axis of {layer.needs(0).type} must have 1 (real) or 2 (complex) components")
