"""Runtime and Engine: open an engine file, compare it with this machine, share its kernels and weights between contexts."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from whet import forks
from whet.backends import Backend, get_backend
from whet.engine import EnginePlan, Profile, probe_differs, probe_inputs
from whet.engine.check import check_plan
from whet.engine.file import release_pages
from whet.errors import BackendError, ContextError, EngineError, ShapeError, UsageError, WhetError, WhetWarning
from whet.forks import make_lock
from whet.network import DType, Network, TensorType
from whet.plugin_packages import list_version_changes
from whet.runtime.calls import ContextPool, call_engine, call_with, name_inputs
from whet.runtime.kernels import ConfigCheck, Planned, list_library_versions
from whet.runtime.memory import WeightStore, read_bytes
from whet.runtime.profiles import compute_size_factor
from whet.runtime.sample_parallel import count_arena_bytes, plan_shapes
from whet.runtime.shape_trace import ShapeTrace
from whet.runtime.shaped import ShapedPlan, get_opt_shapes
from whet.runtime.verified import find_record, is_recorded, read_digest, write_record

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from whet.measure.benchmark import Benchmark
    from whet.runtime.context import Context

_FAR = 32.0  # factor between the elements of an input and those at the opt shape from which a warning says so
_MAX_SHAPED = 16  # sets of input shapes for which an engine caches kernels


class EngineWarning(WhetWarning):
    """An engine does not run as it was tuned: different hardware or libraries, or a tactic that cannot run on this machine."""


class Runtime:
    """Opens engines on one backend. `backend` is a name, a Backend, or None for the one that each engine was built for.

    `threads` 0 uses as many as the engine was tuned with. Raises BackendError if the device or its library is missing.
    """

    def __init__(self, backend: str | Backend | None = None, threads: int = 0):
        self._backend, self._threads = backend, threads

    def load(
        self,
        source: str | os.PathLike | bytes | EnginePlan,
        *,
        require_same_hardware: bool = False,
        record_shapes: str | os.PathLike | None = None,
    ) -> Engine:
        """An engine from a file, its bytes, or a plan from the builder. `record_shapes` is a file for the shapes of its runs (see
        whet.runtime.shape_trace); without it the environment variable WHET_RECORD_SHAPES names one.

        An engine tuned with other hardware, libraries or threads is loaded with a warning that names the differences, and its probe is run;
        with `require_same_hardware` it is refused. Raises EngineError.
        """
        if isinstance(source, Engine):
            raise EngineError("this is a loaded engine already: call engine(x) or engine.create_context()")
        if isinstance(source, EnginePlan):
            plan, where, digest = source, "the engine", ""
            check_plan(plan)
        else:
            from whet.engine import read_engine

            plan = read_engine(source, defer=True)
            digest = read_digest(plan)
            where = "the engine" if isinstance(source, bytes | bytearray | memoryview) else f"{Path(source).name}"
        engine = Engine(plan, self._choose_backend(plan, where), require_same_hardware=require_same_hardware, where=where, file_digest=digest)
        if record_shapes or (record_shapes := os.environ.get("WHET_RECORD_SHAPES")):
            engine.shape_trace = ShapeTrace(record_shapes)
        return engine

    def _choose_backend(self, plan: EnginePlan, where: str) -> Backend:
        if self._backend is not None and not isinstance(self._backend, str):
            return self._backend
        if self._backend not in (None, plan.backend):
            raise EngineError(
                f"{where} was built for the backend '{plan.backend}', this runtime is on '{self._backend}': use that one, or build it again"
            )
        try:
            threads = self._threads or min(plan.threads, get_backend(plan.backend).threads)
            return get_backend(plan.backend, threads=threads)
        except BackendError as e:
            raise EngineError(f"{where} needs the backend '{plan.backend}', which cannot be used here: {e}") from e


@dataclass(frozen=True)
class Memory:
    """Bytes in use: arena and scratch of one context, weights packed for the backend (shared), source weights (mapped or in memory)."""

    arena: int
    scratch: int
    packed: int
    weights: int

    @property
    def peak(self) -> int:
        """The sum of all."""
        return self.arena + self.scratch + self.packed + self.weights

    def __str__(self) -> str:
        mib = {k: v / 2**20 for k, v in vars(self).items()}
        return (
            f"{self.peak / 2**20:.1f} MiB (arena {mib['arena']:.1f}, scratch {mib['scratch']:.1f}, packed weights {mib['packed']:.1f}, "
            f"source weights {mib['weights']:.1f})"
        )


class Engine:
    """An engine that is ready to run: `engine(x)`. Immutable and thread-safe.

    Made by `whet.build(model)` and `whet.load(path)`. `run`, `run_async` and the call itself take arrays; `create_context` gives contexts, for
    bound buffers, streams and layer times. `inputs`, `outputs` and `profiles` describe it, `plan` has the data, `warnings` those of loading.
    """

    def __init__(
        self, plan: EnginePlan, backend: Backend, *, require_same_hardware: bool = False, where: str = "the engine", file_digest: str = "",
        store: WeightStore | None = None,
    ):  # fmt: skip
        """`file_digest` is that of the engine file, if the plan is as the file has it. Engines of the same backend may share a `store` of weights."""
        self.plan, self.backend = plan, backend
        self.warnings: list[str] = []
        self._where = where
        self._told: set[tuple[str, str]] = set()
        self._far: set[int] = set()  # profiles with a warning about far shapes
        libraries = {k: v for p in plan.by_profile() for k, v in list_library_versions(p.choices, backend).items()}
        differences = list_machine_differences(plan, backend, libraries)
        probed = all(p.probe for p in plan.by_profile())  # packed weights cannot be compared with the source weights: the probe tests them
        self._store = store or WeightStore(backend, plan.packed if probed and not differences else {})
        record = find_record(plan, file_digest, backend, libraries) if probed and (plan.packed or differences) else None
        is_verified = is_recorded(record)
        self._configs = None if is_verified else ConfigCheck()  # a record is written only if all stored configs were admitted
        self._shaped: OrderedDict[tuple, ShapedPlan] = OrderedDict()
        self._lock = make_lock()
        self._open = True
        self._pool = ContextPool(self)
        self._workers: tuple[int, ThreadPoolExecutor] | None = None  # of run_async, with the process that started them
        self.generation = forks.generation
        self.shape_trace: ShapeTrace | None = None  # counts the shapes of all runs
        self.poisoned = ""  # the reason, after a kernel failure that lost the engine's memory
        self._inputs = {t.name: t.type for t in plan.network.inputs}
        self._types: dict[str, TensorType] = {t.name: t.type for t in (*plan.network.inputs, *plan.network.outputs)} | self.outputs
        if differences and require_same_hardware:
            raise EngineError(f"{where} was tuned on other hardware: {'; '.join(differences)}. Build it again here.")
        if differences:
            self._warn(f"{where} was tuned elsewhere ({'; '.join(differences)}): it may be slower than one tuned here")
        release_pages(plan)
        try:
            self.get_shaped_plan(0, get_opt_shapes(plan, 0))  # plans the kernels now, so that fallbacks are reported at load
        except EngineError:
            raise
        except WhetError as e:
            raise EngineError(f"{where} cannot run here: {e}") from e
        if not is_verified and probed and (differences or self._store.used_prepacked):
            if differences:
                self._run_probe("here", "Do not use it on this machine; build it again here.")
            else:
                advice = "Its packed weights may be damaged: build it again, or write it without packed weights, which are then packed at load."
                self._run_probe("with its packed weights", advice)
            if record is not None and not any(shaped.fell_back for shaped in self._shaped.values()):
                write_record(record)
        elif differences and plan.probe and not is_verified:
            self._run_probe("here", "Do not use it on this machine; build it again here.")
        self._store.forget_prepacked()
        release_pages(plan)

    def __repr__(self) -> str:
        ins, outs = (", ".join(f"{n}: {t}" for n, t in ts.items()) for ts in (self.inputs, self.outputs))
        return f"<Engine {self.plan.network.name!r} on {self.plan.backend}: {len(self.plan.network.layers)} layers, {ins} -> {outs}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an engine cannot be pickled or copied: load its file in each process (whet.load(path)); threads can share it")

    # properties

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """`inputs` without the copy, for code that runs in each call; it must not be changed."""
        return self._inputs

    @property
    def inputs(self) -> dict[str, TensorType]:
        """Types of the inputs by name, in order; dims may be symbols."""
        return dict(self._inputs)

    @property
    def outputs(self) -> dict[str, TensorType]:
        """Types of the outputs by name, in order; sizes that depend on the data are symbols."""
        if self.plan.tail is not None:
            return self.plan.tail.types(self.plan.network)
        return {t.name: t.type for t in self.plan.network.outputs}

    @property
    def profiles(self) -> list[Profile]:
        """Optimization profiles: the shapes that contexts support."""
        return list(self.plan.profiles)

    def dtype(self, name: str) -> DType:
        """Element type of an input or output. Raises ShapeError for an unknown name."""
        if name not in self._types:
            raise ShapeError(f"the engine has no input or output '{name}'; it has {', '.join(self._types)}")
        return self._types[name].dtype

    def describe(self) -> dict[str, Any]:
        """Name, inputs, outputs, profiles, machine, layer count and fallbacks, as JSON data."""
        first = next(iter(self._shaped.values()), None)
        return {
            "name": self.plan.network.name,
            "backend": self.plan.backend,
            "threads": self.plan.threads,
            "machine": self.plan.machine,
            "inputs": {n: str(t) for n, t in self.inputs.items()},
            "outputs": {n: str(t) for n, t in self.outputs.items()},
            "profiles": [{n: {"min": lo, "opt": opt, "max": hi} for n, (lo, opt, hi) in p.shapes.items()} for p in self.plan.profiles],
            "layers": len(self.plan.network.layers),
            "fell_back": dict(first.fell_back) if first else {},
            "warnings": list(self.warnings),
        }

    def memory(self, context: Context | None = None) -> Memory:
        """Bytes in use, including arena and scratch of `context` (None: those planned for profile 0)."""
        held = (t.weight for p in self.plan.by_profile() for t in p.network.constants.values())
        arrays = {w.digest: size for w in held if w is not None and isinstance(size := w.type.nbytes, int)}
        used = context.nbytes() if context is not None else {"arena": count_arena_bytes(self.plan), "scratch": 0}
        return Memory(used["arena"], used["scratch"], self._store.nbytes(), sum(arrays.values()))

    def refittable_weights(self) -> dict[str, TensorType | None]:
        """Source weights that `refit` can replace, with their types (None: the engine file has no values of it)."""
        from whet.runtime.refit import list_refittable_weights

        return list_refittable_weights(self.plan)

    def refit(self, weights: Mapping[str, np.ndarray] | Network) -> Engine:
        """A new engine with other values of source weights: the same kernels, nothing is timed. Raises EngineError (see whet.runtime.refit).

        `weights` are arrays by name, or a source network of the same structure. The new engine must reproduce the outputs of that network.
        """
        from whet.runtime.refit import read_refittable_weights, refit

        return refit(self, read_refittable_weights(self, weights), like=weights) if isinstance(weights, Network) else refit(self, weights)

    # running

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Runs the engine on arrays by position or by name; safe from any thread.

        By position: returns the output, or a tuple of all outputs. By name (`engine(x=a)`, `engine({"x": a})`): a dict of outputs by name.
        Inputs and outputs are as in `run`.

            >>> y = engine(x)                  # doctest: +SKIP
            >>> y = engine(ids, mask)          # doctest: +SKIP
            >>> y = engine(x=x)["output"]      # doctest: +SKIP
        """
        return call_with(self, inputs, named)

    def run(self, inputs: Any) -> Any:
        """Outputs for `inputs`: a dict by name gives a dict by name, a list in the order of `engine.inputs` a list, an array the output.

        Arrays are NumPy's, torch's or CuPy's, or objects with __dlpack__; outputs are of the kind of the first input. On a GPU, tensors
        in its memory are used without copies, and the outputs are new tensors there; the call returns when they are complete. Lists of
        numbers are converted to the input's type. Shapes are taken from the arrays, each within a profile.

        Safe from any thread: each call uses a context of a pool, so that concurrent calls run at the same time. `create_context` gives a
        context of one's own, with bound buffers and streams. Raises ShapeError for unsuitable inputs.
        """
        return call_engine(self, self._pool, inputs)

    async def run_async(self, inputs: Any) -> Any:
        """`run` in a thread of the engine: `outputs = await engine.run_async(inputs)`. The event loop continues meanwhile.

        Concurrent calls on a CPU run one after the other, each on all threads of the engine; on a GPU two are in flight.
        """
        from asyncio import get_running_loop

        return await get_running_loop().run_in_executor(self._get_executor(), self.run, inputs)

    def _get_executor(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._workers is None or self._workers[0] != os.getpid():  # threads do not exist in the child of a fork
                count = 2 if self.backend.capabilities.user_streams else 1
                self._workers = os.getpid(), ThreadPoolExecutor(count, thread_name_prefix="whet-engine")
            return self._workers[1]

    def benchmark(self, inputs: Any = None, *, shapes: Mapping[str, tuple[int, ...]] | None = None, seconds: float = 1.0) -> Benchmark:
        """Times the engine for about `seconds`, after a warm-up of a fifth of it: latency (median, percentiles) and throughput.

        `inputs` as in `run`; default: seeded random values of `shapes`, or of the first profile's opt shapes.

            >>> print(engine.benchmark(seconds=0.5))    # doctest: +SKIP
            latency 1.234 ms (median; 1.201 to 1.262 for 95 % confidence, p99 1.402), 808 queries/s, ...
        """
        from whet.measure.benchmark import benchmark

        return benchmark(self, None if inputs is None else name_inputs(self, inputs), shapes=shapes, seconds=seconds)

    def explain(self, layer: str | None = None) -> str:
        """The engine's decisions as text: a table of its layers with times, tactics and types; with a layer's or node's name its candidates.

        `whet.inspector.explain(engine.plan)` has the data. Raises UsageError for an unknown layer.
        """
        from whet.inspector.summary import make_explanation

        if not isinstance(layer, str | None):
            raise UsageError(f"layer: the name of a layer or of a node of the model, not {layer!r}")
        return make_explanation(self.plan, layer)

    def save(self, path: str | os.PathLike, *, packed_weights: bool = False) -> Path:
        """Writes the engine to a file, which `whet.load` opens; returns its path. With `packed_weights` the file is larger and loads faster on
        this machine. Raises EngineError if it cannot be written."""
        from whet.engine import write_engine

        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"path: the name of a file, not {path!r}")
        write_engine(self.plan, path, packed_weights=self.packed_weights() if packed_weights else None)
        return Path(path)

    # contexts and kernels

    def create_context(self, profile: int | None = None) -> Context:
        """A context with its own arena and launches, set to the profile's opt shapes. Not thread-safe.

        Without `profile` it starts with profile 0 and selects, for any shapes, the matching profile tuned for the nearest shapes;
        its arena then has the size of the largest profile's.
        """
        from whet.runtime.context import Context

        self._check_open()
        return Context(self, profile)

    def get_shaped_plan(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> ShapedPlan:
        """Kernels and weights for these shapes, planned once and cached."""
        self._check_open()
        key = (profile, tuple(sorted((k, tuple(v)) for k, v in shapes.items())))
        with self._lock:
            shaped = self._shaped.get(key)
            if shaped is not None:
                self._shaped.move_to_end(key)
                return shaped
            plan, number = self.plan.part(profile)
            shaped = plan_shapes(plan, self.backend, shapes, number, self._store, self._configs)
            self._shaped[key] = shaped
            while len(self._shaped) > _MAX_SHAPED:
                self._shaped.popitem(last=False)
        self._warn_of_fallbacks(shaped)
        self._warn_of_far_shapes(profile, shapes)
        return shaped

    def _warn_of_far_shapes(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Warns once per profile of shapes that have little in common with those that its kernels were timed at."""
        tuned = self.plan.profiles[profile] if self.plan.profiles else None
        if tuned is None or (factor := compute_size_factor(tuned, shapes)) <= _FAR or profile in self._far:
            return
        self._far.add(profile)
        at = [shapes, {n: s[1] for n, s in tuned.shapes.items()}]
        given, opt = (", ".join(f"{n}: {'x'.join(map(str, a[n]))}" for n in tuned.shapes) for a in at)
        self._warn(
            f"{given} differs by a factor of {factor:.3g} from what profile {profile} was tuned for ({opt}): its kernels may be slow there. "
            "Build with a profile for such shapes, or record those that occur and tune for them: whet retune --from-trace"
        )

    def _warn_of_fallbacks(self, shaped: ShapedPlan) -> None:
        """Warns once about all layers with a tactic that cannot run. At other shapes than the opt ones, another configuration of the same tactic
        is no warning: a library's implementations depend on the shape."""
        groups: dict[str, list[Planned]] = {}
        is_tuned = shaped.shapes == get_opt_shapes(shaped.plan, shaped.profile)
        for s in shaped.steps:
            wanted = shaped.plan.choices[s.layer.name].tactic
            if s.fell_back and (is_tuned or s.tactic != wanted) and (s.layer.name, s.fell_back) not in self._told:
                self._told.add((s.layer.name, s.fell_back))
                groups.setdefault(wanted, []).append(s)
        for wanted, members in groups.items():
            first, now = members[0], ", ".join(dict.fromkeys(s.tactic for s in members))
            if len(members) == 1:
                self._warn(f"layer '{first.layer.name}' runs on {now} instead of {wanted}: {first.fell_back}")
            else:  # only one name, as names of fused layers are long
                more = f"'{first.layer.name}' and {len(members) - 1} more"
                self._warn(f"{len(members)} layers ({more}) run on {now} instead of {wanted}; the first because {first.fell_back}")

    def packed_weights(self) -> dict[str, np.ndarray]:
        """The packed weights of the planned kernels: pass them to `write_engine` so that loading on this machine packs nothing."""
        packed: dict[str, np.ndarray] = {}
        for shaped in self._shaped.values():
            for step, held in zip(shaped.steps, shaped.packed, strict=True):
                for p, s in zip(step.kernel.packed, held, strict=True):
                    if not p.storable:
                        continue
                    packed[p.key] = np.array(read_bytes(self.backend, s.buffer, 0, p.nbytes))
        return packed

    def close(self) -> None:
        """Releases kernels, weights and the contexts of calls; contexts of one's own keep theirs. Later use of the engine raises ContextError."""
        self._open = False
        if self.shape_trace is not None:
            self.shape_trace.save()
        self._pool.close()
        if self._workers is not None and self._workers[0] == os.getpid():
            self._workers[1].shutdown(wait=False)
            self._workers = None
        self._shaped.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ContextError("the engine is closed; load it again")
        self.check_alive()

    def check_alive(self) -> None:
        """Raises ContextError after a kernel failure that invalidated the engine's memory, and in a child process that cannot use the engine."""
        if self.generation != forks.generation and (reason := self.backend.unusable_after_fork):
            raise ContextError(reason)
        if self.poisoned:
            raise ContextError(f"this engine is poisoned and cannot be used again: {self.poisoned}")

    def handle_failure(self, error: BackendError) -> None:
        """Called for each failure in a context: if the device's memory is lost (`lost`), the engine cannot be used again."""
        if self.backend.lost:
            self.poisoned = self.poisoned or str(error)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        warnings.warn(text, EngineWarning, stacklevel=4)

    def _run_probe(self, where: str, advice: str) -> None:
        """Compares the outputs for each probe input with those stored by the build. Raises EngineError if they differ."""
        for k, part in enumerate(self.plan.by_profile()):
            if not (probe := part.probe):
                continue
            context = self.create_context(k or None)
            bound = context.launches(probe["shapes"])
            bound.feed(probe_inputs(part.network, probe["seed"], {n: tuple(v) for n, v in probe["shapes"].items()}))
            bound.run()
            if different := probe_differs(probe, bound.fetch()):
                raise EngineError(f"{self._where} gives other results {where} than where it was verified: {different}. {advice}")
            if k == 0:
                self._pool.take_back(context)  # with its recorded launches, for the first call

def list_machine_differences(plan: EnginePlan, backend: Backend, libraries: Mapping[str, str] | None = None) -> list[str]:
    """Descriptions of the differences between this machine and the one of the build; empty if the machine keys are equal. `libraries` are the
    versions of the tactics' libraries here, if they are known already."""
    there = dict(plan.machine.get("libraries") or {})
    here = libraries
    if here is None:
        here = {k: v for p in plan.by_profile() for k, v in list_library_versions(p.choices, backend).items()}
    changed = [f"{k}: {v} there, {here.get(k, 'none')} here" for k, v in sorted(there.items()) if here.get(k) != v]
    changed += list_version_changes(plan.plugins)
    if plan.machine_key == backend.key():
        return changed
    then, now = _flatten({k: v for k, v in plan.machine.items() if k != "libraries"}), _flatten(backend.describe())
    differences = [f"{k}: {then.get(k, 'none')} there, {now.get(k, 'none')} here" for k in sorted(then | now) if then.get(k) != now.get(k)]
    if plan.threads != backend.threads and not any("thread" in f for f in differences):
        differences.append(f"threads: {plan.threads} there, {backend.threads} here")
    return [*differences, *changed] or [f"machine: {plan.machine_key} there, {backend.key()} here"]


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for k, v in data.items():
        if isinstance(v, Mapping):
            flat |= _flatten(v, f"{prefix}{k} ")
        else:
            flat[f"{prefix}{k}"] = ", ".join(map(str, v)) if isinstance(v, list | tuple | set | frozenset) else str(v)
    return flat
