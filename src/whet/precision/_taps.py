"""A convolution's input as its windows see it: zeros around it, and where each tap of a filter meets it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer


@dataclass(frozen=True)
class Taps:
    """`padded` is [images, channels, *spatial] with the padding; `sizes` are those of the output, `taps` of the filter, by spatial axis."""

    padded: np.ndarray
    taps: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    @staticmethod
    def of(layer: Layer, x: np.ndarray) -> Taps:
        """Of a Conv with explicit pads, and its input."""
        taps = layer.needs(1).shape[2:]
        n = len(taps)
        pads = layer.attrs.get("pads") or (0,) * 2 * n
        strides, dilations = tuple(layer.attrs.get("strides") or (1,) * n), tuple(layer.attrs.get("dilations") or (1,) * n)
        padded = np.pad(x, ((0, 0), (0, 0), *((pads[i], pads[n + i]) for i in range(n))))
        sizes = tuple((padded.shape[2 + i] - (taps[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(n))
        return Taps(padded, taps, sizes, strides, dilations)

    def met_by(self, tap: tuple[int, ...]) -> np.ndarray:
        """What one tap is multiplied with, in all windows: [images, channels, *sizes], a view."""
        first = [t * d for t, d in zip(tap, self.dilations, strict=True)]
        cut = tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first, self.sizes, self.strides, strict=True))
        return self.padded[(slice(None), slice(None), *cut)]

    def met_at(self, tap: tuple[int, ...], image: np.ndarray, place: tuple[np.ndarray, ...]) -> np.ndarray:
        """What one tap is multiplied with in some windows, given by image and place in the output: [windows, channels]."""
        at = tuple(p * s + t * d for p, s, t, d in zip(place, self.strides, tap, self.dilations, strict=True))
        return self.padded[(image, slice(None), *at)]
