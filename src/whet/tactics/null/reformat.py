"""Null reformats between any two formats and storage types."""

from __future__ import annotations

from whet.network import DTYPES, FORMATS, Layer, format_fits
from whet.tactics._base import Config, Operand, Signature, Tactic, tactic
from whet.tactics.null._cost import NullKernel


@tactic
class NullReformat(Tactic):
    ops = ("Reformat",)

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        a = layer.attrs
        if not all(f in FORMATS and format_fits(f, layer.output.type.rank) for f in (a["source_format"], a["format"])):
            return []
        return [Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        return NullKernel(layer, signature, "null_reformat", slow=1.5)
