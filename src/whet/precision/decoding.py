"""A photo from a file as 8 bits a channel, whatever the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_PER_STEP = 257  # of 16 bits: 65535 / 255


def decode(path: str | Path, *, gray: bool) -> Picture:
    """The first picture of a file in RGB, or in gray; 16 bits a pixel become 8, which Pillow itself would cut off at 255.

    Orientation tags are not followed, as the loaders that networks are trained with do not. Raises OSError for what cannot be
    decoded, ImportError without Pillow.
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
