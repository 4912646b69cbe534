"""Helpers for samples of fused layers: bodies from input specifications, activations, nested convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.network import Network, Tensor, TensorType, parse_type

Regions = dict[str, Network]


def parse_spec_type(spec: str | np.ndarray) -> TensorType:
    """The type of a sample's input, given as a specification ("const f32[4,3]") or as a constant array."""
    if isinstance(spec, str):
        return parse_type(spec.split()[-1])
    names = {"float32": "f32", "int64": "i64", "int8": "i8", "uint8": "u8", "float8_e4m3fn": "f8e4m3"}
    return parse_type(f"{names[spec.dtype.name]}[{','.join(map(str, spec.shape))}]")


def make_body(inputs: Sequence[Any], names: str | None = None) -> tuple[Network, list[Tensor]]:
    """An empty body with these inputs, named `names` (a letter each) or i0, i1, ..."""
    body = Network("body", "lowered")
    return body, [body.add_input(names[i] if names else f"i{i}", parse_spec_type(spec)) for i, spec in enumerate(inputs)]


def activate(body: Network, y: Tensor, activation: str) -> Tensor:
    """`activation(y)`: an operation without attributes, or "silu" as y * Sigmoid(y)."""
    return body.add("Mul", y, body.add("Sigmoid", y)) if activation == "silu" else body.add(activation, y)


def add_fused(outer: Network, inputs: Sequence[Tensor], build: Callable[[Network, list[Tensor]], Tensor], kind: str = "Conv") -> Tensor:
    """Adds a fused layer of `kind` to `outer`; `build` adds the layers of its body and returns the result."""
    body = Network("body", "lowered")
    body.mark_output(build(body, [body.add_input(f"r{i}", t.type) for i, t in enumerate(inputs)]))
    return outer.add("Fused", *inputs, composite=kind, regions={"body": body})


def parse_dims(spec: str) -> tuple[int, ...]:
    """The shape in a specification."""
    return tuple(int(d) for d in spec.split("[")[1].rstrip("]").split(","))
