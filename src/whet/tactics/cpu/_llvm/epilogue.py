"""The epilogue of a fused layer as elementwise ops of the running value, with at most one residual, for kernels that apply it to accumulators.

`cpu/elementwise` has the ops themselves. Constants of one value (a Clip's bounds, a factor) become literals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import F32, Layer, Tensor
from whet.tactics._fused import EpilogueStep, find_epilogue_steps
from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import Function, Value
from whet.tactics.cpu.elementwise._operations import OPERATIONS, Emitter

_UNARY = {
    "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg", "Relu", "Sigmoid", "Silu", "Softplus", "Swish",
    "Tanh",
}  # fmt: skip
_ZERO_AT_ZERO = {"Gelu", "HardSwish", "LeakyRelu", "Mish", "Relu", "Swish"}  # exactly, as computed
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
    """All steps, and the input index of the residual. `bias`: a constant row that is added to each row of the product before them."""

    steps: tuple[Step, ...] = ()
    residual: int | None = None
    bias: Tensor | None = None


def match_chain(layer: Layer, takes_bias: bool = False, steps: list[EpilogueStep] | None = None) -> Chain | str:
    """The epilogue of a layer whose result is f32, or why the kernels cannot compute it. `takes_bias`: its first step may add a constant row. `steps`
    replace the layer's own."""
    matched = find_epilogue_steps(layer) if steps is None else steps
    if matched is None:
        return "its fused operations do not form a chain"
    bias = None
    if takes_bias and matched and matched[0].op == "Add" and _is_constant_row(matched[0].other_tensor, layer):
        bias = matched[0].other_tensor
        matched = matched[1:]
    chosen: list[Step] = []
    residual: int | None = None
    for post in matched:
        step = _match_step(layer, post)
        if isinstance(step, str):
            return step
        if step.reads_residual:
            if residual is not None:
                return "takes one residual"
            residual = post.other
        chosen.append(step)
    return Chain(tuple(chosen), residual, bias)


def _is_constant_row(t: Tensor | None, layer: Layer) -> bool:
    """True for a constant of one value for each result of a row."""
    if t is None or not t.is_constant:
        return False
    width = layer.outputs[0].shape[-1]
    return t.shape[-1:] == (width,) and t.array().size == width


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
            x = emitter.math.clamp(x, *step.literals)
            continue
        others = [residual] if step.reads_residual else [f.value(n or 0.0, x.type) for n in step.literals]
        x = OPERATIONS[step.op](emitter, dict(step.attrs), [*others, x] if step.swapped else [x, *others])
    return x


def emit_float_chain(f: Function, activations: Activations, steps: Sequence[Step], x: Value, residual: Value | None) -> Value:
    """The epilogue of kernels in f32, with the SiLU and ReLU of `activations`."""
    for step in steps:
        if is_silu(step):
            x = activations.silu(x)
        elif step.op == "Relu":
            x = activations.relu(x)
        else:
            x = emit_chain(f, (step,), x, residual)
    return x


def is_silu(step: Step) -> bool:
    return step.op == "Swish" and dict(step.attrs).get("alpha", 1.0) == 1.0


def keeps_zeros(steps: Sequence[Step]) -> bool:
    """True if the epilogue of 0 is 0 where the residual is 0: padding channels stay zeros."""
    return all(_keeps_zero(step) for step in steps)


def _keeps_zero(step: Step) -> bool:
    if step.op == "Clip":
        low, high = step.literals
        return (low is None or low <= 0) and (high is None or high >= 0)
    if step.op in _BINARY:
        return step.op == "Mul" or (step.reads_residual and step.op != "Div")
    return step.op in _ZERO_AT_ZERO


def emit_fast_chain(f: Function, activations: Activations, steps: Sequence[Step], x: Value, residual: Value | None) -> Value:
    """The epilogue, with the activations whose error is far below that of bf16."""
    for step in steps:
        if is_silu(step):
            x = activations.silu(x)
        elif step.op == "Sigmoid":
            x = activations.sigmoid(x)
        elif step.op == "Gelu" and dict(step.attrs).get("approximate", "none") == "none":
            x = activations.gelu(x)
        else:
            x = emit_chain(f, (step,), x, residual)
    return x
