"""The benchmark of one layer: operands that its options share, packed weights, launches recorded once or several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from whet.backends import Backend
from whet.measure.option import Option
from whet.network import DType, Layer
from whet.runtime.memory import write_bytes
from whet.tactics import Args, Packed, iterate_shifted_pairs

_HOT_SAMPLE_MS = 0.05  # with hot caches a sample repeats short kernels up to this: the clock resolves a microsecond


class Weight(NamedTuple):
    """A weight that a kernel reads: element `position` of Args' `field` ("packed" or "inputs"), its buffer and size."""

    field: str
    position: int
    buffer: Any
    nbytes: int


class BenchHost(Protocol):
    """The backend of a bench and memory that outlives a layer; implemented by timing.Timer."""

    backend: Backend

    @property
    def flush_bytes(self) -> int:
        """Bytes read before each sample to flush the caches; 0 if caches stay hot."""

    def flush(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Evicts this memory (addresses and bytes) from all caches."""

    def borrow(self, key: tuple, nbytes: int) -> Any:
        """A buffer of at least so many bytes, reused for the same key."""

    def allocate_filler(self, nbytes: int) -> Any:
        """Memory of so many bytes that no kernel reads."""


class Bench:
    """Buffers that a layer's options share while they are timed. Operands hold normally distributed values, or zeros if they are integers."""

    def __init__(self, host: BenchHost, layer: Layer):
        self.host, self.layer = host, layer
        self.buffers: dict[tuple, Any] = {}
        self._used: dict[tuple, int] = {}  # bytes used by operands
        self._packed: dict[str, Any] = {}
        self._args: dict[int, Args] = {}  # by an option's rank
        self._weights: dict[int, list[Weight]] = {}
        self.held: list[Any] = []

    def args(self, o: Option) -> Args:
        """The addresses of an option's operands, weights and scratch; the same at every call."""
        if o.rank not in self._args:
            self._args[o.rank] = self._place_operands(o)
        return self._args[o.rank]

    def prepare(self, o: Option) -> tuple[Any, int]:
        """An executable for the option and how many launches it holds."""
        args = self.args(o)
        executable = self.record(o, [args])
        if self.host.flush_bytes or not self.host.backend.capabilities.executes:
            return executable, 1
        once = min(self.host.backend.seconds_in_row([executable] * 3)) * 1e3
        count = max(1, min(64, int(_HOT_SAMPLE_MS / max(once, 1e-4))))
        return (executable, 1) if count == 1 else (self.record(o, [args] * count), count)

    def record(self, o: Option, runs: list[Args]) -> Any:
        """An executable that launches the option once on each of these operands, back to back."""
        stream = self.host.backend.stream()
        reuse = self.host.backend.capabilities.overlapping_launches  # a graph repeats a launch; preparing it again takes longer
        known: dict[int, list[Any]] = {}
        for args in runs:
            if id(args) in known:
                for call in known[id(args)]:
                    stream.record(call)
                continue
            before = len(stream.calls) if reuse else 0
            o.kernel.enqueue(args, stream)
            if reuse:
                known[id(args)] = stream.calls[before:]
        return stream.finish()

    def weights(self, o: Option) -> list[Weight]:
        """The weights of an option (packed weights and constant operands), which no earlier layer has touched."""
        self.args(o)
        return self._weights[o.rank]

    def prepare_caches(self, o: Option) -> None:
        """Leaves the caches as the network would: weights are cold, inputs are not, since the previous layer has just written them. The memory of
        results and scratch was in use a few layers ago. Operands larger than any cache need no flush, since the previous run has evicted
        everything else."""
        k, flushed = o.kernel, self.host.flush_bytes
        if not flushed or sum(k.inputs) + sum(k.outputs) >= flushed:
            return
        weights = self.weights(o)
        self.host.flush([(w.buffer.address, w.nbytes) for w in weights if w.nbytes])
        constants = {w.position for w in weights if w.field == "inputs"}
        for i, operand in enumerate(o.signature.inputs):
            if operand is not None and i not in constants:
                array = self.buffers["in", i, operand.dtype].array
                if array is not None:
                    self.host.backend.warm(array[: k.inputs[i]])

    def _place_operands(self, o: Option) -> Args:
        k = o.kernel
        given = [None if s is None else self._buffer("in", i, s.dtype, n) for i, (s, n) in enumerate(zip(o.signature.inputs, k.inputs, strict=True))]
        ins = [0 if buffer is None else buffer.address for buffer in given]
        outs = [self._buffer("out", i, operand.dtype, k.outputs[i]).address for i, operand in enumerate(o.signature.outputs)]
        for i, j, shift in iterate_shifted_pairs(k, o.signature):
            if k.inputs[i] < k.outputs[j]:
                ins[i] = outs[j] + shift
            else:
                outs[j] = ins[i] + shift
        packed = tuple(self._weight(p) for p in k.packed)
        scratch = self._buffer("scratch", 0, None, k.scratch).address if k.scratch else 0
        constants = [i for i, t in enumerate(self.layer.inputs) if t is not None and t.is_constant and given[i] is not None]
        self._weights[o.rank] = [Weight("inputs", i, given[i], k.inputs[i]) for i in constants]
        self._weights[o.rank] += [Weight("packed", i, self._packed[p.key], p.nbytes) for i, p in enumerate(k.packed)]
        return Args(tuple(ins), tuple(outs), packed, scratch)

    def _buffer(self, kind: str, i: int, dtype: DType | None, nbytes: int) -> Any:
        key = (kind, i, dtype)
        found = self.buffers.get(key)
        if found is None or self._used[key] < nbytes:
            self.held.append(found)  # earlier options refer to it
            found, self._used[key] = self.host.borrow(key, nbytes), nbytes
            self.buffers[key] = found
            if kind == "in" and dtype is not None and self.host.backend.capabilities.executes:
                raw = np.zeros(found.nbytes, np.uint8) if found.array is None else found.array[:nbytes]
                fill(raw, dtype)
                if found.array is None:
                    write_bytes(self.host.backend, found, 0, raw)
        return found

    def _weight(self, p: Packed) -> int:
        if p.key not in self._packed:
            buffer = self.host.backend.allocate(max(p.nbytes, 64))
            if self.host.backend.capabilities.executes:
                write_bytes(self.host.backend, buffer, 0, p.make())
            self._packed[p.key] = buffer
        return self._packed[p.key].address


def fill(raw: np.ndarray, dtype: DType) -> None:
    """Fills bytes with values of a type: normal numbers for floats, zeros for the rest (valid as indices and flags)."""
    if not dtype.is_float:
        raw[:] = 0
        return
    count = raw.nbytes // dtype.numpy.itemsize
    block = np.random.default_rng(1).standard_normal(min(count, 1 << 16)).astype(dtype.numpy)
    view = raw[: count * dtype.numpy.itemsize].view(dtype.numpy)
    for at in range(0, count, block.size):
        view[at : at + block.size] = block[: count - at]
