"""An engine plan at actual shapes, ready to run: kernels planned, weights packed, launches recorded over one arena.

    bound = bind(plan, backend, {"x": (1, 3, 224, 224)})
    bound.feed({"x": array}); bound.run(); outputs = bound.fetch()

The builder times and verifies whole engines with it; `Engine` and `Context` are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.backends import Backend, Buffer, Executable
from whet.engine.plan import ArenaPlan, EnginePlan
from whet.errors import BackendError, EngineError, ShapeError
from whet.network import Layer, Network, evaluate, format_bytes, from_stored, static_shape, stored_shape, to_stored
from whet.ops import bind_layer, bind_symbols
from whet.runtime.kernels import Planned, plan_layer
from whet.runtime.memory import ALIGNMENT, Shared, WeightStore, read_bytes, write_bytes
from whet.tactics import Args, Kernel, Operand


@dataclass
class Shaped:
    """What contexts of one engine share for one set of input shapes: static layers, kernels, weights in backend memory."""

    plan: EnginePlan
    profile: int
    shapes: dict[str, tuple[int, ...]]
    env: dict[str, int]
    steps: list[Planned]
    operands: dict[str, Operand]  # how each tensor is stored
    types: dict[str, Any]  # its static type
    packed: list[list[Shared]]  # per step
    constants: list[dict[int, Shared]]  # per step: input index -> constant that the kernel reads as an operand

    @property
    def fell_back(self) -> list[tuple[str, str]]:
        """(layer, reason) of the steps that do not run the stored choice."""
        return [(s.layer.name, s.fell_back) for s in self.steps if s.fell_back]

    @property
    def packed_bytes(self) -> int:
        held = {id(s): s.buffer.nbytes for group in (*self.packed, *(c.values() for c in self.constants)) for s in group}
        return sum(held.values())


def shape_plan(plan: EnginePlan, backend: Backend, shapes: Mapping[str, tuple[int, ...]], profile: int, store: WeightStore) -> Shaped:
    """Kernels and weights for these input shapes. Raises ShapeError, EngineError, BackendError."""
    net = plan.network
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
    steps = []
    for layer in net.layers:
        if layer.name not in plan.choices:
            raise EngineError(f"layer '{layer.name}' has no choice: the engine is incomplete")
        steps.append(plan_layer(bind_layer(layer, env) if env else layer, plan.choices[layer.name], backend))
    types = {t.name: t.type.with_shape(evaluate(d, env) for d in t.shape) for t in net.tensors()}
    packed = [[store.packed(p) for p in s.kernel.packed] for s in steps]
    constants: list[dict[int, Shared]] = []
    for s in steps:
        held = {}
        for i, (t, o) in enumerate(zip(s.layer.inputs, s.signature.inputs, strict=True)):
            if t is not None and t.weight is not None and o is not None:
                held[i] = store.constant(t.weight, o)
        constants.append(held)
    return Shaped(plan, profile, dict(shapes), env, steps, storage(plan), types, packed, constants)


def storage(plan: EnginePlan) -> dict[str, Operand]:
    """How each tensor that lies in the arena is stored: as its maker's choice says; inputs as their readers' choices say.

    Raises EngineError when maker and reader, or two readers, disagree.
    """
    from whet.runtime.kernels import signature_of

    found: dict[str, Operand] = {}
    for layer in plan.network.layers:
        signature = signature_of(plan.choices[layer.name], layer)
        for t, o in zip(layer.inputs, signature.inputs, strict=True):
            if t is None or o is None or t.is_constant:
                continue
            if found.setdefault(t.name, o) != o:
                raise EngineError(f"layer '{layer.name}' reads %{t.name} as {o}, it is stored as {found[t.name]}: a Reformat is missing")
        for t, o in zip(layer.outputs, signature.outputs, strict=True):
            found[t.name] = o
    for t in plan.network.inputs:
        found.setdefault(t.name, Operand("linear", t.dtype))
    return found


@dataclass
class _Sites:
    """Where a tensor's address stands in recorded launches."""

    calls: list[tuple[Any, str, int]] = field(default_factory=list)


