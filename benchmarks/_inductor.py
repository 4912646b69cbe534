"""torch.compile's cache for several networks: filled on one machine without disturbing its timings, packed, and used on another.

Most of a first max-autotune is CPU time for compiling Triton's candidates. Several processes can compile in parallel if only one at a time
uses the GPU: `exclusive` puts each of Inductor's timings under a lock. The settings are those of `compiled`,
for filling and for measuring, so that the cache keys agree.
"""

from __future__ import annotations

import fcntl
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: seconds for which the GPU stays with a process outside the queue after its turn: its next measurement follows soon
LINGERS = 0.2


class Turn:
    """A reentrant lock (for one thread) among the processes that share a GPU. Processes in the queue (`queues`) wait for one another first, and
    until no process outside the queue had a turn for LINGERS: such a process waits for one turn at most, and then measures without interruption."""

    def __init__(self, gpu: str, queues: bool = False) -> None:
        def lock_file(name: str) -> int:
            path = Path(tempfile.gettempdir()) / f"gpu_peers.{os.getuid()}.{gpu}.{name}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # files of an ending process are closed in ascending order: this one after the GPU's, whose memory is free by then
            last = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 900)
            os.close(file)
            return last

        self.file, self.queue = lock_file("lock"), lock_file("queue")
        self.queues, self.depth, self.waited = queues, 0, 0.0

    def __enter__(self) -> None:
        if not self.depth:
            begun = time.perf_counter()
            if self.queues:
                fcntl.flock(self.queue, fcntl.LOCK_EX)
            fcntl.flock(self.file, fcntl.LOCK_EX)
            while self.queues and time.monotonic() - self._find_last_turn() < LINGERS:
                fcntl.flock(self.file, fcntl.LOCK_UN)
                time.sleep(LINGERS / 4)
                fcntl.flock(self.file, fcntl.LOCK_EX)
            if self.queues:
                fcntl.flock(self.queue, fcntl.LOCK_UN)
            self.waited += time.perf_counter() - begun
        self.depth += 1

    def _find_last_turn(self) -> float:
        """The end of the last turn of a process outside the queue, by the clock that all processes share."""
        return float(os.pread(self.file, 32, 0) or b"-inf")

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            if not self.queues:
                os.pwrite(self.file, f"{time.monotonic():<32.6f}".encode(), 0)
            fcntl.flock(self.file, fcntl.LOCK_UN)


#: the settings of `compiled`, for the note of result files
SETTINGS = (
    "torch.compile: mode max-autotune-no-cudagraphs, captured in a CUDA graph by the benchmark; 1x1 convolutions as products, other convolutions by "
    "cuDNN (ATEN); no freezing; FP16 modules in eval mode without gradients"
)


def compiled(net: Any) -> Any:
    """torch.compile of a network with the baseline's settings: max-autotune, 1x1 convolutions as products, cuDNN's convolutions.

    `no-cudagraphs`, since the caller captures the graph itself, without the input copy of Inductor's own graphs.
    """
    import torch
    import torch._inductor.config as inductor

    inductor.conv_1x1_as_mm = True
    inductor.max_autotune_conv_backends = "ATEN"  # cuDNN is faster here than Inductor's own convolutions
    return torch.compile(net, mode="max-autotune-no-cudagraphs")


def exclusive(turn: Turn) -> None:
    """Makes Inductor in this process hold `turn` while it times kernels.

    Candidates are compiled by threads: after its pool of processes the candidates are compiled again, serially, during timing
    (observed with torch 2.11: 0.45 s per candidate, against 0.01 s with threads).
    """
    import torch
    from torch._inductor import async_compile, select_algorithm
    from torch._inductor.runtime.benchmarking import benchmarker

    def run_in_turn(function: Callable) -> Callable:
        def call(*args: Any, **named: Any) -> Any:
            with turn:
                found = function(*args, **named)
                torch.cuda.synchronize()
                return found

        return call

    for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
        if hasattr(benchmarker, name):
            setattr(benchmarker, name, run_in_turn(getattr(benchmarker, name)))

    selector, pool = select_algorithm.AlgorithmSelectorCache, async_compile.AsyncCompile
    chosen = selector.make_precompile_fn

    def by_threads(*args: Any, **named: Any) -> Any:
        usual = pool.__dict__["use_process_pool"]
        pool.use_process_pool = classmethod(lambda _: False)
        try:
            return chosen(*args, **named)
        finally:
            pool.use_process_pool = usual

    selector.make_precompile_fn = by_threads


def pack(folder: Path, archive: Path) -> int:
    """Packs a cache folder without the losing kernels (Triton's own cache; selected kernels are bundled with the graph); returns bytes."""
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        for path in sorted(folder.iterdir()):
            if path.name not in ("triton", "locks"):
                tar.add(path, path.name)
    return archive.stat().st_size


def unpack(archive: Path, folder: Path) -> None:
    """Extracts a cache archive written by this project's benchmark (it contains pickles, as Inductor's cache does)."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
