"""Which options of a layer are worth timing: up to a cap, tactics and formats in turn, few of those that nearly always lose."""

from __future__ import annotations

from collections.abc import Sequence

from whet.builder.candidates import Option

_FALLBACKS = 4  # the level from which references in NumPy are timed beside kernels
_FEW = 2  # options of 32 bits that each tactic times beside those of fewer bits
_SHARE = 0.625  # of the cap that is timed then
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
        most = round(_SHARE * most)
        for key, group in groups.items():
            if _wide(group[0]):
                for o in group[_FEW:]:
                    o.note = "not timed: the first ones in 32 bits were far behind those of fewer bits"
                groups[key] = group[:_FEW]
    rounds = [group[i : i + 1] for i in range(max(map(len, groups.values()))) for group in groups.values()]
    turns = [o for group in rounds for o in group]
    for o in turns[most:]:
        o.note = f"not timed: at most {most} tactics a layer at this level"
    for o in turns[:most]:
        o.note = "" if o.note.startswith("not timed") else o.note
    return sorted(turns[:most], key=lambda o: o.rank)


def wide_is_close(options: Sequence[Option]) -> bool:
    """Whether the fastest option in 32 bits is nearly as fast as the fastest in fewer, where both were timed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for o in options:
        if o.ms is not None:
            times[_wide(o)].append(o.ms)
    return bool(times[True] and times[False]) and min(times[True]) <= _CLOSE * min(times[False])


def _wide(o: Option) -> bool:
    return all(x is None or x.dtype.bits >= 32 for x in (*o.signature.inputs, *o.signature.outputs))
