"""Shared by windowed ops: output sizes from kernel, stride, dilation and padding; windows as strided views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Dim, Layer, TensorType, ceildiv, floordiv, minimum, static_shape
from whet.ops._base import INTS, Couple
from whet.ops._types import require_numeric_input


def compute_out_size(size: Dim, kernel: int, stride: int, dilation: int, before: int, after: int, ceil: bool = False) -> Dim:
    """Output length of one spatial axis. Raises NetworkError if the window exceeds the padded input."""
    if stride < 1 or dilation < 1 or kernel < 1:
        raise NetworkError(f"kernel, stride and dilation must be at least 1, not {kernel}, {stride}, {dilation}")
    span = size + before + after - (dilation * (kernel - 1) + 1)
    if isinstance(span, int) and span < 0:
        raise NetworkError(f"a window of {kernel} (dilation {dilation}) is larger than {size} + padding {before} + {after}")
    if not ceil:
        return floordiv(span, stride) + 1
    n = ceildiv(span, stride) + 1
    if after <= dilation * (kernel - 1) + 1 - stride:
        return n
    return minimum(n, ceildiv(size + before, stride))  # the last window must start inside the input or its leading padding


_MOST_TAPS = 1 << 22  # entries of a window; the references take a step for each
_MOST_PADDED = 1 << 31  # elements of a padded input, unless the input itself is that large


def check_window(kernel: Sequence[Dim], unpadded: Sequence[Dim], padded: Sequence[Dim]) -> None:
    """Raises UnsupportedError for a window with too many entries, or padding that makes a tensor too large to compute with.

    `unpadded` and `padded` are the shapes of the tensor without and with its padding; symbolic sizes do not count.
    """
    taps, before, after = (prod(d for d in dims if isinstance(d, int)) for dims in (kernel, unpadded, padded))
    if taps > _MOST_TAPS:
        raise UnsupportedError(f"a window of {' x '.join(map(str, kernel))} has {taps} entries; the most are {_MOST_TAPS}")
    if after > max(_MOST_PADDED, 4 * before):
        raise UnsupportedError(f"padding makes {after} elements of {before}; the most are {_MOST_PADDED}")


def compute_same_pads(sizes: Sequence[Dim], kernel, strides, dilations, upper: bool) -> tuple[int, ...] | None:
    """Explicit pads for auto_pad SAME_UPPER/SAME_LOWER, or None if a size is symbolic and its stride is not 1."""
    before, after = [], []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        span = d * (k - 1) + 1
        if isinstance(n, int):
            total = max((-(-n // s) - 1) * s + span - n, 0)
        elif s == 1:
            total = span - 1
        else:
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return (*before, *after)


def resolve_auto_pad(node, sizes: Sequence[Dim], kernel: Sequence[Dim]) -> dict[str, Any]:
    """The node's attributes with `auto_pad` resolved into pads. Raises UnsupportedError if a needed size is unknown."""
    attrs = {k: v for k, v in node.attrs.items() if k != "auto_pad"}
    auto, one = node.attrs.get("auto_pad", "NOTSET"), (1,) * len(kernel)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = compute_same_pads(sizes, kernel, attrs.get("strides", one), attrs.get("dilations", one), auto == "SAME_UPPER")
        if pads is None:
            raise node.unsupported(f"auto_pad={auto} with a stride needs a static height and width; give shapes, or export with fixed H and W")
        attrs["pads"] = pads
    elif auto == "VALID":
        attrs.pop("pads", None)
    return attrs


