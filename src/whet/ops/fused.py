"""Fused: a body that a tactic may compute in one kernel. `composite` names its kind (see whet.composites); the body can be decomposed again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from whet.errors import NetworkError
from whet.network import Layer, Network, Tensor, TensorType, parse_type
from whet.ops._base import OPS, REQUIRED, Sample, op
from whet.ops._cost import FUSED_OPERATIONS


def infer(layer: Layer) -> list[TensorType]:
    body = layer.regions["body"]
    if len(body.inputs) != len(layer.inputs):
        raise NetworkError(f"fused layer '{layer.name}' has {len(layer.inputs)} inputs, its body {len(body.inputs)}")
    for inner, outer in zip(body.inputs, layer.inputs, strict=True):
        if outer is None or inner.type != outer.type:
            raise NetworkError(f"fused layer '{layer.name}': body input %{inner.name} is {inner.type}, but is passed {outer and outer.type}")
    if (free := _free_tensor(body)) is not None:
        raise NetworkError(f"fused layer '{layer.name}': its body uses %{free.name} of the network around it; pass it as an input")
    return [t.type for t in body.outputs]


def _free_tensor(body: Network) -> Tensor | None:
    """A tensor that the body uses and neither has nor computes."""
    known = {*body.inputs, *body.constants.values()}
    for layer in body.layers:
        for t in layer.inputs:
            if t is not None and t not in known:
                return t
        known.update(layer.outputs)
    return next((t for t in body.outputs if t not in known), None)


def register_fused_kind(
    kinds: Sequence[str], samples: Sequence[Sample], operations: Callable[[Layer, Mapping[str, int]], int] | None = None
) -> None:
    """Adds samples of these composite kinds and their operation count (None: that of the body)."""
    OPS["Fused"] = replace(OPS["Fused"], samples=(*OPS["Fused"].samples, *samples))
    if operations is not None:
        FUSED_OPERATIONS.update(dict.fromkeys(kinds, operations))


def _build_conv_add_relu() -> dict[str, Network]:
    body = Network("body", "lowered")
    x, w, b = (body.add_input(n, parse_type(t)) for n, t in (("x", "f32[1,16,8,8]"), ("w", "f32[32,16,3,3]"), ("b", "f32[32]")))
    z = body.add_input("z", parse_type("f32[1,32,8,8]"))
    y = body.add("Conv", x, w, b, pads=(1, 1, 1, 1))
    body.mark_output(body.add("Relu", body.add("Add", y, z)))
    return {"body": body}


op(
    "Fused",
    infer,
    lambda layer, *arrays, run: run("body", *arrays),
    attrs={"composite": REQUIRED},
    onnx_ops=(),
    samples=[Sample(["f32[1,16,8,8]", "const f32[32,16,3,3]", "const f32[32]", "f32[1,32,8,8]"], {"composite": "Conv"}, _build_conv_add_relu)],
)
