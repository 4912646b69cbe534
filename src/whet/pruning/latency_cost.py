"""Latency as a cost: the sum of the best measured times of the lowered layers at any widths.

The axes of lowered layers that shrink with a unit of a group are found by cutting one unit and lowering again, in one pass for groups
without a common layer. Times are measured on demand and stored in the table. A sum of layer times excludes reformats and executor
overhead, so it predicts ratios rather than milliseconds; the built engine's time is authoritative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from whet.builder.batching.profiles import OPT, bind_profile_symbols, bound_layers, resolve_profiles
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import Quantization
from whet.builder.lowering import lower_network
from whet.builder.precision.calibration import is_explicit, make_placeholder_ranges, prepare
from whet.builder.precision.int8 import quantize_network
from whet.errors import NetworkError, PruneError, WhetError
from whet.measure.timing_key import format_layer_text
from whet.network import Layer, Network
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.cut import cut
from whet.pruning.depth import Branch, remove_branches
from whet.pruning.meter import Meter
from whet.pruning.shrink import Slot, shrink_layer
from whet.pruning.sizes import Overlaps, Part, Widths

Progress = Callable[[int, int, str], None]


def lower_to_static_layers(net: Network, config: BuildConfig, *, filled: bool = False) -> dict[str, Layer]:
    """The lowered layers of a network by name, at the opt shapes of the first profile. Without `filled`, channels are not padded to
    multiples: padding would hide the loss of one unit. With INT8 permitted, layers have Q/DQ with placeholder ranges, which do not affect
    times."""
    if "int8" in config.precisions and not is_explicit(net):
        made = prepare(net, config)
        net = quantize_network(made, Quantization(make_placeholder_ranges(made)))
    lowered, _ = lower_network(net, config if filled else replace(config, passes=(*config.passes, "-pad_channels")))
    profiles, _ = resolve_profiles(lowered, config)
    return bound_layers(lowered, bind_profile_symbols(lowered, profiles[0], OPT))


def make_latency_costs(
    net: Network,
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    meter: Meter,
    base: Mapping[str, Layer],
    progress: Progress | None = None,
) -> Costs:
    """Milliseconds of `net` (whose lowered layers are `base`) as a function of widths and removed branches."""
    config = meter.config
    meter.announce(base.values())
    parts: dict[str, dict[Slot, list[Part]]] = {name: {} for name in base}
    near = _find_affecting_groups(net, channel_groups, base)
    waiting, done = _split_independent(channel_groups, near), 0
    while waiting:
        some = waiting.pop()
        touched = compute_axis_shrinkage(cut(net, {g.name: range(g.size - 1) for g in some}, channel_groups), base, config)
        owner = {name: [g for g in some if g.name in near[name]] for name in touched}
        if len(some) > 1 and any(len(gs) != 1 for gs in owner.values()):
            waiting += [[g] for g in some]  # a changed layer that no group explains
            continue
        for name, places in touched.items():
            g = owner[name][0] if owner[name] else some[0]
            for slot, lost in places.items():
                parts[name].setdefault(slot, []).append(Part(g.name, g.size, lost))
        done += len(some)
        if progress is not None:
            progress(done, len(channel_groups) + len(blocks), f"layers of {some[0].name}")
    gone, added, shares = {}, {}, {}
    for n, b in enumerate(blocks):
        after = lower_to_static_layers(remove_branches(net, [b.name]), config)
        sources = {s for name in after for s in after[name].sources}
        resized = [name for name, x in after.items() if name in base and format_layer_text(x) != format_layer_text(base[name])]
        gone[b.name] = frozenset(name for name in base if name not in after and not set(base[name].sources) <= sources)
        added[b.name] = sum(meter.ms(x) for name, x in after.items() if name not in base)
        shares[b.name] = {name: meter.ms(after[name]) / meter.ms(base[name]) for name in resized}
        if progress is not None:
            progress(len(channel_groups) + n + 1, len(channel_groups) + len(blocks), f"layers of {b.name}")
    overlaps = Overlaps.of(channel_groups)

    def get_sized_layer(name: str, widths: Widths) -> Layer:
        layer = base[name]
        full = {(side, k, axis): (layer.needs(k) if side == "in" else layer.outputs[k]).shape[axis] for side, k, axis in parts[name]}
        sizes = {slot: overlaps.size(d, parts[name][slot], widths) for slot, d in full.items()}
        changed = {slot: n for slot, n in sizes.items() if n != full[slot]}
        for step in dict.fromkeys((meter.step, 1)) if changed else ():
            with suppress(NetworkError):  # padded inputs of a Concat are larger than the padded result
                return shrink_layer(layer, {slot: min(-(-n // step) * step, full[slot]) for slot, n in changed.items()})
        return layer  # uncut, or its sizes depend on a complete cut: no gain is credited

    def price(name: str, widths: Widths) -> float:
        return meter.ms(get_sized_layer(name, widths))

    def expect(queries: Iterable[tuple[str, Widths]]) -> None:
        meter.announce(get_sized_layer(name, widths) for name, widths in queries)

    groups_of = {name: tuple(dict.fromkeys(p.group for ps in parts[name].values() for p in ps)) for name in base}
    return Costs("ms", price, groups_of, gone, added, measured=True, expect=expect, shares=shares)


def _find_affecting_groups(net: Network, channel_groups: Sequence[Group], base: Mapping[str, Layer]) -> dict[str, set[str]]:
    """The groups that affect each lowered layer, by its source nodes."""
    nodes = {x.name: {x.name, *x.sources} for x in net.layers}
    of_node: dict[str, set[str]] = {}
    for g in channel_groups:
        for name in g.layers:
            for node in nodes[name]:
                of_node.setdefault(node, set()).add(g.name)
    return {name: set().union(*(of_node.get(s, set()) for s in (name, *layer.sources))) for name, layer in base.items()}


def _split_independent(channel_groups: Sequence[Group], near: Mapping[str, set[str]]) -> list[list[Group]]:
    """Greedy colouring of the groups: no two groups of a set affect the same layer."""
    together: dict[str, set[str]] = {g.name: set() for g in channel_groups}
    for names in near.values():
        for name in names:
            together[name] |= names
    sets: list[list[Group]] = []
    for g in channel_groups:
        home = next((s for s in sets if not together[g.name] & {x.name for x in s}), None)
        if home is None:
            sets.append([g])
        else:
            home.append(g)
    return sets


def compute_axis_shrinkage(small: Network, base: Mapping[str, Layer], config: BuildConfig) -> dict[str, dict[Slot, int]]:
    """The axis shrinkage of each layer of `base` when one unit is cut: {layer: {slot: elements}}."""
    made: dict[str, dict[Slot, int]] = {}
    for name, after in lower_to_static_layers(small, config).items():
        before = base.get(name)
        if before is None or len(before.inputs) != len(after.inputs):
            continue  # lowered differently: its time is unchanged
        for side, old, new in (("in", before.inputs, after.inputs), ("out", before.outputs, after.outputs)):
            for k, (a, b) in enumerate(zip(old, new, strict=True)):
                if a is None or b is None or a.type.rank != b.type.rank:
                    continue
                for axis, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)):
                    if m != n and isinstance(m, int) and isinstance(n, int):
                        made.setdefault(name, {})[side, k, axis] = m - n
    return made


def measure_latency_sum(net: Network, meter: Meter, progress: Progress | None = None) -> float:
    """Sum of the best tactic times of all lowered layers in ms. Raises PruneError for a layer without a tactic."""
    layers = lower_to_static_layers(net, meter.config, filled=True)
    meter.announce(layers.values())
    total = 0.0
    for n, (name, layer) in enumerate(layers.items()):
        try:
            total += meter.ms(layer)
        except PruneError:
            raise
        except WhetError as e:
            raise PruneError(f"'{name}' could not be timed: {e}") from e
        if progress is not None:
            progress(n + 1, len(layers), name)
    return total
