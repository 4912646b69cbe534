"""Quantized stem convolutions that quantize the image themselves.

Saves the launch that quantizes and its traffic (206 MB for 128 images together with the pooling). Covers any stride and up to 128 channels;
`qstem_overlap` takes stride 2 with 32 or 64.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, same
from whet.tactics.cuda._device.source import source as text
from whet.tactics.cuda.quantized._quantized_image import Image, image_parts
from whet.tactics.cuda.stem.qstem import integer_stem_configs, integer_stem_constants, integer_stem_kernel, integer_stem_reason

_COMPOSITE = "QuantizeThenConv"


@tactic
class QStemImage(Tactic):
    """Layers of the pass fuse_quantize_then_conv: a float image of up to 4 channels, up to 128 output channels, integers out."""

    ops = ("*",)
    composites = (_COMPOSITE,)

    def why_not(self, layer: Layer) -> str | None:
        reason = super().why_not(layer)
        if reason:
            return reason
        found = image_parts(layer, _COMPOSITE)
        return found if isinstance(found, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        found = image_parts(layer, _COMPOSITE)
        if isinstance(found, str) or not all_static(layer) or found.parts.stores is None:
            return []
        dtype = layer.needs(found.image).dtype
        return [same(layer, {found.image: Operand(form, dtype)}, Operand("nhwc", found.parts.stores.dtype)) for form in ("linear", "nhwc")]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        found = image_parts(layer, _COMPOSITE)
        return found if isinstance(found, str) else integer_stem_reason(found.shape, backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        found = image_parts(layer, _COMPOSITE)
        assert isinstance(found, Image)
        configs, source, stores = integer_stem_configs(found.shape), signature.inputs[found.image], signature.outputs[0].dtype.name
        tiles = ({k: int(v) for k, v in c} for c in configs)
        parts, epilogue, shape = found.parts, found.epilogue, found.shape
        compile_ahead(backend, [text("stem.cu", integer_stem_constants(parts, epilogue, shape, t, source, stores, floats=True)) for t in tiles])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        found = image_parts(layer, _COMPOSITE)
        if isinstance(found, str):
            raise PlanRefused(found)
        return integer_stem_kernel(layer, found.parts, found.epilogue, signature, config, backend, found.image, found.step)
