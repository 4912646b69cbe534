"""Growth of GPU memory: builds and loads one network repeatedly in one process and reads the process's GPU memory.

The first build fills a timing cache, the others use it; every tenth is verified too. The memory is that of the process by NVML, or, if NVML
does not report processes, that used on the whole GPU: then nothing else may run there.

Usage: python3 benchmarks/gpu_memory.py [network] [rounds] [seconds]      # ends after these seconds, with the rounds measured so far
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
from gpu_engines import CONFIG, network

from whet.backends import get_backend
from whet.builder import build
from whet.runtime import Runtime


def read_used_memory(machine: Any) -> tuple[int, bool]:
    """Bytes of GPU memory in use, and True if they are only this process's."""
    with suppress(pynvml.NVMLError):  # not available in some virtual machines
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(machine.device.bus_id)
        mine = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        if mine and mine[0]:
            return mine[0], True
    free, total = machine.device.free_memory()
    return total - free, False


if __name__ == "__main__":
    name, rounds, seconds = (*sys.argv[1:], *("resnet18", "20", "1e9")[len(sys.argv) - 1 :])
    machine, net = get_backend("cuda"), network(name, 1)
    pynvml.nvmlInit()
    used: list[int] = []
    began = time.perf_counter()
    cache = Path(tempfile.mkdtemp()) / "timing.cache"
    for i in range(int(rounds)):
        if time.perf_counter() - began > float(seconds):
            break
        engine = Runtime(machine).load(build(net, replace(CONFIG, timing_cache=str(cache), verify=i % 10 == 0)))
        context = engine.create_context()
        context.run({n: context.input_array(n) for n in context.input_names})
        context.close()
        engine.close()
        del engine, context
        gc.collect()
        found, alone = read_used_memory(machine)
        used.append(found)
        if i % 20 == 1:
            print(f"  {i + 1} of {rounds} after {time.perf_counter() - began:.0f} s: {found >> 20} MiB in use", flush=True)
    grown = (used[-1] - used[1]) / 2**20 / max(1, len(used) - 2)
    of = "by this process" if alone else "on the GPU"
    print(f"{name}: after {len(used)} builds and loads, {grown:.3f} MiB a round since the second ({used[0] >> 20} to {used[-1] >> 20} MiB {of})")
