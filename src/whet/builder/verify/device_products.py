"""Products of verification's references on the GPU, where NumPy would need seconds: each call is checked against NumPy on some results.

A GPU that computes wrongly could hide a wrong kernel. So of every product the first and last results and SAMPLED others, drawn anew for each call,
are computed by NumPy too. A fault in a share f of the results is missed in one call with a probability of (1 - f)^SAMPLED: 28 % for one result in
a hundred, 0.14 % for one in twenty. A verification makes tens to hundreds of calls: a fault that all of them have is missed with that power of the
probability, which for 1 % and ten calls is 3e-6. After a difference NumPy computes everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from whet.backends import Backend
from whet.builder.candidates.enumerate import count_macs
from whet.errors import BackendError
from whet.forks import make_lock
from whet.network import Network
from whet.ops import bind_layer, bind_symbols
from whet.ops._products import Window

SAMPLED = 128  # results of a call that NumPy computes too
LEAST_IN_ALL = 2e10  # multiply-adds of a verification from which the GPU computes products: NumPy needs 2 to 10 seconds in float64 on one CPU
LEAST = 2e8  # multiply-adds of one product: NumPy computes smaller ones in about the time that their copies to the GPU take
_MOST_AXES = 3
_COMPARISONS = 8  # of each layer: four kinds of inputs, and the network in float64 and in its own types, before and after the passes


def find_device_products(
    backend: Backend, source: Network, shapes: Mapping[str, tuple[int, ...]], share: float, seed: int, note: Callable[[str], None],
) -> CheckedProducts | None:  # fmt: skip
    """Products by the backend for the verification of a network at these input shapes, `share` of whose batch is compared; None where NumPy is fast
    enough or the backend has none."""
    if not backend.capabilities.reference_products:
        return None
    env = bind_symbols([(t.name, t.type) for t in source.inputs], shapes)
    macs = sum(count_macs(bind_layer(x, env)) for x in source.layers)
    return CheckedProducts(backend, seed, note) if _COMPARISONS * share * macs >= LEAST_IN_ALL else None


class CheckedProducts:
    """`Products` by a backend, checked against NumPy on some results of each call. `note` receives the reason if NumPy has to compute everything."""

    def __init__(self, backend: Backend, seed: int, note: Callable[[str], None], least: float | None = None):
        self.backend, self.note, self.least = backend, note, LEAST if least is None else least
        self.computed = self.declined = 0  # calls by the backend; large ones that failed there
        self.wrong = ""  # the first difference
        self._rng, self._guard = np.random.default_rng(seed), make_lock()

    def multiply(self, a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
        """See `Products`."""
        if a.ndim < 2 or b.ndim < 2 or a.dtype.kind != "f" or b.dtype.kind != "f":
            return None
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])

        def compute_some(at: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
            rows = np.broadcast_to(a, (*batch, *a.shape[-2:]))[(*at[:-2], at[-2])]
            columns = np.broadcast_to(b, (*batch, *b.shape[-2:])).swapaxes(-1, -2)[(*at[:-2], at[-1])]
            return rows, columns

        return self._compute(lambda: self.backend.multiply(a, b, dtype), shape, a.shape[-1], dtype, compute_some)

    def convolve(self, x: np.ndarray, w: np.ndarray, window: Window, dtype: np.dtype) -> np.ndarray | None:
        """See `Products`."""
        if w.ndim - 2 > _MOST_AXES or x.dtype.kind != "f" or w.dtype.kind != "f":
            return None
        ins, outs = x.shape[1] // window.group, w.shape[1] if window.transposed else len(w) // window.group
        shape = (len(x), window.group * outs, *window.sizes)

        def compute_some(at: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
            return gather_operands(x, w, window, at)

        args = (window.sizes, window.strides, window.dilations, window.pads, window.group, window.transposed)
        return self._compute(lambda: self.backend.convolve(x, w, *args, dtype), shape, ins * math.prod(w.shape[2:]), dtype, compute_some)

    def _compute(
        self, compute: Callable[[], np.ndarray], shape: tuple[int, ...], terms: int, dtype: np.dtype,
        compute_some: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, np.ndarray]],
    ) -> np.ndarray | None:  # fmt: skip
        """The backend's result if it is large enough and some of it agrees with NumPy; else None."""
        if self.wrong or dtype not in (np.float32, np.float64) or math.prod(shape) * terms < self.least:
            return None
        try:
            sums = compute()
        except BackendError:  # most often too little memory; a lost context is reported by the engine's own launches
            self.declined += 1
            return None
        at = np.unravel_index(self._draw_indices(math.prod(shape)), shape)
        a, b = (v.astype(np.float64) for v in compute_some(at))
        with np.errstate(all="ignore"):
            want, size = np.einsum("ij,ij->i", a, b), np.einsum("ij,ij->i", np.abs(a), np.abs(b))
            error, got = "", sums[at].astype(np.float64)
            allowed = (terms + 2) * (float(np.finfo(dtype).eps) * size + float(np.finfo(dtype).smallest_subnormal))
            same = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= allowed)
            if dtype == np.float32:  # overflows of its own range
                same |= ~np.isfinite(got) & (size > np.finfo(np.float32).max)
        if not same.all():
            first = int(np.argmin(same))
            error = f"{int((~same).sum())} of {len(same)} results of a product of shape {list(shape)} differ from NumPy's, such as "
            error += f"{got[first]:.6g} instead of {want[first]:.6g}"
            with self._guard:
                if not self.wrong:
                    self.wrong = error
                    self.note(f"verification's products are computed by NumPy, which is slower: on this GPU {error}")
            return None
        self.computed += 1
        return sums

    def _draw_indices(self, count: int) -> np.ndarray:
        with self._guard:
            drawn = self._rng.integers(0, count, SAMPLED)
        return np.concatenate([[0, count - 1], drawn])


def gather_operands(x: np.ndarray, w: np.ndarray, window: Window, at: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The operands whose products are added for the results at these indices, each [results, products]; zeros where there is none."""
    image, k, places = at[0], at[1], at[2:]
    ins, outs = x.shape[1] // window.group, w.shape[1] if window.transposed else len(w) // window.group
    taps = np.stack([t.reshape(-1) for t in np.indices(w.shape[2:])])  # [axes, entries of the window]
    spatial = x.shape[2:]
    index, inside = [], np.ones((len(k), taps.shape[1]), bool)
    for axis, place in enumerate(places):
        moved, stride, pad = taps[axis] * window.dilations[axis], window.strides[axis], window.pads[axis]
        if window.transposed:
            entry, rest = np.divmod(place[:, None] + pad - moved, stride)
            inside &= rest == 0
        else:
            entry = place[:, None] * stride - pad + moved
        inside &= (entry >= 0) & (entry < spatial[axis])
        index.append(np.clip(entry, 0, spatial[axis] - 1))
    channels = (k // outs * ins)[:, None] + np.arange(ins)  # [results, channels]
    values = x[(image[:, None, None], channels[:, :, None], *(i[:, None, :] for i in index))]
    values = np.where(inside[:, None, :], values, 0)
    if window.transposed:
        weights = w[(channels, (k % outs)[:, None])].reshape(*channels.shape, -1)
        weights = np.where(inside[:, None, :], weights, 0)
    else:
        weights = w[k].reshape(len(k), ins, -1)
    return values.reshape(len(k), -1), weights.reshape(len(k), -1)
