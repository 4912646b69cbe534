"""Base of tactics for two convolutions in one launch, the second a 1x1 on the first's result."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Operand, Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, is_quantized
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import FLOAT16_TYPES, Epilogue, all_static, list_float_types, machine_has, make_stored_signature, match_epilogue
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape, why_not_packable


@dataclass(frozen=True)
class Both:
    """The two convolutions as unfused layers, their sizes and epilogues, and the indices of the fused layer's operands."""

    first: Layer
    product: Layer
    shape: ConvShape
    k: int
    inner: Epilogue
    epilogue: Epilogue
    x: int
    residual: int | None


class ConvAndProduct(Tactic):
    """Base of these tactics: 16-bit floats, channels last, Hopper's tensor cores. A tactic decides which first convolution it takes."""

    ops = ("*",)

    @abstractmethod
    def why_not_pair(self, both: Both) -> str | None:
        """The reason why the kernel does not take these convolutions, whatever their sizes."""

    @abstractmethod
    def why_not_sizes(self, both: Both, backend: Backend) -> str | None:
        """Why it does not take these sizes."""

    def pair(self, layer: Layer) -> Both | str:
        """The two convolutions, or why they are none that the kernel takes."""
        both = _match_both(layer)
        return both if isinstance(both, str) else self.why_not_pair(both) or both

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer):
            return []
        both = self.pair(layer)
        if isinstance(both, str):
            return []
        places = [i for i in (both.x, both.residual) if i is not None]
        types = list_float_types([layer.inputs[both.x], layer.outputs[0]], FLOAT16_TYPES)
        return [make_stored_signature(layer, {i: Operand("nhwc", t) for i in places}, Operand("nhwc", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        both = self.pair(layer)
        return both if isinstance(both, str) else self.why_not_sizes(both, backend)


@dataclass(frozen=True)
class Pair:
    """Two convolutions, the second with the first as its only input, as unfused layers; epilogues; indices of the fused layer's operands."""

    first: Layer
    second: Layer
    inner: Epilogue
    epilogue: Epilogue
    x: int
    residual: int | None


def match_pair(layer: Layer) -> Pair | str:
    """The two convolutions of a fused layer, or why there are none that a kernel of floats with packed weights takes."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or body.outputs != [body.layers[1].outputs[0]]:
        return "the body is not a pair of convolutions"
    if any(is_quantized(x) for x in body.layers):
        return "computes floats, and the layer is quantized"
    first, second = (with_outer_inputs(x, outer) for x in body.layers)
    for view in (first, second):
        head = get_root_layer(view)
        if head.op != "Conv" or head.needs(0).type.rank != 4:
            return "takes convolutions of two spatial axes"
        if reason := why_not_packable(view, head):
            return reason
    inner, epilogue = match_epilogue(first, find_epilogue_steps(first)), match_epilogue(second, find_epilogue_steps(second))
    if isinstance(inner, str):
        return inner
    if isinstance(epilogue, str):
        return epilogue
    if inner.residual is not None or get_root_layer(second).attrs["group"] != 1:
        return "takes a first convolution without a residual and a second one without groups"
    fed = {t: i for i, t in enumerate(layer.inputs)}
    x = first.inputs[get_source_index(first)]
    added = None if epilogue.residual is None else second.inputs[epilogue.residual]
    read = second.inputs[get_source_index(second)]
    if read is not first.outputs[0] or x not in fed or (added and added not in fed):
        return "the second convolution has other inputs than the first"
    return Pair(first, second, inner, epilogue, fed[x], None if added is None else fed[added])


def _match_both(layer: Layer) -> Both | str:
    pair = match_pair(layer)
    if isinstance(pair, str):
        return pair
    behind = get_conv_shape(pair.second)
    if not behind.plain:
        return "the second convolution is not 1x1 without stride and padding"
    return Both(pair.first, pair.second, get_conv_shape(pair.first), behind.k, pair.inner, pair.epilogue, pair.x, pair.residual)
