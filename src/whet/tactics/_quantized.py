"""The structure of a quantized fused layer: the same layer in floating point, and the scale and zero point of each integer operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import BuildError
from whet.network import DType, Layer, Tensor
from whet.tactics._fused import (
    EpilogueStep,
    find_epilogue_steps,
    get_operand_indices,
    get_root_layer,
    get_source_index,
    outer_input,
    remove_quantization,
)

_EIGHT_BIT = ("i8", "u8")
FLOAT8 = "f8e4m3"


@dataclass(frozen=True)
class Scale:
    """real = (integer - zero) * scale, or number * scale for float8. `scale` is f32 [1] or [channels], `zero` one integer."""

    scale: np.ndarray
    zero: int
    dtype: DType

    @property
    def key(self) -> str:
        return f"{self.scale.tobytes().hex()}|{self.zero}"

    @property
    def number(self) -> float:
        return float(self.scale.reshape(-1)[0])


@dataclass(frozen=True)
class Parts:
    """`view` is the layer without Q and DQ layers, with inputs at the same indices; `reads` has the scales by input index, `stores` the output's."""

    view: Layer
    head: Layer
    steps: list[EpilogueStep]
    reads: dict[int, Scale]
    stores: Scale | None

    @property
    def result(self) -> Scale:
        """Scale of the output's integers. Raises BuildError when the output is floating point."""
        if self.stores is None:
            raise BuildError(f"{self.view.name} stores floats, not integers of a scale")
        return self.stores

    @property
    def float8(self) -> bool:
        """True if any operand is float8."""
        return any(s.dtype.name == FLOAT8 for s in (*self.reads.values(), *([self.stores] if self.stores else [])))

    def place(self, inner: Tensor | None) -> int | None:
        """Input index of the body input `inner`."""
        return outer_input(self.view, inner)

    def source_index(self) -> int:
        """Input index of the root layer's first input."""
        return get_source_index(self.view)

    def operand_indices(self) -> tuple[int, int, int | None]:
        """Input indices of the root layer's data, weights and bias (None: without bias)."""
        return get_operand_indices(self.view)


def match_quantized(layer: Layer, *, float8: bool = False) -> Parts | str:
    """The parts of a quantized layer, or why no kernel supports it. Layers with float8 operands are only accepted with `float8`."""
    plain = remove_quantization(layer)
    if isinstance(plain, str):
        return plain
    place = {t: k for k, t in enumerate(layer.regions["body"].inputs)}
    scales: dict[int | None, Scale] = {}
    layers: list[tuple[int | None, Layer]] = list(plain.dequantize.items())
    if plain.quantize is not None:
        layers.append((None, plain.quantize))
    for at, x in layers:
        got = _scale(x, [None if t is None or t not in place else layer.inputs[place[t]] for t in x.inputs[1:]])
        if isinstance(got, str):
            return got
        if got.dtype.name == FLOAT8 and not float8:
            return f"computes on integers, not on {got.dtype}"
        scales[at] = got
    view, stores = plain.layer, scales.pop(None, None)
    head, steps = get_root_layer(view), find_epilogue_steps(view)
    if steps is None or head is view:
        return "its body is not a chain"
    return Parts(view, head, steps, {i: s for i, s in scales.items() if i is not None}, stores)


def require_quantized(layer: Layer) -> Parts:
    """The parts of a quantized layer that a tactic supports. Raises BuildError, with the reason, for another layer."""
    parts = match_quantized(layer)
    if isinstance(parts, str):
        raise BuildError(f"{layer.name}: {parts}")
    return parts


def _scale(layer: Layer, operands: Sequence[Tensor | None]) -> Scale | str:
    scale, zero = operands[0], operands[1] if len(operands) > 1 else None
    if scale is None or scale.weight is None or (zero is not None and zero.weight is None):
        return "a scale is computed at run time"
    zeros = np.zeros(1, np.int64) if zero is None else np.asarray(zero.array()).astype(np.float64).reshape(-1)
    if np.any(zeros != zeros[0]):
        return "zero points differ within a tensor"
    dtype = layer.output.dtype if layer.op == "QuantizeLinear" else layer.needs(0).dtype
    if dtype.name == FLOAT8 and (zeros[0] != 0 or not layer.attrs.get("saturate", 1)):
        return "float8 has no zero point here, and saturates"
    if dtype.name not in (*_EIGHT_BIT, FLOAT8):
        return f"computes in 8 bits, not in {dtype}"
    return Scale(np.asarray(scale.array(), np.float32).reshape(-1), int(zeros[0]), dtype)
