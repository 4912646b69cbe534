"""Samples of the end of a quantized residual block: two convolutions, of which one adds the integers of the other."""

from __future__ import annotations

import numpy as np

from whet.network import Network, Tensor, parse_type
from whet.ops._base import Sample

SCALE, ZERO, STEP, OFFSET = (np.asarray(v) for v in (np.float32(0.02), np.uint8(7), np.float32(0.04), np.uint8(100)))
WEIGHTS = np.float32(0.0008)  # filters: half to twice of it


def quantized_sum(x: str, w: str, y: str, v: str, *, stride: int = 1, pad: int = 0) -> Sample:
    """relu(conv(y, v) + conv(x, w) as integers): u8 activations, i8 filters with a scale a channel; the second reads every `stride`-th pixel."""
    k = int(w.split("[")[1].split(",")[0])
    scales, bias = np.linspace(0.5, 2, k, dtype=np.float32) * WEIGHTS, np.linspace(-1, 1, k, dtype=np.float32)
    inputs = [f"full {x}", SCALE, ZERO, f"const {w}", scales, bias, STEP, OFFSET, f"full {y}", f"const {v}", scales[::-1].copy()]

    def conv(net: Network, source: list[Tensor], filters: list[Tensor], bias: Tensor, stride: int, pad: int) -> Tensor:
        real = net.add("DequantizeLinear", *filters, axis=0)
        return net.add("Conv", net.add("DequantizeLinear", *source), real, bias, strides=(stride,) * 2, pads=(pad,) * 4)

    def regions() -> dict[str, Network]:
        body, first, last = (Network("body", "lowered") for _ in range(3))
        kinds = [x, "f32[]", "u8[]", w, f"f32[{k}]", f"f32[{k}]", "f32[]", "u8[]", y, v, f"f32[{k}]"]
        own = [body.add_input(f"i{i}", parse_type(t)) for i, t in enumerate(kinds)]
        a = [first.add_input(t.name, t.type) for t in own[:8]]
        first.mark_output(first.add("QuantizeLinear", conv(first, a[:3], a[3:5], a[5], 1, pad), *a[6:8]))
        between = body.add("Fused", *own[:8], composite="Conv", regions={"body": first})
        read = [own[8], own[1], own[2], own[9], own[10], own[5], between, own[6], own[7]]
        b = [last.add_input(t.name, t.type) for t in read]
        z = last.add("Add", last.add("DequantizeLinear", *b[6:9]), conv(last, b[:3], b[3:5], b[5], stride, 0))
        last.mark_output(last.add("QuantizeLinear", last.add("Relu", z), *b[7:9]))
        body.mark_output(body.add("Fused", *read, composite="Conv", regions={"body": last}))
        return {"body": body}

    return Sample(inputs, {"composite": "QuantizedSum"}, regions)


SAMPLES = [
    quantized_sum("u8[2,64,9,9]", "i8[96,64,1,1]", "u8[2,32,9,9]", "i8[96,32,1,1]"),
    quantized_sum("u8[1,32,14,14]", "i8[64,32,1,1]", "u8[1,48,28,28]", "i8[64,48,1,1]", stride=2),
]
