"""Layers that keep their bytes: nothing is launched when input and output share them, else a copy.

A Transpose from channels last to row-major and its inverse are such layers.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, format_fits, static_shape
from whet.network.formats import has_same_bytes
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, ViewKernel, count_operand_bytes, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda.move.reformat import RowsArguments


class AliasKernel(GpuKernel, ViewKernel):
    """The result is the input's bytes."""

    shifts = (0,)


@tactic
class View(Tactic):
    """Reshape, Flatten, Squeeze, Unsqueeze, row-major; Identity and Dropout (no-op at inference); Transposes whose formats keep the bytes."""

    ops = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Transpose")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if len(layer.outputs) != 1:
            return "computes no mask"
        later = [t for t in layer.inputs[1:] if t is not None and not t.is_constant]
        return "the new shape is computed at run time" if later else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer) or layer.op == "Fused":
            return []
        t = layer.needs(0)
        kinds = [t.dtype]
        if t.dtype.name == "f32":
            from whet.network.types import BF16, F16

            kinds = [F16, BF16, t.dtype]
        forms = [("linear", "linear")]
        if layer.op == "Transpose":
            shape, formats = static_shape(t.shape), [f for f in ("linear", "nhwc") if format_fits(f, t.type.rank)]
            forms = [(f, g) for f in formats for g in formats if has_same_bytes(f, g, shape, layer.attrs["perm"])]
        elif layer.op in ("Identity", "Dropout") and t.type.rank == 4:
            forms.append(("nhwc", "nhwc"))
        signatures = []
        for kind in kinds:
            for source, target in forms:
                ins = tuple(Operand(source, kind) if i == 0 else None for i in range(len(layer.inputs)))
                signatures += [Signature(ins, (Operand(target, kind),), ((0, 0),)), Signature(ins, (Operand(target, kind),))]
        return signatures

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        nbytes = count_operand_bytes(layer.outputs[0], signature.outputs[0])

        def make(args: Args) -> list:
            if args.inputs[0] == args.outputs[0]:
                return []
            unit = 16 if nbytes % 16 == 0 else 1
            constants = {"FROM": 0, "TO": 0, "UNIT": unit}
            count = nbytes // unit
            arguments = RowsArguments(args.inputs[0], args.outputs[0], rows=1, width=count, in_pitch=count, out_pitch=count)
            return [launch("rows", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        if signature.inplace:
            return AliasKernel(layer, signature, make, implementation="alias", rtol=0.0)
        return GpuKernel(layer, signature, make, implementation="copy", rtol=0.0)
