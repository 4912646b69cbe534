"""Kernels chosen in the network, where launches overlap their neighbours: the whole is replayed with one kind of layer changed at a time.

A kernel timed in a chain of its own kind hides what it takes from the launches around it: how much shared memory it leaves to the next
one for weights that are fetched early, when its last block ends, what it leaves in the cache. So the few that are nearly as fast as the
chosen one take turns in the network itself, kind by kind, the ones with the most time first; what is faster stays for the next kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import median
from time import perf_counter
from typing import Any

from whet.builder.assemble import choice_of
from whet.builder.candidates.option import Option
from whet.errors import BackendError, BuildError, EngineError
from whet.runtime import Bound, WeightStore
from whet.runtime.kernels import plan_layer

_SWEEPS = 3  # over all kinds: a choice changes what the others meet
_LOOK, _FIRST = 4, 8  # turns of all variants of a kind, then of those that are left
_MORE, _AT_MOST = 12, 3  # turns of the few that lead, and how often, while it is open who wins
_FIRST_S, _MORE_S = 0.03, 0.03  # seconds that those may take; slow networks get fewer turns
_FEWEST = 5  # of the last turns
_SURE = 2.0  # standard errors of a gain that needs no more turns
_LOST = 1.04  # of the best after a look: what takes no more turns
_LEFT = 1.01  # of the best: what gets the last turns
_AGAIN = 1.015  # of the best: what is tried again once other kinds have changed
_GAIN = 0.0007  # of the network's time: a smaller gain changes nothing


@dataclass(frozen=True, eq=False)
class Kind:
    """Layers that do equal work by one option, and the other options that may replace it in all of them."""

    text: str  # what the layers have in common
    layers: tuple[str, ...]
    mine: Option
    others: tuple[Option, ...]


@dataclass(frozen=True)
class Winner:
    """The option that a kind keeps, and the network's milliseconds with it when it was chosen."""

    kind: Kind
    option: Option
    ms: float


def chosen_in_chain(bound: Bound, kinds: Sequence[Kind], store: WeightStore, seconds: float) -> list[Winner]:
    """The options with which the network as a whole is fastest, one for each kind. Takes about `seconds`."""
    chain, end = _Chain(bound, store), perf_counter() + seconds
    now = {kind: Winner(kind, kind.mine, inf) for kind in kinds}
    order = sorted(kinds, key=lambda kind: -kind.mine.cost * len(kind.layers))
    close: dict[Kind, Sequence[Option]] = {kind: kind.others for kind in kinds}
    changes, seen = 0, dict.fromkeys(kinds, -1)  # changes so far, and those that there were when a kind was tried last
    for _ in range(_SWEEPS):
        for kind in order:
            if perf_counter() > end:
                break
            if seen[kind] == changes:
                continue
            before = now[kind].option
            now[kind], close[kind] = chain.best(kind, now[kind], close[kind], again=seen[kind] >= 0)
            changes += now[kind].option is not before
            seen[kind] = changes
    return list(now.values())


