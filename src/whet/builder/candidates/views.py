"""Selecting Concat, Split and Slice layers that become views: their parts share memory with the whole tensor, so that nothing is copied. Reshapes,
Transposes and others that keep all bytes are views too: input and result are one range of bytes, which any number of layers read.

A part can be at one address only, and an in-place kernel on a part must not overwrite bytes that are still read through the whole. So views
are accepted one by one, the largest first; a view that clashes with earlier ones is replaced by a kernel that copies in the same formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whet.builder.memory.byte_groups import Groups
from whet.builder.select.formats import TensorReaders
from whet.engine.intersections import Rectangle, list_intersections
from whet.errors import BuildError
from whet.measure.option import Option
from whet.network import Layer, Network
from whet.tactics import iterate_shifted_pairs, view_shifts

#: Ops with in-place kernels that leave every byte unchanged; the same set as in the engine's check.
_BYTES_STAY = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Slice", "Split", "Dropout", "Transpose"})


class ViewClashError(BuildError):
    """Views that clash with others and have no copying kernel in the same formats; the selection is repeated without them."""

    def __init__(self, layers: Sequence[str]):
        super().__init__(f"the parts of {', '.join(layers)} cannot be at two addresses")
        self.layers = tuple(layers)


def view_refusal(net: Network | TensorReaders, layer: Layer, option: Option, *, fixed: bool) -> str | None:
    """The reason why a layer of a network cannot be a view at all, or None. Clashes between views are checked by `resolve_clashes`.

    `fixed`: all inputs have one shape, although the network's types may have symbols.
    """
    readers = net if isinstance(net, TensorReaders) else TensorReaders(net)
    for i, j in option.signature.inplace:
        t, output = layer.inputs[i], layer.outputs[j]
        if t is None or t.is_constant:
            return f"works in place on input {i}, which is constant"
        if t in readers.inputs or t in readers.outputs:
            return f"%{t.name} is an input or output of the network, which have bytes of their own"
        if output in readers.outputs and layer.op != "Concat":
            return f"%{output.name} is an output of the network, which has bytes of its own"
        is_part = option.is_view and (any(view_shifts(option.kernel)) or option.kernel.inputs[i] != option.kernel.outputs[j])
        if is_part and not (fixed or (t.type.static and output.type.static)):
            return "its shapes differ from run to run, and with them the addresses of its parts"
    return None


def resolve_clashes(net: Network, chosen: Mapping[str, Option], copying: Callable[[Layer, Option], Option | None]) -> dict[str, Option]:
    """`chosen` with clashing views replaced by `copying(layer, view)`. Raises ViewClashError if that is None.

    `net` includes its reformats.
    """
    views = [layer for layer in net.layers if chosen[layer.name].is_view]
    if not views:
        return dict(chosen)
    resolved = dict(chosen)
    kept: set[str] = set()
    unresolved: list[str] = []
    waiting = sorted(views, key=lambda x: -sum(chosen[x.name].kernel.outputs))  # stable: equal sizes stay in execution order
    while waiting:
        count = _count_compatible(net, chosen, kept, waiting)
        kept.update(x.name for x in waiting[:count])
        if count == len(waiting):
            break
        layer, waiting = waiting[count], waiting[count + 1 :]
        other = copying(layer, chosen[layer.name])
        if other is None:
            unresolved.append(layer.name)
        else:
            resolved[layer.name] = other
    if unresolved:
        raise ViewClashError(unresolved)
    return resolved


def _count_compatible(net: Network, chosen: Mapping[str, Option], accepted_views: set[str], views: Sequence[Layer]) -> int:
    """How many of the first `views` can be added to the views that are kept: bisection, since each check reads the whole network."""

    def fits(count: int) -> bool:
        return not has_clashes(net, chosen, accepted_views | {x.name for x in views[:count]})

    if fits(len(views)):
        return len(views)
    low, high = 0, len(views)  # the first `low` fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def has_clashes(net: Network, chosen: Mapping[str, Option], views: set[str]) -> bool:
    """True if bytes would be overwritten while they are needed, with only the layers in `views` as views."""
    groups, pairs, roots = Groups(), {}, Groups()
    first = {t.name: -1 for t in net.inputs}
    last = dict.fromkeys(first, len(net.layers))
    size = dict.fromkeys(first, 0)
    written: set[str] = set()
    for k, layer in enumerate(net.layers):
        for t in layer.inputs:
            if t is not None and t.name in last:
                last[t.name] = max(last[t.name], k)
        for r in layer.regions.values():
            for t in r.captures():
                last[t.name] = max(last.get(t.name, k), k)
        o = chosen[layer.name]
        for t, nbytes in zip(layer.outputs, o.kernel.outputs, strict=True):
            first[t.name] = last[t.name] = k
            size[t.name] = nbytes
            groups.add(t.name, nbytes)
            roots.add(t.name, 0)
        shares = bool(o.signature.inplace) and (not o.is_view or layer.name in views)
        if not (shares and layer.op in _BYTES_STAY):
            written.update(t.name for t in layer.outputs)
        if not shares:
            continue
        for i, j, shift in iterate_shifted_pairs(o.kernel, o.signature):
            source, out = layer.inputs[i], layer.outputs[j]
            if source is None or source.name not in size or source in net.inputs:
                continue
            if not groups.join(source.name, out.name, shift):
                return True
            pairs[source.name, out.name] = k
            if layer.op in _BYTES_STAY:
                roots.join(source.name, out.name)
    for t in net.outputs:
        last[t.name] = len(net.layers)
    members: dict[str, list[str]] = {}
    for n in dict.fromkeys(name for pair in pairs for name in pair):
        members.setdefault(groups.root(n), []).append(n)
    for group in members.values():
        blocks = [Rectangle(n, at := groups.offset(n), at + size[n], first[n], last[n]) for n in group]
        names = (sorted((a.name, b.name)) for a, b in list_intersections(blocks))
        if any(_clobbers(a, b, groups, roots, pairs, size, first, last, written) for a, b in names):
            return True
    return False


def _clobbers(a: str, b: str, groups: Groups, roots: Groups, pairs, size, first, last, written) -> bool:
    """True if one of two tensors of a group overwrites the other while that is needed."""
    at_a, at_b = groups.offset(a), groups.offset(b)
    if at_a + size[a] <= at_b or at_b + size[b] <= at_a or first[a] > last[b] or first[b] > last[a]:
        return False
    early, late = (a, b) if first[a] <= first[b] else (b, a)
    if roots.root(a) == roots.root(b):
        return late in written and last[early] >= first[late] and (early, late) not in pairs
    step = pairs.get((early, late))
    return step is None or last[early] > step
