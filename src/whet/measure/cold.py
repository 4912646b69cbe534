"""Timing the finalists of a layer with cold weights: the L2 cache holds the kernel's activations but not its weights.

A replay of a network reads every weight once, and between two replays the whole network passes through the cache. So a launch finds its
activations in the cache, which the previous layer has just written, but its weights only if the whole network fits. A kernel timed alone in
equal launches always finds both. Common benchmarks flush the cache before each run (nvbench's cold measurement, Triton's do_bench) or rotate
among copies of all operands that exceed the cache (PyTorch's TunableOp, Composable Kernel). Both make activations cold too, unlike a network,
and single launches do not overlap, so that prefetching weights gains nothing. Here the cache is flushed, a launch with other weights restores
activations and code, and then a chain of launches is timed, each with its own copy of the weights.

Options are ranked by this time: its order agrees better with the network than that of the warm time, also for networks that fit the cache
(benchmarks/gpu_l2.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from whet.backends import Backend
from whet.errors import BackendError
from whet.measure.bench import Bench, Weight
from whet.measure.compare import compare
from whet.measure.option import Option
from whet.measure.policy import COLD_FINALIST, COLD_FINALISTS, COLD_WEIGHTS
from whet.network import Layer
from whet.tactics import Args

_LAUNCHES = (2, 8)  # in a chain: two overlap; eight are enough for a stable time
_SAMPLE_MS = 0.04  # of a chain, unless two launches take longer
_REUSE_DISTANCE = 2  # times the cache size, read before a copy of a weight is read again: caches are not strictly LRU
_ALIGNMENT = 256


def select_finalists(layer: Layer, options: Sequence[Option]) -> list[Option]:
    """The fastest options of a layer with warm weights, of those that read weights; ordered by rank."""
    timed = sorted((o.ms, o.rank, o) for o in options if o.ms is not None and count_weight_bytes(layer, o))[:COLD_FINALISTS]
    return [o for _, o in sorted((rank, o) for ms, rank, o in timed if ms <= COLD_FINALIST * timed[0][0])]


def count_weight_bytes(layer: Layer, o: Option) -> int:
    """Bytes of packed weights and of constants that a kernel takes as operands."""
    constants = (n for t, s, n in zip(layer.inputs, o.signature.inputs, o.kernel.inputs, strict=True) if t is not None and t.is_constant and s)
    return sum(p.nbytes for p in o.kernel.packed) + sum(constants)


def sample_cold_weights(bench: Bench, options: Sequence[Option], rounds: int, l2_bytes: int) -> dict[int, list[float]]:
    """Samples in ms by an option's rank; none for an option if its chain cannot be recorded.

    The backend has `cold_seconds(executable, before, filler)`.
    """
    backend = bench.host.backend
    fastest = min(o.cost for o in options)
    launches = max(_LAUNCHES[0], min(_LAUNCHES[1], int(_SAMPLE_MS / max(fastest, 1e-6))))
    copies = Copies(bench, options, launches + 1, l2_bytes)
    filler = bench.host.allocate_filler(_REUSE_DISTANCE * l2_bytes)
    chains: list[tuple[Option, Any, Any]] = []
    for o in options:
        operands = copies.args(o, launches + 1)
        try:
            chains.append((o, bench.record(o, operands[1:]), bench.record(o, operands[:1])))
        except (BackendError, ValueError, IndexError, TypeError) as e:
            o.note = o.note or f"could not be timed with a cold L2 cache: {e}"

    def time_chain(chain: Any, before: Any) -> float:
        return float(backend.cold_seconds(chain, before, filler)) / launches

    ranking = compare([partial(time_chain, chain, before) for _, chain, before in chains], COLD_WEIGHTS.with_rounds(rounds))
    return {o.rank: [s * 1e3 for s in samples] for (o, *_), samples in zip(chains, ranking.samples, strict=True)}


class Copies:
    """Copies of the weights of several options in one piece of memory; options that read the same weights share them."""

    def __init__(self, bench: Bench, options: Sequence[Option], most: int, l2_bytes: int):
        """Makes at most `most` copies of each weight; fewer if they already total `_REUSE_DISTANCE` times the cache size."""
        self.bench = bench
        self.counts = {o.rank: min(most, 1 + -(-_REUSE_DISTANCE * l2_bytes // sum(w.nbytes for w in bench.weights(o)))) for o in options}
        originals: dict[int, tuple[Weight, int]] = {}  # by address, with the number of copies
        for o in options:
            for w in bench.weights(o):
                originals[w.buffer.address] = (w, max(self.counts[o.rank], originals.get(w.buffer.address, (w, 0))[1]))
        self._steps = {at: -(-w.nbytes // _ALIGNMENT) * _ALIGNMENT for at, (w, _) in originals.items()}
        backend = bench.host.backend
        self.memory = backend.allocate(sum(self._steps[at] * n for at, (_, n) in originals.items()) + _ALIGNMENT)
        self._first: dict[int, int] = {}
        end = -self.memory.address % _ALIGNMENT
        for at, (w, n) in originals.items():
            self._first[at] = end
            for _ in range(n):
                _copy(backend, self.memory, end, w.buffer, w.nbytes)
                end += self._steps[at]

    def args(self, o: Option, runs: int) -> list[Args]:
        """The operands of `runs` runs, one after the other: each with the least recently read copies."""
        args, copies = self.bench.args(o), []
        for k in range(self.counts[o.rank]):
            fields = {"inputs": list(args.inputs), "packed": list(args.packed)}
            for w in self.bench.weights(o):
                at = w.buffer.address
                fields[w.field][w.position] = self.memory.address + self._first[at] + k * self._steps[at]
            copies.append(replace(args, inputs=tuple(fields["inputs"]), packed=tuple(fields["packed"])))
        return [copies[k % len(copies)] for k in range(runs)]


def _copy(backend: Backend, target: Any, to: int, source: Any, nbytes: int) -> None:
    if target.array is not None:
        target.array[to : to + nbytes] = source.array[:nbytes]
    else:
        backend.copy(target, to, source, 0, nbytes)