class _Chain:
    """A bound engine's launches, some of them exchanged for those of other kernels with the same operands."""

    def __init__(self, bound: Bound, store: WeightStore):
        self.bound, self.store = bound, store
        self.calls = [list(calls) for calls in bound.step_calls]
        self.at = {step.layer.name: i for i, step in enumerate(bound.shaped.steps)}
        self._made: dict[tuple[int, Any], list[Any] | None] = {}
        self._held: list[Any] = []  # packed weights of exchanged kernels

    def best(self, kind: Kind, now: Winner, others: Sequence[Option], *, again: bool = False) -> tuple[Winner, list[Option]]:
        """The fastest of the option that a kind has now and some others, in the network as it stands; it stays in the chain. And those that
        came near to it. `again`: they all came near before."""
        variants: list[tuple[Option, Any]] = []
        for option in (now.option, *(o for o in others if o is not now.option)):
            calls = {self.at[name]: self._calls(name, option) for name in kind.layers}
            if all(c is not None for c in calls.values()):
                variants.append((option, self._executable(calls)))  # type: ignore[arg-type]
        if len(variants) < 2:
            return now, []
        samples: dict[int, list[float]] = {i: [] for i, (_, executable) in enumerate(variants) if self._runs(executable)}  # makes the graphs
        self._turns(variants, samples, _LOOK)
        if not again:
            self._turns(variants, _near(samples, _LOST), _FIRST, _FIRST_S)
        near = [variants[i][0] for i in _near(samples, _AGAIN)]
        left, winner = _near(samples, _AGAIN if again else _LEFT), 0
        for _ in range(_AT_MOST if len(left) > 1 else 0):
            self._turns(variants, left, _MORE, _MORE_S, _FEWEST)
            winner = min(left, key=lambda i: median(left[i]))
            if winner == 0 or _clearly_less(left[winner], left[0], _SURE):
                break
        if winner != 0 and not _clearly_less(left[winner], left[0]):
            winner = 0
        for name in kind.layers:
            self.calls[self.at[name]] = self._calls(name, variants[winner][0]) or self.calls[self.at[name]]
        return Winner(kind, variants[winner][0], median(left[winner]) * 1e3), near

    def _turns(
        self, variants: Sequence[tuple[Option, Any]], samples: Mapping[int, list[float]], rounds: int, seconds: float = inf, least: int = 0
    ) -> None:
        """Adds up to `rounds` samples to each, forwards and backwards in turns; at least `least`, else as many as the seconds allow."""
        once = sum(median(s) for s in samples.values() if s)
        for r in range(max(least, min(rounds, int(min(seconds / max(once, 1e-6), 1e6))))):
            order = list(samples)[:: 1 if r % 2 == 0 else -1]
            for i, seconds_of_one in zip(order, self.bound.backend.seconds_in_row([variants[i][1] for i in order]), strict=True):
                samples[i].append(seconds_of_one)

    def _runs(self, executable: Any) -> bool:
        try:
            executable.run()
        except BackendError:
            return False
        return True

    def _executable(self, exchanged: Mapping[int, list[Any]]) -> Any:
        stream = self.bound.backend.stream()
        for i, calls in enumerate(self.calls):
            for call in exchanged.get(i, calls):
                stream.record(call)
        return stream.finish()

    def _calls(self, name: str, option: Option) -> list[Any] | None:
        """What an option records for a layer; None where it cannot be planned for it."""
        i = self.at[name]
        if (i, option.ident) not in self._made:
            try:
                step = plan_layer(self.bound.shaped.steps[i].layer, choice_of(option), self.bound.backend)
                if step.fell_back:
                    raise BackendError(step.fell_back)
                packed = [self.store.packed(p) for p in step.kernel.packed]
                self._held += packed
                self._made[i, option.ident] = self.bound.recorded(i, step.kernel, [p.address for p in packed])
            except (BackendError, BuildError, EngineError):
                self._made[i, option.ident] = None
        return self._made[i, option.ident]


def _near(samples: Mapping[int, list[float]], factor: float) -> dict[int, list[float]]:
    """Those whose median is within `factor` of the least, and the first, which they have to beat."""
    least = min(median(s) for s in samples.values())
    return {i: s for i, s in samples.items() if i == 0 or median(s) <= factor * least}


def _clearly_less(a: Sequence[float], b: Sequence[float], errors: float = 1.0) -> bool:
    """Whether the median of `a` is below that of `b` by more than chance (so many standard errors) and by enough to matter."""
    gain = median(b) - median(a)
    return gain > _GAIN * median(b) and gain > errors * sqrt(_error(a) ** 2 + _error(b) ** 2)


def _error(samples: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles (of normal samples: 1.25 sigma / sqrt(n), quartiles at 0.674 sigma)."""
    s = sorted(samples)
    return 1.25 / 0.674 * (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2 / sqrt(len(s))
