"""Values of a network computed by an engine with fixed kernels, reproducible under any load: used for calibration and accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np

from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.network import Network
from whet.runtime import Context, Runtime
from whet.tactics import list_tactics
from whet.tactics.cpu.onednn._api.library import load_error


class EngineRun:
    """A network's values by an FP32 engine of fixed kernels on one thread: the same bits for the same sample under any load.

    Without oneDNN (possible on GPU machines) the NumPy reference computes the values: equal up to rounding, but slower.
    Q/DQ and casts are separate layers, so a network from precision.emulated computes its roundings in FP32.
    """

    def __init__(self, net: Network, names: Iterable[str]):
        self.net, self.names = net, list(names)
        self.contexts: dict[tuple, Context] = {}

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {t.name: tuple(np.shape(feeds[t.name])) for t in self.net.inputs}
        key = tuple(shapes.items())
        if key not in self.contexts:
            self.contexts[key] = self._context(shapes)
        got = self.contexts[key].run(feeds)
        return {n: feeds[n] if n in shapes else got[n] for n in self.names}

    def _context(self, shapes: dict[str, tuple[int, ...]]) -> Context:
        watched = self.net.clone()
        watched.outputs = []
        inputs = {t.name for t in watched.inputs}
        for name in self.names:
            if name not in inputs:
                watched.mark_output(watched.tensor(name))
        watched.prune_dead()
        dynamic = any(not t.type.static for t in watched.inputs)
        config = BuildConfig(
            threads=1, optimization_level=0, passes=("none", "+dequantize_weights"), verify=False, timing_cache="", whole_engines=0,
            profiles=((shapes, shapes, shapes),) if dynamic else (), tactic_sources=list_tactic_sources(),
        )  # fmt: skip
        return Runtime(backend="cpu", threads=1).load(build(watched, config)).create_context()


@cache
def list_tactic_sources() -> tuple[str, ...]:
    """Tactic sources without oneDNN, if it cannot be loaded: only the NumPy reference remains."""
    if load_error() is None:
        return ()
    return tuple(f"-{t.name}" for t in list_tactics("cpu") if not t.name.rpartition("/")[2].startswith("numpy_"))
