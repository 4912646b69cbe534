"""Primitive attributes: post-ops on the result before it is stored, scales, and the owner of the scratchpad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whet.errors import BackendError
from whet.tactics.cpu.onednn._api.library import load_library
from whet.tactics.cpu.onednn._api.memory import DTYPES, MemoryDesc, describe

#: exec arguments by operand name (dnnl_types.h)
ARGS = {"src": 1, "src1": 2, "dst": 17, "weights": 33, "bias": 41, "mean": 49, "variance": 50, "scale": 51, "shift": 52,
        "scratchpad": 80}  # fmt: skip
SCALES, ZERO_POINTS, MULTIPLE_SRC = 4096, 8192, 1024

ELTWISE = {"relu": 32, "tanh": 33, "elu": 34, "square": 35, "abs": 36, "sqrt": 37, "linear": 38, "soft_relu": 39, "hardsigmoid": 40,
           "logistic": 41, "exp": 42, "gelu_tanh": 43, "swish": 44, "log": 45, "clip": 46, "clip_v2": 47, "pow": 48, "gelu_erf": 49,
           "round": 50, "mish": 51, "hardswish": 52}  # fmt: skip
BINARY = {"add": 0x1FFF0, "mul": 0x1FFF1, "max": 0x1FFF2, "min": 0x1FFF3, "div": 0x1FFF4, "sub": 0x1FFF5, "ge": 0x1FFF6,
          "gt": 0x1FFF7, "le": 0x1FFF8, "lt": 0x1FFF9, "eq": 0x1FFFA, "ne": 0x1FFFB}  # fmt: skip
FPMATH = {"strict": 0, "bf16": 1, "f16": 2, "any": 3}


def lookup(table: dict[str, int], name: str, subject: str) -> int:
    """The code of `name`. Raises BackendError with the known names."""
    if name not in table:
        raise BackendError(f"oneDNN has no {subject} {name!r}; it has {', '.join(table)}")
    return table[name]


@dataclass(frozen=True)
class Sum:
    """dst = result + scale * (old dst - zero_point); `dtype` reads the old value as another type of the same size."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: str | None = None


@dataclass(frozen=True)
class Eltwise:
    """dst = alg(result; alpha, beta), by oneDNN's names and parameters."""

    alg: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, eq=False)
class Binary:
    """dst = result <alg> operand; the operand broadcasts along dims of 1. Its name in a call is `post<i>`."""

    alg: str
    md: MemoryDesc


@dataclass(frozen=True)
class Prelu:
    """dst = result if positive, else result * slope; `mask` bit i: one slope along axis i; `count` slopes, the operand `prelu<i>`."""

    mask: int
    count: int


PostOp = Sum | Eltwise | Binary | Prelu


@dataclass(frozen=True, eq=False)
class Attributes:
    """Attributes of one primitive. The scratchpad is always the caller's.

    `scales` and `zero_points` hold (operand, mask, count): mask 0 is one value for the tensor, bit i one value along axis i.
    The values are run-time operands `scale:<operand>` (count f32) and `zero:<operand>` (count i32).
    """

    post_ops: tuple[PostOp, ...] = ()
    scales: tuple[tuple[str, int, int], ...] = ()
    zero_points: tuple[tuple[str, int, int], ...] = ()
    fpmath: str = "strict"

    def operands(self) -> tuple[str, ...]:
        """Names of the run-time operands that the attributes add to a call."""
        post_ops = tuple(f"post{i}" for i, p in enumerate(self.post_ops) if isinstance(p, Binary))
        return (*post_ops, *self.vectors())

    def vectors(self) -> dict[str, MemoryDesc]:
        """Layouts of the operands that hold scales and zero points, which oneDNN itself does not tell."""
        scales = {f"scale:{name}": describe((count,), "f32") for name, _, count in self.scales}
        slopes = {f"prelu{i}": describe((p.count,), "f32") for i, p in enumerate(self.post_ops) if isinstance(p, Prelu)}
        return slopes | scales | {f"zero:{name}": describe((count,), "i32") for name, _, count in self.zero_points}

    @contextmanager
    def native(self) -> Iterator[int]:
        """A dnnl_primitive_attr_t for the time of a primitive descriptor's creation, which copies it."""
        lib = load_library()
        attr = lib.make("primitive_attr_create")
        post_ops = lib.make("post_ops_create")
        try:
            lib.call("primitive_attr_set_scratchpad_mode", attr, 1)
            if self.fpmath != "strict":
                lib.call("primitive_attr_set_fpmath_mode", attr, lookup(FPMATH, self.fpmath, "math mode"))
            for name, mask, _ in self.scales:
                lib.call("primitive_attr_set_scales_mask", attr, ARGS[name], mask)
            for name, mask, _ in self.zero_points:
                lib.call("primitive_attr_set_zero_points_mask", attr, ARGS[name], mask)
            for post in self.post_ops:
                _append(post_ops, post)
            if self.post_ops:
                lib.call("primitive_attr_set_post_ops", attr, post_ops)
            yield attr
        finally:
            lib.call("post_ops_destroy", post_ops)
            lib.call("primitive_attr_destroy", attr)


def _append(post_ops: int, post: PostOp) -> None:
    lib = load_library()
    if isinstance(post, Sum):
        lib.call("post_ops_append_sum", post_ops, post.scale, post.zero_point, DTYPES[post.dtype] if post.dtype else 0)
    elif isinstance(post, Eltwise):
        lib.call("post_ops_append_eltwise", post_ops, lookup(ELTWISE, post.alg, "activation"), post.alpha, post.beta)
    elif isinstance(post, Prelu):
        lib.call("post_ops_append_prelu", post_ops, post.mask)
    else:
        lib.call("post_ops_append_binary", post_ops, lookup(BINARY, post.alg, "binary operation"), post.md.handle)
