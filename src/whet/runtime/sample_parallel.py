"""Sample-parallel execution of a batch: every sample runs separately, on a worker or on all threads (engine/plan.py, ArenaPlan.concurrent_samples).

A worker is one thread with its own arena and launches, whose kernels are planned for one thread; worker k processes the samples k,
k + workers, ... of the batch. Samples that would leave workers idle (a single sample, the remainder of the division), and all samples with only
one worker, run on all threads, one after the other. Inputs and outputs of the whole batch are contiguous, or are a user's arrays; launches
address them directly, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from whet.backends import Backend, Buffer, Executable, get_backend
from whet.engine.plan import ArenaPlan, EnginePlan
from whet.errors import EngineError, ShapeError
from whet.network import Network, TensorType, evaluate, static_shape
from whet.ops import bind_symbols
from whet.runtime.kernels import ConfigCheck
from whet.runtime.memory import ALIGNMENT, WeightStore, align_size
from whet.runtime.shaped import ShapedPlan, get_max_shapes, get_opt_shapes, make_shaped_plan
from whet.runtime.steps import BoundEngine, RepeatedLaunches, run_checked


@dataclass
class SampleParallelPlan(ShapedPlan):
    """A shaped plan of a batch whose samples run separately. `steps` are those of one sample on a worker, then those on all threads.

    `operands` and `types` describe inputs and outputs of the whole batch.
    """

    on_worker: ShapedPlan
    worker_backend: Backend  # this device with one thread
    on_all_threads: ShapedPlan
    batch: int
    workers: int


def plan_samples(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]],
    profile: int,
    store: WeightStore,
    configs: ConfigCheck | None = None,
) -> SampleParallelPlan:
    """Kernels of one sample for these shapes of a batch: for one thread, and for all threads of the backend. Raises as `make_shaped_plan` does."""
    env = bind_symbols([(t.name, t.type) for t in plan.network.inputs], shapes)
    of_sample, sample_shapes = plan.of_one_sample(profile), {n: (1, *s[1:]) for n, s in shapes.items()}
    batch = next(iter(shapes.values()))[0]
    if batch < 1:
        raise ShapeError(f"the batch has {batch} samples; the engine runs them one by one and needs at least one")
    on_all_threads = on_worker = make_shaped_plan(of_sample, backend, sample_shapes, 0, store, configs)
    worker_backend = backend
    workers = min(plan.arenas[profile].concurrent_samples, backend.threads)
    if workers > 1:
        worker_backend = get_backend(backend.name, threads=1)
        on_worker = make_shaped_plan(of_sample, worker_backend, sample_shapes, 0, store, configs)
        backend.activate()  # planning for one thread has set the calling thread's count
    bindings = _list_bindings(plan.network)
    types = {t.name: TensorType(t.dtype, tuple(evaluate(d, env) for d in t.shape)) for t in bindings}
    operands = {t.name: on_worker.operands[t.name] for t in bindings if t.name in on_worker.operands}
    return SampleParallelPlan(
        plan, profile, dict(shapes), env, on_worker.steps + on_all_threads.steps, operands, types, on_worker.packed + on_all_threads.packed,
        on_worker.constants + on_all_threads.constants, on_worker.precomputed + on_all_threads.precomputed,
        on_worker, worker_backend, on_all_threads, batch, workers,
    )  # fmt: skip


def count_arena_bytes(plan: EnginePlan, profile: int = 0) -> int:
    """Bytes of memory that a context of a profile allocates: its arena; for a sample-parallel profile one arena per worker, and inputs and
    outputs of the largest batch."""
    arena = plan.arenas[profile]
    if not arena.concurrent_samples:
        return max(arena.total, 1)
    part, number = plan.part(profile)
    batch = next(iter(get_max_shapes(part, number).values()))[0]
    return align_size(arena.total) * arena.concurrent_samples + sum(align_size(arena.sizes[t.name]) * batch for t in _list_bindings(part.network))


class SampleParallelEngine:
    """A recorded batch over memory of `count_arena_bytes`; contexts use it like a BoundEngine. Not thread-safe."""

    def __init__(self, shaped: SampleParallelPlan, backend: Backend, arena: Buffer | None = None):
        self.shaped, self.backend = shaped, backend
        self.network: Network = shaped.plan.network
        self.arena = arena if arena is not None else backend.allocate(count_arena_bytes(shaped.plan, shaped.profile), ALIGNMENT)
        own: ArenaPlan = shaped.on_worker.plan.arenas[0]
        self._staged: dict[str, tuple[int, int]] = {}  # input or output -> its offset, and the distance between samples in bytes
        at = align_size(own.total) * shaped.plan.arenas[shaped.profile].concurrent_samples
        for t in _list_bindings(self.network):
            distance = align_size(own.sizes.get(t.name, 0))
            self._staged[t.name] = (at, distance)
            at += distance * shaped.batch
        if at > self.arena.nbytes:
            raise EngineError(f"a batch of {shaped.batch} samples takes {at} bytes, the arena has {self.arena.nbytes}")
        self._workers = [
            BoundEngine(shaped.on_worker, shaped.worker_backend, self._slice(k * align_size(own.total), own.total)) for k in range(shaped.workers)
        ]
        self._check_bindable()
        launches = [call for calls in self._workers[0].step_calls for call in calls]
        self.why_not_parallel: str | None = backend.why_not_parallel(launches) if shaped.workers > 1 else None
        if self.why_not_parallel is not None:
            steps = zip(shaped.on_worker.steps, self._workers[0].step_calls, strict=True)
            self.why_not_parallel += next((f" (layer '{s.layer.name}')" for s, calls in steps if any(c.native is None for c in calls)), "")
        self._samples_launches: list[_SampleLaunches] = []
        self.executable: Executable = self._record()

    def _check_bindable(self) -> None:
        """Raises EngineError if launches cannot address inputs and outputs of single samples; the builder creates no such engine."""
        for t in _list_bindings(self.network):
            o, why = self.shaped.operands.get(t.name), self._workers[0].explain_unbindable(t.name)
            if o is None or o.format != "linear" or o.dtype != t.dtype:
                why = f"it is stored as {o}"
            elif t.dtype.bits < 8:
                why = "its elements are smaller than a byte"
            if why is not None:
                raise EngineError(f"samples cannot run separately: %{t.name} has to stay in the arena ({why})")

    def _record(self) -> Executable:
        """The launches of all samples: those of the workers, then those on all threads."""
        batch, workers = self.shaped.batch, self.shaped.workers
        rest = batch % workers
        parallel = 0 if self.why_not_parallel is not None or workers == 1 else batch if 2 * rest > workers else batch - rest
        stream = self.backend.stream()
        launch_lists: list[list[Any]] = [[] for _ in range(min(workers, parallel))]
        for i in range(parallel):
            launch_lists[i % workers] += self._record_sample(self._workers[i % workers], first=i < workers)
        if launch_lists:
            stream.record(self.backend.parallel_launch(launch_lists))
        team = self._bind_all_threads_engine() if parallel < batch else []
        for i in range(parallel, batch):
            for call in self._record_sample(team[0], first=i == parallel):
                stream.record(call)
        self._engines = [*self._workers[: len(launch_lists)], *team]
        for name in self._staged:
            self.set_address(name, None)
        return stream.finish()

    def _bind_all_threads_engine(self) -> list[BoundEngine]:
        """The engine that runs a sample on all threads, in the first worker's memory."""
        own = self._slice(0, self.shaped.on_worker.plan.arenas[0].total)
        return self._workers if self.shaped.workers == 1 else [BoundEngine(self.shaped.on_all_threads, self.backend, own)]

    def _record_sample(self, engine: BoundEngine, *, first: bool) -> list[Any]:
        """The launches of another sample in an engine's memory; layers that read inputs or write outputs get new launches."""
        launches = engine.collect_launches() if first else engine.record_again(self._staged)
        self._samples_launches.append(_SampleLaunches(engine, launches))
        return launches.calls

    # the interface of BoundEngine

    def feed(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies inputs of the whole batch. Raises ShapeError for a missing or unsuitable one."""
        for t in self.network.inputs:
            if t.name not in arrays:
                raise ShapeError(f"input '{t.name}' is missing; the engine takes {', '.join(i.name for i in self.network.inputs)}")
            self.write(t.name, np.asarray(arrays[t.name]))

    def write(self, name: str, array: np.ndarray) -> None:
        """Copies one input. Raises ShapeError for another shape or type."""
        type_ = self.shaped.types[name]
        if array.shape != static_shape(type_.shape):
            raise ShapeError(f"'{name}' has shape {list(array.shape)}, this context is set to {type_}")
        if array.dtype != type_.dtype.numpy:
            raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {type_.dtype.numpy.name}: convert it with .astype(...)")
        np.copyto(self._samples(name), np.ascontiguousarray(array).reshape(self.shaped.batch, -1).view(np.uint8))

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs of the whole batch."""
        return {t.name: self.output(t.name) for t in self.network.outputs}

    def output(self, name: str) -> np.ndarray:
        """A copy of one output of the whole batch."""
        type_ = self.shaped.types[name]
        return np.ascontiguousarray(self._samples(name)).view(type_.dtype.numpy).reshape(static_shape(type_.shape))

    def run(self) -> None:
        """Runs the batch; returns when the results are complete. Raises BackendError when a kernel fails."""
        run_checked(self.executable)

    def seconds(self, repeats: int) -> list[float]:
        """`repeats` times of the whole engine in seconds, by the backend's clock."""
        return self.backend.seconds(self.executable, repeats)

    def seconds_in_row(self, repeats: int) -> list[float]:
        """The same, back to back: on a GPU without the host's launch time (see `Backend.seconds_in_row`)."""
        return self.backend.seconds_in_row([self.executable] * repeats)

    def run_timed(self) -> list[float]:
        """Runs the first sample layer by layer, on one worker (on all threads if there is none), and returns the seconds of each layer."""
        return self._engines[0].run_timed()

    def explain_unbindable(self, name: str) -> str | None:
        """Reason why kernels cannot use a user's memory for an input or output; None if they can."""
        nbytes = self._sample_bytes(name)
        if self.shaped.batch > 1 and nbytes % ALIGNMENT:
            return f"a sample of it has {nbytes} bytes, and the next would not be {ALIGNMENT}-byte aligned"
        return None

    def set_address(self, name: str, address: int | None) -> None:
        """Makes every sample's launches use a user's memory for an input or output (the caller keeps it alive); None: the arena again."""
        at, distance = self._staged[name]
        base, stride = (self.arena.address + at, distance) if address is None else (address, self._sample_bytes(name))
        for i, sample in enumerate(self._samples_launches):
            sample.launches.sites.set_address(sample.engine, name, base + i * stride)

    def make_address_setter(self, name: str) -> Callable[[int], None]:
        """`set_address` for one input or output as a function."""
        return partial(self.set_address, name)

    def nbytes(self) -> dict[str, int]:
        """Bytes in use: arenas, additional scratch, and the packed weights (shared with others)."""
        scratch = sum(b.nbytes()["scratch"] for b in self._engines)
        return {"arena": self.arena.nbytes, "scratch": scratch, "packed": self.shaped.packed_bytes}

    # internal

    def _samples(self, name: str) -> np.ndarray:
        """The bytes of each sample of an input or output in the context's memory, which is used if no array is bound."""
        (at, each), nbytes = self._staged[name], self._sample_bytes(name)
        assert self.arena.array is not None, "host memory"
        return self.arena.array[at : at + each * self.shaped.batch].reshape(self.shaped.batch, each)[:, :nbytes]

    def _sample_bytes(self, name: str) -> int:
        return int(evaluate(self.shaped.types[name].nbytes, {})) // self.shaped.batch

    def _slice(self, at: int, nbytes: int) -> Buffer:
        array = self.arena.array
        return Buffer(self.arena.address + at, nbytes, None if array is None else array[at : at + nbytes], self.arena)


@dataclass
class _SampleLaunches:
    """The launches of one sample, and the engine that owns their memory."""

    engine: BoundEngine
    launches: RepeatedLaunches


def plan_shapes(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]],
    profile: int,
    store: WeightStore,
    configs: ConfigCheck | None = None,
) -> ShapedPlan:
    """Kernels and weights for these input shapes, of the whole batch or of its samples, depending on the profile.

    Raises as `make_shaped_plan` does.
    """
    if plan.arenas[profile].concurrent_samples:  # backends without workers are refused when the engine is read (engine/check.py)
        return plan_samples(plan, backend, shapes, profile, store, configs)
    return make_shaped_plan(plan, backend, shapes, profile, store, configs)


