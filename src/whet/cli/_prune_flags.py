"""Flags that `whet prune`, `whet compare` and `whet latency-table` share: for which engine latencies are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from whet.cli import _exec_values as values

_FLAGS = (
    click.option("--backend", default="cpu", show_default=True, help="Machine that the engine is for: cpu, cuda, null."),
    click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads (0: all usable ones)."),
    click.option("--shapes", "shapes", help="Input shapes to be fast at: input0:8x3x224x224,... (default: 1 for each symbol)."),
    click.option("--fp16", is_flag=True, help="The engine may store and compute in FP16."),
    click.option("--bf16", is_flag=True, help="The engine may store and compute in BF16."),
    click.option("--int8", is_flag=True, help="The engine computes in INT8 where it can (timed with invented ranges; calibrate what comes out)."),
    click.option("--timingCacheFile", "timing_cache", type=click.Path(dir_okay=False), help="Timing cache (default: the user's)."),
)


def build_flags(command: Callable) -> Callable:
    """Adds the flags; the command takes their values as keywords and passes them to `build_config`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def build_config(*, backend: str, threads: int, shapes: str | None, fp16: bool, bf16: bool, int8: bool, timing_cache: str | None) -> Any:
    """The BuildConfig of the flags. Raises UsageError for shapes that cannot be read."""
    from whet.builder import BuildConfig

    at = values.shapes(shapes, "shapes") if shapes else None
    return BuildConfig(
        backend=backend,
        threads=threads,
        precisions=tuple(name for name, on in (("fp16", fp16), ("bf16", bf16), ("int8", int8)) if on),
        profiles=((at, at, at),) if at else (),
        timing_cache=timing_cache,
    )
