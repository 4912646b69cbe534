"""Finalists of a layer with weights out of memory: what a kernel takes where the L2 cache holds its activations and not its weights.

A network's replay reads every weight once and goes on to the next layer's; what has passed through the cache since is all of the network. So a
launch finds what the layer before has just written, and its weights only where the whole network fits. Timed alone in equal launches a kernel
always finds both. Benchmarks empty the cache before each run (nvbench's cold measurement, Triton's do_bench) or go round among copies of all
operands that no cache holds together (PyTorch's TunableOp, Composable Kernel); both leave activations cold too, which in a network they are
not, and one launch at a time does not overlap its neighbours, whose time a prefetch of weights is for. Here: the cache is emptied, a launch
with weights of its own brings activations and code back, and then a chain of launches is timed, each with its own copy of the weights.

This time ranks: it orders kernels more as the network does than the warm one, in networks that fit the cache too (benchmarks/gpu_l2.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whet.backends import Backend
from whet.builder.candidates.option import Option
from whet.errors import BackendError
from whet.measure.bench import Bench, Weight
from whet.measure.statistics import typical
from whet.network import Layer
from whet.tactics import Args

NEAR = 1.25  # times the fastest in a warm cache: who is timed in a cold one too
MOST = 8  # of a layer's options
_LAUNCHES = (2, 8)  # in a chain
_SAMPLE_MS = 0.04  # that a chain takes at most, but for the fewest launches
_APART = 2  # times the cache's size that passes before a copy is read again
_HOPELESS = 1.5  # after two rounds: a finalist this much slower than the best is not timed again
_ALIGNMENT = 256


def finalists(layer: Layer, options: Sequence[Option]) -> list[Option]:
    """The fastest options of a layer in a warm cache, those that read weights; in order of rank."""
    timed = sorted((o.ms, o.rank, o) for o in options if o.ms is not None and weight_bytes(layer, o))[:MOST]
    return [o for _, o in sorted((rank, o) for ms, rank, o in timed if ms <= NEAR * timed[0][0])]


def weight_bytes(layer: Layer, o: Option) -> int:
    """Bytes of packed weights and of constants that a kernel takes as operands."""
    constants = (n for t, s, n in zip(layer.inputs, o.signature.inputs, o.kernel.inputs, strict=True) if t is not None and t.is_constant and s)
    return sum(p.nbytes for p in o.kernel.packed) + sum(constants)


def cold_samples(bench: Bench, options: Sequence[Option], rounds: int, l2_bytes: int) -> dict[int, list[float]]:
    """Samples in ms per option rank, all options in turns; an option whose chain cannot be made has none.

    The machine has `cold_seconds(executable, before, other)`.
    """
    backend = bench.shop.backend
    best = min(o.cost for o in options)
    launches = max(_LAUNCHES[0], min(_LAUNCHES[1], int(_SAMPLE_MS / max(best, 1e-6))))
    copies = Copies(bench, options, launches + 1, l2_bytes)
    other = bench.shop.other(_APART * l2_bytes)
    chains = []
    for o in options:
        runs = copies.args(o, launches + 1)
        try:
            chains.append((o, bench.record(o, runs[1:]), bench.record(o, runs[:1])))
        except (BackendError, ValueError, IndexError, TypeError) as e:
            o.note = o.note or f"could not be timed with a cold L2 cache: {e}"
    samples: dict[int, list[float]] = {o.rank: [] for o, _, _ in chains}
    for r in range(rounds + 1):
        for o, chain, before in chains if r % 2 == 0 else chains[::-1]:
            samples[o.rank].append(backend.cold_seconds(chain, before, other) * 1e3 / launches)
        if r == 0:
            for taken in samples.values():
                taken.clear()  # it made the graphs
        elif r == 2:
            least = min((typical(s, False) for s in samples.values()), default=0.0)
            chains = [c for c in chains if typical(samples[c[0].rank], False) <= _HOPELESS * least]
    return samples


class Copies:
    """Copies of the weights of several options in one piece of memory; options that read the same weights share them."""

    def __init__(self, bench: Bench, options: Sequence[Option], most: int, l2_bytes: int):
        """At most `most` copies of each weight: fewer where these few are `_APART` times as large as the cache."""
        self.bench = bench
        self.counts = {o.rank: min(most, 1 + -(-_APART * l2_bytes // sum(w.nbytes for w in bench.weights(o)))) for o in options}
        wanted: dict[int, tuple[Weight, int]] = {}  # by the original's address
        for o in options:
            for w in bench.weights(o):
                wanted[w.buffer.address] = (w, max(self.counts[o.rank], wanted.get(w.buffer.address, (w, 0))[1]))
        self._steps = {at: -(-w.nbytes // _ALIGNMENT) * _ALIGNMENT for at, (w, _) in wanted.items()}
        backend = bench.shop.backend
        self.memory = backend.allocate(sum(self._steps[at] * n for at, (_, n) in wanted.items()) + _ALIGNMENT)
        self._first: dict[int, int] = {}
        end = -self.memory.address % _ALIGNMENT
        for at, (w, n) in wanted.items():
            self._first[at] = end
            for _ in range(n):
                _copy(backend, self.memory, end, w.buffer, w.nbytes)
                end += self._steps[at]

    def args(self, o: Option, runs: int) -> list[Args]:
        """The operands of `runs` runs, one after the other: each with the copies that were read longest ago."""
        mine, made = self.bench.args(o), []
        for k in range(self.counts[o.rank]):
            fields = {"inputs": list(mine.inputs), "packed": list(mine.packed)}
            for w in self.bench.weights(o):
                at = w.buffer.address
                fields[w.field][w.place] = self.memory.address + self._first[at] + k * self._steps[at]
            made.append(replace(mine, inputs=tuple(fields["inputs"]), packed=tuple(fields["packed"])))
        return [made[k % len(made)] for k in range(runs)]


def _copy(backend: Backend, target: Any, to: int, source: Any, nbytes: int) -> None:
    if target.array is not None:
        target.array[to : to + nbytes] = source.array[:nbytes]
    else:
        backend.copy(target, to, source, 0, nbytes)
