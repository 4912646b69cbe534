"""Decoding an image file to 8 bits per channel, whatever its own depth."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_PIXELS = 2**27
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")  # no others, whatever the file's name: Pillow runs Ghostscript for EPS
_DAMAGE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, SyntaxError, MemoryError, RuntimeError, struct.error, zlib.error)
_PER_STEP = 257  # of 16 bits: 65535 / 255


def decode(path: str | Path, *, gray: bool) -> Picture:
    """The first image of a file in RGB or gray. 16-bit pixels are scaled to 8 bits (Pillow would clip them at 255).

    Orientation tags are ignored, as in the loaders that networks are trained with. Raises OSError for an undecodable file and for one of more
    than 2^27 pixels, ImportError without Pillow.
    """
    from PIL import Image

    mode = "L" if gray else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter than that of Pillow's error
            Image.init()
            with Image.open(path, formats=[f for f in _FORMATS if f in Image.OPEN]) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise OSError(f"it has {opened.width} x {opened.height} pixels, more than {MOST_PIXELS:,}")
                if not opened.mode.startswith("I"):
                    return opened.convert(mode)
                deep = np.asarray(opened).astype(np.float64) / _PER_STEP
                return Image.fromarray(deep.round().clip(0, 255).astype(np.uint8)).convert(mode)
    except (*_DAMAGE, Image.DecompressionBombError) as e:
        raise OSError(f"{str(e) or type(e).__name__}. Remove the image, or save it again as PNG or JPEG") from e
