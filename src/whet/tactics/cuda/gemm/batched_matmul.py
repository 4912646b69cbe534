"""MatMul of two matrices, or stacks of them, with a scale and an activation: both are computed at run time (attention), or one is a constant stack
(scores of relative positions)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, outer_input
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstPointer, Float32, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    FLOAT16_TYPES,
    TYPE,
    GpuKernel,
    all_static,
    count_blocks,
    find_activation,
    launch,
    list_float_types,
    make_stored_signature,
)


@dataclass(frozen=True)
class BatchedMatmulArguments(Arguments, kernel="batched_matmul.cu"):
    a: ConstPointer
    b: ConstPointer
    out: Pointer
    a_step: Int64  # elements from one matrix of a stack to the next; 0: the same for all
    b_step: Int64
    m: Int32
    n: Int32
    k: Int32
    scale: Float32
    act: ActivationParameters


@tactic
class BatchedMatmul(Tactic):
    """16-bit operands on tensor cores (sm_80 or newer); f32 one value a thread."""

    ops = ("MatMul",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        a, b = head.needs(0), head.needs(1)
        where = [outer_input(layer, t) for t in (a, b)]
        if any(i is None or (layer.needs(i).is_constant and prod(static_shape(t.shape)[:-2]) == 1) for i, t in zip(where, (a, b), strict=True)):
            return "takes constant matrices only in stacks"
        if all(layer.needs(i).is_constant for i in where if i is not None):
            return "takes a matrix computed at run time"
        if a.type.rank < 2 or b.type.rank < 2:
            return "takes matrices, not vectors"
        epilogue = _match_epilogue(layer)
        return epilogue if isinstance(epilogue, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        head = get_root_layer(layer)
        a, b = _get_operand_indices(layer)
        signatures = []
        for t in list_float_types([*head.inputs[:2], layer.outputs[0]], (F16, BF16, F32)):
            results = [t, F32] if t in FLOAT16_TYPES and layer.outputs[0].dtype == F32 else [t]
            signatures += [make_stored_signature(layer, {a: Operand("linear", t), b: Operand("linear", t)}, Operand("linear", r)) for r in results]
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        sizes = _find_sizes(layer)
        return sizes if isinstance(sizes, str) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        sizes, epilogue = _find_sizes(layer), _match_epilogue(layer)
        if isinstance(sizes, str) or isinstance(epilogue, str):
            raise PlanRefused(str(sizes) if isinstance(sizes, str) else str(epilogue))
        stack, m, n, k, a_step, b_step = sizes
        scale, (kind, low, high) = epilogue
        a, b = _get_operand_indices(layer)
        dtype = signature.needs(a).dtype
        half = dtype in FLOAT16_TYPES
        constants = {
            "TYPE": TYPE[dtype.name] if half else 0,
            "BF16": int(dtype == BF16),
            "OUT": TYPE[signature.outputs[0].dtype.name],
            "WIDE_A": int(k % 8 == 0),
            "WIDE_B": int(n % 8 == 0),
            "ACT": ACTIVATIONS[kind],
        }
        grid = (count_blocks(n, 64), count_blocks(m, 64), stack) if half else (count_blocks(n, 32), count_blocks(m, 8), stack)

        def make(args: Args) -> list:
            arguments = BatchedMatmulArguments(
                args.inputs[a], args.inputs[b], args.outputs[0], a_step, b_step, m=m, n=n, k=k, scale=scale, act=(low, high)
            )
            return [launch("bmm" if half else "plain", arguments, constants, grid, 128 if half else 256)]

        return GpuKernel(layer, signature, make, implementation="mma 64x64" if half else "plain product")


def _get_operand_indices(layer: Layer) -> tuple[int, int]:
    """Which inputs of the layer are multiplied."""
    a, b = (outer_input(layer, t) for t in get_root_layer(layer).inputs[:2])
    assert a is not None
    assert b is not None
    return a, b


def _find_sizes(layer: Layer) -> tuple[int, int, int, int, int, int] | str:
    """(matrices, m, n, k, elements from one left matrix to the next, from one right matrix), or why not."""
    head = get_root_layer(layer)
    left, right, out = (static_shape(t.shape) for t in (head.needs(0), head.needs(1), head.outputs[0]))
    m, k, n, stack = left[-2], left[-1], right[-1], prod(out[:-2])
    steps = []
    for shape, size in ((left, m * k), (right, k * n)):
        count = prod(shape[:-2])
        if count not in (1, stack):
            return "an operand broadcasts along some batch axes only"
        steps.append(size if count == stack and stack > 1 else 0)
    if not m * n * k or stack > 65535 or count_blocks(m, 8) > 65535:
        return "takes 1 to 65535 matrices"
    return stack, m, n, k, steps[0], steps[1]


def _match_epilogue(layer: Layer) -> tuple[float, tuple[str, float, float]] | str:
    """The factor and the activation after the product, or the reason why the kernel cannot compute them."""
    steps = find_epilogue_steps(layer)
    if steps is None:
        return "its fused operations do not form a chain"
    scale, act = 1.0, ("clip", -float("inf"), float("inf"))
    activated = False
    for post in steps:
        if post.other is not None:
            t = post.other_tensor
            if t is None or not t.is_constant or t.array().size != 1 or activated or (post.op, post.swapped) == ("Div", True):
                return f"the kernel has no {post.op} with this operand"
            if post.op not in ("Mul", "Div"):
                return f"the kernel has no {post.op} with this operand"
            value = float(np.asarray(t.array(), np.float64).reshape(-1)[0])
            scale = scale * value if post.op == "Mul" else scale / value
            continue
        activation = find_activation(post)
        if activation is None or activated:
            return f"the kernel has no {post.op} here"
        act, activated = activation, True
    return scale, act