class _Recorder:
    """A stream that notes which launches a layer recorded, and passes them on."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.calls: list[Any] = []

    def record(self, call: Any) -> None:
        self.calls.append(call)
        self._stream.record(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Bound:
    """A recorded engine over an arena of its own (or one that is given). Not safe from several threads at once; Context guards it."""

    def __init__(self, shaped: Shaped, backend: Backend, arena: Buffer | None = None):
        self.shaped, self.backend = shaped, backend
        self.network: Network = shaped.plan.network
        self.arena_plan: ArenaPlan = shaped.plan.arenas[shaped.profile]
        self.arena = arena if arena is not None else allocate_arena(self.arena_plan, backend)
        self._scratch, scratch = self._scratch_memory()
        self._base = {name: self._check(name) for name in shaped.operands}
        self._sites: dict[str, _Sites] = {}
        self.step_calls: list[list[Any]] = []
        recorder = _Recorder(backend.stream())
        self._args = [self._arguments(i, scratch) for i in range(len(shaped.steps))]
        for step, args in zip(shaped.steps, self._args, strict=True):
            recorder.calls = []
            step.kernel.enqueue(args, recorder)
            self.step_calls.append(recorder.calls)
            self._note(step, recorder.calls)
        self.executable: Executable = recorder.finish()
        self._single: list[Executable] | None = None
        self._groups = _in_place_groups(shaped)
        self._worked = {  # outputs that are written over an input; those of views, which record nothing, are not
            s.layer.outputs[j].name for s, calls in zip(shaped.steps, self.step_calls, strict=True) for _, j in s.signature.inplace if calls
        }

    # running

    def run(self) -> None:
        """Runs everything; returns when the results are there. Raises BackendError when a kernel fails."""
        try:
            self.executable.run()
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError, StopIteration) as e:
            raise BackendError(f"a layer failed while it ran: {type(e).__name__}: {e}. Verify the engine, or build it again.") from e

    def run_timed(self) -> list[float]:
        """Runs launch by launch; seconds of each *layer*."""
        times = self.executable.run_timed()
        counts = [len(c) for c in self.step_calls]
        if len(times) == len(counts):
            return list(times)
        if len(times) != sum(counts):
            raise BackendError(f"the executor timed {len(times)} launches, {sum(counts)} were recorded")
        out, at = [], 0
        for n in counts:
            out.append(float(sum(times[at : at + n])))
            at += n
        return out

    def seconds(self, repeats: int) -> list[float]:
        """`repeats` times of the whole, by the backend's clock."""
        return self.backend.seconds(self.executable, repeats)

    def walk(
        self, value: Callable[[Layer, str], np.ndarray] | None = None
    ) -> Iterator[tuple[Layer, list[np.ndarray | None], list[np.ndarray]]]:
        """Runs layer by layer and yields (static layer, its actual inputs, its outputs) as logical arrays: what verification compares.

        Arrays have the storage type's values in the tensor's own type's shape; constants stand as they are. `value(layer, name)` reads
        one of the layer's tensors (default: all of it; see `images`).
        """
        read = value or (lambda layer, name: self.value(name))
        for i, step in enumerate(self.shaped.steps):
            ins = [None if t is None else t.array() if t.is_constant else read(step.layer, t.name) for t in step.layer.inputs]
            self.run_step(i)
            yield step.layer, ins, [read(step.layer, t.name) for t in step.layer.outputs]

    def run_step(self, i: int) -> None:
        """Runs one layer alone, on what now lies in the arena; returns when it is done. Raises BackendError when its kernel fails."""
        if self._single is None:
            self._single = []
            for step, args in zip(self.shaped.steps, self._args, strict=True):
                stream = self.backend.stream()
                step.kernel.enqueue(args, stream)
                self._single.append(stream.finish())
        self._single[i].run()

    def recorded(self, i: int, kernel: Kernel, packed: Sequence[int]) -> list[Any]:
        """The launches that another kernel of the same operands records in the place of step `i`, its packed weights at these addresses.

        Raises BackendError where it needs more scratch than the step has.
        """
        mine, args = self.shaped.steps[i].kernel, self._args[i]
        if kernel.scratch > mine.scratch:
            raise BackendError(f"needs {kernel.scratch} bytes of scratch, the step has {mine.scratch}")
        recorder = _Recorder(self.backend.stream())
        kernel.enqueue(Args(args.inputs, args.outputs, tuple(packed), args.scratch), recorder)
        return recorder.calls

    # values

    def feed(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies inputs into the arena, in the stored format. Raises ShapeError for a missing or unfit one."""
        for t in self.network.inputs:
            if t.name not in arrays:
                raise ShapeError(f"input '{t.name}' is missing; the engine takes {', '.join(i.name for i in self.network.inputs)}")
            self.write(t.name, np.asarray(arrays[t.name]))

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs, in the network's own types."""
        return {t.name: self.output(t.name) for t in self.network.outputs}

    def output(self, name: str) -> np.ndarray:
        """A copy of one output, in the network's own type."""
        t = next(t for t in self.network.outputs if t.name == name)
        return t.array().copy() if t.is_constant else self.value(name).astype(t.dtype.numpy, copy=False)

    def value(self, name: str) -> np.ndarray:
        """A copy of a tensor as it now lies in memory, as a logical array of its storage type (valid while it is alive)."""
        return self._read(name, 0, None)

    def images(self, name: str, at: Sequence[int]) -> np.ndarray:
        """As `value`, only the entries `at` of the first axis; every format keeps that axis outermost, so nothing else is read."""
        return np.concatenate([self._read(name, i, 1) for i in at])

    def place(self, name: str) -> tuple[int, int]:
        """Offset in the arena and bytes of a tensor."""
        return self._base[name], self._nbytes(name)

    def _read(self, name: str, first: int, count: int | None) -> np.ndarray:
        o, shape = self.shaped.operands[name], static_shape(self.shaped.types[name].shape)
        at, nbytes = self.place(name)
        if count is not None:
            each = nbytes // shape[0]
            at, nbytes, shape = at + first * each, count * each, (count, *shape[1:])
        stored = static_shape(stored_shape(o.format, shape))
        raw = read_bytes(self.backend, self.arena, at, nbytes)
        return np.array(from_stored(raw.view(o.dtype.numpy).reshape(stored), o.format, shape), order="C")

    def write(self, name: str, array: np.ndarray) -> None:
        """Puts a logical array into a tensor's place. Raises ShapeError when shape or type do not fit."""
        type_, o = self.shaped.types[name], self.shaped.operands[name]
        if array.shape != static_shape(type_.shape):
            raise ShapeError(f"'{name}' has shape {list(array.shape)}, this context is set to {type_}")
        if array.dtype != type_.dtype.numpy:
            raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {type_.dtype.numpy.name}: convert it with .astype(...)")
        if o.format == "linear" and o.dtype == type_.dtype:
            write_bytes(self.backend, self.arena, self._base[name], array)
        else:
            write_bytes(self.backend, self.arena, self._base[name], to_stored(array.astype(o.dtype.numpy, copy=False), o.format))

    def put(self, name: str, array: np.ndarray) -> None:
        """Puts a logical array of a tensor's storage type into its place, as it is."""
        write_bytes(self.backend, self.arena, self._base[name], to_stored(array, self.shaped.operands[name].format))

    # addresses

    def address(self, name: str) -> int:
        """Where a tensor lies in the arena."""
        return self.arena.address + self._base[name]

    def why_not_pointed(self, name: str) -> str | None:
        """Why an input or output must stay in the arena; None when its launches can use a user's memory."""
        group = self._groups.get(name, {name})
        inputs, outputs = ({t.name for t in ts} for ts in (self.network.inputs, self.network.outputs))
        if not any(self._sites.get(n, _Sites()).calls for n in group):
            return "no kernel reads or writes it"
        if len(group & (inputs | outputs)) > 1:
            return "it shares its bytes with another input or output of the engine"
        if name in inputs and any(n in self._worked for n in group):
            return "a layer works on it in place"
        if any(n not in self._sites for n in group):
            return "it shares its bytes with a constant"
        at, size = self._base[name], self._nbytes(name)
        if any(not at <= self._base[n] <= self._base[n] + self._nbytes(n) <= at + size for n in group):
            return "it lies inside of a larger tensor"
        return None

    def point(self, name: str, address: int | None) -> None:
        """Makes every launch that touches the tensor's bytes use other memory (the caller keeps it alive); None: the arena again.

        Ask `why_not_pointed` first.
        """
        base = self.address(name)
        for n in self._groups.get(name, {name}):
            shift = self.address(n) - base
            for call, kind, index in self._sites.get(n, _Sites()).calls:
                call.point(kind, index, (base if address is None else address) + shift)
        refresh = getattr(self.executable, "refresh", None)
        if refresh is not None:
            refresh()

    def nbytes(self) -> dict[str, int]:
        """Bytes this holds: arena, scratch beyond the arena's, and the packed weights (shared with others)."""
        return {
            "arena": self.arena.nbytes,
            "scratch": self._scratch.nbytes if self._scratch is not None else 0,
            "packed": self.shaped.packed_bytes,
        }

    def _scratch_memory(self) -> tuple[Buffer | None, int]:
        """The arena's scratch, or a buffer of its own where kernels at these shapes (or of this library) need more than was planned."""
        need = max((s.kernel.scratch for s in self.shaped.steps), default=0)
        if need <= self.arena_plan.scratch_bytes:
            return None, self.arena.address + self.arena_plan.scratch_offset
        buffer = self.backend.allocate(need, ALIGNMENT)
        return buffer, buffer.address

    def _nbytes(self, name: str) -> int:
        t, o = self.shaped.types[name], self.shaped.operands[name]
        return int(format_bytes(t.with_dtype(o.dtype), o.format))  # type: ignore[arg-type]

    def _check(self, name: str) -> int:
        plan = self.arena_plan
        if name not in plan.offsets:
            raise EngineError(f"%{name} has no place in the arena: the engine is incomplete")
        at, size = plan.offsets[name], self._nbytes(name)
        if size > plan.sizes.get(name, 0) or at < 0 or at + size > self.arena.nbytes:
            raise EngineError(f"%{name} needs {size} bytes at {at}; its place has {plan.sizes.get(name, 0)}, the arena {self.arena.nbytes}")
        return at

    def _arguments(self, i: int, scratch: int) -> Args:
        step = self.shaped.steps[i]
        ins = []
        for k, (t, o) in enumerate(zip(step.layer.inputs, step.signature.inputs, strict=True)):
            if t is None or o is None:
                ins.append(0)
            elif t.is_constant:
                ins.append(self.shaped.constants[i][k].address)
            else:
                ins.append(self.address(t.name))
        outs = tuple(self.address(t.name) for t in step.layer.outputs)
        return Args(tuple(ins), outs, tuple(p.address for p in self.shaped.packed[i]), scratch if step.kernel.scratch else 0)

    def _note(self, step: Planned, calls: list[Any]) -> None:
        for call in calls:
            if hasattr(call, "label"):
                call.label = ", ".join(step.layer.sources) or step.layer.name
        for kind, tensors, operands in (
            ("input", step.layer.inputs, step.signature.inputs),
            ("output", step.layer.outputs, step.signature.outputs),
        ):
            for index, (t, o) in enumerate(zip(tensors, operands, strict=True)):
                if t is not None and o is not None and not t.is_constant:
                    self._sites.setdefault(t.name, _Sites()).calls += [(call, kind, index) for call in calls]


def _in_place_groups(shaped: Shaped) -> dict[str, set[str]]:
    """Tensors that share bytes because a layer works in place -> all of them."""
    groups: dict[str, set[str]] = {}
    for step in shaped.steps:
        for i, j in step.signature.inplace:
            a, b = step.layer.inputs[i], step.layer.outputs[j]
            joined = groups.get(a.name, {a.name}) | groups.get(b.name, {b.name})  # type: ignore[union-attr]
            for n in joined:
                groups[n] = joined
    return groups


def allocate_arena(plan: ArenaPlan, backend: Backend) -> Buffer:
    """Zeroed memory for an arena (a host's pages come in as they are touched)."""
    return backend.allocate(max(plan.total, 1), ALIGNMENT)


def opt_shapes(plan: EnginePlan, profile: int = 0) -> dict[str, tuple[int, ...]]:
    """The opt shape of each input in a profile; the static one where it has none. Raises EngineError for a profile there is not."""
    return _profile_shapes(plan, profile, 1)


def max_shapes(plan: EnginePlan, profile: int = 0) -> dict[str, tuple[int, ...]]:
    """The largest shape of each input in a profile."""
    return _profile_shapes(plan, profile, 2)


def _profile_shapes(plan: EnginePlan, profile: int, which: int) -> dict[str, tuple[int, ...]]:
    count = max(len(plan.profiles), 1)
    if not 0 <= profile < count:
        raise EngineError(f"there is no profile {profile}; the engine has {count} (0 to {count - 1})")
    given = plan.profiles[profile].shapes if plan.profiles else {}
    return {t.name: tuple(given[t.name][which]) if t.name in given else static_shape(t.shape) for t in plan.network.inputs}


def bind(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    profile: int = 0,
    store: WeightStore | None = None,
    arena: Buffer | None = None,
) -> Bound:
    """The engine at `shapes` (default: the profile's opt shapes), ready to run.

    `store` shares packed weights with other binds of the same backend (candidate engines in a build); `arena` is memory to use,
    at least `plan.arenas[profile].total` bytes. A choice that cannot run here falls back: see `bound.shaped.fell_back`.
    Raises ShapeError, EngineError, BackendError.
    """
    wanted = dict(shapes) if shapes is not None else opt_shapes(plan, profile)
    shaped = shape_plan(plan, backend, wanted, profile, store or WeightStore(backend))
    return Bound(shaped, backend, arena)
