"""Reformats: the cost of converting a tensor to another format or storage type, and the layers that convert it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Protocol

from whet.backends import Backend
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.candidates.other_shapes import OtherShapes
from whet.builder.precision.permissions import Permissions
from whet.builder.select.formats import TensorReaders, explain_inplace_refusal, get_required_operand, get_stored_operand, list_links
from whet.measure.option import Ident, Option
from whet.measure.timing import Timer, select_fastest
from whet.network import BF16, F16, Dim, Layer, Network, Tensor, substitute
from whet.tactics import Operand, Tactic

_ANY = Permissions(frozenset({F16, BF16}))


class ReformatOptions(Protocol):
    """Finds the option that converts a tensor between two operands."""

    def option(self, t: Tensor, source: Operand, target: Operand, *, out_of_place: bool = False) -> Option | None:
        """The option for a tensor of `t`'s type, or None if there is none; `out_of_place` excludes options that overwrite the source."""


class Reformats:
    """Options for converting tensors between operands, timed once for each shape and pair. `timer` None: estimates."""

    def __init__(self, tactics: list[Tactic], backend: Backend, env: Mapping[str, Dim], timer: Timer | None, others: OtherShapes | None = None):
        self.tactics, self.backend, self.env, self.timer, self.others = tactics, backend, env, timer, others
        self._found: dict[tuple, list[Option]] = {}
        self._bans: dict[Ident, str] = {}

    def ban(self, ident: Ident, reason: str) -> None:
        """Excludes an option that computes wrongly."""
        self._bans[ident] = reason
        self._found = {k: [o for o in options if o.ident != ident] for k, options in self._found.items()}

    def option(self, t: Tensor, source: Operand, target: Operand, *, out_of_place: bool = False) -> Option | None:
        """The best option for a tensor of `t`'s type (symbols bound), or None if no tactic converts it.

        `out_of_place` excludes options that overwrite the source.
        """
        shape = tuple(substitute(d, self.env) for d in t.shape)
        key = (shape, t.dtype, source, target)
        if key not in self._found:
            self._found[key] = self._search(Tensor("x", t.type.with_shape(shape)), source, target)
        options = [o for o in self._found[key] if not (out_of_place and o.signature.inplace)]
        if self.others is not None and self.others.symbols:
            layer = _make_layer(t, source, target)
            options = [o for o in options if self.others.refusal(layer, o) is None]
        return select_fastest(options) if options else None

    def cost(self, t: Tensor, source: Operand, target: Operand) -> float:
        """Milliseconds; infinity if no tactic converts it."""
        found = self.option(t, source, target)
        return inf if found is None else found.cost

    def _search(self, t: Tensor, source: Operand, target: Operand) -> list[Option]:
        layer = _make_layer(t, source, target)
        found = list_candidates(layer, self.tactics, self.backend, _ANY)
        allowed = [o for o in found.options if o.ident not in self._bans]
        options = [o for o in allowed if not o.tactic.fallback]
        if all(o.signature.inplace for o in options):  # a value that is read again must not be overwritten
            options = allowed
        if self.timer is not None and options:
            self.timer.time(layer, found.text, options)
            options = [o for o in options if o.ms is not None] or options
        return options


def _make_layer(t: Tensor, source: Operand, target: Operand) -> Layer:
    layer = Layer("Reformat", "reformat", (t,), _make_attributes(source, target))
    layer.outputs = (Tensor("y", t.type, layer),)
    return layer


def _make_attributes(source: Operand, target: Operand) -> dict[str, str]:
    return {"source_format": source.format, "source_dtype": source.dtype.name, "format": target.format, "dtype": target.dtype.name}


def with_reformats(net: Network, picked: Mapping[str, Option], reformats: ReformatOptions) -> tuple[Network, dict[str, Option]]:
    """A copy of `net` with a Reformat layer on every edge between different formats, and the options of all its layers.

    Readers of the same format share a reformat, which is inserted before the first of them.
    """
    reformatted = net.clone()
    chosen = dict(picked)
    moved: dict[tuple[Tensor, Operand], Tensor] = {}
    before: dict[str | None, list[Layer]] = {}  # the reformats before each reader; None: after all layers
    originals = list(reformatted.layers)
    by_name = {layer.name: layer for layer in originals}
    inputs = {t.name: t for t in reformatted.inputs}
    slots: dict[str, list[Tensor | None]] = {}  # the inputs of readers that read a reformat
    position = {layer.name: i for i, layer in enumerate(net.layers)}
    for w in sorted(list_links(net), key=lambda w: len(position) if w.reader is None else position[w.reader]):
        a, b = get_stored_operand(w, picked), get_required_operand(w, picked)
        if b is None or a == b:
            continue
        option = reformats.option(w.tensor, a, b)
        assert option is not None, f"no reformat of %{w.tensor.name} from {a} to {b}"
        source = by_name[w.maker].outputs[w.index] if w.maker else inputs[w.tensor.name]
        if (w.tensor, b) not in moved:
            layer = reformatted.add_layer("Reformat", (source,), _make_attributes(a, b), name=f"{w.tensor.name}_{b.format}_{b.dtype}")
            before.setdefault(w.reader, []).append(layer)
            moved[w.tensor, b] = layer.outputs[0]
            chosen[layer.name] = option
        target = moved[w.tensor, b]
        if w.reader is None:
            _make_output(reformatted, source, target, w.tensor.name)
        else:
            slots.setdefault(w.reader, list(by_name[w.reader].inputs))[w.slot] = target
    for name, tensors in slots.items():
        by_name[name].inputs = tuple(tensors)
    reformatted.layers = [x for layer in originals for x in (*before.get(layer.name, ()), layer)] + before.get(None, [])
    readers = TensorReaders(reformatted)
    for (t, b), target in moved.items():
        mover = target.maker
        assert mover is not None
        if chosen[mover.name].signature.inplace and explain_inplace_refusal(readers, mover, chosen[mover.name]) is not None:
            (source_operand,) = chosen[mover.name].signature.inputs
            assert source_operand is not None
            option = reformats.option(t, source_operand, b, out_of_place=True)
            assert option is not None, f"no reformat of %{t.name} to {b} out of place"
            chosen[mover.name] = option
    return reformatted, chosen


def _make_output(net: Network, source: Tensor, target: Tensor, name: str) -> None:
    """Replaces the output `source` by `target`, which gets its name."""
    source.name = net.fresh(f"{name}_stored")
    target.name = name
    net.outputs = [target if t is source else t for t in net.outputs]
