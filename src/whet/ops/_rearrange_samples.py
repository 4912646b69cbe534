"""Samples of Rearrange: a Reshape that splits an image's channels in two, and a Transpose that moves the inner part behind the pixels."""

from __future__ import annotations

import numpy as np

from whet.network import Network, parse_type
from whet.ops._base import Sample


def rearrange(shape: tuple[int, ...], split: tuple[int, ...], perm: tuple[int, ...], dtype: str = "f32") -> Sample:
    """An image of `shape` reshaped to `split` and transposed by `perm`."""
    text = f"{dtype}[{','.join(map(str, shape))}]"

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        x, s = body.add_input("x", parse_type(text)), body.add_input("s", parse_type(f"i64[{len(split)}]"))
        s.shape_value = split
        body.mark_output(body.add("Transpose", body.add("Reshape", x, s), perm=perm))
        return {"body": body}

    return Sample([text if dtype == "f32" else f"full {text}", np.array(split, np.int64)], {"composite": "Rearrange"}, regions)


SAMPLES = [rearrange((2, 6, 3, 5), (2, 2, 3, 3, 5), (0, 1, 3, 4, 2)), rearrange((1, 12, 4, 7), (1, 3, 4, 4, 7), (0, 1, 3, 4, 2), "u8")]
