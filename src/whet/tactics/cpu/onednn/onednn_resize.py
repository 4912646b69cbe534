"""Resize of images by oneDNN: half-pixel linear, and nearest if its rounding selects the same pixels."""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, format_bytes, static_shape
from whet.ops.resize import resize_targets
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_image_formats, list_storage_types

_LARGEST = 2**31 - 1  # bytes: its offsets are 32-bit integers
_LONGEST = 2**24  # pixels of an axis: its index tables have 64 bytes per pixel, with 32-bit offsets; 2^25 crash
_MOVABLE = ("i8", "u8")  # nearest only copies them


@tactic
class OneDnnResize(OneDnnTactic):
    ops = ("Resize",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if any(t is not None and not t.is_constant and t.shape_value is None for t in layer.inputs[1:]):
            return "sizes or scales are computed at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        x, y = layer.inputs[0], layer.outputs[0]
        if self.why_not(layer) or not is_static(layer) or not 3 <= y.type.rank <= 5:
            return []
        return [
            Signature((Operand(f, d), *(None,) * (len(layer.inputs) - 1)), (Operand(f, d),))
            for d in list_storage_types([x, y], backend) or ([y.dtype] if y.dtype.name in _MOVABLE and layer.attrs["mode"] == "nearest" else [])
            for f in list_image_formats(y.type.rank)
        ]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        a = layer.attrs
        source, target = (static_shape(t.shape) for t in (layer.needs(0), layer.outputs[0]))
        stored = signature.needs(0)
        nbytes = [format_bytes(t.type.with_dtype(stored.dtype), stored.format) for t in (layer.needs(0), layer.outputs[0])]
        if max(target[2:]) > _LONGEST or any(isinstance(n, int) and n > _LARGEST for n in nbytes):
            return "oneDNN's resize addresses bytes in 32 bits, too few for these tensors"
        if source[:2] != target[:2]:
            return "batch or channels are resized"
        mode = a.get("mode", "nearest")
        centres = a.get("coordinate_transformation_mode", "half_pixel")
        whole = all(t % s == 0 for s, t in zip(source[2:], target[2:], strict=True))
        if mode == "nearest":
            floors = centres == "asymmetric" and a.get("nearest_mode") == "floor"
            rounds = centres in ("half_pixel", "pytorch_half_pixel") and a.get("nearest_mode", "round_prefer_floor").startswith("round")
            if not whole or not (floors or rounds) or not _has_plain_scales(layer, source, target):
                return f"nearest with {centres} and these sizes selects other pixels than oneDNN"
        elif mode != "linear" or centres not in ("half_pixel", "pytorch_half_pixel") or a.get("antialias"):
            return f"oneDNN has no {mode} resize with {centres}" + (" and antialiasing" if a.get("antialias") else "")
        elif centres == "pytorch_half_pixel" and 1 in target[2:]:
            return "pytorch_half_pixel treats a length of 1 differently"
        elif not _has_plain_scales(layer, source, target):
            return "the scales are not output size / input size, which oneDNN uses"
        first = dnn.resampling(mode, describe(layer.needs(0), signature.outputs[0]), describe(layer.outputs[0], signature.outputs[0]))
        return Recipe(first, {"src": ("input", 0), "dst": ("output", 0)}, rtol=0.0 if mode == "nearest" else None)


def _has_plain_scales(layer: Layer, source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """True if the scales are exactly the ratio of the sizes (ONNX uses the scale, oneDNN the ratio)."""
    scales = [scale for _, scale in resize_targets(layer)]
    return all(s is None or abs(float(s) * n - m) < 1e-4 for s, n, m in zip(scales, source, target, strict=True))
