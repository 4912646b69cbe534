"""Squeeze-and-excitation becomes one layer: an image's channel means, two pointwise convolutions of them, and the product with the image."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_conv_input, find_inner_conv, fuse_nested, is_conv, is_pointwise_conv, list_epilogue_steps
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def squeeze_excite_sample(x: str, hidden: int, *, hard: bool = False, gate_first: bool = False) -> Sample:
    """SiLU and Sigmoid, or with `hard` Relu and HardSigmoid, after the convolutions; `gate_first`: the gate is the first factor."""
    c = parse_dims(x)[1]
    inputs = [x, f"const f32[{hidden},{c},1,1]", f"const f32[{hidden}]", f"const f32[{c},{hidden},1,1]", f"const f32[{c}]"]

    def reduce(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), "Relu" if hard else "silu")

    def expand(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), "HardSigmoid" if hard else "Sigmoid")

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        between = add_fused(body, [body.add("GlobalAveragePool", own[0]), *own[1:3]], reduce)
        gate = add_fused(body, [between, *own[3:]], expand)
        body.mark_output(body.add("Mul", *((gate, own[0]) if gate_first else (own[0], gate))))
        return {"body": body}

    return Sample(inputs, {"composite": "SqueezeExcite"}, build_regions)


SQUEEZE_EXCITE = register_composite(
    "SqueezeExcite",
    title="squeeze-and-excitation",
    unsupported="no tactic here computes squeeze-and-excitation in one kernel",
    samples=[
        squeeze_excite_sample("f32[1,32,56,56]", 8),
        squeeze_excite_sample("f32[2,144,13,11]", 6, hard=True, gate_first=True),
        squeeze_excite_sample("f32[1,1152,7,7]", 48),
    ],
)


@SQUEEZE_EXCITE.matcher("Mul", after=["fuse_conv_then_pointwise"])
def fuse_squeeze_excite(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        second = _match_pointwise_of_means(g, gate)
        first = None if second is None else _match_pointwise_of_means(g, find_conv_input(second))
        pool = None if first is None else g.maker(find_conv_input(first))
        if x is None or pool is None or second is None or first is None or pool.op != "GlobalAveragePool" or pool.inputs[0] is not x:
            continue
        if not x.dtype.is_float or x.type.rank != 4 or layer.output.type != x.type:
            return Skip(f"%{x.name}: {x.type} is not an image in floating point")
        for producer, reader in ((pool, first), (first, second), (second, layer)):
            if reason := g.escapes(producer.output, reader):
                return Skip(reason)
        has_run_time_operands = any(t is not None and not t.is_constant for m in (first, second) for t in m.inputs[1:])
        if has_run_time_operands or "add" in (*list_epilogue_steps(first), *list_epilogue_steps(second)):
            return Skip("a convolution of the means has other run-time operands")
        return fuse_nested(g, SQUEEZE_EXCITE.kind, pool, first, second, layer)
    return None


def _match_pointwise_of_means(g: Graph, t: Tensor | None) -> Layer | None:
    """The pointwise convolution in one group, alone or with an epilogue, that produces `t` [images, channels, 1, 1]."""
    conv = g.maker(t)
    if t is None or conv is None or not is_conv(conv) or t.type.rank != 4 or t.shape[2:] != (1, 1):
        return None
    return conv if is_pointwise_conv(find_inner_conv(conv)) and find_inner_conv(conv).attrs["group"] == 1 else None
