"""Linear layers at batch 1 on the CPU against reading their weights: GB/s of the fastest kernel and of a pure read of the same memory.

    python benchmarks/cpu_linear.py [--cases TEXT,...] [--rounds N] [--threads N] [--out FILE]       results/cpu/linear.json, and a table

A layer with one row multiplies each weight once, so its least time is that of reading the weights. Weights are cold: copies in turn, together 512 MiB
(at least three). All of whet's and oneDNN's dense tactics that store the case's type are timed by themselves. The three fastest are then interleaved
with the read, a loop over the copies of the first with as many threads (the faster one of two: with and without prefetches), and the row is that of
the one with the least median. GB/s are of the weights as the layer has them, without padding. `share`: the median over the rounds of the read's time
over the layer's. `others`: load of other processes in CPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from _record import provenance
from cpu_sparse import Calls, candidates

from whet.backends.cpu import CpuBackend
from whet.backends.cpu.info import read_cpuinfo
from whet.backends.cpu.load import watch
from whet.network import Layer, Network, parse_type
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT32, Module, Type
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

RESULT = Path(__file__).parent / "results" / "cpu" / "linear.json"
COLD_BYTES = 512 << 20
BAR = 0.9
_FINALISTS = 3
SHAPES = ((1280, 1000), (768, 768), (768, 3072), (3072, 768), (2048, 1000), (4096, 4096))
PIXELS = ((320, 1280), (960, 320))  # input and output channels of 1x1 convolutions of a pixel: MobileNetV2 at 32x32
_WORDS = ("source", "sink", "blocks", "share")
_LINES = 64  # cache lines of an item: a page
_AHEAD = 32  # lines
_LANES = 16  # 32-bit values of a line


@dataclass(frozen=True)
class Case:
    """A product of one row of `inputs` values with a matrix, or a 1x1 convolution of one pixel."""

    inputs: int
    channels: int
    kind: str  # "f32" or "bf16", the storage type of an f32 layer
    is_conv: bool = False

    @property
    def name(self) -> str:
        return f"{'conv 1x1' if self.is_conv else 'linear'} {self.inputs}-{self.channels}"

    @property
    def nbytes(self) -> int:
        return self.inputs * self.channels * (2 if self.kind == "bf16" else 4)

    def layer(self) -> Layer:
        rng, net = np.random.default_rng(24), Network("case", "lowered")
        w = rng.standard_normal((self.channels, self.inputs)).astype(np.float32) / np.float32(np.sqrt(self.inputs))
        bias = net.constant(rng.standard_normal(self.channels).astype(np.float32), "b")
        if self.is_conv:
            x = net.add_input("x", parse_type(f"f32[1,{self.inputs},1,1]"))
            y = net.add("Conv", x, net.constant(w[:, :, None, None], "w"), bias)
        else:
            x = net.add_input("x", parse_type(f"f32[1,{self.inputs}]"))
            y = net.add("Gemm", x, net.constant(w, "w"), bias, transB=1)
        net.mark_output(y)
        return net.layers[0]


@cache
def emit_read_ir(is_prefetched: bool) -> str:
    """`read(context)`: the sum of the 32-bit values of each block of `_LINES` cache lines, at a place per block of `sink`."""
    module = Module()
    with parallel_kernel(module, "read", _WORDS, "blocks") as (f, w):
        source, sink = w.source.as_pointer(INT32), w.sink.as_pointer(INT32)
        zero = f.value(0, Type("i32", _LANES))
        with f.loop(w.begin, w.end, carried=[zero] * 4) as blocks:
            block = source.at(blocks.index * (_LINES * _LANES))
            with f.loop(0, _LINES, step=4, carried=blocks.values) as lines:
                at = f.opaque_pointer(block.at(lines.index * _LANES))
                if is_prefetched:
                    for k in range(4):
                        at.prefetch((_AHEAD + k) * _LANES, to_second_cache=True)
                lines.carry(*(total + at.load(k * _LANES, _LANES) for k, total in enumerate(lines.values)))
            blocks.carry(*lines.results)
        a, b, c, d = blocks.results
        sink.at(w.begin * _LANES).store(a + b + c + d)
    return str(module)


class Read:
    """Reads of `nbytes` of each of some copies in turn."""

    def __init__(self, copies: list[int], nbytes: int, threads: int, is_prefetched: bool) -> None:
        blocks = nbytes // (_LINES * 64)
        self._sink = np.zeros((blocks + 2) * _LANES, np.int32)
        function, share = jit.load_function(emit_read_ir(is_prefetched), "read"), -(-blocks // threads)
        self.name = "read with prefetches" if is_prefetched else "read"
        self._calls = [jit.ParallelCall(function, [at, self._sink.ctypes.data, blocks, share], {}, threads, self.name) for at in copies]
        self._at = 0

    def block(self, seconds: float = 0.004) -> float:
        """Seconds of a read: the mean over reads for at least `seconds`."""
        count, start = 0, time.perf_counter()
        while True:
            for _ in range(4):
                self._calls[self._at].run()
                self._at = (self._at + 1) % len(self._calls)
            count += 4
            if (spent := time.perf_counter() - start) > seconds:
                return spent / count


def measure(case: Case, backend: CpuBackend, rounds: int, is_verbose: bool = False) -> dict[str, Any] | None:
    """The row of a case; None if no kernel stores its type here."""
    copies = max(3, COLD_BYTES // case.nbytes)
    kernels = candidates(case.layer(), case.kind, backend, lambda t: "sparse" not in t.name, copies)
    if not kernels:
        return None
    if is_verbose:
        for k in kernels:
            print(f"  {k.name:60} {min(k.block() for _ in range(5)) * 1e6:8.1f} us", flush=True)
    finalists = sorted(kernels, key=lambda k: min(k.block() for _ in range(5)))[:_FINALISTS]
    sizes = [p.nbytes for p in finalists[0].kernel.packed]
    weights = [addresses[sizes.index(max(sizes))] for addresses in finalists[0].packed]
    reads = [Read(weights, case.nbytes, backend.threads, is_prefetched) for is_prefetched in (False, True)]
    read = min(reads, key=lambda r: min(r.block() for _ in range(5)))
    timed: list[Calls | Read] = [*finalists, read]
    times: list[list[float]] = [[] for _ in timed]
    with watch() as load:
        for i in range(rounds):
            for k in range(len(timed))[:: 1 if i % 2 else -1]:
                times[k].append(timed[k].block())
    best = min(range(len(finalists)), key=lambda k: median(times[k]))
    share = median(b / a for a, b in zip(times[best], times[-1], strict=True))
    medians = {"layer": median(times[best]), "read": median(times[-1])}
    us = {f"{n}_us": round(t * 1e6, 1) for n, t in medians.items()}
    rates = {f"{n}_gb_per_s": round(case.nbytes / t / 1e9, 1) for n, t in medians.items()}
    return {
        "case": case.name, "type": case.kind, "mib": round(case.nbytes / 2**20, 2), **us, **rates, "share": round(share, 3), "bar": BAR,
        "verdict": "met" if share >= BAR else "lost", "tactic": finalists[best].name, "others": round(load.others or 0.0, 2),
    }  # fmt: skip


def list_cases() -> list[Case]:
    return [Case(k, n, kind, is_conv) for kind in ("f32", "bf16") for shapes, is_conv in ((SHAPES, False), (PIXELS, True)) for k, n in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="parts of names with types: 'linear 768-768 f32'")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print the time of each candidate")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    backend = CpuBackend(threads=args.threads)
    backend.activate()
    rows: list[dict[str, Any]] = []
    for case in list_cases():
        if args.cases and not any(text in f"{case.name} {case.kind}" for text in args.cases.split(",")):
            continue
        row = measure(case, backend, args.rounds, args.verbose)
        if row is None:
            continue
        rows.append(row)
        rates = f"{row['layer_gb_per_s']:6.1f} of {row['read_gb_per_s']:6.1f} GB/s"
        print(f"{row['case']:20} {row['type']:5} {row['layer_us']:8.1f} us {rates} {row['share']:6.3f}  {row['tactic']}", flush=True)
        data = provenance(["numpy", "llvmlite", "onednn-cpu-gomp"]) | {"cpu": read_cpuinfo().get("model name"), "threads": args.threads, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")  # after each case: a run may be ended early


if __name__ == "__main__":
    main()
