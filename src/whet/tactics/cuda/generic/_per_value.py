"""Base of tactics with kernels that are generated for one layer: statements for a thread per value of the result, with shapes compiled in.

The statements are C++ over the index `i`: `in0(j)` is element j of the first input in the layer's arithmetic, `at0(j)` the same as a 64-bit
integer, `put0(j, v)` stores an element of the first output, `index0(j, n)` stores an integer, `got0(j)` reads an output back. Indices that come
from tensors are clamped or skipped: no value of an input makes a kernel access memory outside of its operands.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics import list_tactics
from whet.tactics._base import Args, Config, Operand, Signature
from whet.tactics.cuda._device.arguments import Arguments, Int64, make_array_type
from whet.tactics.cuda._device.kernel import RTOL, GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda._device.plain_layer import UnfusedTactic

KINDS = {
    "f32": 0, "f16": 1, "bf16": 2, "i64": 3, "i32": 4, "u8": 5, "i8": 6, "bool": 7, "f64": 8, "i16": 9, "u16": 10, "u32": 11, "u64": 12,
}  # fmt: skip
_INPUTS, _OUTPUTS = 8, 3


@dataclass(frozen=True)
class PerValueArguments(Arguments, kernel="per_value.cu"):
    input: Annotated[Sequence[int], make_array_type("const u8*", _INPUTS)]
    output: Annotated[Sequence[int], make_array_type("u8*", _OUTPUTS)]
    count: Int64  # threads


class PerValueTactic(UnfusedTactic):
    """Subclasses give the statements of their launches."""

    fallback = True

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        """The inputs that `passes` reads at build time; they must be constants."""
        return ()

    def allows_16_bits(self, layer: Layer) -> bool:
        """True if f32 values may be stored in 16 bits, which then only rounds the results."""
        return True

    @abstractmethod
    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        """(statements, threads) of each launch."""

    def why_no_code(self, layer: Layer) -> str | None:
        """Why the kernel cannot compute this layer."""
        return None

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if len(layer.inputs) > _INPUTS or len(layer.outputs) > _OUTPUTS:
            return f"takes up to {_INPUTS} inputs and {_OUTPUTS} outputs"
        if any(t is not None and t.dtype.name not in KINDS for t in (*layer.inputs, *layer.outputs)):
            return f"takes {', '.join(KINDS)}"
        if any(t is not None and not t.is_constant for i in self.parameters(layer) if (t := layer.input(i)) is not None):
            return "its parameters are computed at run time"
        return self.why_no_code(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        floats = {t.dtype for t in (*layer.inputs, *layer.outputs) if t is not None and t.dtype.is_float}
        signatures = []
        for kind in (F16, BF16, F32) if floats == {F32} and self.allows_16_bits(layer) else (next(iter(floats), F32),):
            one = len(floats) == 1
            ins = tuple(
                None if t is None or i in self.parameters(layer) else Operand("linear", kind if one and t.dtype.is_float else t.dtype)
                for i, t in enumerate(layer.inputs)
            )
            outs = tuple(Operand("linear", kind if one and t.dtype.is_float else t.dtype) for t in layer.outputs)
            signatures.append(Signature(ins, outs))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if any(prod(static_shape(t.shape)) >= 2**31 for t in (*layer.inputs, *layer.outputs) if t is not None):
            return "more than 2**31 elements"
        for t in list_tactics("cuda"):
            if not t.opt_in and not isinstance(t, PerValueTactic) and t.why_not(layer) is None:
                for other in t.signatures(layer, backend):
                    if _list_types(other) == _list_types(signature) and t.refuses(layer, other, backend) is None:
                        return f"{t.name} computes this"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        constants: dict[str, str | int] = {"NUMBER": get_number_type(layer)}
        constants |= {
            f"KIND{k}": 0 if k >= len(signature.inputs) or (o := signature.inputs[k]) is None else KINDS[o.dtype.name] for k in range(_INPUTS)
        }
        constants |= {f"TO{k}": KINDS[signature.outputs[min(k, len(signature.outputs) - 1)].dtype.name] for k in range(_OUTPUTS)}
        passes = [(" ".join(text.split()), count) for text, count in self.launches(layer) if count]
        stored = [o.dtype.name for o in (*signature.inputs, *signature.outputs) if o is not None]
        rtol = max((RTOL.get(name, 1e-12 if name == "f64" else 0.0) for name in stored), default=0.0)

        def make(args: Args) -> list:
            pointers = ((*args.inputs, *(0,) * _INPUTS)[:_INPUTS], (*args.outputs, *(0,) * _OUTPUTS)[:_OUTPUTS])
            return [
                launch("per_value", PerValueArguments(*pointers, count), constants | {"BODY": text}, (count_blocks(count, 256), 1, 1), 256)
                for text, count in passes
            ]

        return GpuKernel(layer, signature, make, implementation="per value", rtol=rtol)


def _list_types(signature: Signature) -> tuple[str, ...]:
    """The types of a signature's floating-point results, or of all results if none is one."""
    kinds = [o.dtype for o in signature.outputs]
    return tuple(k.name for k in kinds if k.is_float) or tuple(k.name for k in kinds)


def get_number_type(layer: Layer) -> str:
    """The C++ type of a layer's arithmetic."""
    kinds = {t.dtype for t in (*layer.inputs, *layer.outputs) if t is not None}
    if any(k.is_float for k in kinds):
        return "double" if any(k.name == "f64" for k in kinds) else "float"
    return "u64" if any(k.name == "u64" for k in kinds) else "long long"


def compute_row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def emit_coordinates(shape: Sequence[int], index: str = "i") -> list[str]:
    """C++ expressions of the coordinates of element `index` of a row-major tensor."""
    return [f"({index} / {step} % {size})" if size > 1 else "0" for size, step in zip(shape, compute_row_major_strides(shape), strict=True)]


def emit_flat_index(places: Sequence[str], shape: Sequence[int]) -> str:
    """The C++ expression of the index of the element at these coordinates."""
    terms = [f"(long long)({x}) * {step}" for x, step in zip(places, compute_row_major_strides(shape), strict=True) if x != "0"]
    return " + ".join(terms) or "0"


def clamp_index(index: str, size: int) -> str:
    """The C++ expression of an index that may count from the end, kept inside the axis."""
    return f"inside({index}, {size})"
