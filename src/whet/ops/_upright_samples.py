"""Samples of convolutions of 64 channels over more pixels than a GPU's multiprocessors take at once."""

from __future__ import annotations

from whet.network import Network, parse_type
from whet.ops._base import Sample


def upright(x: str, k: int, added: str = "") -> Sample:
    """A 3x3 convolution with a bias and Relu, what is `added` "before" or "behind" it."""
    n, c, h, w = (int(v) for v in x[4:-1].split(","))
    inputs = [x, f"const f32[{k},{c},3,3]", f"const f32[{k}]", *([f"f32[{n},{k},{h},{w}]"] if added else [])]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(name, parse_type(t.split()[-1])) for name, t in zip("xwbz", inputs, strict=False)]
        y = body.add("Conv", *own[:3], pads=(1, 1, 1, 1))
        if added == "before":
            y = body.add("Add", y, own[3])
        y = body.add("Relu", y)
        body.mark_output(body.add("Add", y, own[3]) if added == "behind" else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Conv"}, regions)


SAMPLES = [
    upright("f32[40,64,40,6]", 64, "before"),
    upright("f32[8,64,22,18]", 40, "behind"),
    upright("f32[3,64,43,56]", 64),
]
