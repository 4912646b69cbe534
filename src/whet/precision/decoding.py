"""Decoding an image file to 8 bits per channel, whatever its own depth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_PER_STEP = 257  # of 16 bits: 65535 / 255


def decode(path: str | Path, *, gray: bool) -> Picture:
    """The first image of a file in RGB or gray. 16-bit pixels are scaled to 8 bits (Pillow would clip them at 255).

    Orientation tags are ignored, as in the loaders that networks are trained with. Raises OSError for an undecodable file, ImportError
    without Pillow.
    """
    from PIL import Image

    mode = "L" if gray else "RGB"
    try:
        with Image.open(path) as opened:
            if not opened.mode.startswith("I"):
                return opened.convert(mode)
            deep = np.asarray(opened).astype(np.float64) / _PER_STEP
            return Image.fromarray(deep.round().clip(0, 255).astype(np.uint8)).convert(mode)
    except Image.DecompressionBombError as e:
        raise OSError(str(e)) from e
