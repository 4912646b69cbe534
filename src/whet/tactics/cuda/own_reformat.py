"""Reformats between row-major and channels last, and between float types."""

from __future__ import annotations

from math import prod
from typing import Any

from whet.network import DTYPES, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._kernel import TYPE, GpuKernel, all_static, blocks_of, launch

_FORMATS = ("linear", "nhwc")


@tactic
class OwnReformat(Tactic):
    """One kernel: a transpose through shared memory, or a straight conversion where only the type differs."""

    ops = ("Reformat",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        a = layer.attrs
        if a["source_format"] not in _FORMATS or a["format"] not in _FORMATS:
            return f"knows {' and '.join(_FORMATS)}, not {a['source_format']} to {a['format']}"
        if a["source_dtype"] not in TYPE or a["dtype"] not in TYPE:
            return f"converts floats, not {a['source_dtype']} to {a['dtype']}"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        a = layer.attrs
        return [Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        source, target = signature.inputs[0], signature.outputs[0]
        assert source is not None
        shape = static_shape(layer.outputs[0].shape)
        constants = {"FROM": TYPE[source.dtype.name], "TO": TYPE[target.dtype.name], "UNIT": 1}
        pixels = prod(shape[2:]) if len(shape) > 2 else 1
        if source.format == target.format or shape[1] == 1 or pixels == 1:
            entry, rows, columns, grid = "convert", 0, 0, (blocks_of(prod(shape), 2048), 1, 1)
        else:
            rows, columns = (shape[1], pixels) if source.format == "linear" else (pixels, shape[1])
            entry, grid = "transpose", (blocks_of(columns, 32), blocks_of(rows, 32), shape[0])

        def make(args: Args) -> list:
            values = (args.inputs[0], args.outputs[0], prod(shape), rows, columns)
            return [launch("reformat.cu", entry, constants, grid, 256, "<QQq2i", *values)]

        return GpuKernel(layer, signature, make, implementation=f"own {entry}")
