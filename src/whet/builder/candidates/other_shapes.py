"""Options that hold at one shape only are refused: an engine runs all shapes between min and max of its profiles in the formats of the opt shapes.

With a batch of one, a Transpose of the first two axes and many reformats leave all bytes in place. With more items they move them, and then no
kernel has the same operands: the layer would run on the slow safe reference, and on a GPU not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from whet.backends import Backend
from whet.builder.batching.profiles import MAX, MIN, OPT, bind_profile_symbols
from whet.engine.plan import Profile
from whet.errors import NetworkError
from whet.measure.option import Option
from whet.measure.timing_key import format_layer_text
from whet.network import Dim, Layer, Network
from whet.ops import bind_layer
from whet.tactics import Signature, Tactic


class OtherShapes:
    """The shapes of a build's profiles at which no candidates are listed. `env` has the symbols of the shapes at which they are."""

    def __init__(self, net: Network, profiles: Sequence[Profile], env: Mapping[str, Dim], tactics: Sequence[Tactic], backend: Backend):
        self.tactics, self.backend = tactics, backend
        all_shapes = [bind_profile_symbols(net, p, which) for p in profiles for which in (MIN, OPT, MAX)]
        self.symbols = [other for i, other in enumerate(all_shapes) if other != env and other not in all_shapes[:i]]
        self._signatures: dict[str, list[tuple[Tactic, Signature]]] = {}
        self._holds: dict[tuple[str, Signature], bool] = {}
        self._refusals: dict[tuple[str, str, Signature, str], str | None] = {}

    def refusal(self, layer: Layer, option: Option) -> str | None:
        """The reason why an option for a layer (symbols in its types) cannot be selected, or None: no tactic has its operands at another shape, or
        its own tactic takes few shapes (`needs_all_shapes`) and not that one."""
        if not self.symbols:
            return None
        key = layer.name, str([t and t.type for t in (*layer.inputs, *layer.outputs)]), option.signature, option.tactic.name
        if key not in self._refusals:
            self._refusals[key] = self._find_refusal(layer, option)
        return self._refusals[key]

    def _find_refusal(self, layer: Layer, option: Option) -> str | None:
        for symbols in self.symbols:
            bound = bind_layer(layer, symbols)
            shapes = " and ".join(str(list(t.shape)) for t in bound.outputs)
            if option.tactic.needs_all_shapes and (reason := option.tactic.why_not(bound)) is not None:
                return f"{reason}; another shape of the profiles is {shapes}"
            if not self._has_kernel(bound, option.signature):
                return f"no tactic has these operands at another shape of the profiles, {shapes}"
        return None

    def _has_kernel(self, bound: Layer, signature: Signature) -> bool:
        key = format_layer_text(bound), signature
        if key not in self._holds:
            listed = self._signatures.get(key[0])
            if listed is None:
                listed = self._signatures[key[0]] = list(self._list(bound))
            self._holds[key] = any(s == signature and t.refuses(bound, s, self.backend) is None for t, s in listed)
        return self._holds[key]

    def _list(self, bound: Layer) -> Iterator[tuple[Tactic, Signature]]:
        for t in self.tactics:
            if t.why_not(bound) is None:
                try:
                    yield from ((t, s) for s in t.signatures(bound, self.backend))
                except NetworkError:  # a shape known only at run time
                    continue
