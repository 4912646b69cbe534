"""Scrambled times: with WHET_SCRAMBLED_TIMES=SEED the tests run as on a machine where other tactics are the fastest.

Every comparison of candidates on the CPU multiplies the measured times of each by a factor of its own. A tactic's factor depends on the seed, its
name and its configuration, an engine's on its selections, so equal candidates get equal factors in a run. Under other seeds other tactics, formats,
precisions, thread counts and batch modes win: a test that fails under some seeds but not without assumes the winner of a measurement.

`make test-scrambled` runs a selection of the tests; CI does so. Processes that tests start import this file too (startup/sitecustomize.py).
This module imports nothing of whet until whet is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "WHET_SCRAMBLED_TIMES"
_COMPARISONS, _BOUND = "whet.measure.compare", "whet.runtime.steps"  # the modules whose times are scrambled
_LOWEST, _HIGHEST = 0.2, 5.0  # factors of tactics and engines
_CONFIGS = 2.0  # factors of the configurations of one tactic: 1 / 2 to 2


def scramble_processes() -> None:
    """Scrambles times in this process and in the processes that it starts, if the variable is set. Times recorded by other runs must not be read
    (own_cache.py).

    To be called before whet is imported.
    """
    if not os.environ.get(VARIABLE):
        return
    startup = str(Path(__file__).parent / "startup")
    if startup not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))
    patch_when_imported()


def patch_when_imported() -> None:
    """Makes the import of whet's comparisons replace their functions."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules with comparisons as usual, but with another loader."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in (_COMPARISONS, _BOUND):
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Replaces `compare`, or the times by layer of a bound engine, once the module is executed."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_source and the like, for tracebacks and inspect
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == _COMPARISONS:
            vars(module)["compare"] = scramble_comparison(vars(module)["compare"])
        else:
            bound = vars(module)["BoundEngine"]
            bound.run_timed = scramble_layers(bound.run_timed)


def draw_factor(*names: object, low: float = _LOWEST, high: float = _HIGHEST) -> float:
    """A factor between `low` and `high` (uniform in its logarithm) that depends on the seed and the names only."""
    text = "\0".join(map(str, (os.environ.get(VARIABLE, ""), *names)))
    uniform = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return float(low * (high / low) ** uniform)


def find_factor(run: Any) -> float:
    """The factor of a candidate of `compare`: of an option or a bound engine on the CPU that the run has as an argument; else 1.

    Tests with machines of their own state the times, which stay as they are.
    """
    for x in run.args if isinstance(run, partial) else ():
        if hasattr(x, "tactic") and hasattr(x, "signature"):
            return find_option_factor(x.tactic.name, x.config) if _is_cpu(run.func.__self__.backend) else 1.0
        if hasattr(x, "shaped") and hasattr(x, "backend"):
            return _find_engine_factor(x) if _is_cpu(x.backend) else 1.0
    return 1.0


def find_option_factor(tactic: str, config: Any) -> float:
    """The factor of a tactic times that of its configuration."""
    return draw_factor(tactic) * draw_factor(tactic, config, low=1 / _CONFIGS, high=_CONFIGS)


def _find_engine_factor(bound: Any) -> float:
    plan = getattr(bound.shaped, "plan", None) or bound.shaped.on_worker.plan
    choices = [(n, c.tactic, c.config, c.inputs, c.outputs) for n, c in sorted(plan.choices.items())]
    return draw_factor(type(bound).__name__, bound.backend.threads, choices)


def _is_cpu(backend: Any) -> bool:
    return (type(backend).__module__, type(backend).__name__) == ("whet.backends.cpu", "CpuBackend")


def scramble_comparison(compare: Callable[..., Any]) -> Callable[..., Any]:
    """`compare` with the times of each candidate multiplied by its factor."""

    def compare_scrambled(runs: Sequence[Any], policy: Any, *, run_in_order: Any = None, **options: Any) -> Any:
        factors = [find_factor(run) for run in runs]

        def run_scrambled(i: int) -> float:
            return float(runs[i]() * factors[i])

        def run_all(order: Sequence[int]) -> list[float]:
            return [s * factors[i] for i, s in zip(order, run_in_order(order), strict=True)]

        scrambled = [partial(run_scrambled, i) for i in range(len(runs))]
        return compare(scrambled, policy, run_in_order=None if run_in_order is None else run_all, **options)

    return compare_scrambled


def scramble_layers(run_timed: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
    """The times by layer of a bound engine, each multiplied by the factor of the layer's tactic."""

    def run_timed_scrambled(self: Any) -> list[float]:
        times = run_timed(self)
        if not _is_cpu(self.backend):
            return times
        choices = self.shaped.plan.choices
        chosen = [choices.get(step.layer.name) for step in self.shaped.steps]
        return [s if c is None else s * find_option_factor(c.tactic, c.config) for s, c in zip(times, chosen, strict=True)]

    return run_timed_scrambled
