"""Does GPU memory grow? Builds and loads one network again and again in one process and reads what the GPU says is free.

The first build fills a timing cache, the others build from it; every tenth is verified too.

Usage: python3 benchmarks/gpu_memory.py [network] [rounds] [seconds]      # ends after so many seconds, with the rounds that it got to
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpu_engines import CONFIG, network

from whet.backends import get_backend
from whet.builder import build
from whet.runtime import Runtime

if __name__ == "__main__":
    name, rounds, seconds = (*sys.argv[1:], *("resnet18", "20", "1e9")[len(sys.argv) - 1 :])
    machine, net = get_backend("cuda"), network(name, 1)
    free: list[int] = []
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
        free.append(machine.device.free_memory()[0])
        if i % 20 == 1:
            print(f"  {i + 1} of {rounds} after {time.perf_counter() - began:.0f} s: {free[-1] >> 20} MiB free", flush=True)
    grown = (free[1] - free[-1]) / 2**20 / max(1, len(free) - 2)
    print(f"{name}: after {len(free)} builds and loads, {grown:.3f} MiB a round since the second; free {free[0] >> 20} .. {free[-1] >> 20} MiB")
