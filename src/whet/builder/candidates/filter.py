"""Selecting the options of a layer to time: up to a cap, round-robin over tactics and formats, few of those that are nearly always slower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from whet.builder.candidates.tactic_sources import get_family
from whet.measure.option import Option
from whet.network import BF16, F16

_FALLBACKS = 4  # the least level that times NumPy references although there are kernels
_FEW = 2  # 32-bit options timed per family of tactics and arithmetic, if there are options of fewer bits
_SHARE = 0.625  # of the cap, in this case
_TRIED, _SLOWER = 4, 2.5  # timed layers, and the factor over the fastest in all of them, from which an implementation counts as slow
_MIN_MS = 0.5  # shorter layers do not count: times of microseconds do not carry over to other layers
_CLOSE = 1.3  # times the fastest: if a 32-bit option comes that near, all 32-bit options are timed


def select_for_timing(options: list[Option], level: int, cap: int | None, few_float32: bool) -> list[Option]:
    """The options to time, at most `cap`, in listing order; the others get a note. Below level 4 no fallbacks if there are kernels.

    `few_float32`: if there are more options than the cap (each has to be compiled), only few of those that store everything in 32 bits. If
    these few are close (`is_float32_close`), the caller asks again without it.
    """
    kernels = [o for o in options if not o.tactic.fallback]
    if level < _FALLBACKS and kernels:
        for o in options:
            if o.tactic.fallback:
                o.note = "not timed: a reference in NumPy, and there are kernels (level 4 times it too)"
        options = kernels
    groups: dict[object, list[Option]] = {}
    for o in options:
        groups.setdefault((o.tactic.name, o.signature), []).append(o)
    most = len(options) if cap is None else cap
    if few_float32 and level < _FALLBACKS and len(options) > most and len({_is_float32(group[0]) for group in groups.values()}) == 2:
        # Composites exist to move fewer bytes; their parts are timed in 32 bits too.
        composite = all(o.tactic.composites for o in options)
        most = most if composite else round(_SHARE * most)
        groups = _limit_float32(groups, 0 if composite else _FEW)
    rounds = [group[i : i + 1] for i in range(max(map(len, groups.values()))) for group in groups.values()]
    ordered = [o for group in rounds for o in group]
    for o in ordered[most:]:
        o.note = f"not timed: at most {most} tactics a layer at this level"
    for o in ordered[:most]:
        o.note = "" if o.note.startswith("not timed") else o.note
    return sorted(ordered[:most], key=lambda o: o.rank)


def _limit_float32(groups: dict[object, list[Option]], few: int) -> dict[object, list[Option]]:
    """Keeps `few` 32-bit options per family and arithmetic, round-robin over its tactics, and all other options."""
    families: dict[object, list[object]] = {}
    for key, group in groups.items():
        if _is_float32(group[0]):
            first = group[0]
            families.setdefault((get_family(first.tactic), dict(first.config).get("math"), first.signature), []).append(key)
    for keys in families.values():
        ordered = [o for turn in zip_longest(*(groups[key] for key in keys)) for o in turn if o is not None]
        for o in ordered[few:]:
            o.note = "not timed: the first 32-bit options were much slower than those of fewer bits" if few else "not timed: in 32 bits its parts are"
        kept = {id(o) for o in ordered[:few]}
        for key in keys:
            groups[key] = [o for o in groups[key] if id(o) in kept]
    return {key: group for key, group in groups.items() if group}


class SlowImplementations:
    """Library implementations that were much slower than the fastest option in all layers timed so far. They are skipped where there is another
    option of the same signature, since they take the most timing time."""

    def __init__(self) -> None:
        self._factors: dict[object, list[float]] = {}

    def record(self, options: Sequence[Option]) -> None:
        """Records each option's time relative to the fastest of its layer."""
        times = [o.ms for o in options if o.ms is not None]
        if times and min(times) >= _MIN_MS:
            for o in options:
                if o.ms is not None:
                    self._factors.setdefault(_get_implementation(o), []).append(o.ms / min(times))

    def drop_slow(self, options: Sequence[Option]) -> list[Option]:
        """The options of a layer without the slow ones, which get a note."""
        others = [o for o in options if not self._is_slow(o)]
        signatures = {o.signature for o in others}
        for o in options:
            if self._is_slow(o) and o.signature in signatures:
                o.note = f"not timed: at least {min(self._factors[_get_implementation(o)]):.1f} times slower than the best in all layers before"
        return [o for o in options if not self._is_slow(o) or o.signature not in signatures]

    def _is_slow(self, o: Option) -> bool:
        factors = self._factors.get(_get_implementation(o), [])
        return len(factors) >= _TRIED and min(factors) >= _SLOWER


def _get_implementation(o: Option) -> object:
    return o.tactic.name, o.kernel.implementation, tuple(x.dtype for x in o.signature.outputs)


def is_float32_close(options: Sequence[Option]) -> bool:
    """True if the fastest timed 32-bit option is nearly as fast as the fastest of fewer bits. Views, which take no time in any type, do not count."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for o in options:
        if o.ms is not None and not o.is_view:
            times[_is_float32(o)].append(o.ms)
    return bool(times[True] and times[False]) and min(times[True]) <= _CLOSE * min(times[False])


def stores_float16(o: Option) -> bool:
    """True if an option stores any operand as 16-bit floats."""
    return any(x is not None and x.dtype in (F16, BF16) for x in (*o.signature.inputs, *o.signature.outputs))


def _is_float32(o: Option) -> bool:
    return all(x is None or x.dtype.bits >= 32 for x in (*o.signature.inputs, *o.signature.outputs))
