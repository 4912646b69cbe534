"""Elementwise operations from 8-bit integers to 8-bit integers become one lookup in a table of 256 entries, whatever they compute between."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import activate
from whet.composites.quantized import make_quantized_sample
from whet.network import Layer, Network, Tensor
from whet.rewrite.fusing import ACTIVATIONS, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_activation_obstacle
from whet.rewrite.rules import Phase, Skip

ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
UNARY = (*(a for a in ACTIVATIONS if a != "PRelu"), "Abs", "Erf", "Exp", "Neg", "Reciprocal", "Sqrt")


def _build_silu(body: Network, values: list[Tensor]) -> Tensor:
    return activate(body, body.add("LeakyRelu", values[0], alpha=4.0), "silu")


QUANTIZED_TABLE = register_composite(
    "QuantizedTable",
    title="lookup table of 8-bit integers",
    unsupported="no tactic here looks up functions of 8-bit integers; they are computed step by step",
    samples=[
        # odd sizes, results that saturate at both ends, a change of scale alone
        make_quantized_sample("QuantizedTable", [("full u8[1,16,19,19]", 0.05, 40, 1)], _build_silu, (0.04, 7, "u8")),
        make_quantized_sample("QuantizedTable", [("full i8[3,7,5]", 0.05, -3, 1)], _build_silu, (0.01, -100, "i8")),
        make_quantized_sample(
            "QuantizedTable", [("full u8[2,17,45,45]", 0.5, 0, 1)], lambda body, values: body.add("Gelu", *values), (0.25, 0, "i8")
        ),
        make_quantized_sample("QuantizedTable", [("full i8[40000]", 0.02, 0, 1)], lambda body, values: values[0], (0.0317, 130, "u8")),
    ],
)


@QUANTIZED_TABLE.matcher("QuantizeLinear", phase=Phase.FUSE, after=["fuse_quantized"])
def fuse_quantized_table(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Elementwise operations from 8-bit integers to 8-bit integers become one lookup in a table of 256 entries.

    Intermediate values may be read by other QuantizeLinear layers too: each of those gets its own table of the same integers.
    """
    chain = _match_elementwise_chain(g, layer)
    if chain is None:
        return None
    source, steps = chain
    if reason := find_activation_obstacle(source) or find_activation_obstacle(layer):
        return Skip(reason)
    value = layer.needs(0)
    if source.output.type != value.type:
        return Skip(f"%{value.name} is broadcast")
    for x in steps:
        if g.is_output(x.output):
            return Skip(f"%{x.output.name} is an output of the network")
        others = [r for r in g.readers(x.output) if r not in steps and not (r.op == "QuantizeLinear" and x.output is value)]
        if others:
            return Skip(f"%{x.output.name} is also read by '{others[0].name}', in floating point")
    return fuse_flat(g, QUANTIZED_TABLE.kind, source, *steps, layer)


def _match_elementwise_chain(g: Graph, layer: Layer) -> tuple[Layer, list[Layer]] | None:
    """(the only DequantizeLinear that `layer` depends on, the elementwise layers between them in execution order); None for other graphs."""
    source: Layer | None = None
    steps: dict[Layer, None] = {}
    waiting = [layer.inputs[0]]
    while waiting:
        maker = g.maker(waiting.pop())
        if maker is None:
            return None
        if maker.op == "DequantizeLinear":
            if source not in (None, maker) or maker.needs(0).is_constant:
                return None
            source = maker
        elif maker not in steps:
            if maker.op not in ARITHMETIC and maker.op not in UNARY:
                return None
            steps[maker] = None
            for t in maker.inputs:
                if t is None or (t.is_constant and t.type.elements == 1):
                    continue
                waiting.append(t)
    return None if source is None else (source, sorted(steps, key=g.position))
