"""Samples of max poolings in a row, joined with what went in."""

from __future__ import annotations

from whet.network import Network, parse_type
from whet.ops._base import Sample


def chain(x: str, window: int, pools: int) -> Sample:
    """Concat(x, pool(x), pool(pool(x)), ...) along channels."""

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        made = [body.add_input("x", parse_type(x))]
        for _ in range(pools):
            made.append(body.add("MaxPool", made[-1], kernel_shape=(window, window), pads=(window // 2,) * 4, strides=(1, 1)))
        body.mark_output(body.add("Concat", *made, axis=1))
        return {"body": body}

    return Sample([x], {"composite": "PoolChain"}, regions)


SAMPLES = [chain("f32[2,16,9,7]", 5, 3), chain("f32[1,40,20,20]", 5, 3), chain("f32[3,8,4,11]", 3, 2), chain("u8[2,32,9,7]", 5, 3)]
