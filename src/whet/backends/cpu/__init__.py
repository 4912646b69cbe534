"""The CPU backend: host memory, launch lists run by one compiled loop, the wall clock, one thread pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends._base import Backend, Buffer, Capabilities, Load, backend
from whet.backends.cpu import caches, info
from whet.backends.cpu import threads as _threads
from whet.backends.cpu.launch import LaunchExecutable, LaunchList
from whet.backends.cpu.load import watch
from whet.backends.cpu.machine_code import why_no_compiler
from whet.backends.cpu.memory import allocate
from whet.backends.cpu.workers import ParallelLaunch, why_not_parallel
from whet.errors import BackendError


@backend
class CpuBackend(Backend):
    """This machine's CPU with `threads` threads (0: all that the process may use).

    The constructor sets the calling thread's OpenMP thread count, because oneDNN creates descriptors for the current count.
    """

    capabilities = Capabilities(
        workers=True, measures_load=True, unsupported_types=frozenset({"f8e4m3"}), widened_types=frozenset({"f16"})
    )  # fmt: skip

    def __init__(self, threads: int = 0, **_: Any):
        usable = _threads.count_usable_cpus()
        if threads < 0:
            raise BackendError(f"the number of threads is at least 1 (or 0 for all usable ones), not {threads}")
        self.threads = threads or usable
        features, missing = info.list_cpu_features(), self.capabilities.unsupported_types
        if not features & {"avx512_bf16", "amx_bf16"}:
            missing |= {"bf16"}
        if "avx512_fp16" not in features:
            missing |= {"f16"}
        self.capabilities = replace(self.capabilities, features=features, cache_bytes=info.cache_bytes(), unsupported_types=missing)
        self.activate()

    @property
    def caution(self) -> str:
        """Names the kernels that need a compiler and the package that provides it; "" if nothing is missing."""
        why = why_no_compiler()
        if why is None:
            return ""
        return (
            f"Engines built here are slower than they could be: {why}. Without it there are no kernels for attention, SiLU after convolutions, "
            "lookup tables, gates on integers or the quantization of images, and the loop over the layers is not compiled."
        )

    @property
    def unusable_after_fork(self) -> str:
        """Reason why a child made by fork() has no threads; "" if it has."""
        return _threads.why_lost_by_fork()

    def activate(self) -> None:
        """Sets the calling thread's thread count to this backend's; call it in each thread that plans or runs kernels."""
        _threads.set_threads(self.threads)

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        """Zeroed host memory, its pages touched. Raises BackendError (with the sizes) when there is not enough."""
        return allocate(nbytes, alignment)

    def stream(self) -> LaunchList:
        """A new launch list."""
        return LaunchList(self.threads)

    def why_not_parallel(self, calls: Sequence[Any]) -> str | None:
        """Reason why launches recorded for one thread cannot run in parallel with others; None if they can."""
        return why_not_parallel(calls)

    def parallel_launch(self, launch_lists: Sequence[Sequence[Any]]) -> ParallelLaunch:
        """One launch that runs several launch lists in parallel, one thread each. Raises BackendError if `why_not_parallel` gives a reason."""
        return ParallelLaunch(launch_lists)

    def seconds(self, executable: LaunchExecutable, repeats: int) -> list[float]:
        """Wall-clock seconds of each of `repeats` runs.

        The pool's threads are woken before each run, as the preceding layer would have done; the wake-up is not part of a kernel's time.
        """
        times = []
        for _ in range(repeats):
            _threads.wake_workers()
            start = perf_counter()
            executable.run()
            times.append(perf_counter() - start)
        return times

    def warm(self, array: np.ndarray) -> None:
        """Reads an array into the caches: each thread reads its share."""
        caches.read(array, self.threads)

    def evict(self, pieces: Iterable[tuple[int, int]]) -> bool:
        """Evicts memory (addresses and bytes) from all caches; returns False without effect if this CPU has no fast instruction for it."""
        if not caches.can_evict():
            return False
        for at, nbytes in pieces:
            caches.evict(at, nbytes, self.threads)
        return True

    def watch(self) -> AbstractContextManager[Load]:
        """A context that measures the CPU time that other processes use inside it."""
        return watch()

    def key(self) -> str:
        """Model, caches, instruction sets, thread count and wait policy."""
        caches = ",".join(f"L{level}={size}" for level, size in sorted(self.capabilities.cache_bytes.items()))
        waits = _threads.wait_settings()
        policy = f"threads={self.threads} spin={waits['spin']} pool={waits['pool']}"
        return f"{info.get_cpu_model()} | {caches} | {info.format_features(self.capabilities.features)} | {policy}"

    def describe(self) -> dict[str, Any]:
        """Description of the machine for reports and engine headers."""
        return {
            "backend": "cpu",
            "model": info.get_cpu_model(),
            "cpus": _threads.count_usable_cpus(),
            "threads": self.threads,
            "caches": {f"L{level}": size for level, size in sorted(self.capabilities.cache_bytes.items())},
            "features": sorted(self.capabilities.features),
            "memory_bytes": info.get_total_memory(),
            "wait_policy": _threads.wait_settings(),
            "loop": LaunchList(self.threads).loop_kind(),
        }


__all__ = ["CpuBackend", "LaunchExecutable", "LaunchList", "Load"]
