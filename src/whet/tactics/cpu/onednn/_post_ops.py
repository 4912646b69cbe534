"""A fused layer's epilogue as oneDNN post-ops, and activations as oneDNN's eltwise algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Operand, Signature
from whet.tactics._fused import EpilogueStep
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Place, Recipe, describe


def find_activation(op: str, attrs: Mapping[str, Any]) -> dnn.Eltwise | None:
    """oneDNN's algorithm for a unary op; None if it has none. `attrs` has constant operands as `input1`, `input2`.

    Results for NaN and infinities: _nonfinite.py.
    """
    a = attrs.get
    simple = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "logistic", "Abs": "abs", "Sqrt": "sqrt", "Round": "round", "Mish": "mish"}
    if op in simple:
        return dnn.Eltwise(simple[op])
    if op == "LeakyRelu":
        alpha = float(a("alpha", 0.01))
        return dnn.Eltwise("relu", alpha) if alpha else None  # with 0 it is another algorithm, which loses NaN
    if op == "Elu":
        return dnn.Eltwise("elu", float(a("alpha", 1.0)))
    if op in ("Silu", "Swish"):
        return dnn.Eltwise("swish", float(a("alpha", 1.0)))
    if op == "HardSigmoid":
        return dnn.Eltwise("hardsigmoid", float(a("alpha", 0.2)), float(a("beta", 0.5)))
    if op == "HardSwish":
        return dnn.Eltwise("hardswish", 1 / 6, 0.5)
    if op == "Softplus":
        return dnn.Eltwise("soft_relu", 1.0)
    if op == "Gelu":
        return dnn.Eltwise("gelu_tanh" if a("approximate", "none") == "tanh" else "gelu_erf")
    power = a("input1")
    if op == "Pow" and power is not None and np.size(power) == 1:
        exponent = _get_scalar(power)
        return dnn.Eltwise("square") if exponent == 2 else dnn.Eltwise("pow", 1.0, exponent)
    if op == "Reciprocal":
        return dnn.Eltwise("pow", 1.0, -1.0)
    if op == "Neg":
        return dnn.Eltwise("linear", -1.0, 0.0)
    if op == "Clip":
        low, high = clip_bounds(attrs)
        return dnn.Eltwise("clip_v2", low, high) if low <= high else None
    return None


def clip_bounds(attrs: Mapping[str, Any]) -> tuple[float, float]:
    """A Clip's constant bounds; infinite if it has none."""
    low, high = (_get_scalar(attrs[n]) if attrs.get(n) is not None else d for n, d in (("input1", -math.inf), ("input2", math.inf)))
    return low, high


