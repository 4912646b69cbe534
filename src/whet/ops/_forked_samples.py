"""Samples of two 1x1 convolutions that read the same image, or the same two images' joined channels."""

from __future__ import annotations

from whet.network import Network, Tensor, parse_type
from whet.ops._base import Sample


def forked(images: int, channels: tuple[int, ...], filters: tuple[int, int], h: int, w: int, act: str = "silu") -> Sample:
    """act(conv(x) + bias) twice, x one image or two joined ones."""
    c = sum(channels)
    inputs = [f"f32[{images},{n},{h},{w}]" for n in channels]
    constants = [t for k in filters for t in (f"const f32[{k},{c},1,1]", f"const f32[{k}]")]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate([*inputs, *constants])]
        own, weights = own[: len(inputs)], own[len(inputs) :]
        for i in range(2):
            body.mark_output(_one(body, own, weights[2 * i : 2 * i + 2], act))
        return {"body": body}

    return Sample([*inputs, *constants], {"composite": "DualOutputConv"}, regions)


def _one(body: Network, images: list[Tensor], weights: list[Tensor], act: str) -> Tensor:
    """One of the two, as the passes leave it."""
    if len(images) == 1:
        return body.add("Fused", *images, *weights, composite="Conv", regions={"body": _conv([*images, *weights], act)})
    whole = Network("body", "lowered")
    own = [whole.add_input(f"j{i}", t.type) for i, t in enumerate([*images, *weights])]
    fed = [whole.add("Concat", *own[:2], axis=1), *own[2:]]
    whole.mark_output(whole.add("Fused", *fed, composite="Conv", regions={"body": _conv(fed, act)}))
    return body.add("Fused", *images, *weights, composite="ConcatInputConv", regions={"body": whole})


def _conv(like: list[Tensor], act: str) -> Network:
    inner = Network("body", "lowered")
    y = inner.add("Conv", *(inner.add_input(f"r{i}", t.type) for i, t in enumerate(like)))
    inner.mark_output(inner.add("Mul", y, inner.add("Sigmoid", y)) if act == "silu" else inner.add(act, y))
    return inner


SAMPLES = [
    forked(1, (16,), (16, 32), 6, 7),
    forked(2, (64,), (32, 32), 9, 9),
    forked(3, (160,), (64, 64), 20, 20, "Relu"),
    forked(1, (320,), (160, 160), 10, 10),
    forked(2, (64, 64), (64, 64), 12, 12),
    forked(1, (32, 24), (48, 16), 9, 7, "HardSwish"),
    forked(8, (32,), (32, 32), 40, 40),
]
