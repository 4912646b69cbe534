"""Samples of convolutions with 1x1 convolutions behind them, as bottlenecks end."""

from __future__ import annotations

from whet.network import Network, parse_type
from whet.ops._base import Sample


def conv_product(x: str, inner: int, k: int, *, taps: int = 3, hard: bool = False, residual: str = "") -> Sample:
    """A bottleneck's end: a convolution, an activation, a 1x1 convolution with a bias, what is added "before" or "after" its activation."""
    n, c, h, w = (int(v) for v in x[4:-1].split(","))
    inputs = [x, f"const f32[{inner},{c},{taps},{taps}]", f"const f32[{inner}]", f"const f32[{k},{inner},1,1]", f"const f32[{k}]"]
    inputs += [f"f32[{n},{k},{h},{w}]"] if residual else []

    def regions() -> dict[str, Network]:
        body, first, last = (Network("body", "lowered") for _ in range(3))
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        y = first.add("Conv", *[first.add_input(t.name, t.type) for t in own[:3]], pads=(taps // 2,) * 4)
        first.mark_output(first.add("HardSwish" if hard else "Relu", y))
        between = body.add("Fused", *own[:3], hint="Conv", regions={"body": first})
        z = last.add("Conv", last.add_input("between", between.type), *[last.add_input(t.name, t.type) for t in own[3:5]])
        other = last.add_input("other", own[5].type) if residual else None
        z = last.add("Add", z, other) if residual == "before" else z
        z = last.add("Relu", z)
        last.mark_output(last.add("Add", z, other) if residual == "after" else z)
        body.mark_output(body.add("Fused", between, *own[3:], hint="Conv", regions={"body": last}))
        return {"body": body}

    return Sample(inputs, {"hint": "ConvProduct"}, regions)


SAMPLES = [
    conv_product("f32[1,128,14,14]", 128, 512, residual="before"),
    conv_product("f32[2,64,9,11]", 64, 128, taps=5, hard=True),
    conv_product("f32[1,32,7,7]", 128, 256, residual="after"),
    conv_product("f32[1,64,56,56]", 64, 256),
]
