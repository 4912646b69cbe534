"""Ranges per reader of a quantized tensor: its own, or the shared range of a Concat.

A Concat moves integers, so its inputs share one scale. An input with much smaller values that other layers read too would lose precision
for them. Such a tensor is stored with its own scale and requantized for the Concat, at the cost of one pass over its bytes. (YOLOv5s with
seeded weights: one scale per Concat of the neck costs 3.6 of 25.5 dB at the output.)
"""

from __future__ import annotations

from dataclasses import dataclass

from whet.network import Layer, Tensor
from whet.precision.quantization_sites import QuantizationSites, Sets
from whet.precision.ranges import Range, Ranges

#: Scales that differ by less than this factor are merged: a factor of 2 is 6 dB of rounding noise in one tensor.
APART = 2.0


@dataclass(frozen=True)
class Stored:
    """One quantized form of a tensor and its readers; None means all readers that no other form serves."""

    range: Range
    readers: frozenset[Layer] | None


def assign_stored_forms(sites: QuantizationSites, ranges: Ranges, apart: float = APART) -> dict[Tensor, list[Stored]]:
    """Quantized forms of each root, finest scale first: the producer stores that one, the others are requantized from it."""
    keys = Sets[str]()
    while True:
        found = _merge_ranges(sites, ranges, keys)
        scales = {t: {k: float(found[k].scale) for k in map(keys.root, uses.values())} for t, uses in sites.uses.items()}
        close = next(
            ((a, b) for s in scales.values() for a in s for b in s if a != b and max(s[a], s[b]) < apart * min(s[a], s[b])), None
        )  # fmt: skip
        if close is None:
            break
        keys.join(*close)
    made: dict[Tensor, list[Stored]] = {}
    for t, readers in sites.roots.items():
        order = sorted(scales[t], key=lambda k: (scales[t][k], k))
        forms = [Stored(found[k], frozenset(r for r, name in sites.uses[t].items() if keys.root(name) == k)) for k in order[1:]]
        others = frozenset().union(*(f.readers or () for f in forms))
        made[t] = [Stored(found[order[0]], None if readers is None else frozenset(readers) - others), *forms]
    return made


def _merge_ranges(sites: QuantizationSites, ranges: Ranges, keys: Sets[str]) -> dict[str, Range]:
    """The merged range of each set of keys."""
    found: dict[str, Range] = {}
    for t, uses in sites.uses.items():
        for key in dict.fromkeys(map(keys.root, uses.values())):
            found[key] = ranges.tensors[t.name] if key not in found else found[key].merge(ranges.tensors[t.name])
    return found
