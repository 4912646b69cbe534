"""Quantized stem convolutions that quantize the image themselves.

Saves the launch that quantizes and its traffic (206 MB for 128 images together with the pooling). Covers any stride and up to 128 channels;
`qstem_overlap` takes stride 2 with 32 or 64.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, make_stored_signature
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.quantized._quantized_image import Image, match_image
from whet.tactics.cuda.stem.qstem import list_integer_stem_configs, make_integer_stem_constants, make_integer_stem_kernel, why_not_integer_stem

_COMPOSITE = "QuantizeThenConv"


@tactic
class QStemImage(Tactic):
    """Layers of the pass fuse_quantize_then_conv: a float image of up to 4 channels, up to 128 output channels, integers out."""

    ops = ("*",)
    composites = (_COMPOSITE,)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        image = match_image(layer, _COMPOSITE)
        return image if isinstance(image, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        image = match_image(layer, _COMPOSITE)
        if isinstance(image, str) or not all_static(layer) or image.parts.stores is None:
            return []
        dtype = layer.needs(image.image).dtype
        return [
            make_stored_signature(layer, {image.image: Operand(form, dtype)}, Operand("nhwc", image.parts.stores.dtype))
            for form in ("linear", "nhwc")
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        image = match_image(layer, _COMPOSITE)
        return image if isinstance(image, str) else why_not_integer_stem(image.shape, backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        image = match_image(layer, _COMPOSITE)
        assert isinstance(image, Image)
        configs, source, stores = list_integer_stem_configs(image.shape), signature.inputs[image.image], signature.outputs[0].dtype.name
        tiles = ({k: int(v) for k, v in c} for c in configs)
        parts, epilogue, shape = image.parts, image.epilogue, image.shape
        compile_ahead(backend, [text("stem.cu", make_integer_stem_constants(parts, epilogue, shape, t, source, stores, floats=True)) for t in tiles])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        image = match_image(layer, _COMPOSITE)
        if isinstance(image, str):
            raise PlanRefused(image)
        return make_integer_stem_kernel(layer, image.parts, image.epilogue, signature, config, backend, image.image, image.step)
