"""Where a layer's options are timed: operands that they share, their packed weights, launches recorded once or in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from whet.backends import Backend
from whet.builder.candidates.option import Option
from whet.network import DType, Layer
from whet.runtime.memory import write_bytes
from whet.tactics import Args, Packed

_HOT_SAMPLE_MS = 0.05  # in hot caches, short kernels are repeated within one sample up to this


class Weight(NamedTuple):
    """A weight that a kernel reads: the `place`-th of Args' `field` ("packed" or "inputs"), where it lies, its size."""

    field: str
    place: int
    buffer: Any
    nbytes: int


class Workshop(Protocol):
    """What a bench stands in: the machine, and memory that outlives a layer. measure/timing.py has it."""

    backend: Backend

    @property
    def flush_bytes(self) -> int:
        """Bytes that are walked over before each sample; 0 where caches stay hot."""

    def flush(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Walks over them, or takes these pieces of memory (addresses and bytes) out of all caches."""

    def lend(self, key: tuple, nbytes: int) -> Any:
        """A buffer of at least so many bytes, lent again for the same key."""

    def other(self, nbytes: int) -> Any:
        """Memory of so many bytes that no kernel reads."""


class Bench:
    """Buffers that a layer's options share while they are timed: operands hold normal numbers, or zeros where they are integers."""

    def __init__(self, shop: Workshop, layer: Layer):
        self.shop, self.layer = shop, layer
        self.buffers: dict[tuple, Any] = {}
        self._used: dict[tuple, int] = {}  # bytes of each that operands take
        self._packed: dict[str, Any] = {}
        self._args: dict[int, Args] = {}  # by an option's rank
        self._weights: dict[int, list[Weight]] = {}
        self.held: list[Any] = []

    def args(self, o: Option) -> Args:
        """The addresses of an option's operands, weights and scratch; the same at every call."""
        if o.rank not in self._args:
            self._args[o.rank] = self._placed(o)
        return self._args[o.rank]

    def prepare(self, o: Option) -> tuple[Any, int]:
        """An executable for the option and how many launches it holds."""
        args = self.args(o)
        executable = self.record(o, [args])
        if self.shop.flush_bytes or not self.shop.backend.capabilities.executes:
            return executable, 1
        once = min(self.shop.backend.seconds_in_row([executable] * 3)) * 1e3
        count = max(1, min(64, int(_HOT_SAMPLE_MS / max(once, 1e-4))))
        return (executable, 1) if count == 1 else (self.record(o, [args] * count), count)

    def record(self, o: Option, runs: list[Args]) -> Any:
        """The option run on each of these operands in turn, in a row, as an executable."""
        stream = self.shop.backend.stream()
        again = self.shop.backend.capabilities.overlapping_launches  # a graph repeats a launch; making it again takes longer
        known: dict[int, list[Any]] = {}
        for args in runs:
            if id(args) in known:
                for call in known[id(args)]:
                    stream.record(call)
                continue
            before = len(stream.calls) if again else 0
            o.kernel.enqueue(args, stream)
            if again:
                known[id(args)] = stream.calls[before:]
        return stream.finish()

    def weights(self, o: Option) -> list[Weight]:
        """What the option reads that no layer before it has touched: packed weights, and constants that it takes as operands."""
        self.args(o)
        return self._weights[o.rank]

    def chill(self, o: Option) -> None:
        """Leaves the caches as the network would: cold, but for the inputs, which the layer before has just written. Operands that no cache
        holds need none of it: the run before has left nothing else there."""
        k, flushed = o.kernel, self.shop.flush_bytes
        if not flushed or sum(k.inputs) + sum(k.outputs) >= flushed:
            return
        args = self.args(o)
        pieces = [*zip(args.inputs, k.inputs, strict=True), *zip(args.outputs, k.outputs, strict=True), (args.scratch, k.scratch)]
        pieces += [(w.buffer.address, w.nbytes) for w in self.weights(o) if w.field == "packed"]
        self.shop.flush([(at, nbytes) for at, nbytes in pieces if nbytes])
        for i, operand in enumerate(o.signature.inputs):
            if operand is not None:
                array = self.buffers["in", i, operand.dtype].array
                if array is not None:
                    self.shop.backend.warm(array[: k.inputs[i]])

    def _placed(self, o: Option) -> Args:
        k = o.kernel
        given = [None if s is None else self._buffer("in", i, s.dtype, n) for i, (s, n) in enumerate(zip(o.signature.inputs, k.inputs, strict=True))]
        ins = [0 if buffer is None else buffer.address for buffer in given]
        outs = [self._buffer("out", i, operand.dtype, k.outputs[i]).address for i, operand in enumerate(o.signature.outputs)]
        for (i, j), shift in zip(o.signature.inplace, getattr(k, "shifts", ()) or (0,) * len(o.signature.inplace), strict=True):
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
            self.held.append(found)  # earlier options point at it
            found, self._used[key] = self.shop.lend(key, nbytes), nbytes
            self.buffers[key] = found
            if kind == "in" and dtype is not None and self.shop.backend.capabilities.executes:
                raw = np.zeros(found.nbytes, np.uint8) if found.array is None else found.array[:nbytes]
                fill(raw, dtype)
                if found.array is None:
                    write_bytes(self.shop.backend, found, 0, raw)
        return found

    def _weight(self, p: Packed) -> int:
        if p.key not in self._packed:
            buffer = self.shop.backend.allocate(max(p.nbytes, 64))
            if self.shop.backend.capabilities.executes:
                write_bytes(self.shop.backend, buffer, 0, p.make())
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
