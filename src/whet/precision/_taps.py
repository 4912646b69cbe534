"""The padded input of a convolution, indexed by filter tap and output position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer


@dataclass(frozen=True)
class Taps:
    """`padded` is the input [N, C, *spatial] with padding; `sizes` are the output sizes and `taps` the filter sizes, per spatial axis."""

    padded: np.ndarray
    taps: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    @staticmethod
    def of(layer: Layer, x: np.ndarray) -> Taps:
        """From a Conv layer with explicit pads and its input `x` [N, C, *spatial]."""
        taps = layer.needs(1).shape[2:]
        n = len(taps)
        pads = layer.attrs.get("pads") or (0,) * 2 * n
        strides, dilations = tuple(layer.attrs.get("strides") or (1,) * n), tuple(layer.attrs.get("dilations") or (1,) * n)
        padded = np.pad(x, ((0, 0), (0, 0), *((pads[i], pads[n + i]) for i in range(n))))
        sizes = tuple((padded.shape[2 + i] - (taps[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(n))
        return Taps(padded, taps, sizes, strides, dilations)

    def get_elements(self, tap: tuple[int, ...]) -> np.ndarray:
        """The input elements that one tap multiplies, over all windows: a view [N, C, *sizes]."""
        first = [t * d for t, d in zip(tap, self.dilations, strict=True)]
        cut = tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first, self.sizes, self.strides, strict=True))
        return self.padded[(slice(None), slice(None), *cut)]

    def get_elements_at(self, tap: tuple[int, ...], image: np.ndarray, place: tuple[np.ndarray, ...]) -> np.ndarray:
        """The input elements that one tap multiplies in selected windows, given by batch item and output position: [windows, C]."""
        at = tuple(p * s + t * d for p, s, t, d in zip(place, self.strides, tap, self.dilations, strict=True))
        index: tuple[np.ndarray | slice, ...] = (image, slice(None), *at)
        return self.padded[index]
