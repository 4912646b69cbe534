"""Values of a network computed by an engine with fixed kernels, reproducible under any load: used for calibration and accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np

from whet.backends import get_backend
from whet.builder.build import build
from whet.builder.candidates.enumerate import Candidates
from whet.builder.config import BuildConfig
from whet.engine.plan import EnginePlan
from whet.forks import make_lock
from whet.network import Network
from whet.runtime import Context, Engine
from whet.runtime.memory import WeightStore
from whet.tactics import list_tactics
from whet.tactics.cpu.onednn._api.library import load_error

_building = make_lock()  # builds of several threads would only wait for each other


class SharedParts:
    """What the engines of similar networks have in common: the backend, the candidates of each kind of layer, and weights in the layouts that kernels
    read."""

    def __init__(self, backend: str = "cpu") -> None:
        self.backend = get_backend(backend, threads=1)
        self.listed: dict[str, Candidates] = {}
        self.store = WeightStore(self.backend)


class EngineRun:
    """A network's values by an FP32 engine of fixed kernels on one CPU thread (or on the backend of `shared`): the same bits for the same sample
    under any load.

    Without oneDNN (possible on GPU machines) the NumPy reference computes the values: equal up to rounding, but slower.
    Q/DQ and casts are separate layers, so a network from precision.emulated computes its roundings in FP32. Threads may run different samples at
    the same time; inputs that the network does not have are ignored.
    """

    def __init__(self, net: Network, names: Iterable[str], shared: SharedParts | None = None):
        """`shared` saves work if networks with mostly the same layers are run."""
        self.net, self.names, self.shared = net, list(names), shared or SharedParts()
        self._engines: dict[tuple, Engine] = {}
        self._idle: dict[tuple, list[Context]] = {}
        self._guard = make_lock()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {t.name: tuple(np.shape(feeds[t.name])) for t in self.net.inputs}
        key = tuple(shapes.items())
        with self._guard:
            if key not in self._engines:
                with _building:
                    self._engines[key], self._idle[key] = self._build_engine(shapes), []
            context = self._idle[key].pop() if self._idle[key] else self._engines[key].create_context()
        got = context.run({n: feeds[n] for n in shapes})
        with self._guard:
            self._idle[key].append(context)
        return {n: feeds[n] if n in shapes else got[n] for n in self.names}

    @property
    def plans(self) -> list[EnginePlan]:
        """The plans of the engines that were built, one for each set of input shapes."""
        return [e.plan for e in self._engines.values()]

    def _build_engine(self, shapes: dict[str, tuple[int, ...]]) -> Engine:
        watched = self.net.clone()
        watched.outputs = []
        inputs = {t.name for t in watched.inputs}
        for name in self.names:
            if name not in inputs:
                watched.mark_output(watched.tensor(name))
        watched.prune_dead()
        dynamic = any(not t.type.static for t in watched.inputs)
        config = BuildConfig(
            backend=self.shared.backend.name, threads=1, optimization_level=0, passes=("none", "+dequantize_weights"), verify=False, timing_cache="",
            whole_engines=0, deterministic=True, profiles=((shapes, shapes, shapes),) if dynamic else (),
            tactic_sources=list_tactic_sources(self.shared.backend.name),
        )  # fmt: skip
        return Engine(build(watched, config, listed=self.shared.listed), self.shared.backend, store=self.shared.store)


@cache
def list_tactic_sources(backend: str = "cpu") -> tuple[str, ...]:
    """On the CPU, tactic sources without oneDNN, if it cannot be loaded: only the NumPy reference remains. Elsewhere those
    without TF32 and products of it: packing weights for these takes longer than all runs of an engine."""
    if backend != "cpu":
        return tuple(f"-{t.name}" for t in list_tactics(backend) if t.name.endswith("tf32"))
    if load_error() is None:
        return ()
    return tuple(f"-{t.name}" for t in list_tactics("cpu") if not t.name.rpartition("/")[2].startswith("numpy_"))
