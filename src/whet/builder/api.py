"""The builds of the public interface: they warn of each note, and refuse INT8 and FP8 without ranges. The command line prints notes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from whet.builder.build import build as _build
from whet.builder.config import BuildConfig
from whet.builder.precision import float8, int8
from whet.builder.precision.calibration import is_explicit
from whet.builder.retune import retune as _retune
from whet.engine.plan import EnginePlan
from whet.errors import BuildWarning, MemoryLimitError, UsageError
from whet.network import Network
from whet.option_names import reads_flags, translate_flags

P = ParamSpec("P")


def _warn_about_notes(build: Callable[P, EnginePlan], *, needs_ranges: bool = False) -> Callable[P, EnginePlan]:
    """`build`, with a BuildWarning for each note of its plan. `needs_ranges` refuses INT8 and FP8 for a network without Q/DQ nodes."""

    @wraps(build)
    def build_with_warnings(*args: P.args, **kwargs: P.kwargs) -> EnginePlan:
        net, config = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("net", "config")))
        if needs_ranges and isinstance(net, Network) and isinstance(config, BuildConfig):
            _must_have_ranges(net, config)
        try:
            plan = build(*args, **kwargs)
        except MemoryError as e:
            raise MemoryLimitError(f"the build needs more memory than this machine has: {e or 'MemoryError'}. Lower the shapes or the batch.") from e
        if not reads_flags():
            for note in plan.report.notes:
                warnings.warn(translate_flags(note), BuildWarning, stacklevel=2)
        return plan

    return build_with_warnings


def _must_have_ranges(net: Network, config: BuildConfig) -> None:
    wanted = next((p for p in ("int8", "fp8") if p in config.precisions), None)
    if wanted is None or config.lock or is_explicit(net):
        return
    function = f"build_{'int8' if wanted == 'int8' else 'float8'}"
    raise UsageError(
        f"precisions={config.precisions!r} needs ranges, and the network has no Q/DQ nodes: call whet.builder.{function}(net, config, "
        "Calibration(samples=lambda: batches)) with calibration data, where batches yields a dict of arrays by input name, or "
        f"Calibration(cache=path); or leave out {wanted!r}"
    )


build = _warn_about_notes(_build, needs_ranges=True)
build_int8 = _warn_about_notes(int8.build_int8)
build_float8 = _warn_about_notes(float8.build_float8)
retune = _warn_about_notes(_retune)
