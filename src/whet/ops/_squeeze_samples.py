"""Samples of squeeze and excitation: an image times what two small products make of its means."""

from __future__ import annotations

from whet.network import Network, parse_type
from whet.ops._base import Sample


def squeeze(x: str, hidden: int, *, hard: bool = False, turned: bool = False) -> Sample:
    """SiLU and Sigmoid, or `hard` Relu and HardSigmoid, behind the products; `turned`: the gate is the first factor."""
    c = int(x[4:-1].split(",")[1])
    inputs = [x, f"const f32[{hidden},{c},1,1]", f"const f32[{hidden}]", f"const f32[{c},{hidden},1,1]", f"const f32[{c}]"]

    def regions() -> dict[str, Network]:
        body, first, second = (Network("body", "lowered") for _ in range(3))
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        means = body.add("GlobalAveragePool", own[0])
        y = first.add("Conv", first.add_input("means", means.type), *[first.add_input(t.name, t.type) for t in own[1:3]])
        first.mark_output(first.add("Relu", y) if hard else first.add("Mul", y, first.add("Sigmoid", y)))
        between = body.add("Fused", means, *own[1:3], composite="Conv", regions={"body": first})
        z = second.add("Conv", second.add_input("between", between.type), *[second.add_input(t.name, t.type) for t in own[3:]])
        second.mark_output(second.add("HardSigmoid" if hard else "Sigmoid", z))
        gate = body.add("Fused", between, *own[3:], composite="Conv", regions={"body": second})
        body.mark_output(body.add("Mul", *((gate, own[0]) if turned else (own[0], gate))))
        return {"body": body}

    return Sample(inputs, {"composite": "SqueezeExcite"}, regions)


SAMPLES = [
    squeeze("f32[1,32,56,56]", 8),
    squeeze("f32[2,144,13,11]", 6, hard=True, turned=True),
    squeeze("f32[1,1152,7,7]", 48),
]