def gather_windows(x: np.ndarray, kernel, strides, dilations, pads, fill, extra_after=None) -> np.ndarray:
    """A view [N, C, *out, *kernel] of the padded `x` [N, C, *spatial]; `extra_after` adds padding at the end (ceil mode)."""
    r = len(kernel)
    after = [pads[r + i] + (extra_after[i] if extra_after else 0) for i in range(r)]
    if any(pads) or any(after):
        x = np.pad(x, [(0, 0), (0, 0), *((pads[i], after[i]) for i in range(r))], constant_values=fill)
    out = [(x.shape[2 + i] - (dilations[i] * (kernel[i] - 1) + 1)) // strides[i] + 1 for i in range(r)]
    shape = (*x.shape[:2], *out, *kernel)
    steps = (*x.strides[:2], *(x.strides[2 + i] * strides[i] for i in range(r)), *(x.strides[2 + i] * dilations[i] for i in range(r)))
    return np.lib.stride_tricks.as_strided(x, shape, steps, writeable=False)


POOL_ATTRS = {"kernel_shape": INTS, "strides": INTS, "dilations": INTS, "pads": INTS, "ceil_mode": 0}


@dataclass(frozen=True)
class Pool:
    """A pooling's attributes with defaults filled in."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    ceil: bool

    def out(self, spatial: Sequence[Dim]) -> list[Dim]:
        """Output sizes."""
        r = len(self.kernel)
        return [
            compute_out_size(n, self.kernel[i], self.strides[i], self.dilations[i], self.pads[i], self.pads[r + i], self.ceil)
            for i, n in enumerate(spatial)
        ]

    def padded(self, spatial: Sequence[Dim]) -> list[Dim]:
        """Sizes with padding."""
        r = len(self.kernel)
        return [n + self.pads[i] + self.pads[r + i] for i, n in enumerate(spatial)]

    def extra(self, spatial: Sequence[int]) -> list[int]:
        """Elements past the trailing padding that ceil-mode windows cover."""
        r, out = len(self.kernel), static_shape(tuple(self.out(spatial)))
        need = [(out[i] - 1) * self.strides[i] + self.dilations[i] * (self.kernel[i] - 1) + 1 for i in range(r)]
        return [max(need[i] - n - self.pads[i] - self.pads[r + i], 0) for i, n in enumerate(spatial)]

    def slices(self, x: np.ndarray, fill) -> Iterator[np.ndarray]:
        """For each tap of the window: its values for all outputs, [N, C, *out]."""
        v = gather_windows(x, self.kernel, self.strides, self.dilations, self.pads, fill, self.extra(x.shape[2:]))
        out = [slice(0, n) for n in static_shape(tuple(self.out(x.shape[2:])))]
        for at in product(*map(range, self.kernel)):
            index: tuple[slice | int, ...] = (slice(None), slice(None), *out, *at)
            yield v[index]


def pool_of(layer: Layer) -> Pool:
    """The geometry of a pooling layer. Raises NetworkError."""
    x, a = layer.needs(0), layer.attrs
    r = x.type.rank - 2
    kernel = a.get("kernel_shape")
    if kernel is None or len(kernel) != r:
        raise NetworkError(f"{layer.op} '{layer.name}' needs a kernel_shape of {r} values for {x.type}, not {kernel}")
    one = (1,) * r
    strides, dilations, pads = tuple(a.get("strides") or one), tuple(a.get("dilations") or one), tuple(a.get("pads") or (0,) * 2 * r)
    if len(strides) != r or len(dilations) != r or len(pads) != 2 * r or min(pads) < 0:
        raise NetworkError(f"{layer.op} '{layer.name}': strides {strides}, dilations {dilations}, pads {pads} do not match {r} spatial axes")
    return Pool(tuple(kernel), strides, dilations, pads, bool(a.get("ceil_mode", 0)))


def infer_pool(layer: Layer) -> TensorType:
    x = layer.needs(0)
    require_numeric_input(layer)
    if not 3 <= x.type.rank <= 5:
        raise NetworkError(f"{layer.op} '{layer.name}' takes [N, C, *spatial], not {x.type}")
    pool = pool_of(layer)
    check_window(pool.kernel, x.shape, (*x.shape[:2], *pool.padded(x.shape[2:])))
    return x.type.with_shape((*x.shape[:2], *pool.out(x.shape[2:])))


def pool_couples(layer: Layer) -> list[Couple]:
    """Couples batch and channels; spatial axes are not pruned."""
    x, y = layer.needs(0), layer.output
    return [Couple(x, i, y, i) for i in range(2)]


def read_pool(node, g):
    """Any pooling node; auto_pad becomes explicit pads."""
    attrs = resolve_auto_pad(node, node.inputs[0].shape[2:], node.attrs["kernel_shape"])
    attrs.pop("storage_order", None)
    return node.add(g, node.op, node.inputs[0], **attrs)
