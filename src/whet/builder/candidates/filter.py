"""Which options of a layer are worth timing: up to a cap, tactics and formats in turn, few of those that nearly always lose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from whet.builder.candidates.tactic_sources import family
from whet.measure.option import Option
from whet.network import BF16, F16

_FALLBACKS = 4  # the level from which references in NumPy are timed beside kernels
_FEW = 2  # options of 32 bits that each family of tactics times, of each kind of arithmetic, beside those of fewer bits
_SHARE = 0.625  # of the cap that is timed then
_TRIED, _LOSES = 4, 2.5  # layers in which an implementation of a library was timed, and times behind the best in all of them: it has lost
_SAYS_MS = 0.5  # layers that are faster do not count for that
_CLOSE = 1.3  # times the fastest: where 32 bits come that near, they take part like all others


def worth_timing(options: list[Option], level: int, cap: int | None, sparing: bool) -> list[Option]:
    """Options in listing order, at most `cap`; those left out get a note. No fallbacks beside kernels below level 4.

    `sparing`: where there are more than the cap, and every one has to be compiled, few of those that store all in 32 bits beside those that
    do not. If these few come near (`wide_is_close`), it is asked again without.
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
    if sparing and level < _FALLBACKS and len(options) > most and len({_wide(group[0]) for group in groups.values()}) == 2:
        # Composites exist to move fewer bytes; their parts are timed in 32 bits too.
        several = all(o.tactic.composites for o in options)
        most = most if several else round(_SHARE * most)
        groups = _few_wide(groups, 0 if several else _FEW)
    rounds = [group[i : i + 1] for i in range(max(map(len, groups.values()))) for group in groups.values()]
    turns = [o for group in rounds for o in group]
    for o in turns[most:]:
        o.note = f"not timed: at most {most} tactics a layer at this level"
    for o in turns[:most]:
        o.note = "" if o.note.startswith("not timed") else o.note
    return sorted(turns[:most], key=lambda o: o.rank)


def _few_wide(groups: dict[object, list[Option]], few: int) -> dict[object, list[Option]]:
    """`few` of each family's options in 32 bits that compute in the same numbers, of its tactics in turn; all others."""
    families: dict[object, list[object]] = {}
    for key, group in groups.items():
        if _wide(group[0]):
            first = group[0]
            families.setdefault((family(first.tactic), dict(first.config).get("math"), first.signature), []).append(key)
    for keys in families.values():
        turns = [o for turn in zip_longest(*(groups[key] for key in keys)) for o in turn if o is not None]
        for o in turns[few:]:
            o.note = "not timed: the first ones in 32 bits were far behind those of fewer bits" if few else "not timed: in 32 bits its parts are"
        kept = {id(o) for o in turns[:few]}
        for key in keys:
            groups[key] = [o for o in groups[key] if id(o) in kept]
    return {key: group for key, group in groups.items() if group}


class Losers:
    """Implementations of a library that were far behind wherever they were timed in this build; so they are where another one is to be had
    for the same operands, and they take the longest."""

    def __init__(self) -> None:
        self._behind: dict[object, list[float]] = {}

    def saw(self, options: Sequence[Option]) -> None:
        """Notes how far each option is behind the best of its layer. What takes microseconds says nothing about others."""
        times = [o.ms for o in options if o.ms is not None]
        if times and min(times) >= _SAYS_MS:
            for o in options:
                if o.ms is not None:
                    self._behind.setdefault(_implementation(o), []).append(o.ms / min(times))

    def without(self, options: Sequence[Option]) -> list[Option]:
        """Options of one layer but for those that lose; these get a note."""
        able = [o for o in options if not self._loses(o)]
        signatures = {o.signature for o in able}
        for o in options:
            if self._loses(o) and o.signature in signatures:
                o.note = f"not timed: at least {min(self._behind[_implementation(o)]):.1f} times slower than the best in all layers before"
        return [o for o in options if not self._loses(o) or o.signature not in signatures]

    def _loses(self, o: Option) -> bool:
        behind = self._behind.get(_implementation(o), [])
        return len(behind) >= _TRIED and min(behind) >= _LOSES


def _implementation(o: Option) -> object:
    return o.tactic.name, o.kernel.implementation, tuple(x.dtype for x in o.signature.outputs)


def wide_is_close(options: Sequence[Option]) -> bool:
    """Whether the fastest option in 32 bits is nearly as fast as the fastest in fewer, where both were timed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for o in options:
        if o.ms is not None:
            times[_wide(o)].append(o.ms)
    return bool(times[True] and times[False]) and min(times[True]) <= _CLOSE * min(times[False])


def is_narrow(o: Option) -> bool:
    """Whether an option stores any operand as floats of 16 bits."""
    return any(x is not None and x.dtype in (F16, BF16) for x in (*o.signature.inputs, *o.signature.outputs))


def _wide(o: Option) -> bool:
    return all(x is None or x.dtype.bits >= 32 for x in (*o.signature.inputs, *o.signature.outputs))