def _get_scalar(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


@dataclass
class Chain:
    """EpilogueStep-ops and their operands: inputs of the fused layer, or constants."""

    post_ops: list[dnn.Sum | dnn.Eltwise | dnn.Binary | dnn.Prelu] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    constants: dict[str, tuple[str, Callable[[], np.ndarray]]] = field(default_factory=dict)

    @property
    def attributes(self) -> dnn.Attributes:
        return dnn.Attributes(tuple(self.post_ops))

    def extend(self, other: Chain) -> None:
        """Appends another chain, whose operands are named by their index in it."""
        shift = len(self.post_ops)

        def renumber(name: str) -> str:
            kind = name.rstrip("0123456789")
            return f"{kind}{int(name[len(kind) :]) + shift}"

        self.post_ops += other.post_ops
        self.places |= {renumber(n): p for n, p in other.places.items()}
        self.constants |= {renumber(n): c for n, c in other.constants.items()}

    def fill(self, recipe: Recipe) -> None:
        """Adds the operands to the recipe."""
        recipe.places |= self.places
        for operand, (key, make) in self.constants.items():
            recipe.constant(operand, key, make)


_BINARY = {"Add": "add", "Mul": "mul", "Sub": "sub", "Div": "div", "Max": "max", "Min": "min"}
_COMMUTES = ("Add", "Mul", "Max", "Min")

Shaper = Callable[[tuple[int, ...]], "tuple[int, ...] | None"]


def match_post_ops(steps: Sequence[EpilogueStep], layer: Layer, signature: Signature, shaper: Shaper | None = None) -> Chain | str:
    """The epilogue as post-ops, or why oneDNN cannot compute it.

    An operand that shares its memory with the output by `signature` is added in place. `shaper` maps the shape of an operand (padded to the
    output's rank) to its shape in the primitive; None keeps it.
    """
    out, chain = static_shape(layer.outputs[0].shape), Chain()
    for post in steps:
        if post.other is None:
            unary = find_activation(post.op, post.attrs)
            if unary is None:
                return f"oneDNN has no post-op for {post.op}"
            chain.post_ops.append(unary)
            continue
        if post.op == "Pow" and not post.swapped and layer.needs(post.other).is_constant:
            power = find_activation("Pow", {"input1": layer.needs(post.other).array()})
            if power is None:
                return "oneDNN takes one constant exponent, not several"
            chain.post_ops.append(power)
            continue
        if post.op == "PRelu" and not post.swapped:
            if why := _append_prelu(chain, post, layer, out, shaper):
                return why
            continue
        if post.op not in _BINARY or (post.swapped and post.op not in _COMMUTES):
            return f"oneDNN has no post-op for {post.op} with the accumulator as second operand" if post.swapped else (
                f"oneDNN has no post-op for {post.op} with two operands"
            )  # fmt: skip
        if why := _append_binary(chain, post, layer.inputs[post.other], signature, out, shaper):
            return why
    return chain


def _append_prelu(chain: Chain, post: EpilogueStep, layer: Layer, out: tuple[int, ...], shaper: Shaper | None) -> str | None:
    """Appends a PRelu with constant slopes, one in all or one per channel. Returns the reason if it cannot."""
    assert post.other is not None
    slope = layer.needs(post.other)
    if not slope.is_constant:
        return "PRelu's slopes are computed at run time"
    shape = static_shape(slope.shape)
    full = (1,) * (len(out) - len(shape)) + shape
    if all(d == 1 for d in full):
        unary = find_activation("LeakyRelu", {"alpha": _get_scalar(slope.array())})
        if unary is None:
            return "oneDNN has no post-op for PRelu with slope 0"
        chain.post_ops.append(unary)
        return None
    seen = shaper(full) if shaper else full
    axes = [i for i, d in enumerate(seen or ()) if d != 1]
    if len(axes) != 1:
        return f"PRelu's slopes {list(shape)} are more than one per channel"
    name = f"prelu{len(chain.post_ops)}"
    chain.post_ops.append(dnn.Prelu(1 << axes[0], math.prod(full)))
    chain.constants[name] = make_f32_constant(slope)
    return None


def _append_binary(
    chain: Chain, post: EpilogueStep, other: Tensor | None, signature: Signature, out: tuple[int, ...], shaper: Shaper | None
) -> str | None:
    """Appends a binary step. Returns the reason if it cannot."""
    assert other is not None
    assert post.other is not None
    shape = static_shape(other.shape)
    full = (1,) * (len(out) - len(shape)) + shape
    if len(full) != len(out) or any(f not in (1, o) for f, o in zip(full, out, strict=True)):
        return f"{post.op} would broadcast the accumulator {list(out)} to {list(shape)}"
    name = f"post{len(chain.post_ops)}"
    if other.is_constant:
        if all(d == 1 for d in full) and post.op in ("Add", "Mul", "Sub", "Div"):
            scaling = _make_scaling(post.op, _get_scalar(other.array()))
            if isinstance(scaling, str):
                return scaling
            chain.post_ops.append(scaling)
            return None
        wanted = shaper(full) if shaper else full
        if wanted is None:
            return f"{post.op} with a constant of shape {list(shape)} does not fit the matrix"
        chain.post_ops.append(dnn.Binary(_BINARY[post.op], dnn.describe(wanted, "f32")))
        chain.constants[name] = make_f32_constant(other)
        return None
    operand = signature.inputs[post.other]
    if operand is None:
        return f"{post.op}'s second operand is not stored"
    if (post.other, 0) in signature.inplace:
        if post.op != "Add" or full != out:
            return f"only an Add of the full shape can be done in place, this is {post.op} of {list(shape)}"
        chain.post_ops.append(dnn.Sum())
        return None
    wanted = shaper(full) if shaper else full
    if wanted is None or not is_readable_at_rank(operand, shape, full):
        return f"{post.op} with {list(shape)} stored as {operand} does not fit the output {list(out)}"
    chain.post_ops.append(dnn.Binary(_BINARY[post.op], describe(other, operand, wanted)))
    chain.places[name] = ("input", post.other)
    return None


def _make_scaling(op: str, value: float) -> dnn.Eltwise | str:
    """x <op> value as alpha * x + beta, or the obstacle: a divisor with a reciprocal that is no normal f32 value."""
    if op == "Div":
        least, greatest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if np.isfinite(value) and not 1 / greatest <= abs(value) <= 1 / least:
            return f"the reciprocal of the divisor {value:g} is no normal f32 value"
        op, value = "Mul", 1 / value
    return dnn.Eltwise("linear", *{"Add": (1.0, value), "Sub": (1.0, -value), "Mul": (value, 0.0)}[op])


def make_f32_constant(tensor: Tensor) -> tuple[str, Callable[[], np.ndarray]]:
    """Key of a constant as f32, and the function that computes it."""
    return f"{tensor.constant().digest}|f32", lambda: np.asarray(tensor.array(), np.float32)


def is_readable_at_rank(operand: Operand, shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a tensor stored as `operand` can be read as the rank-padded shape `full` in the same format."""
    if operand.format == "linear" or len(shape) == len(full):
        return True
    return sum(d != 1 for d in shape) <= 1


def select_second_operands(steps: Sequence[EpilogueStep], layer: Layer, out: Operand) -> dict[int, Operand]:
    """How the epilogue's run-time operands are stored: like the output, or row-major if their rank is lower."""
    rank, stored = layer.outputs[0].type.rank, {}
    for post in steps:
        tensor = layer.inputs[post.other] if post.other is not None else None
        if tensor is not None and not tensor.is_constant:
            assert post.other is not None
            stored[post.other] = out if tensor.type.rank == rank else Operand("linear", out.dtype)
    return stored


def list_residuals(steps: Sequence[EpilogueStep], layer: Layer) -> list[int]:
    """Inputs that are added with the full shape: each could be added in place."""
    out = layer.outputs[0]
    indices = [p.other for p in steps if p.op == "Add" and p.other is not None]
    return [i for i in indices if not layer.needs(i).is_constant and layer.needs(i).shape == out.shape]