def bind_shapes(shaped: ShapedPlan, backend: Backend, arena: Buffer | None = None) -> Any:
    """Records a shaped plan over an arena of `count_arena_bytes` (by default its own): a BoundEngine or a SampleParallelEngine, by the profile."""
    return SampleParallelEngine(shaped, backend, arena) if isinstance(shaped, SampleParallelPlan) else BoundEngine(shaped, backend, arena)


def bind(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    profile: int = 0,
    store: WeightStore | None = None,
    arena: Buffer | None = None,
) -> BoundEngine:
    """The engine at `shapes` (default: the profile's opt shapes), ready to run: a BoundEngine, or a SampleParallelEngine.

    `store` shares packed weights with other binds of the same backend (candidate engines in a build); `arena` is memory to use,
    at least `count_arena_bytes(plan, profile)`. A tactic that cannot run here is replaced: see `bound.shaped.fell_back`.
    Raises ShapeError, EngineError, BackendError.
    """
    wanted = dict(shapes) if shapes is not None else get_opt_shapes(plan, profile)
    bound: BoundEngine = bind_shapes(plan_shapes(plan, backend, wanted, profile, store or WeightStore(backend)), backend, arena)
    return bound


def _list_bindings(net: Network) -> list[Any]:
    return [*net.inputs, *net.outputs]
