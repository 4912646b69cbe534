"""Launches of If, Loop and Scan: Python controls the iterations, and one launch list computes the layers of a body."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from whet.backends import Backend, Call, Executable
from whet.backends.cpu.memory import make_array_at
from whet.network import Layer, Network, Tensor, static_shape
from whet.ops import count_region_steps
from whet.ops.scan import ScanForm
from whet.tactics import Args
from whet.tactics.cpu.generic._region_program import Place, Recorded, RegionProgram, Slot


class RegionCall(Call):
    """The launch of a layer with regions. `programs` are those of the regions; the block of each begins at its offset in the scratch memory, and the
    states at theirs. `carried` is the number of values that an iteration passes to the next one."""

    def __init__(
        self, layer: Layer, programs: Sequence[tuple[Network, RegionProgram, int]], states: Sequence[tuple[Tensor, int]], args: Args,
        backend: Backend, carried: int = 0,
    ) -> None:  # fmt: skip
        self.layer, self.carried = layer, carried
        self._constants = {i: t.array() for i, t in enumerate(layer.inputs) if t is not None and t.is_constant}
        self.places: dict[Place, int] = {("input", i): a for i, a in enumerate(args.inputs)}
        self.places |= {("output", i): a for i, a in enumerate(args.outputs)}
        self.places |= {("state", i): args.scratch + offset for i, (_, offset) in enumerate(states)}
        self.states = [_make_view(t, self.places["state", i]) for i, (t, _) in enumerate(states)]
        self._programs = [(region, program, args.scratch + offset) for region, program, offset in programs]
        self._packed, at = [], 0
        self.lists: list[Executable] = []
        self._recorded: list[Recorded] = []
        for _, program, block in self._programs:
            self._packed.append(args.packed[at : at + len(program.packed)])
            at += len(program.packed)
            stream = backend.stream()
            self._recorded.append(program.record(self.places, block, self._packed[-1], stream, stream.calls))
            self.lists.append(stream.finish())
        self._make_views()

    def _make_views(self) -> None:
        """Arrays of the layer's operands and of the regions' outputs. A constant has no operand."""
        self.inputs = [
            None if t is None else self._constants[i] if i in self._constants else _make_view(t, self.places["input", i])
            for i, t in enumerate(self.layer.inputs)
        ]
        self.outputs = [_make_view(t, self.places["output", i]) for i, t in enumerate(self.layer.outputs)]
        self.results = [
            [_make_view(t, self._locate(k, slot)) for t, slot in zip(region.outputs, program.outputs, strict=True)]
            for k, (region, program, _) in enumerate(self._programs)
        ]
        self.prepare()

    def _locate(self, k: int, slot: Slot | int) -> int:
        _, program, block = self._programs[k]
        return self._packed[k][slot] if isinstance(slot, int) else program.locate(slot, self.places, block)

    def set_address(self, kind: str, index: int, address: int) -> None:
        self.places[kind, index] = address
        for recorded in self._recorded:
            recorded.set_address((kind, index), address)
        self._make_views()

    def needs(self, i: int) -> np.ndarray:
        """The array of input `i`."""
        a = self.inputs[i]
        assert a is not None, f"input {i} of {self.layer.op} is absent"
        return a

    def prepare(self) -> None:
        """Called when the arrays of the operands have changed."""

    @abstractmethod
    def run(self) -> None:
        """Raises NetworkError when the layers of the regions run more often than a network may."""


def _make_view(t: Tensor, address: int) -> np.ndarray:
    return make_array_at(address, static_shape(t.shape), t.dtype.numpy)


class IfCall(RegionCall):
    """Runs one of two branches; `copied` are the outputs of each that its kernels do not write to the layer's outputs."""

    copied: Sequence[Sequence[int]] = ((), ())

    def run(self) -> None:
        taken = 0 if self.needs(0).item() else 1
        with count_region_steps() as count:
            count(self.layer, self._programs[taken][0])
            self.lists[taken].run()
        for i in self.copied[taken]:
            np.copyto(self.outputs[i], self.results[taken][i])


class _IteratedCall(RegionCall):
    """Runs a body again and again. The first `carried` states are the values that an iteration passes to the next one."""

    def prepare(self) -> None:
        pairs = list(zip(self.list_new_values(), self.list_values(), strict=True))
        self._moves = [(new, old) for new, old in pairs if new.ctypes.data != old.ctypes.data]
        self._overlap = any(np.may_share_memory(new, old) for new, _ in self._moves for old in self.states)

    def list_values(self) -> list[np.ndarray]:
        """The arrays of the carried values that an iteration reads."""
        return self.states[: self.carried]

    def list_new_values(self) -> list[np.ndarray]:
        """Those that it computes, in the same order."""
        return self.results[0][: self.carried]

    def read_values(self, first: int) -> None:
        """Copies the layer's inputs from index `first` on into the carried values."""
        for i, value in enumerate(self.list_values(), start=first):
            np.copyto(value, self.needs(i))

    def write_values(self) -> None:
        """Copies the carried values into the layer's first outputs."""
        for out, value in zip(self.outputs, self.list_values(), strict=False):
            np.copyto(out, value)

    def pass_values(self) -> None:
        """Makes the computed values those of the next iteration."""
        moves = [(np.array(new), old) for new, old in self._moves] if self._overlap else self._moves
        for new, old in moves:
            np.copyto(old, new)


class LoopCall(_IteratedCall):
    """States are the carried values, the iteration and the condition."""

    def list_new_values(self) -> list[np.ndarray]:
        return self.results[0][1 : 1 + self.carried]

    def prepare(self) -> None:
        super().prepare()
        self._rows = list(zip(self.outputs[self.carried :], self.results[0][1 + self.carried :], strict=True))

    def run(self) -> None:
        (limit, first), turn = (None if a is None else a.item() for a in self.inputs[:2]), 0
        iteration, condition = self.states[self.carried :]
        again, body = self.results[0][0], self._programs[0][0]
        self.read_values(2)
        condition[...] = goes_on = first is None or first
        with count_region_steps() as count:
            while goes_on and (limit is None or turn < limit):
                count(self.layer, body)
                iteration[...] = turn
                self.lists[0].run()
                for rows, row in self._rows:
                    rows[turn] = row
                goes_on, turn = again.item(), turn + 1
                self.pass_values()
                condition[...] = goes_on
        self.write_values()


class ScanCall(_IteratedCall):
    """States are the carried values, then the entries of the sequences."""

    def prepare(self) -> None:
        super().prepare()
        form = ScanForm.of(self.layer)
        sequences = form.order_inputs([self.needs(i) for i in range(form.carried + form.sequences)])
        self._entries = list(zip(self.states[self.carried :], sequences, strict=True))
        self._rows = list(zip(form.order_outputs(self.outputs), self.results[0][self.carried :], strict=True))
        (self._length,) = static_shape((form.length,))

    def run(self) -> None:
        self.read_values(0)
        with count_region_steps() as count:
            for step in range(self._length):
                count(self.layer, self._programs[0][0])
                for entry, sequence in self._entries:
                    np.copyto(entry, sequence[step])
                self.lists[0].run()
                for rows, row in self._rows:
                    rows[step] = row
                self.pass_values()
        self.write_values()
