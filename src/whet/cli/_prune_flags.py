"""The build flags shared by `whet prune`, `whet compare` and `whet latency-table`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from whet.cli import _exec_values as values

_FLAGS = (
    click.option("--backend", default="cpu", show_default=True, help="Backend that the engine is for: cpu, cuda, null or another that is installed."),
    click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads (0: all usable ones)."),
    click.option("--shapes", "shapes", help="Input shapes to optimize for: input0:8x3x224x224,... (default: 1 for each symbol)."),
    click.option("--fp16", is_flag=True, help="The engine may store and compute in FP16."),
    click.option("--bf16", is_flag=True, help="The engine may store and compute in BF16."),
    click.option("--int8", is_flag=True, help="The engine may compute in INT8 (timed with placeholder ranges; calibrate the result)."),
    click.option("--timingCacheFile", "timing_cache", type=click.Path(dir_okay=False), help="Timing cache (default: the user's)."),
)


def build_flags(command: Callable) -> Callable:
    """Adds the flags; the command takes their values as keywords and passes them to `build_config`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def build_config(*, backend: str, threads: int, shapes: str | None, fp16: bool, bf16: bool, int8: bool, timing_cache: str | None) -> Any:
    """The BuildConfig of the flags. Raises UsageError for invalid shapes."""
    from whet.builder import BuildConfig

    at = values.parse_shapes(shapes, "shapes") if shapes else None
    return BuildConfig(
        backend=backend,
        threads=threads,
        precisions=tuple(name for name, on in (("fp16", fp16), ("bf16", bf16), ("int8", int8)) if on),
        profiles=((at, at, at),) if at else (),
        timing_cache=timing_cache,
    )


_TIMED_ONLY = ("table", "retime", "no_engines", "backend", "threads", "shapes", "fp16", "bf16", "int8", "timing_cache")


def check_effective_flags(*, target: str | None, data: str | None, importance: str) -> None:
    """Raises UsageError for flags of `whet prune` that have no effect in combination with the others.

    `target` is the flag of the target without its dashes (None: --ratio), `data` the source of the recovery data.
    """
    from whet.errors import UsageError

    now = click.get_current_context()
    given = {str(p.name): p.opts[0] for p in now.command.params if now.get_parameter_source(str(p.name)) is not click.core.ParameterSource.DEFAULT}

    def refuse(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in given:
                raise UsageError(f"{given[name]} has no effect here: {why}")

    if target is not None:
        refuse(("ratio",), f"--{target} sets the amount. Leave one of them out.")
        refuse(("scope",), f"--{target} chooses over all groups; --scope is for --ratio.")
        refuse(("width",), f"--{target} chooses the widths. --skip excludes a group.")
    else:
        refuse(("depth",), "with --ratio alone no branch is removed. It is for --latency and other targets.")
    if target not in ("latency", "throughput"):
        refuse(_TIMED_ONLY, "nothing is built or timed. It is for --latency and --throughput.")
    if data is None:
        refuse(("preprocess", "samples"), "there is no data. Give --calibData too.")
    if not importance.startswith("taylor"):
        refuse(("labels",), "labels are for --importance=taylor1 and taylor2; recovery needs none.")
