"""Split by oneDNN's reorder, one launch per part."""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, compute_strides, static_shape
from whet.ops.split import list_part_sizes
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, Tactic, count_stored_bytes, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnKernel, is_static, list_image_formats, list_storage_types, planned_threads

_MOVABLE = ("i32", "i8", "u8")


class SplitKernel:
    """One reorder for each output."""

    scratch, rtol, deterministic = 0, 0.0, True
    packed: tuple[Packed, ...] = ()

    def __init__(self, layer: Layer, signature: Signature, parts: list[OneDnnKernel]) -> None:
        self.parts, self.implementation = parts, parts[0].implementation
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Stream) -> None:
        for part in self.parts:
            part.enqueue(args, stream)


@tactic
class OneDnnSplit(Tactic):
    library = "oneDNN"
    ops = ("Split",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x = layer.inputs[0]
        if layer.op == "Fused" or x is None or x.is_constant:
            return "takes single layers that split a tensor computed at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        x = layer.needs(0)
        if self.why_not(layer) or not is_static(layer):
            return []
        types = list_storage_types([x], backend) or ([x.dtype] if x.dtype.name in _MOVABLE else [])
        absent = (None,) * (len(layer.inputs) - 1)
        formats = [f for f in list_image_formats(x.type.rank) if not f.startswith("nChw")]
        return [Signature((Operand(f, d), *absent), (Operand(f, d),) * len(layer.outputs)) for d in types for f in formats]

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        return [()]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return None if all(isinstance(n, int) for n in list_part_sizes(layer)) else "the parts' sizes are known only at run time"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> SplitKernel:
        x, stored = layer.needs(0), signature.outputs[0]
        own = static_shape(x.shape)
        axis, at, parts = layer.attrs["axis"] % len(own), 0, []
        steps, nbytes = compute_strides(stored.format, own), count_stored_bytes(layer, signature)
        with planned_threads(layer, backend) as count:
            for i, y in enumerate(layer.outputs):
                shape = static_shape(y.shape)
                try:
                    move = dnn.reorder(
                        dnn.describe(shape, stored.dtype.name, strides=steps), dnn.describe(shape, stored.dtype.name, stored.format)
                    )
                except dnn.Unimplemented as error:
                    raise PlanRefused(str(error)) from None
                offsets = {"src": at * steps[axis] * stored.dtype.bits // 8}
                part = OneDnnKernel(layer, signature, move, {"src": ("input", 0), "dst": ("output", i)}, (), 0.0, offsets, nbytes)
                part.team = backend.threads if count < backend.threads else 1
                parts.append(part)
                at += shape[axis]
        return SplitKernel(layer, signature, parts)

    def missing_library(self) -> str | None:
        return dnn.load_error()

    def library_version(self) -> str:
        return dnn.get_library_version()
