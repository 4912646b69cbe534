"""Reformats: what it costs to bring a tensor from one format or storage type into another, and the layers that do it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from whet.backends import Backend
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.precision.permissions import Permissions
from whet.builder.select.formats import inplace_refusal, links, stored, wanted
from whet.measure.option import Ident, Option
from whet.measure.timing import Timer, select_fastest
from whet.network import BF16, F16, Dim, Layer, Network, Tensor, substitute
from whet.tactics import Operand, Tactic

_ANY = Permissions(frozenset({F16, BF16}))


class Reformats:
    """Options for moving tensors between operands, timed once for each shape and pair. `timer` None: estimates."""

    def __init__(self, tactics: list[Tactic], backend: Backend, env: Mapping[str, Dim], timer: Timer | None):
        self.tactics, self.backend, self.env, self.timer = tactics, backend, env, timer
        self._found: dict[tuple, list[Option]] = {}
        self._bans: dict[Ident, str] = {}

    def ban(self, ident: Ident, reason: str) -> None:
        """Takes a way of reformatting out: it computes wrongly."""
        self._bans[ident] = reason
        self._found = {k: [o for o in options if o.ident != ident] for k, options in self._found.items()}

    def option(self, t: Tensor, source: Operand, target: Operand, *, apart: bool = False) -> Option | None:
        """The best way for a tensor of `t`'s type (symbols filled in), or None when no tactic does it.

        `apart` leaves out those that work in place: the old bytes are still needed.
        """
        shape = tuple(substitute(d, self.env) for d in t.shape)
        key = (shape, t.dtype, source, target)
        if key not in self._found:
            self._found[key] = self._search(Tensor("x", t.type.with_shape(shape)), source, target)
        options = [o for o in self._found[key] if not (apart and o.signature.inplace)]
        return select_fastest(options) if options else None

    def cost(self, t: Tensor, source: Operand, target: Operand) -> float:
        """Milliseconds; infinity when no tactic does it."""
        found = self.option(t, source, target)
        return inf if found is None else found.cost

    def _search(self, t: Tensor, source: Operand, target: Operand) -> list[Option]:
        layer = Layer("Reformat", "reformat", (t,), _attributes(source, target))
        layer.outputs = (Tensor("y", t.type, layer),)
        found = list_candidates(layer, self.tactics, self.backend, _ANY)
        allowed = [o for o in found.options if o.ident not in self._bans]
        options = [o for o in allowed if not o.tactic.fallback] or allowed
        if self.timer is not None and options:
            self.timer.time(layer, found.text, options)
            options = [o for o in options if o.ms is not None] or options
        return options


def _attributes(source: Operand, target: Operand) -> dict[str, str]:
    return {"source_format": source.format, "source_dtype": source.dtype.name, "format": target.format, "dtype": target.dtype.name}


def with_reformats(net: Network, picked: Mapping[str, Option], reformats: Reformats) -> tuple[Network, dict[str, Option]]:
    """A copy of `net` with Reformat layers where maker and reader differ, and the options of all its layers.

    Readers that want the same share one, which stands right before the first of them.
    """
    made = net.clone()
    chosen = dict(picked)
    moved: dict[tuple[Tensor, Operand], Tensor] = {}
    by_name = {layer.name: layer for layer in made.layers}
    for w in sorted(links(net), key=lambda w: _position(net, w.reader)):
        a, b = stored(w, picked), wanted(w, picked)
        if b is None or a == b:
            continue
        option = reformats.option(w.tensor, a, b)
        assert option is not None, f"no reformat of %{w.tensor.name} from {a} to {b}"
        source = by_name[w.maker].outputs[w.index] if w.maker else next(t for t in made.inputs if t.name == w.tensor.name)
        if (w.tensor, b) not in moved:
            at = len(made.layers) if w.reader is None else made.layers.index(by_name[w.reader])
            base = w.tensor.name
            layer = made.add_layer("Reformat", (source,), _attributes(a, b), name=f"{base}_{b.format}_{b.dtype}", at=at)
            moved[w.tensor, b] = layer.outputs[0]
            chosen[layer.name] = option
        target = moved[w.tensor, b]
        if w.reader is None:
            _make_output(made, source, target, w.tensor.name)
        else:
            reader = by_name[w.reader]
            reader.inputs = tuple(target if i == w.slot else t for i, t in enumerate(reader.inputs))
    for (t, b), target in moved.items():
        mover = target.maker
        assert mover is not None
        if chosen[mover.name].signature.inplace and inplace_refusal(made, mover, chosen[mover.name]) is not None:
            option = reformats.option(t, chosen[mover.name].signature.inputs[0], b, apart=True)  # type: ignore[arg-type]
            assert option is not None, f"no reformat of %{t.name} to {b} beside the old one"
            chosen[mover.name] = option
    return made, chosen


def _position(net: Network, reader: str | None) -> int:
    return len(net.layers) if reader is None else next(i for i, layer in enumerate(net.layers) if layer.name == reader)


def _make_output(net: Network, source: Tensor, target: Tensor, name: str) -> None:
    """`target` takes the place and the name of the output `source`."""
    source.name = net.fresh(f"{name}_stored")
    target.name = name
    net.outputs = [target if t is source else t for t in net.outputs]
