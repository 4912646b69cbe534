"""An engine plan at actual shapes, ready to run: launches recorded over one arena.

    bound = bind(plan, backend, {"x": (1, 3, 224, 224)})
    bound.feed({"x": array}); bound.run(); outputs = bound.fetch()

The builder times and verifies whole engines with it; `Engine` and `Context` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from whet.backends import Backend, Buffer, Executable, Recorder
from whet.errors import BackendError
from whet.network import Layer
from whet.runtime.memory import ALIGNMENT
from whet.runtime.operand_sites import OperandSites
from whet.runtime.shaped import ShapedPlan
from whet.runtime.values import Values
from whet.tactics import Args, Kernel


class _Recorder:
    """A stream that forwards launches to another and stores those of the current layer in `calls`."""

    def __init__(self, stream: Recorder):
        self._stream = stream
        self.calls: list[Any] = []

    def record(self, call: Any) -> None:
        self.calls.append(call)
        self._stream.record(call)

    def finish(self) -> Executable:
        return self._stream.finish()


class BoundEngine(Values):
    """A recorded engine over `arena` (by default its own). Not thread-safe; Context guards it."""

    def __init__(self, shaped: ShapedPlan, backend: Backend, arena: Buffer | None = None):
        super().__init__(shaped, backend, arena)
        self._scratch, scratch = self._allocate_scratch()
        self._sites = OperandSites(shaped)
        self.step_calls: list[list[Any]] = []
        recorder = _Recorder(backend.stream())
        self._args = [self._arguments(i, scratch) for i in range(len(shaped.steps))]
        for step, args, is_precomputed in zip(shaped.steps, self._args, shaped.precomputed, strict=True):
            recorder.calls = []
            if not is_precomputed:
                step.kernel.enqueue(args, recorder)
            self.step_calls.append(recorder.calls)
            self._sites.note(step, recorder.calls)
        self.executable: Executable = recorder.finish()
        self._single: list[Executable] | None = None
        self._touching: tuple[set[str], list[bool]] | None = None  # tensor names of the last `record_again` -> for each step whether it uses them

    def run(self) -> None:
        """Runs all launches; returns when the results are complete. Raises BackendError when a kernel fails."""
        run_checked(self.executable)

    def run_timed(self) -> list[float]:
        """Runs launch by launch and returns the seconds of each *layer* (with zero, one or several launches)."""
        times = self.executable.run_timed()
        counts = [len(c) for c in self.step_calls]
        if len(times) != sum(counts):
            raise BackendError(f"the executor timed {len(times)} launches, {sum(counts)} were recorded")
        each = iter(times)
        return [float(sum(islice(each, n))) for n in counts]

    def seconds(self, repeats: int) -> list[float]:
        """`repeats` times of the whole engine in seconds, by the backend's clock."""
        return self.backend.seconds(self.executable, repeats)

    def seconds_in_row(self, repeats: int) -> list[float]:
        """The same, back to back: on a GPU without the host's launch time (see `Backend.seconds_in_row`)."""
        return self.backend.seconds_in_row([self.executable] * repeats)

    def walk(
        self, value: Callable[[Layer, str], np.ndarray] | None = None
    ) -> Iterator[tuple[Layer, list[np.ndarray | None], list[np.ndarray]]]:
        """Runs layer by layer and yields (static layer, its actual inputs, its outputs) as logical arrays, for verification.

        Arrays have the tensor's logical shape and the storage type's values; constants are unchanged. `value(layer, name)` reads
        one of the layer's tensors (default: all of it; see `samples`).
        """
        read = value or (lambda layer, name: self.value(name))
        for i, step in enumerate(self.shaped.steps):
            ins = [None if t is None else t.array() if t.is_constant else read(step.layer, t.name) for t in step.layer.inputs]
            self.run_step(i)
            yield step.layer, ins, [read(step.layer, t.name) for t in step.layer.outputs]

    def run_step(self, i: int) -> None:
        """Runs one layer on the current contents of the arena, values of shapes included; returns when it is done. Raises BackendError when its
        kernel fails."""
        if self._single is None:
            self._single = []
            for k, step in enumerate(self.shaped.steps):
                args = self._arguments(k, self._args[k].scratch, alone=True)
                stream = self.backend.stream()
                step.kernel.enqueue(args, stream)
                self._single.append(stream.finish())
        self._single[i].run()

    def overwrites_inputs(self, i: int) -> bool:
        """True if an output of step `i` shares memory with one of its inputs."""
        layer = self.shaped.steps[i].layer
        outs = [self.place(t.name) for t in layer.outputs]
        ins = [self.place(t.name) for t in layer.inputs if t is not None and not t.is_constant]
        return any(a < b + m and b < a + n for a, n in outs for b, m in ins)

    def record_kernel(self, i: int, kernel: Kernel, packed: Sequence[int]) -> list[Any]:
        """Records another kernel with the operands of step `i` and packed weights at these addresses; returns the launches.

        Raises BackendError if it needs more scratch than the step has.
        """
        mine, args = self.shaped.steps[i].kernel, self._args[i]
        if kernel.scratch > mine.scratch:
            raise BackendError(f"needs {kernel.scratch} bytes of scratch, the step has {mine.scratch}")
        recorder = _Recorder(self.backend.stream())
        kernel.enqueue(Args(args.inputs, args.outputs, tuple(packed), args.scratch), recorder)
        return recorder.calls

    def record_again(self, names: Collection[str]) -> RepeatedLaunches:
        """Launches of another run in the same memory; layers that touch the inputs or outputs `names` are recorded again."""
        if self._touching is None or self._touching[0] != set(names):
            steps = zip(self.shaped.steps, self.step_calls, strict=True)
            self._touching = set(names), [bool(own) and self._sites.touches(step, names) for step, own in steps]
        sites, calls = OperandSites(self.shaped, like=self._sites), []
        recorder = _Recorder(self.backend.stream())
        for step, args, own, touching in zip(self.shaped.steps, self._args, self.step_calls, self._touching[1], strict=True):
            if touching:
                recorder.calls = own = []
                step.kernel.enqueue(args, recorder)
                sites.note(step, own)
            calls += own
        return RepeatedLaunches(calls, sites)

    def collect_launches(self) -> RepeatedLaunches:
        """The launches of this engine."""
        return RepeatedLaunches([call for calls in self.step_calls for call in calls], self._sites)

    def explain_unbindable(self, name: str) -> str | None:
        """Reason why an input or output must stay in the arena; None if its launches can use a user's memory."""
        return self._sites.why_not(self, name)

    def set_address(self, name: str, address: int | None) -> None:
        """Makes every launch that uses the tensor use other memory (the caller keeps it alive); None: the arena.

        Requires `why_not` to be None.
        """
        self.executable.refresh(self._sites.set_address(self, name, address))

    def make_address_setter(self, name: str) -> Callable[[int], None]:
        """`set_address` for one tensor as a function, for frequent calls."""
        if not self.executable.needs_refresh:
            return self._sites.make_address_setter(self, name)
        return partial(self.set_address, name)

    def nbytes(self) -> dict[str, int]:
        """Bytes in use: arena, additional scratch, and the packed weights (shared with others)."""
        return {
            "arena": self.arena.nbytes,
            "scratch": self._scratch.nbytes if self._scratch is not None else 0,
            "packed": self.shaped.packed_bytes,
        }

    def _allocate_scratch(self) -> tuple[Buffer | None, int]:
        """The arena's scratch, or a separate buffer if kernels for these shapes (or of this library version) need more than was planned."""
        need = max((s.kernel.scratch for s in self.shaped.steps), default=0)
        if need <= self.arena_plan.scratch_bytes:
            return None, self.arena.address + self.arena_plan.scratch_offset
        buffer = self.backend.allocate(need, ALIGNMENT)
        return buffer, buffer.address

    def _arguments(self, i: int, scratch: int, *, alone: bool = False) -> Args:
        """The operands of a step. Those that depend on shapes only are outside of the arena, unless the step runs `alone`, after its predecessors."""
        step = self.shaped.steps[i]
        ins = []
        for k, (t, o) in enumerate(zip(step.layer.inputs, step.signature.inputs, strict=True)):
            if t is None or o is None:
                ins.append(0)
            elif (held := self.shaped.constants[i].get(k)) is not None and (t.is_constant or not alone):
                ins.append(held.address)
            else:
                ins.append(self.address(t.name))
        outs = tuple(self.address(t.name) for t in step.layer.outputs)
        return Args(tuple(ins), outs, tuple(p.address for p in self.shaped.packed[i]), scratch if step.kernel.scratch else 0)


@dataclass
class RepeatedLaunches:
    """Launches of a run, with the positions of the addresses of inputs and outputs in them."""

    calls: list[Any]
    sites: OperandSites


#: what a kernel in NumPy can raise
KERNEL_ERRORS = (ValueError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError, StopIteration)


def run_checked(executable: Executable) -> None:
    """Runs launches. Raises BackendError for any failure of a kernel."""
    try:
        executable.run()
    except KERNEL_ERRORS as e:
        raise as_backend_error(e) from e


def as_backend_error(error: Exception) -> BackendError:
    """The BackendError for one of KERNEL_ERRORS."""
    return BackendError(f"a layer failed while it ran: {type(error).__name__}: {error}. Verify the engine, or build it again.")
