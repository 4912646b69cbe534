"""Context: an arena with one set of shapes at a time, which copies or binds inputs and outputs. Cheap; not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from whet import forks
from whet.backends import Completion
from whet.engine import LayerTimes, display_names, profile_suffix
from whet.errors import BackendError, ContextError, NetworkError, ShapeError
from whet.forks import make_lock
from whet.network import Dim, Expr, evaluate, find_symbols, static_shape
from whet.registry import suggest_name
from whet.runtime.arrays import UserArray, as_array, as_user_array, copy_in, copy_out, explain_copy, get_address, on_host
from whet.runtime.dlpack import CPU, DeviceArray
from whet.runtime.engine import Engine
from whet.runtime.memory import ALIGNMENT, allocate_aligned_array
from whet.runtime.profiles import find_nearest_profile, takes
from whet.runtime.sample_parallel import bind_shapes, count_arena_bytes
from whet.runtime.shaped import get_opt_shapes
from whet.runtime.steps import KERNEL_ERRORS, BoundEngine, as_backend_error, run_checked
from whet.runtime.values import View
from whet.tactics.host_layers import HostLayers

UNKNOWN = -1  # the address of a tensor that another object moves
_MAX_BOUND = 4  # sets of shapes for which a context caches recorded launches


class Context:
    """Runs an engine. Created by `Engine.create_context`; use one per thread: two threads in one context raise ContextError.

    context.run({"x": array}) -> {"y": array}           copies in and out; takes NumPy arrays and DLPack objects
    context.bind("x", array); context.execute()         reads and writes the user's buffers, without copies if possible
    context.bind("x", tensor); context.enqueue(stream)  the same on a GPU, asynchronously: torch tensors by DLPack
    """

    def __init__(self, engine: Engine, profile: int | None = None):
        self.engine, self._fixed = engine, profile
        self._shapes = get_opt_shapes(engine.plan, profile or 0)
        self._lock = make_lock()
        self._arena_bytes = max(count_arena_bytes(engine.plan, k) for k in (range(len(engine.plan.arenas)) if profile is None else (profile,)))
        self._arena: Any = None
        self._bounds: OrderedDict[tuple, BoundEngine] = OrderedDict()
        self._addresses: dict[int, dict[str, int]] = {}  # id(bound) -> tensor -> user's address
        self._users: dict[str, UserArray] = {}
        self._current: BoundEngine | None = None  # the one of the current shapes; None after they changed
        #: after a run: the views of inputs and outputs, and the launches, for the next one of the same shapes; None after any other change
        self._views: tuple[list[View], list[View], Any] | None = None
        self._guard = _Exclusive(self)
        self._ready: tuple[BoundEngine, list, list] | None = None  # the work of execute(), invalidated by bind() and run()
        self._host_layers: HostLayers | None = None  # of the layers that run on the host
        self._closed = False

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}: {'x'.join(map(str, s)) or 'scalar'}" for n, s in self._shapes.items())
        return f"<Context of {self.engine!r}, profile {self._profile()}, {'closed' if self._closed else shapes}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a context cannot be pickled or copied: it is one thread's memory. Create another with engine.create_context()")

    # shapes

    @property
    def profile_index(self) -> int:
        """The profile for the current shapes: the one given at creation, else the nearest. Raises ShapeError if there is none."""
        profile = self._profile()
        if profile is None:
            given = ", ".join(f"{n}: {_format_shape(s)}" for n, s in self._shapes.items())
            raise ShapeError(f"no profile of the engine takes these shapes together: {given}. {self._ranges()}")
        return profile

    def _profile(self) -> int | None:
        return self._fixed if self._fixed is not None else find_nearest_profile(self.engine.plan, self._shapes)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the network's order."""
        return list(self.engine.inputs)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in the network's order."""
        return list(self.engine.outputs)

    @property
    def bindable_outputs(self) -> list[str]:
        """Names of the outputs that `bind` takes: all, or none if sizes depend on the data."""
        return [] if self.engine.plan.tail is not None else self.output_names

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Sets the shape of an input. Raises ShapeError if the profile does not accept it."""
        self._check_shape(name, tuple(int(d) for d in shape))
        self._shapes[name], self._current = tuple(int(d) for d in shape), None
        self._views = None

    def input_shapes(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, tuple[int, ...]]:
        """Sets the given shapes and returns those of all inputs."""
        for name, shape in (shapes or {}).items():
            self.set_input_shape(name, shape)
        return dict(self._shapes)

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs for the inputs' current shapes; -1 for a size that depends on the data."""
        env = self.engine.get_shaped_plan(self.profile_index, self._shapes).env

        def size(d: Dim) -> int:
            return evaluate(d, env) if find_symbols(d) <= env.keys() else -1

        return {n: tuple(map(size, t.shape)) for n, t in self.engine.outputs.items()}

    def input_array(self, name: str) -> np.ndarray:
        """A zeroed array for an input of its current shape, aligned so that `bind` needs no copies."""
        self._require_known(name, self.engine.inputs, "input")
        return self._make_aligned(self._shapes[name], name)

    def output_array(self, name: str) -> np.ndarray:
        """A zeroed array for an output for the current shapes, aligned so that `bind` needs no copies."""
        self._require_known(name, self.engine.outputs, "output")
        self._needs_fixed_sizes("output_array()")
        return self._make_aligned(self.output_shapes()[name], name)

    # running

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for inputs by name (NumPy arrays or anything with __dlpack__); shapes are taken from the arrays.

        Raises ShapeError for unsuitable inputs, ContextError if another thread is using this context.
        """
        with self._guard:
            views = self._views
            if views is not None and type(inputs) is dict and len(inputs) == len(views[0]):
                for name, view, shape, dtype in views[0]:
                    a = inputs.get(name)
                    if type(a) is not np.ndarray or a.shape != shape or a.dtype != dtype:
                        break
                    view[...] = a
                else:
                    run_checked(views[2])
                    self._record_shapes()
                    return {name: view.copy() for name, view, _, _ in views[1]}
            arrays = self._arrays(inputs)
            for name, a in arrays.items():
                if self._shapes[name] != a.shape:
                    self.set_input_shape(name, a.shape)
            bound = self._bound()
            self._set_addresses(bound, {})
            bound.feed(arrays)
            bound.run()
            self._record_shapes()
            if self.engine.plan.tail is None and isinstance(bound, BoundEngine) and (views_now := bound.list_views()) is not None:
                self._views = *views_now, bound.executable
            return self._outputs(bound, arrays)

    def bind(self, name: str, array: Any) -> str:
        """Makes `execute` read an input from, or write an output to, this array (NumPy or DLPack), until another is bound.

        On a GPU it may be a tensor in device memory (torch.Tensor, CuPy, DeviceArray), which kernels use without a copy.

        Returns "" if kernels use its memory directly, else the reason for a copy (not 64-byte aligned, another format, ...).
        Raises ShapeError for another shape or type.
        """
        with self._exclusive():
            types = self.engine.inputs | self.engine.outputs
            self._require_known(name, types, "input or output")
            a = as_user_array(name, array, types[name].dtype, self.engine.backend)
            if name in self.engine.inputs:
                self.set_input_shape(name, a.shape)
            elif self.engine.plan.tail is not None:
                self._needs_fixed_sizes(f"bind('{name}', ...)")
            elif isinstance(a, np.ndarray) and not a.flags.writeable:
                raise ShapeError(f"the array for output '{name}' is read-only; bind a writable one")
            self._users[name], self._ready = a, None
            bound = self._bound()
            self._check_users(bound, only=name)
            return explain_copy(bound, name, a, self._users) or ""

    def unbind(self) -> None:
        """Releases all bound arrays."""
        with self._exclusive():
            self._users.clear()
            self._ready = None

    def execute(self) -> None:
        """Runs on the bound arrays, with their shapes; returns when the outputs are written. For outputs without an array see `fetch`.

        Tensors on a GPU are read after earlier work on its default stream; use `enqueue` for other streams.
        """
        with self._exclusive():
            if self._ready is None:
                self._ready = self._make_ready()
            bound, copied_in, copied_out = self._ready
            if any(isinstance(a, DeviceArray) for a in self._users.values()):
                self.engine.backend.after_default_stream(bound.executable)
            for n, a in copied_in:
                copy_in(bound, n, a)
            bound.run()
            self._record_shapes()
            for n, a in copied_out:
                copy_out(bound, n, a)

    def enqueue(self, stream: Any = None) -> Pending:
        """Starts a run on the bound arrays and returns at once; the run is ordered by `stream`.

        `stream` is a torch or CuPy stream, one with `__cuda_stream__`, an address, or None for the context's own. All bound arrays must be
        tensors on the GPU that need no copy (`bind` returned ""); outputs without an array stay in the context (see `output_tensor`).
        The context, the tensors and their contents must stay unchanged until the run is done. On the CPU this returns after the run.
        Raises ContextError for host arrays, BackendError for failed launches.
        """
        with self._exclusive():
            self._needs_fixed_sizes("enqueue()")
            if self._ready is None:
                self._ready = self._make_ready()
            bound, copied_in, copied_out = self._ready
            self._record_shapes()
            backend = self.engine.backend
            if not backend.capabilities.user_streams:
                for n, a in copied_in:
                    copy_in(bound, n, a)
                bound.run()
                for n, a in copied_out:
                    copy_out(bound, n, a)
                return Pending(None, bound)
            if copied_in or copied_out:
                n, a = (copied_in + copied_out)[0]
                why = "it is in host memory" if isinstance(a, np.ndarray) else explain_copy(bound, n, a, self._users)
                raise ContextError(f"enqueue() cannot copy '{n}': {why}. Bind a tensor on the GPU that needs no copy, or use execute().")
            return Pending(backend.enqueue(bound.executable, stream), bound)

    def addressed_run(self) -> AddressedRun:
        """The run of `execute` on the bound arrays, or on other memory in the place of some of them, given by addresses: for callers whose time per
        call counts. It holds until something is bound or run."""
        with self._exclusive():
            self._needs_fixed_sizes("addressed_run()")
            if self._ready is None:
                self._ready = self._make_ready()
            (bound, copied_in, copied_out), self._ready = self._ready, None  # execute() sets the addresses again
            return AddressedRun(self.engine, bound, self._addresses[id(bound)], copied_in, copied_out, dict(self._shapes))

    def output_tensor(self, name: str) -> DeviceArray:
        """The GPU memory of an output without a bound array after a run, for torch.from_dlpack and similar functions.

        The next run overwrites it. Raises ContextError if the engine does not store the output row-major in its own type.
        """
        with self._exclusive():
            self._require_known(name, self.engine.outputs, "output")
            self._needs_fixed_sizes("output_tensor()")
            bound = self._bound()
            o, t = bound.shaped.operands.get(name), bound.shaped.types[name]
            if bound.arena.array is not None or o is None or o.format != "linear" or o.dtype != t.dtype:
                raise ContextError(f"output '{name}' has no GPU memory that other libraries can read (it is stored as {o}): use fetch()")
            return DeviceArray(bound.address(name), static_shape(t.shape), t.dtype, self.engine.backend.device_number, bound)

    def device_array(self, name: str) -> DeviceArray:
        """New GPU memory to bind to an input or output of its current shape. Raises ContextError on other backends."""
        types = self.engine.inputs | self.engine.outputs
        self._require_known(name, types, "input or output")
        shape = self._shapes[name] if name in self.engine.inputs else self.output_shapes()[name]
        dtype = types[name].dtype
        backend = self.engine.backend
        if backend.capabilities.dlpack_device == CPU:
            raise ContextError(f"the backend '{backend.name}' has no device memory: use input_array and output_array")
        buffer = backend.allocate(max(int(np.prod(shape)) * dtype.bits // 8, 1), 256)
        return DeviceArray(buffer.address, tuple(shape), dtype, backend.device_number, buffer)

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs of the last `execute` that have no bound array. Raises ContextError if a `bind` or `run` came after it."""
        with self._exclusive():
            if self._ready is None:
                raise ContextError("there is nothing to fetch: something was bound or run since the last execute()")
            bound = self._ready[0]
            if self.engine.plan.tail is not None:
                return self._outputs(bound, {n: on_host(bound, a) for n, a in self._users.items() if n in self.engine.inputs})
            return {n: bound.output(n) for n in self.engine.outputs if n not in self._users}

    def profile(self, inputs: Mapping[str, Any], iterations: int = 10) -> list[LayerTimes]:
        """Times of each layer, in execution order, under the user's node names. Slower in total than `run`."""
        with self._exclusive():
            arrays = self._arrays(inputs)
            for name, a in arrays.items():
                self.set_input_shape(name, a.shape)
            bound = self._bound()
            self._set_addresses(bound, {})
            bound.feed(arrays)
            bound.run()
            rounds = []
            for _ in range(max(iterations, 1)):
                bound.feed(arrays)
                rounds.append(bound.run_timed())
        net = bound.shaped.plan.network
        names, suffix = display_names(net), profile_suffix(self.profile_index)
        return [LayerTimes(names[layer.name] + suffix, layer.name, tuple(1e3 * r[i] for r in rounds)) for i, layer in enumerate(net.layers)]

    def launches(self, shapes: Mapping[str, Sequence[int]] | None = None) -> BoundEngine:
        """The recorded launches and memory for the current shapes, or for `shapes` of all inputs, for measurements that order copies and launches
        themselves. They use the arena, not the bound arrays: pass inputs to `feed` of the result."""
        with self._exclusive():
            for name, shape in (shapes or {}).items():
                self.set_input_shape(name, tuple(shape))
            bound = self._bound()
            self._set_addresses(bound, {})
            return bound

    def nbytes(self) -> dict[str, int]:
        """Bytes of this context: arena and scratch."""
        return {
            "arena": self._arena_bytes,
            "scratch": max((b.nbytes()["scratch"] for b in self._bounds.values()), default=0),
        }

    def close(self) -> None:
        """Releases the arena; idempotent. Later use of the context raises ContextError."""
        if self._closed:
            return
        with self._exclusive():
            self._closed, self._ready, self._current, self._views = True, None, None, None
            self._bounds.clear()
            self._addresses.clear()
            self._users.clear()
            self._arena = self._host_layers = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # internal

    def _record_shapes(self) -> None:
        if (trace := self.engine.shape_trace) is not None:
            trace.record(self._shapes)

    def _outputs(self, bound: BoundEngine, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies of all outputs after a run, with those of the layers on the host."""
        tail, outputs = self.engine.plan.tail, bound.fetch()
        if tail is None:
            return outputs
        try:
            if self._host_layers is None:
                self._host_layers = HostLayers(self.engine.backend if self.engine.backend.name == "cpu" else None)
            return tail.run(self.engine.plan.network, inputs, outputs, self._host_layers)
        except NetworkError as e:
            raise BackendError(f"a layer failed while it ran: {e}") from e

    def _needs_fixed_sizes(self, call: str) -> None:
        """Raises ContextError if sizes of the outputs depend on the data."""
        if self.engine.plan.tail is not None:
            raise ContextError(f"{call}: the sizes of this engine's outputs depend on the data. Use run(), or execute() and fetch().")

    def _exclusive(self) -> _Exclusive:
        return self._guard

    def _bound(self) -> BoundEngine:
        if self._current is None:
            self._current = self._find_bound()
        return self._current

    def _find_bound(self) -> BoundEngine:
        key = tuple(self._shapes[n] for n in self.engine.input_types)
        bound = self._bounds.get(key)
        if bound is not None:
            self._bounds.move_to_end(key)
            return bound
        if self._arena is None:
            self._arena = self._allocate_arena()
        bound = bind_shapes(self.engine.get_shaped_plan(self.profile_index, self._shapes), self.engine.backend, self._arena)
        self._bounds[key] = bound
        while len(self._bounds) > _MAX_BOUND:
            _, old = self._bounds.popitem(last=False)
            self._addresses.pop(id(old), None)
        return bound

    def _allocate_arena(self) -> Any:
        try:
            return self.engine.backend.allocate(self._arena_bytes, ALIGNMENT)
        except BackendError as e:
            scratch = max(a.scratch_bytes * max(a.concurrent_samples, 1) for a in self.engine.plan.arenas)
            raise BackendError(
                f"there is no memory for a context: its arena takes {self._arena_bytes / 2**20:.1f} MiB (of them scratch {scratch / 2**20:.1f}), "
                f"the engine's packed weights {self.engine.memory().packed / 2**20:.1f}. {e}"
            ) from e

    def _make_ready(self) -> tuple[BoundEngine, list[tuple[str, UserArray]], list[tuple[str, UserArray]]]:
        """Launches for the shapes of users' arrays, with the addresses of those that kernels can use; the others are copied in and out."""
        missing = [n for n in self.engine.inputs if n not in self._users]
        if missing:
            raise ContextError(f"input '{missing[0]}' has no array: context.bind('{missing[0]}', array) before execute(), or use run()")
        self._current = self._views = None
        self._shapes = {n: self._users[n].shape for n in self.engine.inputs}  # replaces shapes set by run() or set_input_shape()
        bound = self._bound()
        self._check_users(bound)
        direct = {n: get_address(a) for n, a in self._users.items() if explain_copy(bound, n, a, self._users) is None}
        self._set_addresses(bound, direct)
        rest = [(n, a) for n, a in self._users.items() if n not in direct]
        return bound, [(n, a) for n, a in rest if n in self.engine.inputs], [(n, a) for n, a in rest if n in self.engine.outputs]

    def _set_addresses(self, bound: BoundEngine, wanted: dict[str, int]) -> None:
        """Sets launch addresses so that exactly the tensors in `wanted` are at users' addresses."""
        self._ready = None
        now = self._addresses.setdefault(id(bound), {})
        if not now and not wanted:
            return
        for name in [*now, *wanted]:
            if now.get(name) != wanted.get(name):
                bound.set_address(name, wanted.get(name))
        self._addresses[id(bound)] = dict(wanted)

    def _arrays(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        types = self.engine.input_types
        if not (type(inputs) is dict and inputs.keys() == types.keys()):
            if not isinstance(inputs, Mapping):
                kind = type(inputs).__name__
                raise ShapeError(f"inputs are given by name, {{name: array}}, not as {kind}; the engine takes {self._describe_inputs()}")
            for name in inputs:
                self._require_known(name, types, "input")
            if missing := [n for n in types if n not in inputs]:
                raise ShapeError(f"input '{missing[0]}' is missing; the engine takes {self._describe_inputs()}")
        return {name: as_array(name, inputs[name], type_.dtype) for name, type_ in types.items()}

    def _check_users(self, bound: BoundEngine, only: str | None = None) -> None:
        for n, a in self._users.items():
            if n in self.engine.outputs and only in (None, n):
                want = static_shape(bound.shaped.types[n].shape)
                if a.shape != want:
                    raise ShapeError(f"the array bound to output '{n}' has shape {list(a.shape)}, at these input shapes it is {list(want)}")

    def _require_known(self, name: str, names: Mapping[str, Any], subject: str) -> None:
        if name not in names:
            raise ShapeError(f"the engine has no {subject} '{name}'.{suggest_name(name, names)} It has {', '.join(names)}.")

    def _describe_inputs(self) -> str:
        return ", ".join(f"{n}: {t}" for n, t in self.engine.inputs.items())

    def _make_aligned(self, shape: tuple[int, ...], name: str) -> np.ndarray:
        a = allocate_aligned_array(shape, self.engine.dtype(name).numpy)
        a.fill(0)
        return a

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._require_known(name, self.engine.inputs, "input")
        type_ = self.engine.inputs[name]
        if len(shape) != type_.rank:
            raise ShapeError(f"input '{name}' has {len(shape)} dimensions {list(shape)}, the engine takes {type_.rank}: {name}: {type_}")
        profiles = self.engine.plan.profiles
        if self._fixed is None and len(profiles) > 1:
            if not any(takes(p, {name: shape}) for p in profiles):
                raise ShapeError(f"input '{name}': {_format_shape(shape)}, which no profile accepts. {self._ranges()}")
            return
        number = self._fixed or 0
        given = profiles[number].shapes.get(name) if profiles else None
        for axis, (have, want) in enumerate(zip(shape, type_.shape, strict=True)):
            if not isinstance(want, Expr) and have != want:
                raise ShapeError(f"input '{name}', axis {axis}: {have}, but the engine takes {want} there ({name}: {type_})")
            if given is not None and not given[0][axis] <= have <= given[2][axis]:
                raise ShapeError(
                    f"input '{name}', axis {axis}: {have}, but profile {number} takes {given[0][axis]} to {given[2][axis]} "
                    f"(min {_format_shape(given[0])}, opt {_format_shape(given[1])}, max {_format_shape(given[2])})."
                    f"{self._suggest_profile(name, shape, too_small=have < given[0][axis])}"
                )

    def _ranges(self) -> str:
        """The shape ranges of the profiles, with advice for other shapes."""
        ranges = (", ".join(f"{n} {_format_shape(s[0])} to {_format_shape(s[2])}" for n, s in p.shapes.items()) for p in self.engine.plan.profiles)
        return f"Profiles: {'; '.join(f'{k}: {text}' for k, text in enumerate(ranges))}. Build the engine with another --profile to run it."

    def _suggest_profile(self, name: str, shape: tuple[int, ...], *, too_small: bool) -> str:
        for k, p in enumerate(self.engine.plan.profiles):
            if name in p.shapes and all(lo <= d <= hi for lo, d, hi in zip(p.shapes[name][0], shape, p.shapes[name][2], strict=True)):
                return f" Profile {k} takes it: engine.create_context(profile={k})."
        range_ = "smaller --minShapes" if too_small else "larger --maxShapes"
        return f" Build the engine with {range_} (or another --profile) to run it."


class _Exclusive:
    """One thread's use of a context. Raises ContextError if another thread uses it, or if context or engine cannot be used any more."""

    __slots__ = ("_context",)

    def __init__(self, context: Context):
        self._context = context

    def __enter__(self) -> None:
        context = self._context
        if not context._lock.acquire(blocking=False):
            raise ContextError("this context is in use by another thread; create one per thread with engine.create_context() (it is cheap)")
        try:
            if context._closed:
                raise ContextError("the context is closed; create another with engine.create_context()")
            context.engine.check_alive()
        except BaseException:
            context._lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._context._lock.release()
        if isinstance(error, BackendError):
            self._context.engine.handle_failure(error)


class AddressedRun:
    """Repeated runs on memory that the caller gives by address, without checks: it must be row-major, of the bound array's type and shape, aligned
    like arrays that `Context.bind` does not copy, and stay alive until the run is done. For one thread at a time.

    `direct` names the inputs and outputs that can be given by address; the arrays bound to the others are copied in and out.
    """

    def __init__(
        self,
        engine: Engine,
        bound: BoundEngine,
        addresses: dict[str, int],
        copied_in: list[tuple[str, UserArray]],
        copied_out: list[tuple[str, UserArray]],
        shapes: dict[str, tuple[int, ...]],
    ):
        self.direct = list(addresses)
        self._engine, self._bound, self._copied_in, self._copied_out = engine, bound, copied_in, copied_out
        self._run = self._run_with_copies if copied_in or copied_out else bound.executable.run
        self._now, self._shapes = list(addresses.values()), shapes
        self._set = [bound.make_address_setter(name) for name in self.direct]
        addresses.update(dict.fromkeys(addresses, UNKNOWN))  # the context's own record: it sets them again before its next run

    def run(self, addresses: list[int]) -> None:
        """Runs with these addresses for `direct`; returns when the outputs are written."""
        engine = self._engine
        if engine.poisoned or engine.generation != forks.generation:  # not only `check_alive`: calls count here
            engine.check_alive()
        if addresses != self._now:
            self._move(addresses)
        if engine.shape_trace is not None:
            engine.shape_trace.record(self._shapes)
        try:  # `run_checked` would be one call more
            self._run()
        except BackendError as e:
            engine.handle_failure(e)
            raise
        except KERNEL_ERRORS as e:
            error = as_backend_error(e)
            engine.handle_failure(error)
            raise error from e

    def _run_with_copies(self) -> None:
        for n, a in self._copied_in:
            copy_in(self._bound, n, a)
        self._bound.run()
        for n, a in self._copied_out:
            copy_out(self._bound, n, a)

    def start(self, addresses: list[int], stream: Any) -> None:
        """Starts a run with these addresses for `direct` on a user's stream and returns at once. Nothing may need a copy."""
        engine = self._engine
        engine.check_alive()
        if addresses != self._now:
            self._move(addresses)
        if engine.shape_trace is not None:
            engine.shape_trace.record(self._shapes)
        try:
            engine.backend.start(self._bound.executable, stream)
        except BackendError as e:
            engine.handle_failure(e)
            raise

    def _move(self, addresses: list[int]) -> None:
        before, self._now = self._now, addresses
        for i, new in enumerate(addresses):
            if new != before[i]:
                self._set[i](new)


class Pending:
    """An asynchronous run. It keeps the context's memory alive until it is done."""

    def __init__(self, event: Completion | None, bound: BoundEngine):
        self._event, self._bound = event, bound

    @property
    def done(self) -> bool:
        """True if the outputs are complete. Raises BackendError if a kernel failed."""
        return self._event is None or self._event.done

    def synchronize(self) -> None:
        """Waits for the outputs. Raises BackendError if a kernel failed."""
        if self._event is not None:
            self._event.synchronize()

    def __del__(self) -> None:
        if self._event is not None:
            self._event.close()


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
