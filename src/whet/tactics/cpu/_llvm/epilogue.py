"""The epilogue of a fused layer as elementwise ops of the running value, with at most one residual, for kernels that apply it to accumulators.

`cpu/elementwise` has the ops themselves. Constants of one value (a Clip's bounds, a factor) become literals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import F32, Layer
from whet.tactics._fused import EpilogueStep, find_epilogue_steps
from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import Function, Value
from whet.tactics.cpu.elementwise._operations import OPERATIONS, Emitter

_UNARY = {
    "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg", "Relu", "Sigmoid", "Silu", "Softplus", "Swish",
    "Tanh",
}  # fmt: skip
_BINARY = {"Add", "Div", "Max", "Min", "Mul", "Sub"}


@dataclass(frozen=True)
class Step:
    """One op: its attributes, and its second operand, which is the residual or a literal. `swapped`: the running value is the second operand."""

    op: str
    attrs: tuple[tuple[str, float | int | str], ...] = ()
    literals: tuple[float | None, ...] = ()
    reads_residual: bool = False
    swapped: bool = False


@dataclass(frozen=True)
class Chain:
    """All steps, and the input index of the residual."""

    steps: tuple[Step, ...] = ()
    residual: int | None = None


def match_chain(layer: Layer) -> Chain | str:
    """The epilogue of a layer whose result is f32, or why the kernels cannot compute it."""
    matched = find_epilogue_steps(layer)
    if matched is None:
        return "its fused operations do not form a chain"
    steps: list[Step] = []
    residual: int | None = None
    for post in matched:
        step = _match_step(layer, post)
        if isinstance(step, str):
            return step
        if step.reads_residual:
            if residual is not None:
                return "takes one residual"
            residual = post.other
        steps.append(step)
    return Chain(tuple(steps), residual)


def _match_step(layer: Layer, post: EpilogueStep) -> Step | str:
    other = post.other_tensor
    if other is None:
        if post.op not in _UNARY:
            return f"computes no {post.op} in its epilogue"
        attrs = tuple(sorted((k, v) for k, v in post.attrs.items() if isinstance(v, int | float | str)))
        bounds: tuple[float | None, ...] = ()
        if post.op == "Clip":
            values = [post.attrs.get(f"input{i}") for i in (1, 2)]
            bounds = tuple(None if v is None else float(np.asarray(v).reshape(())) for v in values)
        return Step("Swish" if post.op == "Silu" else post.op, (("alpha", 1.0),) if post.op == "Silu" else attrs, bounds)
    if post.op not in _BINARY:
        return f"computes no {post.op} with two operands in its epilogue"
    if other.dtype != F32:
        return "computes in 32-bit floating point"
    if other.is_constant:
        if other.array().size != 1:
            return f"an operand of {post.op} has more than one value"
        return Step(post.op, literals=(float(other.array().reshape(())),), swapped=post.swapped)
    if other.shape != layer.outputs[0].shape:
        return "takes a residual of the result's shape"
    return Step(post.op, reads_residual=True, swapped=post.swapped)


def emit_chain(f: Function, steps: Sequence[Step], x: Value, residual: Value | None) -> Value:
    """The steps applied to `x`."""
    emitter = Emitter(f)
    for step in steps:
        if step.op == "Clip":
            operands = [x, *(None if b is None else f.value(b, x.type) for b in step.literals)]
        else:
            others = [residual] if step.reads_residual else [f.value(n or 0.0, x.type) for n in step.literals]
            operands = [*others, x] if step.swapped else [x, *others]
        x = OPERATIONS[step.op](emitter, dict(step.attrs), operands)
    return x


def emit_fast_chain(f: Function, activations: Activations, steps: Sequence[Step], x: Value, residual: Value | None) -> Value:
    """The epilogue, with the activations whose error is far below that of bf16."""
    for step in steps:
        if step.op == "Swish" and dict(step.attrs).get("alpha", 1.0) == 1.0:
            x = activations.silu(x)
        elif step.op == "Sigmoid":
            x = activations.sigmoid(x)
        elif step.op == "Gelu" and dict(step.attrs).get("approximate", "none") == "none":
            x = activations.gelu(x)
        else:
            x = emit_chain(f, (step,), x, residual)
    return x
