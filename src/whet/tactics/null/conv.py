"""Null convolution: blocked channels are fastest for multiples of 16 channels, then channels last, then row-major; may add in place."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Config, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer
from whet.tactics.null._cost import NullKernel, count_product_macs, find_uniform_signature

_SLOW = {"nChw16c": 1.0, "nhwc": 1.15, "linear": 2.0}


@tactic
class NullConv(Tactic):
    ops = ("Conv",)

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        signatures = []
        for fmt in _SLOW:
            plain = find_uniform_signature(layer, fmt)
            if plain is None:
                continue
            signatures += [find_uniform_signature(layer, fmt, ((i, 0),)) for i in self._addends(layer)]
            signatures.append(plain)
        return [s for s in signatures if s is not None]

    def _addends(self, layer: Layer) -> list[int]:
        """Inputs of the output's shape that the epilogue adds."""
        steps = find_epilogue_steps(layer) or []
        y = layer.outputs[0].type
        return [p.other for p in steps if p.op == "Add" and p.other is not None and p.other_tensor is not None and p.other_tensor.type == y]

    def refuses(self, layer: Layer, signature: Signature, backend) -> str | None:
        if find_epilogue_steps(layer) is None:
            return "what follows the convolution is no chain"
        channels = get_root_layer(layer).outputs[0].shape[1]
        if signature.outputs[0].format == "nChw16c" and int(channels) % 16:
            return f"{channels} channels do not come in sixteens"
        return None

    def configs(self, layer: Layer, signature: Signature, backend) -> list[Config]:
        return [(("tile", 4),), (("tile", 8),)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        fmt, tile = signature.outputs[0].format, int(dict(config)["tile"])
        wide = int(get_root_layer(layer).outputs[0].shape[-1]) >= 28
        slow = _SLOW[fmt] * (1.0 if wide == (tile == 8) else 1.05) * (0.98 if signature.inplace else 1.0)
        return NullKernel(layer, signature, f"null_conv_{fmt}_{tile}", count_product_macs(layer), slow, scratch=4096 * tile)
