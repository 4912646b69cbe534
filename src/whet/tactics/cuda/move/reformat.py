"""Reformats between row-major and channels last, and between float types."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import DTYPES, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Float32, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda.conv._conv import TYPES

_FORMATS = ("linear", "nhwc")


@dataclass(frozen=True)
class ReformatArguments(Arguments, kernel="reformat.cu"):
    input: ConstPointer
    out: Pointer
    count: Int64  # elements
    rows: Int32  # transpose: [batch][rows][columns] -> [batch][columns][rows]
    columns: Int32
    step: Float32 = 1.0
    zero: Float32 = 0.0


@dataclass(frozen=True)
class RowsArguments(Arguments, kernel="reformat.cu", struct="Rows"):
    input: ConstPointer
    out: Pointer
    rows: Int64
    width: Int32  # in units of UNIT bytes
    in_pitch: Int32
    out_pitch: Int32


@tactic
class Reformat(Tactic):
    """One kernel: a transpose through shared memory, or a conversion of the type alone."""

    ops = ("Reformat",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        a = layer.attrs
        if a["source_format"] not in _FORMATS or a["format"] not in _FORMATS:
            return f"takes {' and '.join(_FORMATS)}, not {a['source_format']} to {a['format']}"
        same_bytes = a["source_dtype"] == a["dtype"] and a["dtype"] in TYPES
        if not same_bytes and (a["source_dtype"] not in TYPE or a["dtype"] not in TYPE):
            return f"converts floats, not {a['source_dtype']} to {a['dtype']}"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        a = layer.attrs
        return [Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        source, target = signature.needs(0), signature.outputs[0]
        shape = static_shape(layer.outputs[0].shape)
        entry, constants, grid, rows, columns = reformat_launch(shape, source, target)

        def make(args: Args) -> list:
            return [launch(entry, ReformatArguments(args.inputs[0], args.outputs[0], prod(shape), rows, columns), constants, grid, 256)]

        return GpuKernel(layer, signature, make, implementation=f"{entry}")


def reformat_launch(shape: tuple[int, ...], source: Operand, target: Operand) -> tuple[str, dict[str, int], tuple[int, int, int], int, int]:
    """Entry, constants, grid, rows and columns of the launch that brings a tensor from one operand's form to another's."""
    constants = {"FROM": TYPES[source.dtype.name], "TO": TYPES[target.dtype.name], "UNIT": 1}
    pixels = prod(shape[2:]) if len(shape) > 2 else 1
    if source.format == target.format or shape[1] == 1 or pixels == 1:
        return "convert", constants, (count_blocks(prod(shape), 2048), 1, 1), 0, 0
    rows, columns = (shape[1], pixels) if source.format == "linear" else (pixels, shape[1])
    return "transpose", constants, (count_blocks(columns, 32), count_blocks(rows, 32), shape[0]), rows, columns
